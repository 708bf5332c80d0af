"""Sums over the ranks that hold rows of the same tensors, all of a step in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.sharding.rows import RowShard

__all__ = ["is_spread", "parameters_with_gradient", "sum_over_ranks"]


def is_spread(shard: RowShard | None) -> bool:
    """Whether other ranks hold rows too."""
    return shard is not None and shard.num_ranks > 1


def sum_over_ranks(parts: Sequence[tuple[RowShard | None, Tensor]]) -> list[Tensor]:
    """Sums flat tensors over the ranks of their shards; those that are whole here come back as they are.

    Every rank of a group passes tensors of the same sizes in the same order, whether it holds rows or not.

    Communication: one all-reduce a process group, of all its tensors together.

    Args:
        parts: Shard that each tensor tells something about, and the tensor, of one dimension.

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
    optimizer: str, shards: Sequence[RowShard | None], num_gradients: Sequence[Tensor]
) -> list[bool]:
    """Whether each parameter has a gradient, which the ranks that hold rows of it must agree on.

    Args:
        optimizer: Its name, for the message.
        shards: Shard of each parameter.
        num_gradients: How many ranks hold rows of each parameter and a gradient for them, as the sum over the ranks.

    Raises:
        RuntimeError: If some of the ranks that hold rows have a gradient for them and others none. All ranks raise.
    """
    if not shards:
        return []
    answers = []
    for shard, number in zip(shards, torch.stack(list(num_gradients)).tolist(), strict=True):
        if shard is not None and 0 < number < (expected := _num_ranks_with_rows(shard)):
            raise RuntimeError(
                f"`{optimizer}`: {number:.0f} of the {expected} ranks that hold rows of `{shard.name}` have a gradient "
                "for them and the others have none. A gradient must be set for all rows of a parameter or for none."
            )
        answers.append(number > 0)
    return answers


def _num_ranks_with_rows(shard: RowShard) -> int:
    rows_per_rank = -(-shard.num_rows // shard.num_ranks)
    return -(-shard.num_rows // rows_per_rank) if rows_per_rank else 0
