"""Bring a module to 16 or 64 bits, but for what must stay in full precision."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torchmetrics import Metric

from lightning_bigmodel import _host

__all__ = ["check_buffers", "convert_module"]

# Angles of far positions are lost in 16 bits, whose steps are larger than a turn.
_FREQUENCIES = ("inv_freq", "original_inv_freq", "freqs", "frequencies", "rotary_freqs")
# Moving averages stand still once a change is smaller than a step of 16 bits.
_STATISTICS = ("running_mean", "running_var")


def check_buffers(given: Any, precision: str) -> Literal["auto"] | list[str]:
    """Patterns of buffers, checked.

    Raises:
        ValueError: For what is no list of patterns, or with a precision that leaves buffers as they are.
    """
    if isinstance(given, str) and given == "auto":
        return "auto"
    if precision not in ("16-true", "bf16-true"):
        raise ValueError(
            f"`full_precision_buffers` has no effect with `precision={precision!r}`, which casts no buffers. Leave it "
            "out."
        )
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(isinstance(item, str) for item in given):
        raise ValueError(
            f"`full_precision_buffers={given!r}` must be \"auto\" or a list of patterns, such as ['*.inv_freq']."
        )
    return list(given)


def convert_module(
    root: nn.Module,
    dtype: torch.dtype,
    kept: Collection[int],
    full_buffers: Literal["auto"] | Sequence[str],
    *,
    buffers_only: bool = False,
) -> None:
    """Cast floating-point parameters and buffers in place; parameters stay the same objects.

    Metrics keep their own type, as do integers. Where running statistics stay, so do the weights beside them: the
    layer takes 16-bit inputs and gives 16-bit outputs all the same.

    Args:
        root: The module.
        dtype: The type to cast to.
        kept: Ids of modules to leave alone.
        full_buffers: Patterns of buffers that stay fp32.
        buffers_only: Whether parameters have been cast already.

    Raises:
        ValueError: For a pattern that matches nothing.
    """
    stays = _buffers_to_keep(root, full_buffers) if dtype.itemsize == 2 else set()
    full = set() if buffers_only else _parameters_to_keep(root, kept)
    for name, module in _own_modules(root):
        if id(module) in kept:
            continue
        prefix = f"{name}." if name else ""
        if not buffers_only and not any(f"{prefix}{key}" in stays for key in _STATISTICS):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_floating_point() and id(parameter) not in full:
                    parameter.data = parameter.data.to(dtype)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and f"{prefix}{key}" not in stays:
                module._buffers[key] = buffer.to(dtype)
    _host.set_dtype(root, dtype)


def _own_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    metrics = {id(part) for module in root.modules() if isinstance(module, Metric) for part in module.modules()}
    return ((name, module) for name, module in root.named_modules() if id(module) not in metrics)


def _parameters_to_keep(root: nn.Module, kept: Collection[int]) -> set[int]:
    """Ids of the parameters of modules in full precision.

    Raises:
        ValueError: For one that a module in 16 bits shares.
    """
    owners: dict[int, str] = {}
    for name, module in root.named_modules():
        if id(module) in kept:
            owners.update((id(p), f"{name}.{key}") for key, p in module._parameters.items() if p is not None)
    for name, module in root.named_modules():
        if id(module) not in kept:
            for parameter in module._parameters.values():
                if id(parameter) in owners:
                    raise ValueError(
                        f"`full_precision_modules` keeps `{owners[id(parameter)]}` in fp32, but `{name}` shares it and "
                        "computes in 16 bits. Name both."
                    )
    return set(owners)


def _buffers_to_keep(root: nn.Module, patterns: Literal["auto"] | Sequence[str]) -> set[str]:
    names = {name: buffer for name, buffer in root.named_buffers() if buffer.is_floating_point()}
    if patterns == "auto":
        wanted = (*_FREQUENCIES, *_STATISTICS)
        return {name for name in names if name.rpartition(".")[2] in wanted}
    kept: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(
                f"`full_precision_buffers` has {pattern!r}, which matches no floating-point buffer. There are: "
                f"{sorted(names)[:10]}."
            )
        kept |= found
    return kept
