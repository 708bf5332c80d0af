"""The tensors in the arguments of a block, taken out and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Position", "map_tensors", "tensors_of", "without_caches"]


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


def without_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments without transformers' key-value caches, which a block that runs again would fill twice.

    Training reads no cache. Their own layers leave caches out in the same way when they are checkpointed.
    """
    if not any(_is_cache(value) for value in (*args, *kwargs.values())):
        return tuple(args), dict(kwargs)
    kept = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    if "use_cache" in kept:
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept
