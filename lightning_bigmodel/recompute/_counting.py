"""The bytes of storages that somebody holds, each once."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor

from lightning_bigmodel.recompute._storages import storage_of

__all__ = ["Held", "HeldBytes"]


class Held:
    """What autograd holds in the place of a tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a result that its own node keeps would keep the node.
        self.tensor = tensor.detach() if tensor.grad_fn is not None else tensor


class HeldBytes:
    """Counts storages, each as long as any of its holders lives.

    Attributes:
        bytes: Held now.
        peak_bytes: The most that were.
    """

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._counts: Counter[Any] = Counter()
        self._sizes: dict[Any, int] = {}

    def add(self, holder: object, tensor: Tensor) -> None:
        """`holder` holds the storage of `tensor`."""
        key, size = storage_of(tensor)
        self._counts[key] += 1
        if self._counts[key] == 1:
            self._sizes[key] = size
            self.change(size)
        weakref.finalize(holder, self._release, key)

    def drop(self, key: Any) -> None:
        """Somebody else counts that storage."""
        self.change(-self._sizes.pop(key, 0))

    def change(self, num_bytes: int) -> None:
        """So many more are held, or fewer."""
        self.bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _release(self, key: Any) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self.drop(key)
