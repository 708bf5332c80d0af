"""A tensor of which this rank holds some rectangular regions, as a checkpoint writes and reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Region", "RegionLayout", "TensorRegions"]


@dataclass(frozen=True)
class Region:
    """Where a rectangular part of a whole tensor lies in a local one.

    Attributes:
        offsets: Its first element in the whole tensor.
        local_offsets: Its first element in the local tensor.
        sizes: Its size.
    """

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class RegionLayout:
    """How a local tensor lies in a whole one.

    Attributes:
        shape: Shape of the whole tensor.
        local_shape: Shape of the local one.
        regions: Its parts; none where this rank holds nothing.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    regions: tuple[Region, ...]

    @classmethod
    def of_rows(cls, shape: Sequence[int], start: int, length: int) -> RegionLayout:
        """The layout of some rows of a tensor.

        Example:
            >>> RegionLayout.of_rows((4, 3), 2, 2).regions
            (Region(offsets=(2, 0), local_offsets=(0, 0), sizes=(2, 3)),)
        """
        local_shape = (length, *shape[1:])
        zeros = (0,) * len(shape)
        regions = (Region((start, *zeros[1:]), zeros, local_shape),) if all(local_shape) else ()
        return cls(tuple(shape), local_shape, regions)

    @classmethod
    def of_whole(cls, shape: Sequence[int]) -> RegionLayout:
        """The layout of a tensor that is here as a whole."""
        whole, zeros = tuple(shape), (0,) * len(shape)
        return cls(whole, whole, (Region(zeros, zeros, whole),) if all(whole) else ())

    def rows(self, start: int, length: int) -> RegionLayout:
        """The layout of some rows of the local tensor."""
        kept = []
        for region in self.regions:
            first = max(region.local_offsets[0], start)
            stop = min(region.local_offsets[0] + region.sizes[0], start + length)
            if first < stop:
                shift = first - region.local_offsets[0]
                kept.append(
                    Region(
                        (region.offsets[0] + shift, *region.offsets[1:]),
                        (first - start, *region.local_offsets[1:]),
                        (stop - first, *region.sizes[1:]),
                    )
                )
        return RegionLayout(self.shape, (length, *self.local_shape[1:]), tuple(kept))

    def along(self, dim: int, shape: Sequence[int], at: int) -> RegionLayout:
        """The layout of a tensor of `shape` whose dimension `at` is, and lies as, dimension `dim` of this one.

        Example:
            >>> RegionLayout.of_rows((4, 3), 2, 2).along(0, (4, 1), 0).regions
            (Region(offsets=(2, 0), local_offsets=(0, 0), sizes=(2, 1)),)
        """

        def put(values: Sequence[int], value: int) -> tuple[int, ...]:
            return (*values[:at], value, *values[at + 1 :])

        zeros = (0,) * len(shape)
        spans = dict.fromkeys((r.offsets[dim], r.local_offsets[dim], r.sizes[dim]) for r in self.regions)
        regions = [Region(put(zeros, full), put(zeros, local), put(shape, size)) for full, local, size in spans]
        return RegionLayout(tuple(shape), put(shape, self.local_shape[dim]), tuple(regions))

    def take(self, whole: Tensor) -> Tensor:
        """The local tensor, cut out of a whole one."""
        local = torch.empty(self.local_shape, dtype=whole.dtype, device=whole.device)
        for region in self.regions:
            source, target = whole, local
            for dim, size in enumerate(region.sizes):
                source = source.narrow(dim, region.offsets[dim], size)
                target = target.narrow(dim, region.local_offsets[dim], size)
            target.copy_(source)
        return local


class TensorRegions:
    """A local tensor with its layout; torch.distributed.checkpoint asks it what to write and where to read to.

    Args:
        local: The local tensor, of `layout.local_shape`.
        layout: How it lies in the whole.
    """

    def __init__(self, local: Tensor, layout: RegionLayout) -> None:
        if tuple(local.shape) != layout.local_shape:
            raise ValueError(f"A tensor of shape {list(local.shape)} does not fit {layout}.")
        self.local, self.layout = local, layout

    def size(self) -> torch.Size:
        """Size of the whole tensor."""
        return torch.Size(self.layout.shape)

    def part(self, index: MetadataIndex) -> Tensor:
        """The view of the local tensor that begins at an offset of the whole."""
        (region,) = [r for r in self.layout.regions if index.offset is None or r.offsets == tuple(index.offset)]
        return self._view(region)

    def _view(self, region: Region) -> Tensor:
        view = self.local
        for dim, (offset, size) in enumerate(zip(region.local_offsets, region.sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        return view

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(region.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(region),
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.size(),
                ),
            )
            for region in self.layout.regions
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(region) for region in self.layout.regions]


def _chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(region.offsets), sizes=torch.Size(region.sizes))
