"""Walk the values users pass around: batches, block inputs and outputs, returned dicts.

`torch.utils._pytree` treats dataclasses and most mapping types as opaque leaves; a batch or a block output of such a
type would silently be neither split nor sent. Here every mapping, sequence, named tuple and dataclass instance is a
container and is rebuilt with its own type.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["children", "detached", "leaves", "map_leaves", "map_tensors", "rebuild", "structure", "tensor_leaves"]


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(type(value), "is_tree_leaf")


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """The (key, child) pairs of a container, or None for a leaf."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if _is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def leaves(value: Any) -> Iterator[Any]:
    """All leaves in a fixed order (containers themselves are not yielded)."""
    pairs = children(value)
    if pairs is None:
        yield value
    else:
        for _, child in pairs:
            yield from leaves(child)


def tensor_leaves(value: Any) -> list[Tensor]:
    """The tensors of `value` in leaf order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def rebuild(container: Any, values: Sequence[Any]) -> Any:
    """A container of the same type as `container` with other children, given in the order of `children(container)`."""
    if isinstance(container, Mapping):
        items = dict(zip(container.keys(), values, strict=True))
        if type(container) is dict:
            return items
        if _is_dataclass(container):  # transformers' ModelOutput is both; its constructor keeps both views in step
            return type(container)(**items)
        rebuilt = copy.copy(container)
        for key, child in items.items():
            rebuilt[key] = child  # type: ignore[index]  # Mapping has no __setitem__; concrete batch types do
        return rebuilt
    if _is_namedtuple(container):
        # Not through the constructor, which may look at what it is given (PackedSequence's does).
        return tuple.__new__(type(container), values)
    if isinstance(container, (list, tuple)):
        return type(container)(values)
    rebuilt = copy.copy(container)
    for field, child in zip(dataclasses.fields(container), values, strict=True):
        object.__setattr__(rebuilt, field.name, child)
    return rebuilt


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Rebuild `value` with `function` applied to each leaf; container types are kept."""
    pairs = children(value)
    if pairs is None:
        return function(value)
    return rebuild(value, [map_leaves(function, child) for _, child in pairs])


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Rebuild `value` with `function` applied to each tensor; other leaves are kept as they are."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def structure(value: Any) -> tuple[Any, tuple[int, ...]]:
    """Split a batch into what must be equal for two batches to run alike, and the sizes that may differ.

    Returns:
        A hashable description (container types, keys, tensor dtypes and ranks, flags, None) and the tuple of all sizes
        and plain integers in leaf order. Floats and strings only count by type: they do not shape a computation.
    """
    sizes: list[int] = []

    def describe(item: Any) -> Any:
        if isinstance(item, Tensor):
            sizes.extend(item.shape)
            return ("tensor", item.dtype, item.ndim)
        pairs = children(item)
        if pairs is not None:
            return (type(item).__name__, tuple((str(key), describe(child)) for key, child in pairs))
        if item is None or isinstance(item, bool):
            return item
        if isinstance(item, int):
            sizes.append(item)
            return "int"
        return type(item).__name__

    return describe(value), tuple(sizes)


def detached(value: Any) -> Any:
    """`value` with every tensor detached from its graph."""
    return map_tensors(torch.Tensor.detach, value)
