"""Sums over the ranks that hold parts of the same tensors, all of a step in one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.sharding.rows import RowShard
from lightning_bigmodel.sharding.tensor_slices import HeldSlice

__all__ = ["Part", "is_spread", "parameters_with_gradient", "sum_over_ranks"]


class Part(Protocol):
    """Part of a tensor: rows of it, or a slice over tensor ranks."""

    @property
    def num_ranks(self) -> int:
        """Ranks that hold the parts."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Their process group."""


def is_spread(shard: Part | None) -> bool:
    """Whether other ranks hold parts too."""
    return shard is not None and shard.num_ranks > 1


def sum_over_ranks(parts: Sequence[tuple[Part | None, Tensor]]) -> list[Tensor]:
    """Sums flat tensors over the ranks of their shards or slices; those that are whole here come back as they are.

    Every rank of a group passes tensors of the same sizes in the same order, whether it holds rows or not.

    Communication: one all-reduce a process group, of all its tensors together.

    Args:
        parts: Shard or slice that each tensor tells something about, and the tensor, of one dimension.

    Returns:
        The sums in the order of `parts`, in the widest of the dtypes given for the group.
    """
    sums = [part for _, part in parts]
    groups: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, (shard, _) in enumerate(parts):
        if shard is not None and is_spread(shard):
            groups.setdefault(shard.group, []).append(index)
    for group, indices in groups.items():
        total = torch.cat([sums[index] for index in indices])
        dist.all_reduce(total, group=group)
        for index, part in zip(indices, total.split([sums[index].numel() for index in indices]), strict=True):
            sums[index] = part
    return sums


def parameters_with_gradient(
    optimizer: str, places: Sequence[tuple[RowShard | None, HeldSlice | None]], num_gradients: Sequence[Tensor]
) -> list[bool]:
    """Whether each parameter has a gradient, which the ranks that hold parts of it must agree on.

    Args:
        optimizer: Its name, for the message.
        places: Which rows and which slice of each parameter are here.
        num_gradients: How many ranks hold a part of each parameter and a gradient for it, as the sum over the ranks.

    Raises:
        RuntimeError: If some of the ranks that hold a part have a gradient for it and others none. All ranks raise.
    """
    if not places:
        return []
    answers = []
    for (shard, cut), number in zip(places, torch.stack(list(num_gradients)).tolist(), strict=True):
        held = cut if shard is None else shard
        expected = _num_ranks_with_rows(shard) * (1 if cut is None else cut.num_ranks)
        if held is not None and 0 < number < expected:
            parts = "rows" if cut is None else "parts"
            raise RuntimeError(
                f"`{optimizer}`: {number:.0f} of the {expected} ranks that hold {parts} of `{held.name}` have a "
                f"gradient for them and the others have none. A gradient must be set for all {parts} of a parameter or "
                "for none."
            )
        answers.append(number > 0)
    return answers


def _num_ranks_with_rows(shard: RowShard | None) -> int:
    if shard is None:
        return 1
    rows_per_rank = -(-shard.num_rows // shard.num_ranks)
    return -(-shard.num_rows // rows_per_rank) if rows_per_rank else 0
