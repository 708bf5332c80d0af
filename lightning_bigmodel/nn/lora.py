"""LoRA: a frozen layer and a product of two thin matrices that is trained beside it.

Method: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (https://arxiv.org/abs/2106.09685, section
4.1): `W x + (alpha / rank) B A x`, `A` of shape (rank, inputs) drawn at random, `B` of shape (outputs, rank) zero.
rsLoRA (https://arxiv.org/abs/2312.03732) divides by the square root of the rank.

What differs: the layer stays the object it is, of the class it is, with its parameters under their names; it gets the
parameters `lora_A` and `lora_B` beside them, and a forward hook that adds the product. So whatever looks for linear
layers (tensor parallelism, mixed precision, quantisation) finds them, and checkpoints of the base fit.

Memory: `rank * (inputs + outputs)` trained elements a layer. No gradients, moments or messages of gradients for the
rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bigmodel.mesh.rng import derive_seed
from lightning_bigmodel.nn._targets import features_of, is_conv1d, linear_layers, match_names, names_of_parameters
from lightning_bigmodel.nn.quantized import QuantizedLinear, quantized_layers

__all__ = [
    "AdapterUpdate",
    "LoRASettings",
    "adapter_of",
    "adapters_of",
    "add_adapters",
    "merge_adapters",
    "remove_adapters",
]

_HANDLE = "_lora_handle"
_FROZEN = "_lora_frozen"
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class LoRASettings:
    """What adapters are like.

    Args:
        targets: Names or patterns of linear layers.
        rank: Rows of `A`, columns of `B`.
        alpha: The product is multiplied by `alpha / rank`.
        dropout: Probability of dropping an element of what `A` gets, in training.
        use_rslora: Multiply by `alpha / sqrt(rank)` instead.
        also_train: Names or patterns of modules or parameters that are trained as a whole, such as a new head.
    """

    targets: Sequence[str]
    rank: int
    alpha: float
    dropout: float = 0.0
    use_rslora: bool = False
    also_train: Sequence[str] = ()

    @property
    def scaling(self) -> float:
        """By what `B A x` is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class AdapterUpdate:
    """The forward hook of a layer with an adapter: adds `scaling * B A dropout(x)` to its output.

    It holds numbers only, and reads the matrices of the layer that is called: copies of a module have their own.

    Args:
        scaling: By what the product is multiplied.
        dropout: See `LoRASettings`.
        rank: Of the matrices, which a rank of a pipeline may not hold.
    """

    def __init__(self, scaling: float, dropout: float, rank: int) -> None:
        self.scaling, self.dropout, self.rank = scaling, dropout, rank

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """What the layer gives with its adapter."""
        inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
        first, second = layer.lora_A, layer.lora_B
        # Of a base in 16 bits adapters are fp32: moments of small updates would round to nothing.
        inputs = inputs.to(first.dtype)
        if self.dropout and layer.training:
            inputs = F.dropout(inputs, self.dropout)
        return (output + self.scaling * F.linear(F.linear(inputs, first), second)).to(output.dtype)


def adapter_of(layer: nn.Module) -> AdapterUpdate | None:
    """The adapter of one layer, if it has one."""
    return next((hook for hook in layer._forward_hooks.values() if isinstance(hook, AdapterUpdate)), None)


def adapters_of(root: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer, of all layers with adapters."""
    return {name: module for name, module in root.named_modules() if adapter_of(module) is not None}


def add_adapters(root: nn.Module, settings: LoRASettings, seed: int) -> dict[str, nn.Module]:
    """Give layers adapters and freeze all other parameters, in place. Does nothing to a module that has them already.

    First values depend on `seed` and a layer's place alone, and no other random numbers are drawn. Adapters of layers
    on the meta device get memory on the CPU.

    Returns:
        Name -> layer, of the layers with adapters.

    Raises:
        ValueError: By name, for a pattern that fits nothing, a rank above a layer's width, a weight that two modules
            share, or adapters of other settings that are there. Nothing has changed then.
    """
    layers = linear_layers(root, settings.targets, "targets")
    present = adapters_of(root)
    if present:
        _check_same(present, layers, settings)
        return present
    users = names_of_parameters(root)
    for name, layer in layers.items():
        _check_layer(name, layer, settings, users)
    trained = _also_trained(root, settings.also_train)
    frozen = [name for name, p in root.named_parameters() if p.requires_grad and id(p) not in trained]
    for parameter in root.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    root.__dict__[_FROZEN] = tuple(frozen)
    for index, layer in enumerate(layers.values()):
        _add(layer, settings, derive_seed(seed, index))
    return layers


def _check_same(present: Mapping[str, nn.Module], layers: Mapping[str, nn.Module], settings: LoRASettings) -> None:
    if present.keys() != layers.keys():
        differing = sorted(present.keys() ^ layers.keys())
        raise ValueError(
            f"The module has adapters already, in other layers than `targets={list(settings.targets)!r}` names: "
            f"{differing[:5]} differ. Give the targets they were made with, or merge them first (`LoRA.merge`)."
        )
    for name, layer in present.items():
        update = adapter_of(layer)
        assert update is not None
        if (update.rank, update.scaling) != (settings.rank, settings.scaling):
            raise ValueError(
                f"{name!r} has an adapter of rank {update.rank} and scaling {update.scaling:g} already, and the "
                f"settings say rank {settings.rank} and scaling {settings.scaling:g}. Give those it was made with, or "
                "merge it first (`LoRA.merge`)."
            )
        update.dropout = settings.dropout


def _check_layer(name: str, layer: nn.Module, settings: LoRASettings, users: Mapping[int, list[str]]) -> None:
    num_inputs, num_outputs = features_of(layer)
    if settings.rank > min(num_inputs, num_outputs):
        raise ValueError(
            f"`rank={settings.rank}` is above the width of {name!r}, which maps {num_inputs} features to "
            f"{num_outputs}: the product would have more parameters than the layer needs. Use a rank of at most "
            f"{min(num_inputs, num_outputs)}, or leave this layer out of `targets`."
        )
    for own, parameter in layer._parameters.items():
        others = [other for other in users.get(id(parameter), ()) if other != f"{name}.{own}"]
        if own == "weight" and others:
            raise ValueError(
                f"`targets` names {name!r}, whose weight is also {others[0]!r}: an adapter merged into one would "
                "change the other. Leave it out, or give the two weights of their own."
            )


def _also_trained(root: nn.Module, patterns: Sequence[str]) -> set[int]:
    modules = {name: module for name, module in root.named_modules() if name}
    parameters = dict(root.named_parameters(remove_duplicate=False))
    found: set[int] = set()
    for pattern in patterns:
        of_modules = [p for name in match_names(pattern, modules) for p in modules[name].parameters()]
        matched = of_modules or [parameters[name] for name in match_names(pattern, parameters)]
        if not matched:
            raise ValueError(
                f"`also_train` has {pattern!r}, which matches no module or parameter. There are {list(modules)[:10]}."
            )
        if not all(parameter.is_floating_point() for parameter in matched):
            raise ValueError(
                f"`also_train` has {pattern!r}, whose weight is quantised and cannot be trained. Leave it out."
            )
        found |= {id(parameter) for parameter in matched}
    return found


def _add(layer: nn.Module, settings: LoRASettings, seed: int) -> None:
    num_inputs, num_outputs = features_of(layer)
    weight = layer._parameters["weight"]
    assert weight is not None
    dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype not in _HALF else torch.float32
    device = torch.device("cpu") if weight.is_meta else weight.device
    first = torch.empty(settings.rank, num_inputs, dtype=dtype, device="cpu")
    nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed))
    layer.register_parameter("lora_A", nn.Parameter(first.to(device)))
    layer.register_parameter(
        "lora_B", nn.Parameter(torch.zeros(num_outputs, settings.rank, dtype=dtype, device=device))
    )
    update = AdapterUpdate(settings.scaling, settings.dropout, settings.rank)
    # A handle that is kept tells a process that unpickles the module which numbers of hooks are taken.
    layer.__dict__[_HANDLE] = layer.register_forward_hook(update, with_kwargs=True)


@torch.no_grad()
def merge_adapters(root: nn.Module) -> list[str]:
    """Add each adapter to its layer's weight and take it off, in place; what was frozen takes gradients again.

    The sum is computed in fp32 (fp64 of fp64 weights) and rounded once to the type of the weight. Quantised layers,
    with adapters or without, become ordinary ones of the type that they had.

    Returns:
        Names of the layers that had adapters.

    Raises:
        ValueError: If there are no adapters, or a layer keeps its weight in a form of its own.
    """
    layers = adapters_of(root)
    if not layers:
        raise ValueError("The module has no adapters to merge. Call `LoRA.merge` on the module that was trained.")
    for name, layer in layers.items():
        weight = layer._parameters["weight"]
        if not isinstance(layer, QuantizedLinear) and not (weight is not None and weight.is_floating_point()):
            raise ValueError(
                f"{name!r} ({type(layer).__name__}) keeps its weight in a form of its own, which an adapter cannot be "
                "added to. Quantise it by the `Quantize` callback, or put its plain weights back first."
            )
    quantized = quantized_layers(root)
    for quantized_layer in quantized.values():  # those without adapters too
        quantized_layer.dequantize()
    for layer in layers.values():
        update = _product(layer)
        weight = layer._parameters["weight"]
        assert weight is not None
        weight.copy_(weight.to(update.dtype) + (update.T if is_conv1d(layer) else update))
        _remove(layer)
    _thaw(root, (*layers, *quantized))
    return list(layers)


def remove_adapters(root: nn.Module) -> None:
    """Take adapters off without adding them to weights; what was frozen takes gradients again."""
    for layer in adapters_of(root).values():
        _remove(layer)
    _thaw(root)


def _thaw(root: nn.Module, layers: Sequence[str] = ()) -> None:
    names = set(root.__dict__.pop(_FROZEN, ()))
    for name, parameter in root.named_parameters():
        if name in names or name.removesuffix(".weight") in layers:
            parameter.requires_grad_(parameter.is_floating_point())


def _product(layer: nn.Module) -> Tensor:
    """`scaling * B A` of shape (outputs, inputs)."""
    update = adapter_of(layer)
    first, second = layer._parameters["lora_A"], layer._parameters["lora_B"]
    assert update is not None
    assert first is not None
    assert second is not None
    dtype = torch.promote_types(first.dtype, torch.float32)
    return update.scaling * (second.detach().to(dtype) @ first.detach().to(dtype))


def _remove(layer: nn.Module) -> None:
    layer.__dict__.pop(_HANDLE).remove()
    del layer._parameters["lora_A"], layer._parameters["lora_B"]


def named_adapters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Full name -> matrix, of all adapters."""
    for name, layer in adapters_of(root).items():
        for own in ("lora_A", "lora_B"):
            matrix = layer._parameters[own]
            assert matrix is not None
            yield f"{name}.{own}", matrix
