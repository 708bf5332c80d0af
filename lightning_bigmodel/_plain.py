"""Values that any reader of checkpoints takes: tensors, numbers, strings, and plain containers of these."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import Tensor

__all__ = ["copied", "is_plain", "num_bytes"]


_KINDS = (bool, int, float, str)


def is_plain(value: Any) -> bool:
    """Whether a value is one of these throughout."""
    if type(value) is dict:
        return all(isinstance(key, (str, int)) and is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (*_KINDS, Tensor)) and not isinstance(value, Enum)


def copied(value: Any) -> Any:
    """A copy of a plain value, its tensors on the CPU and without a graph, numbers of numpy as Python's."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(copied, value))
    return next((kind(value) for kind in _KINDS if isinstance(value, kind)), value)


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in a plain value."""
    if isinstance(value, Tensor):
        return value.nbytes
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(num_bytes, items))
