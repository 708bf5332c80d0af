"""Frozen linear layers in 4 or 8 bits, put in the place of ordinary ones as the same objects.

4 bits: NF4 with double quantisation, T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs"
(https://arxiv.org/abs/2305.14314, section 3): codes of a table for normal values, one scale for each 64 elements of a
row, and the scales themselves in 8 bits with one fp32 number for each 256 of them. 8 bits: one scale for each row, as
of `Linear8bitLt`, T. Dettmers et al., "LLM.int8()" (https://arxiv.org/abs/2208.07339, section 2). Codes are those of
bitsandbytes' kernels, and so is what they stand for.

What differs: codes and scales are ordinary parameters of the layer that take no gradients, rows of codes are rows of
the matrix, and fp32 numbers among the scales are kept by their bits in int32. So ZeRO, pipelines, tensor plans and
checkpoints treat them as any parameter, and a cast of the module to 16 bits leaves them alone.

Memory an element: 0.516 bytes (4 bits; 0.563 without double quantisation) or 1 byte, and while a layer computes, its
matrix in the type of the computation; backward makes it once more instead of keeping it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bigmodel import _host
from lightning_bigmodel.nn._targets import is_conv1d, linear_layers, names_of_parameters, own_weight

__all__ = [
    "Int8Linear",
    "NF4Linear",
    "QuantizedLinear",
    "compute_dtype",
    "quantize_layers",
    "quantized_layers",
    "require_bitsandbytes",
]

_BLOCK = 64
_SCALES_BLOCK = 256


class _FrozenProduct(torch.autograd.Function):
    """`x W^T` for a matrix that is made of codes, in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, make: Callable[..., Tensor], dtype: torch.dtype, *stored: Tensor) -> Tensor:
        ctx.make, ctx.input_dtype = make, inputs.dtype
        ctx.save_for_backward(*stored)
        return F.linear(inputs.to(dtype), make(dtype, *stored))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        stored = ctx.saved_tensors
        weight: Tensor = ctx.make(gradient.dtype, *stored)
        product = gradient.matmul(weight)
        return (product.to(ctx.input_dtype), None, None, *(None for _ in stored))


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight is in codes: what the two kinds have in common."""

    _stored: tuple[str, ...] = ("weight", "weight_scales")
    bits: int
    cut_like = "Linear"  # its rows and columns are those of the codes
    _before: tuple[type[nn.Module], torch.dtype]

    def forward(self, input: Tensor) -> Tensor:
        """The product, and the bias in the type of the product."""
        stored = [p for p in (self._parameters.get(name) for name in self._stored) if p is not None]
        apply: Any = _FrozenProduct.apply
        output: Tensor = apply(input, self._make(), compute_dtype(input), *stored)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _make(self) -> Callable[..., Tensor]:
        raise NotImplementedError

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that codes stand for, of shape (outputs, inputs)."""
        stored = [p.detach() for p in (self._parameters.get(name) for name in self._stored) if p is not None]
        return self._make()(dtype, *stored)

    def dequantize(self) -> None:
        """Become the layer that it was, with the rounded weight, in the type that it had."""
        kind, dtype = self._before
        weight = self.dequantized_weight().to(dtype)
        for name in self._stored:
            self._parameters.pop(name, None)
        bias = self._parameters.pop("bias", None)
        del self.__dict__["_before"]
        self.__class__ = kind  # type: ignore[assignment]
        if is_conv1d(self):
            weight = weight.T.contiguous()
            del self.in_features, self.out_features
        # The order of an ordinary layer, which the state dict and optimizers see.
        adapters = {name: self._parameters.pop(name) for name in list(self._parameters)}
        self._parameters["weight"] = nn.Parameter(weight)
        self._parameters["bias"] = bias
        self._parameters.update(adapters)

    def reset_parameters(self) -> None:
        """Codes have no first values of their own.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("A quantised layer cannot be initialised: quantise one that has its values.")


class NF4Linear(QuantizedLinear):
    """A linear layer whose frozen weight is in 4 bits; see `quantize_layers`, which makes them."""

    _stored = ("weight", "weight_scales", "weight_scales_scale", "weight_scales_offset")
    bits = 4
    block_size = _BLOCK

    def _make(self) -> Callable[..., Tensor]:
        # Rows of codes tell the shape, which is a rank's own under tensor parallelism.
        shape = None if self.weight.shape[1] > 1 else (self.out_features, self.in_features)
        return _NF4(shape)


class Int8Linear(QuantizedLinear):
    """A linear layer whose frozen weight is in 8 bits; see `quantize_layers`, which makes them."""

    bits = 8

    def _make(self) -> Callable[..., Tensor]:
        return _from_int8


def _kernels() -> Any:
    import bitsandbytes.functional

    return bitsandbytes.functional


def require_bitsandbytes() -> None:
    """Raise `ModuleNotFoundError` without it."""
    try:
        import bitsandbytes  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Quantised layers are made by bitsandbytes. Run `pip install 'lightning-bigmodel[optim]'`."
        ) from error


def compute_dtype(inputs: Tensor) -> torch.dtype:
    """The type in which a layer computes: autocast's, or that of its inputs."""
    kind = inputs.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype


class _NF4:
    """Codes to values; a class, so that layers and what they keep for backward pickle."""

    def __init__(self, shape: tuple[int, int] | None) -> None:
        self._shape = shape

    def __call__(self, dtype: torch.dtype, codes: Tensor, scales: Tensor, *of_scales: Tensor) -> Tensor:
        kernels = _kernels()

        shape = self._shape or (codes.shape[0], 2 * codes.shape[1])
        if of_scales:
            numbers, offset = (stored.view(torch.float32) for stored in of_scales)
            table = _scale_table(codes.device)
            inner = kernels.QuantState(absmax=numbers, code=table, blocksize=_SCALES_BLOCK, dtype=torch.float32)
            absmax = kernels.dequantize_blockwise(scales.reshape(-1), inner) + offset
        else:
            absmax = scales.view(torch.float32).reshape(-1)
        made = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
        state = kernels.QuantState(
            absmax=absmax, shape=torch.Size(shape), blocksize=_BLOCK, quant_type="nf4", dtype=made
        )
        values: Tensor = kernels.dequantize_4bit(codes.reshape(-1, 1), state)
        return values.view(shape).to(dtype)


def _scale_table(device: torch.device) -> Tensor:
    key = str(device)
    if key not in _TABLES:
        with _host.without_modes():  # a first call may be one on fake tensors
            _TABLES[key] = _kernels().create_dynamic_map().to(device)
    return _TABLES[key]


_TABLES: dict[str, Tensor] = {}


def _from_int8(dtype: torch.dtype, codes: Tensor, scales: Tensor) -> Tensor:
    made = torch.promote_types(dtype, torch.float32)
    return (codes.to(made) * (scales.view(torch.float32).to(made) / 127.0)[:, None]).to(dtype)


def quantized_layers(root: nn.Module) -> dict[str, QuantizedLinear]:
    """Name -> layer, of all layers in 4 or 8 bits."""
    return {name: module for name, module in root.named_modules() if isinstance(module, QuantizedLinear)}


@torch.no_grad()
def quantize_layers(
    root: nn.Module,
    targets: Sequence[str],
    bits: int = 4,
    *,
    double_quantization: bool = True,
    whole_scales: bool = False,
) -> dict[str, nn.Module]:
    """Make frozen layers in 4 or 8 bits of linear layers, in place. Does nothing to those that are so already.

    A layer keeps its identity, its bias, hooks and adapters; in the state dict it has `weight` (codes: uint8 of half a
    row, or int8) and `weight_scales`, and with double quantisation `weight_scales_scale` and `weight_scales_offset`.

    Args:
        root: The module.
        targets: Names or patterns of linear layers.
        bits: 4 or 8.
        double_quantization: With 4 bits, keep scales in 8 bits.
        whole_scales: Keep the values of double quantisation but its scales in fp32, for layers that are to be cut.

    Returns:
        Name -> layer.

    Raises:
        ValueError: By name, for a pattern that fits nothing, a weight that two modules share, has no values yet or is
            of another kind. Nothing has changed then.
        ModuleNotFoundError: Without bitsandbytes.
    """
    layers = linear_layers(root, targets, "targets")
    users = names_of_parameters(root)
    for name, layer in layers.items():
        _check(name, layer, bits, users)
    require_bitsandbytes()
    for layer in layers.values():
        if not isinstance(layer, QuantizedLinear):
            _convert(layer, bits, double_quantization=double_quantization, whole_scales=whole_scales)
    return layers


def _check(name: str, layer: nn.Module, bits: int, users: dict[int, list[str]]) -> None:
    if isinstance(layer, QuantizedLinear):
        if layer.bits != bits:
            raise ValueError(
                f"{name!r} has {layer.bits} bits already, and `bits={bits}`. Give the number it was made with."
            )
        return
    weight = own_weight(name, layer)
    others = [other for other in users.get(id(weight), ()) if other != f"{name}.weight"]
    if others:
        raise ValueError(
            f"`targets` names {name!r}, whose weight is also {others[0]!r}, which computes with plain values. Leave it "
            "out, or give the two weights of their own."
        )
    if weight.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device and has no values to quantise. Build it on the CPU, with its weights "
            "loaded."
        )
    if not weight.is_floating_point() or weight.numel() % 2:
        raise ValueError(
            f"The weight of {name!r} has {weight.numel()} elements of {weight.dtype}; only floating-point weights of "
            "an even number of elements are quantised. Leave it out of `targets`."
        )


def _convert(layer: Any, bits: int, *, double_quantization: bool, whole_scales: bool) -> None:
    weight = layer._parameters["weight"]
    before = (type(layer), weight.dtype)
    if is_conv1d(layer):
        layer.in_features, layer.out_features = layer.nx, layer.nf
    plain = weight.detach().T if is_conv1d(layer) else weight.detach()
    plain = plain.to(torch.promote_types(plain.dtype, torch.float16)) if plain.dtype != torch.float64 else plain.float()
    stored = _int8(plain) if bits == 8 else _nf4(plain.contiguous(), double_quantization, whole_scales)
    layer.__class__ = Int8Linear if bits == 8 else NF4Linear
    layer.__dict__["_before"] = copy.copy(before)
    for name, value in stored.items():
        layer._parameters[name] = nn.Parameter(value, requires_grad=False)


def _int8(weight: Tensor) -> dict[str, Tensor]:
    kernels = _kernels()
    codes, scales, _ = kernels.int8_vectorwise_quant(weight.to(torch.float16).contiguous())
    return {"weight": codes, "weight_scales": scales.view(torch.int32)}


def _nf4(weight: Tensor, double: bool, whole_scales: bool) -> dict[str, Tensor]:
    kernels = _kernels()
    codes, state = kernels.quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4", compress_statistics=double)
    num_outputs, num_inputs = weight.shape
    aligned = num_inputs % _BLOCK == 0
    rows = (num_outputs, -1) if aligned else (-1,)
    found = {"weight": codes.view(num_outputs, -1) if aligned else codes.view(-1, 1)}
    if not double:
        return {**found, "weight_scales": state.absmax.view(rows).view(torch.int32)}
    if whole_scales:
        absmax = kernels.dequantize_blockwise(state.absmax, state.state2) + state.offset
        return {**found, "weight_scales": absmax.float().view(rows).view(torch.int32)}
    return {
        **found,
        "weight_scales": state.absmax.view(rows),
        "weight_scales_scale": state.state2.absmax.view(torch.int32),
        "weight_scales_offset": state.offset.reshape(1).float().view(torch.int32),
    }
