"""Which rows of a tensor a rank holds: the first dimension by ceiling division, as `torch.chunk` and DTensor do it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["RowShard", "rows_of"]


def rows_of(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of a rank; the last ranks get fewer, or none, where it does not divide.

    Example:
        >>> [rows_of(5, 3, rank) for rank in range(3)]
        [(0, 2), (2, 2), (4, 1)]
    """
    size = -(-num_rows // num_ranks)
    start = min(rank * size, num_rows)
    return start, min(size, num_rows - start)


@dataclass(frozen=True, kw_only=True)
class RowShard:
    """This rank's rows of one parameter.

    A parameter without dimensions counts as one row.

    Attributes:
        name: Name of the parameter in the user's module.
        shape: Shape of the whole parameter (of this rank's slice of it under tensor parallelism).
        num_ranks: Ranks the rows are spread over.
        rank: This rank among them.
        group: Their process group.
    """

    name: str
    shape: torch.Size
    num_ranks: int
    rank: int
    group: dist.ProcessGroup | None

    @cached_property
    def num_rows(self) -> int:
        """Rows of the whole parameter."""
        return self.shape[0] if self.shape else 1

    @cached_property
    def start(self) -> int:
        """First row held here."""
        return rows_of(self.num_rows, self.num_ranks, self.rank)[0]

    @cached_property
    def length(self) -> int:
        """Rows held here; may be 0."""
        return rows_of(self.num_rows, self.num_ranks, self.rank)[1]

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of the rows held here."""
        return torch.Size((self.length, *self.shape[1:]))

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the largest shard of any rank, which is what each rank sends."""
        return -(-self.num_rows // self.num_ranks) * prod(self.shape[1:])

    def rows(self, whole: Tensor) -> Tensor:
        """A view of this rank's rows of a contiguous tensor of `shape`."""
        table = whole.view(1) if not self.shape else whole
        return table[self.start : self.start + self.length]
