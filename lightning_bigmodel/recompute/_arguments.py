"""The tensors in the arguments of a block, taken out and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Position", "map_tensors", "tensors_of", "with_caches_of_their_own"]


class Position:
    """Where a tensor belongs, in its place."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def map_tensors(function: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """Rebuild lists, tuples, dicts and dataclasses with `function` applied to each tensor; the rest stays itself.

    Args:
        function: Of a tensor.
        value: Nested values.
        kind: What counts as a tensor.
    """
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple):
        parts = [map_tensors(function, part, kind) for part in value]
        # Not through a named tuple's constructor, which may look at what it is given.
        return tuple.__new__(type(value), parts)
    if isinstance(value, list):
        return type(value)([map_tensors(function, part, kind) for part in value])
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, part, kind) for key, part in value.items()}
        if type(value) is dict:
            return items
        if dataclasses.is_dataclass(value):  # transformers' outputs are both
            return type(value)(**items)  # type: ignore[unreachable]  # both at once, for mypy
        mapping: Any = copy.copy(value)
        for key, part in items.items():
            mapping[key] = part
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(rebuilt, field.name, map_tensors(function, getattr(value, field.name), kind))
        return rebuilt
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors that `map_tensors` would visit, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_of(part)]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_of(part)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [tensor for field in dataclasses.fields(value) for tensor in tensors_of(getattr(value, field.name))]
    return []


def _is_cache(value: Any) -> bool:
    return any(cls.__module__ == "transformers.cache_utils" for cls in type(value).__mro__)


def with_caches_of_their_own(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with copies of transformers' key-value caches, for one run of a block to fill.

    In training nobody reads what a block leaves there, and a block that runs again would find its own keys in it. With
    no cache at all keys would lie otherwise in memory, so that sums round otherwise, and a learned prefix in it would
    be lost.
    """
    if not any(_is_cache(value) for value in (*args, *kwargs.values())):
        return tuple(args), dict(kwargs)
    copies: dict[int, Any] = {}
    return tuple(_cache_copy(value, copies) for value in args), {
        key: _cache_copy(value, copies) for key, value in kwargs.items()
    }


def _cache_copy(value: Any, copies: dict[int, Any]) -> Any:
    """A cache down to its tensors, which it replaces and does not change; all else is itself."""
    if not _is_cache(value):
        return value
    if id(value) not in copies:
        copies[id(value)] = twin = copy.copy(value)
        for name, part in vars(value).items():
            if isinstance(part, list):
                twin.__dict__[name] = [_cache_copy(each, copies) for each in part]
            else:
                twin.__dict__[name] = dict(part) if type(part) is dict else _cache_copy(part, copies)
    return copies[id(value)]
