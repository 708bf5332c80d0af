"""What a step keeps for backward outside of blocks: embeddings, heads, losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_bigmodel import _host
from lightning_bigmodel.recompute._counting import Held, HeldBytes
from lightning_bigmodel.recompute._storages import is_activation, storage_of

__all__ = ["OutsideMeter"]


class OutsideMeter:
    """Counts the bytes that autograd saves in a training batch where no block does.

    Blocks that are run again save through hooks of their own, and hand their inputs to autograd, which this one is told
    of (`belongs_to_block`). Where other hooks lie in between, nothing is seen of the step, and the number is None.
    """

    def __init__(self) -> None:
        self._held = HeldBytes()
        self._of_blocks: set[Any] = set()
        self._sees_blocks = False

    @property
    def num_bytes(self) -> int | None:
        """The most at a time, over all passes under way."""
        return self._held.peak_bytes if self._sees_blocks else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count within."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor):
                yield
        finally:
            self._of_blocks.clear()

    def belongs_to_block(self, tensor: Tensor) -> None:
        """A block keeps it."""
        key, _ = storage_of(tensor)
        self._of_blocks.add(key)
        self._held.drop(key)

    def _pack(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        if is_activation(tensor) and not _host.is_fake(tensor):
            if storage_of(tensor)[0] in self._of_blocks:
                self._sees_blocks = True
            else:
                self._held.add(held, tensor)
        return held
