"""Which part of a parameter a tensor-parallel rank holds: rectangles of the whole one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HeldSlice", "Region", "SlicedParameter", "is_placeholder"]


@dataclass(frozen=True)
class Region:
    """A rectangle of a parameter: where it lies in the whole, where in this rank's slice, and how large it is.

    Args:
        full_offsets: First index in the whole parameter, one number a dimension.
        local_offsets: First index in the slice.
        sizes: Length along each dimension.
    """

    full_offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SlicedParameter:
    """A parameter that is cut along one dimension, part by part.

    A fused weight such as q|k|v has several parts side by side; a rank holds its share of each, so that what it
    computes is a smaller q|k|v again. An ordinary weight is one part.

    Args:
        name: Name of the parameter in the user's module.
        full_shape: Shape of the whole parameter.
        dim: The dimension that is cut.
        parts: Widths of the parts along `dim`; each divides by `size`, and together they are the dimension.
        rank: This rank.
        size: Number of ranks.

    Example:
        >>> fused = SlicedParameter(name="qkv", full_shape=torch.Size([12, 4]), dim=0, parts=(4, 4, 4), rank=1, size=2)
        >>> fused.local_shape
        torch.Size([6, 4])
        >>> [region.full_offsets for region in fused.regions]
        [(2, 0), (6, 0), (10, 0)]
    """

    name: str
    full_shape: torch.Size
    dim: int
    parts: tuple[int, ...]
    rank: int
    size: int

    @property
    def local_shape(self) -> torch.Size:
        """Shape of a rank's slice; that of every rank."""
        shape = list(self.full_shape)
        shape[self.dim] //= self.size
        return torch.Size(shape)

    @property
    def regions(self) -> list[Region]:
        """The rectangles this rank holds, in the order of the whole parameter; one a part."""
        regions = []
        part_start = 0
        for width in self.parts:
            share = width // self.size
            full, local, sizes = [0] * len(self.full_shape), [0] * len(self.full_shape), list(self.full_shape)
            full[self.dim] = part_start + self.rank * share
            local[self.dim] = part_start // self.size
            sizes[self.dim] = share
            regions.append(Region(tuple(full), tuple(local), tuple(sizes)))
            part_start += width
        return regions

    def of_rank(self, rank: int) -> SlicedParameter:
        """The same for another rank."""
        return replace(self, rank=rank)

    def take(self, full: Tensor) -> Tensor:
        """This rank's slice of a tensor of `full_shape`, in memory of its own."""
        if full.shape != self.full_shape:
            raise ValueError(
                f"A tensor of shape {tuple(full.shape)} was given to be sliced like parameter {self.name!r}, whose "
                f"whole shape is {tuple(self.full_shape)}."
            )
        pieces = [
            full.narrow(self.dim, region.full_offsets[self.dim], region.sizes[self.dim]) for region in self.regions
        ]
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def merge(self, slices: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the slices of all ranks, in their order."""
        full = slices[0].new_empty(self.full_shape)
        for rank, piece in enumerate(slices):
            for region in self.of_rank(rank).regions:
                length = region.sizes[self.dim]
                target = full.narrow(self.dim, region.full_offsets[self.dim], length)
                target.copy_(piece.narrow(self.dim, region.local_offsets[self.dim], length))
        return full


@dataclass(frozen=True)
class HeldSlice:
    """What an optimizer holds is a slice of a parameter, or rows of that slice.

    Args:
        record: Which slice.
        group: The ranks that hold the others.
    """

    record: SlicedParameter
    group: dist.ProcessGroup | None

    @property
    def name(self) -> str:
        """Name of the parameter in the user's module."""
        return self.record.name

    @property
    def num_ranks(self) -> int:
        """Ranks the parameter is cut over."""
        return self.record.size

    @property
    def cuts_columns(self) -> bool:
        """Whether each rank has a part of every row of a matrix."""
        return self.record.dim == 1


def is_placeholder(tensor: Tensor) -> bool:
    """Whether a tensor is one number expanded: it stands for a parameter that another pipeline stage holds."""
    return tensor.numel() > 1 and not any(tensor.stride())
