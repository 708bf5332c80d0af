"""fp8 linear layers, through torchao."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn

__all__ = ["check_fp8", "convert_to_fp8", "fp8_layers"]

# Tensor cores take fp8 operands whose widths are multiples of it.
_MULTIPLE = 16
_CAPABILITY = (8, 9)


def check_fp8(precision: str, patterns: Sequence[str] | None, emulate: bool) -> None:
    """Refuse fp8 settings without fp8, and fp8 without its package.

    Raises:
        ValueError: For settings that nothing would use.
        ModuleNotFoundError: Without torchao.
    """
    if precision != "fp8":
        for name, is_given in (("fp8_modules", patterns is not None), ("fp8_emulate", emulate)):
            if is_given:
                raise ValueError(f'`{name}` steers `precision="fp8"`, but `precision={precision!r}`. Leave it out.')
    elif find_spec("torchao") is None:
        raise ModuleNotFoundError(
            '`precision="fp8"` computes with the fp8 linear layers of torchao, which is not installed: '
            "`pip install torchao`."
        )


def fp8_layers(root: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Names of the linear layers to convert: those that match, or by default all of fitting widths but the last one.

    Raises:
        ValueError: For a pattern that matches no linear layer, a layer whose widths do not fit, or where none is left.
    """
    layers = {name: module for name, module in root.named_modules() if type(module) is nn.Linear}
    sizes = {name: (layer.in_features, layer.out_features) for name, layer in layers.items()}
    fitting = {name for name, both in sizes.items() if not any(size % _MULTIPLE for size in both)}
    if patterns is None:
        chosen = [name for name in list(layers)[:-1] if name in fitting]
        if not chosen:
            raise ValueError(
                '`precision="fp8"` found no linear layer to convert: of the layers before the last, none has widths '
                f"that are multiples of {_MULTIPLE}. Use `precision='bf16-mixed'`."
            )
        return chosen
    chosen = []
    for pattern in patterns:
        found = [name for name in layers if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(
                f"`fp8_modules` has {pattern!r}, which matches no linear layer. There are: {sorted(layers)[:10]}."
            )
        chosen += [name for name in found if name not in chosen]
    for name in chosen:
        if name not in fitting:
            raise ValueError(
                f"`fp8_modules` names `{name}` of widths {sizes[name]}; fp8 products need multiples of {_MULTIPLE}. "
                "Leave it out."
            )
    return chosen


def convert_to_fp8(
    root: nn.Module, patterns: Sequence[str] | None, *, device_type: str | None, emulate: bool
) -> list[str]:
    """Put fp8 layers in the place of linear ones; parameters stay the same objects under the same names.

    Operands and gradients are scaled by their largest value (torchao's tensorwise recipe, after arXiv 2209.05433).

    Args:
        root: The module to convert, in place.
        patterns: See `fp8_layers`.
        device_type: Where it will compute.
        emulate: Round as fp8 does, and compute in the wider type, on devices without such units.

    Returns:
        Names of the layers converted.

    Raises:
        ValueError: Where the device has no fp8 units, or no layer fits.
    """
    if not emulate and not _has_units(device_type):
        raise ValueError(
            f'`precision="fp8"` needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or higher '
            f"(Ada, Hopper), but this run is on {_described(device_type)}. Use `precision='bf16-mixed'`, or "
            "`fp8_emulate=True` to see what the rounding does, at less than the speed of bf16."
        )
    from torchao.float8 import (  # type: ignore[import-untyped]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    already = [name for name, module in root.named_modules() if type(module).__name__ == "Float8Linear"]
    if already:  # an earlier run of the same module
        return already
    chosen = fp8_layers(root, patterns)
    wanted = set(chosen)
    convert_to_float8_training(
        root, module_filter_fn=lambda _, name: name in wanted, config=Float8LinearConfig(emulate=emulate)
    )
    return chosen


def _has_units(device_type: str | None) -> bool:
    return device_type == "cuda" and torch.cuda.get_device_capability() >= _CAPABILITY


def _described(device_type: str | None) -> str:
    if device_type != "cuda":
        return f"device type {device_type!r}"
    return "one of capability {}.{}".format(*torch.cuda.get_device_capability())
