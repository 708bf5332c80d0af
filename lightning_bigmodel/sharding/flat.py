"""Rows of several parameters in one message.

Layout of a message: for each rank in turn its rows of every parameter, each padded to the size of the largest shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel import _host
from lightning_bigmodel.sharding.rows import RowShard

__all__ = ["FlatRows", "Pending"]


class Pending:
    """A collective under way, and what to do with its result.

    Args:
        work: What to wait for; None if there is nothing.
        result: The tensor it fills.
    """

    def __init__(self, work: dist.Work | None, result: Tensor) -> None:
        self._work, self._result = work, result

    def wait(self) -> Tensor:
        """The result, complete."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result


class FlatRows:
    """Packs and unpacks the rows of parameters of one group of ranks.

    Args:
        shards: This rank's rows of each parameter; all over the same group.

    Communication of `gather` and `reduce_scatter`: one collective; each rank contributes `numel` elements to the one,
    `num_ranks * numel` to the other. Memory: one whole message.

    Example:
        >>> rows = FlatRows([RowShard(name="w", shape=torch.Size((3, 2)), num_ranks=2, rank=1, group=None)])
        >>> rows.numel, [view.shape for view in rows.own(torch.zeros(4))]
        (4, [torch.Size([1, 2])])
    """

    def __init__(self, shards: Sequence[RowShard]) -> None:
        self.shards = tuple(shards)
        sizes = [shard.padded_numel for shard in shards]
        self.numel = sum(sizes)
        self.num_ranks = shards[0].num_ranks
        self._group = shards[0].group
        self._spans = list(zip(accumulate([0, *sizes]), sizes, strict=False))

    def own(self, flat: Tensor) -> list[Tensor]:
        """Views of this rank's rows within a local message of `numel` elements."""
        return [
            flat[offset : offset + prod(shard.local_shape)].view(shard.local_shape)
            for shard, (offset, _) in zip(self.shards, self._spans, strict=True)
        ]

    def pack_own(self, rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """A local message made of this rank's rows."""
        flat = torch.zeros(self.numel, dtype=dtype, device=rows[0].device)
        torch._foreach_copy_(self.own(flat), list(rows))
        return flat

    def gather(self, flat: Tensor) -> Pending:
        """Start to collect every rank's local message."""
        if self.num_ranks == 1:
            return Pending(None, flat)
        everything = torch.empty(self.num_ranks * self.numel, dtype=flat.dtype, device=flat.device)
        return Pending(_host.all_gather_flat(everything, flat, self._group), everything)

    def unpack(self, everything: Tensor, wholes: Sequence[Tensor]) -> None:
        """Write a collected message into the whole parameters."""
        table = everything.view(self.num_ranks, self.numel)
        for shard, (offset, size), whole in zip(self.shards, self._spans, wholes, strict=True):
            for target, source in self._parts(shard, table[:, offset : offset + size], whole):
                target.copy_(source)

    def reduce_scatter(self, wholes: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> Pending:
        """Start to sum whole tensors over the ranks, each of which gets its rows; None counts as zeros."""
        everything = torch.zeros(self.num_ranks * self.numel, dtype=dtype, device=device)
        table = everything.view(self.num_ranks, self.numel)
        for shard, (offset, size), whole in zip(self.shards, self._spans, wholes, strict=True):
            if whole is not None:
                for source, target in self._parts(shard, table[:, offset : offset + size], whole):
                    target.copy_(source)
        if self.num_ranks == 1:
            return Pending(None, everything)
        own = torch.empty(self.numel, dtype=dtype, device=device)
        return Pending(_host.reduce_scatter_flat(own, everything, self._group), own)

    def _parts(self, shard: RowShard, table: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Matching parts of a whole tensor and of its columns in a message: all full ranks at once, then the rest."""
        flat = whole.reshape(-1) if not whole.is_contiguous() else whole.view(-1)
        size = table.shape[1]
        if not size:
            return []
        full = flat.numel() // size
        parts = [(flat[: full * size].view(full, size), table[:full])]
        rest = flat.numel() - full * size
        if rest:
            parts.append((flat[full * size :], table[full, :rest]))
        return parts
