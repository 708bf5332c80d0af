"""What a module was called with, as far as a trial needs it: shapes of numbers, and the rest as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel import _host

__all__ = ["Call", "count_tokens", "describe_call", "make_values", "map_items", "own_numbers", "tensors_in"]


@dataclass(frozen=True)
class _Random:
    """Stands for a tensor of numbers; only its shape matters."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """What a module was called with, without the memory of its activations."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    method: str | None = None
    """Name of the method that was called, if not the module itself."""


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], method: str | None = None) -> Call:
    """Keep what a trial needs of a call: shapes of floating-point tensors, values of the rest."""
    described = {name: _describe(value) for name, value in kwargs.items()}
    return Call(tuple(_describe(value) for value in args), described, method)


def count_tokens(call: Call) -> int:
    """Positions of the largest input: all numbers of integers, all but the features of others."""

    def sizes(value: Any) -> Iterator[int]:
        if isinstance(value, _Random):
            yield prod(value.shape[:-1])
        elif isinstance(value, Tensor):
            yield value.numel()
        elif isinstance(value, Mapping):
            yield from sizes(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from sizes(item)

    return max(sizes((call.args, call.kwargs)), default=1)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Random(tuple(value.shape)) if value.is_floating_point() else own_numbers(value)
    if isinstance(value, nn.Module):
        return value
    return map_items(value, _describe, _copied)


def make_values(value: Any, generator: torch.Generator) -> Any:
    """What is described, with random numbers in the place of shapes; objects are copied."""
    if isinstance(value, _Random):
        return torch.randn(value.shape, generator=generator)
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, nn.Module):
        return value
    return map_items(value, lambda item: make_values(item, generator), _copied)


def map_items(value: Any, change: Callable[[Any], Any], otherwise: Callable[[Any], Any]) -> Any:
    """A container of the same kind with changed items; what is no container becomes `otherwise(value)`."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[change(item) for item in value])
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(change(item) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((name, change(item)) for name, item in value.items())
    return otherwise(value)


def _copied(value: Any) -> Any:
    """A copy of an object such as a cache, which a forward may write; itself where it cannot be copied."""
    if value is None or isinstance(value, (int, float, str, torch.dtype, torch.device)) or callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # objects of any library
        return value


def own_numbers(tensor: Tensor) -> Tensor:
    """A copy of a tensor's numbers; of one that has none, zeros or random ones."""
    if not _host.is_fake(tensor) and tensor.device.type != "meta":
        return tensor.detach().cpu().clone()
    if tensor.is_floating_point():
        return torch.randn(tuple(tensor.shape), generator=torch.Generator().manual_seed(4))
    return (
        torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) == 0
        if tensor.dtype == torch.bool
        else torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in containers, dataclasses and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
