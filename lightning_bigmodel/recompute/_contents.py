"""What is inside of an attribute that a forward may change without setting it: collections, and random generators."""

from __future__ import annotations

import random
import sys
from collections import deque
from typing import Any

import torch

__all__ = ["contents_of", "has_contents", "is_same", "put_back"]


def _is_numpy_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def has_contents(value: Any) -> bool:
    """Whether the other functions know what to do with it."""
    return isinstance(value, (list, dict, set, deque, torch.Generator, random.Random)) or _is_numpy_generator(value)


def contents_of(value: Any) -> Any:
    """Of a collection its items, each as it is; of a generator its state."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, set, deque)):
        return list(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    # numpy gives its words as an array, of which a later state would be compared item by item.
    holder = value.bit_generator if hasattr(value, "bit_generator") else value._bit_generator
    return repr(holder.state), holder.state


def is_same(one: Any, other: Any) -> bool:
    """Of what `contents_of` gave for one value at two times."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(_is_same_item(a, b) for a, b in zip(one, other, strict=True))
    return bool(one[0] == other[0]) if isinstance(one[0], str) else bool(one == other)


def _is_same_item(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def put_back(value: Any, contents: Any) -> None:
    """Make it what it was at the time of `contents_of`."""
    if isinstance(value, list):
        value[:] = contents
    elif isinstance(value, deque):
        value.clear()
        value.extend(contents)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(contents)
    elif isinstance(value, torch.Generator):
        value.set_state(contents)
    elif isinstance(value, random.Random):
        value.setstate(contents)
    else:
        holder = value.bit_generator if hasattr(value, "bit_generator") else value._bit_generator
        holder.state = contents[1]
