"""Counts the bytes that autograd keeps for backward."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from lightning_bigmodel.recompute._counting import Held, HeldBytes
from lightning_bigmodel.recompute._storages import is_activation
from lightning_bigmodel.recompute.noting import noting_second_runs

__all__ = ["SavedBytes"]


class SavedBytes:
    """Counts the bytes of all storages that autograd keeps for backward, each once; parameters are no part of them.

    What a block keeps that `Recompute` runs again counts too: its inputs, kept results, and from its second run on what
    that computed. What `Offload` moves is not seen here. Forward and backward run within; not for what runs in other
    threads at the same time.

    Example:
        >>> layer = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Tanh())
        >>> with SavedBytes() as saved:
        ...     layer(torch.ones(100, 10)).sum().backward()
        >>> saved.peak_bytes, saved.bytes  # the input and the result of tanh
        (8000, 0)
    """

    def __init__(self) -> None:
        self._held = HeldBytes()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._notes = noting_second_runs(self._count)

    @property
    def bytes(self) -> int:
        """Kept now."""
        return self._held.bytes

    @property
    def peak_bytes(self) -> int:
        """The most that were."""
        return self._held.peak_bytes

    def __enter__(self) -> SavedBytes:
        self._notes.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._notes.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        self._count(held, tensor)
        return held

    def _count(self, holder: object, tensor: Tensor) -> None:
        if is_activation(tensor):
            self._held.add(holder, tensor)
