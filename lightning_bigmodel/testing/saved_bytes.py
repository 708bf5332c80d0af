"""Counts the bytes that autograd keeps for backward."""

from __future__ import annotations

import weakref
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lightning_bigmodel import _host
from lightning_bigmodel.recompute._storages import is_activation
from lightning_bigmodel.recompute.frame import noting_second_runs

__all__ = ["SavedBytes"]


class _Held:
    """What autograd holds in the place of a tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedBytes:
    """Counts the bytes of all storages that autograd keeps for backward, each once; parameters are no part of them.

    What a block keeps that `Recompute` runs again counts too: its inputs, kept results, and from its second run on what
    that computed. What `Offload` moves is not seen here. Forward and backward run within; not for what runs in other
    threads at the same time.

    Attributes:
        bytes: Kept now.
        peak_bytes: The most that were.

    Example:
        >>> layer = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Tanh())
        >>> with SavedBytes() as saved:
        ...     layer(torch.ones(100, 10)).sum().backward()
        >>> saved.peak_bytes, saved.bytes  # the input and the result of tanh
        (8000, 0)
    """

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._counts: Counter[Any] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._notes = noting_second_runs(self._count)

    def __enter__(self) -> SavedBytes:
        self._notes.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._notes.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Held:
        # Detached: a result that its own node keeps would keep the node.
        held = _Held(tensor.detach() if tensor.grad_fn is not None else tensor)
        if is_activation(tensor):
            self._count(held, tensor)
        return held

    def _count(self, holder: object, tensor: Tensor) -> None:
        if not is_activation(tensor):
            return
        key, size = _host.storage_reference(tensor), tensor.untyped_storage().nbytes()
        self._counts[key] += 1
        if self._counts[key] == 1:
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(holder, self._release, key, size)

    def _release(self, key: Any, size: int) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self.bytes -= size
