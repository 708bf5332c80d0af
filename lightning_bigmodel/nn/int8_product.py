"""Trained linear layers whose matrix products run on 8-bit integers, put in the place of ordinary ones.

Method: T. Dettmers et al., "LLM.int8()" (https://arxiv.org/abs/2208.07339, section 2.1 and appendix on training),
without the part for outliers, as `bitsandbytes.nn.Linear8bitLt(has_fp16_weights=True)` has it by default. Forward: each
row of inputs and each row of the weight is rounded to 127 steps of its largest element. Gradient of the weight: each
column of inputs and of the gradient of the output is rounded so, over the tokens of the micro-batch. Gradient of the
inputs: in the type of the computation, with the rounded weight. Products are bitsandbytes' int8 kernel, which sums in
32-bit integers.

What differs: nothing is kept from one call to the next, so that codes are never older than the weight; `Linear8bitLt`
quantises its weight anew only where there is no gradient yet. Codes are made of values as they are and not of their
fp16 neighbours, so that small gradients do not vanish, and sums leave int32 before they are rounded to 16 bits.

The weight stays the parameter it is, in its type and under its name. Memory: for backward, inputs in 8 bits in place of
theirs; a layer's weight once more in 8 bits while it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from lightning_bigmodel.nn._targets import is_conv1d, linear_layers, own_weight
from lightning_bigmodel.nn.quantized import QuantizedLinear, compute_dtype, require_bitsandbytes

__all__ = ["Int8ProductConv1D", "Int8ProductLinear", "multiply_in_int8"]

# Sums of more products of 127 * 127 may leave 32 bits.
_MOST_SUMMED = 1 << 17


class _Int8Product(torch.autograd.Function):
    """`x W^T` by codes of both."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, dtype: torch.dtype, is_trained: bool) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        ctx.dtypes, ctx.shape = (inputs.dtype, weight.dtype), inputs.shape
        # Of the weight itself: its codes are made once more in backward, which costs less than to keep them.
        ctx.save_for_backward(weight, *(_codes(rows.T) if is_trained else ()))
        product = _product(_codes(rows), _codes(weight), dtype)
        return product.view(*inputs.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight, *columns = ctx.saved_tensors
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            codes, scales = _codes(weight)
            rounded = codes.to(scales.dtype).mul_(scales[:, None]).to(rows.dtype)
            of_inputs = rows.matmul(rounded).view(ctx.shape).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            of_weight = _product(_codes(rows.T), tuple(columns), ctx.dtypes[1])
        return of_inputs, of_weight, None, None


def _codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of at most 127 for each row, and by what they are multiplied."""
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    largest = matrix.abs().amax(dim=1)
    # What is not finite makes the scale so, and a row of zeros must not.
    factors = 127.0 / largest.clamp(min=128 * torch.finfo(largest.dtype).tiny)
    return matrix.mul(factors[:, None]).round_().to(torch.int8).contiguous(), largest / 127.0


def _product(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Rows of the first times rows of the second."""
    multiply = torch.ops.bitsandbytes.int8_linear_matmul.default
    pairs = zip(first[0].split(_MOST_SUMMED, dim=1), second[0].split(_MOST_SUMMED, dim=1), strict=True)
    sums = [multiply(one.contiguous(), other.contiguous()).to(first[1].dtype) for one, other in pairs]
    whole = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return whole.mul_(first[1][:, None]).mul_(second[1]).to(dtype)


def _apply(inputs: Tensor, weight: Tensor, bias: Tensor | None, is_rounded: bool) -> Tensor:
    if not (is_rounded and inputs.numel()):  # the kernel refuses what has no rows, such as tokens an expert did not get
        return F.linear(inputs, weight, bias)
    apply: Any = _Int8Product.apply
    output: Tensor = apply(inputs, weight, compute_dtype(inputs), weight.requires_grad and torch.is_grad_enabled())
    return output if bias is None else output + bias.to(output.dtype)


class Int8ProductLinear(nn.Linear):
    """`nn.Linear` with products on 8-bit integers; see `multiply_in_int8`, which makes them."""

    cut_like = "Linear"
    rounds_products = True

    def forward(self, input: Tensor) -> Tensor:
        """The product and the bias, in the type of the computation."""
        return _apply(input, self.weight, self.bias, self.rounds_products)


class Int8ProductConv1D(nn.Module):
    """transformers' `Conv1D` with products on 8-bit integers; see `multiply_in_int8`, which makes them."""

    cut_like = "Conv1D"
    rounds_products = True
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """The product and the bias, in the type of the computation."""
        return _apply(x, self.weight.T, self.bias, self.rounds_products)


def multiply_in_int8(root: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """Let linear layers compute on 8-bit integers, in place. Does nothing to those that do so already.

    Args:
        root: The module.
        targets: Names or patterns of linear layers.

    Returns:
        Name -> layer.

    Raises:
        ValueError: By name, for a pattern that fits nothing, or a layer that computes in a way of its own. Nothing has
            changed then.
        ModuleNotFoundError: Without bitsandbytes.
    """
    layers = linear_layers(root, targets, "targets")
    for name, layer in layers.items():
        _check(name, layer)
    require_bitsandbytes()
    _count_operations()
    for layer in layers.values():
        if not isinstance(layer, (Int8ProductLinear, Int8ProductConv1D)):
            kind = Int8ProductConv1D if is_conv1d(layer) else Int8ProductLinear
            layer.__class__ = kind
    return layers


def _check(name: str, layer: nn.Module) -> None:
    if isinstance(layer, QuantizedLinear):
        raise ValueError(
            f"{name!r} has {layer.bits} bits and is frozen already, and `trained=True` is for layers with weights of "
            "their own. Leave it out of `targets`, or give `trained=False`."
        )
    if isinstance(layer, (Int8ProductLinear, Int8ProductConv1D)):
        return
    weight = own_weight(name, layer)
    if not weight.is_floating_point():
        raise ValueError(f"The weight of {name!r} is of {weight.dtype}, which is not trained. Leave it out.")


@cache
def _count_operations() -> None:
    """Tell torch's counter how much work the kernel is: a pipeline is cut by it."""
    operator = torch.ops.bitsandbytes.int8_linear_matmul
    if operator in flop_registry:
        return

    @register_flop_formula(operator)
    def _operations(first: Sequence[int], second: Sequence[int], *args: Any, **kwargs: Any) -> int:
        return 2 * torch.Size(first).numel() * second[0]
