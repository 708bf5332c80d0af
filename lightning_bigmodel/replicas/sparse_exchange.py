"""Sum what each replica selected of its tensors: values and places travel together, all tensors in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel._host import all_gather_flat

__all__ = ["PlannedBytes", "add_selected", "index_type"]

_INT32_ELEMENTS = 2**31
# Values and indices share a message of bytes; with this many elements each part starts where any type may.
_ALIGNED_ELEMENTS = 8


def index_type(sizes: Sequence[int]) -> torch.dtype:
    """The type of indices into tensors of these numbers of elements: 64 bits only where one needs it."""
    return torch.int64 if max(sizes, default=0) > _INT32_ELEMENTS else torch.int32


@torch.no_grad()
def add_selected(
    targets: Sequence[Tensor],
    indices: Sequence[Tensor],
    values: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    num_ranks: int,
) -> None:
    """Add to each target what every rank of `group` selected of it.

    Ranks may select different numbers of elements. All ranks get bitwise equal sums if their targets were equal.

    Args:
        targets: Of shape (n,), one a tensor, the same on all ranks.
        indices: Places in each target, none twice.
        values: What to add there, all of one floating type.
        group: The ranks.
        num_ranks: Their number.

    Communication: two all-gathers, of a number a tensor and of values and indices; the second is as long as what the
    rank with most elements has. Memory: the messages of all ranks.
    """
    if not targets:
        return
    if num_ranks == 1:
        for target, places, added in zip(targets, indices, values, strict=True):
            target.index_add_(0, places, added.to(target.dtype))
        return
    device, value_dtype = targets[0].device, values[0].dtype
    own = torch.tensor([places.numel() for places in indices], device=device)
    counts = own.new_empty(num_ranks * len(targets))
    all_gather_flat(counts, own, group).wait()
    rows: list[list[int]] = counts.view(num_ranks, len(targets)).tolist()
    capacity = -(-max(sum(row) for row in rows) // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
    if not capacity:
        return
    index_dtype = index_type([target.numel() for target in targets])
    value_bytes = capacity * value_dtype.itemsize
    message = torch.zeros(value_bytes + capacity * index_dtype.itemsize, dtype=torch.uint8, device=device)
    num_own = sum(places.numel() for places in indices)
    message[:value_bytes].view(value_dtype)[:num_own] = torch.cat(list(values))
    message[value_bytes:].view(index_dtype)[:num_own] = torch.cat(list(indices)).to(index_dtype)
    gathered = message.new_empty(num_ranks * message.numel())
    all_gather_flat(gathered, message, group).wait()
    # Rank after rank: within a rank no place comes twice, so that the order of additions is the same everywhere, also
    # on devices that add in any order.
    for row, part in zip(rows, gathered.view(num_ranks, -1), strict=True):
        its_values = part[:value_bytes].view(value_dtype)[: sum(row)].split(row)
        its_places = part[value_bytes:].view(index_dtype)[: sum(row)].split(row)
        for target, places, added in zip(targets, its_places, its_values, strict=True):
            if places.numel():
                target.index_add_(0, places, added.to(target.dtype))


@dataclass(frozen=True, kw_only=True)
class PlannedBytes:
    """What each replica sends in a step, on average.

    Attributes:
        dense: With a ring all-reduce of all gradients.
        compressed: As planned: the same for what is exempt, and an all-gather of values and indices for the rest.
        compressed_elements: How many elements are not exempt.
    """

    dense: float
    compressed: float
    compressed_elements: int

    @classmethod
    def of(
        cls,
        num_replicas: int,
        *,
        exempt: Sequence[Tensor],
        compressed: Sequence[Tensor],
        density: float,
        value_dtype: torch.dtype | None,
    ) -> PlannedBytes:
        """Count them for these gradients, or parameters of their shapes and types."""

        def ring(tensors: Sequence[Tensor]) -> float:
            whole = sum(tensor.numel() * max(tensor.element_size(), 4) for tensor in tensors)
            return 2 * (num_replicas - 1) / num_replicas * whole

        index_bytes = index_type([tensor.numel() for tensor in compressed]).itemsize
        selected = sum(
            tensor.numel() * (index_bytes + (value_dtype.itemsize if value_dtype else max(tensor.element_size(), 4)))
            for tensor in compressed
        )
        sparse = ring(compressed) if density >= 1 else (num_replicas - 1) * density * selected
        return cls(
            dense=ring(exempt) + ring(compressed),
            compressed=ring(exempt) + sparse,
            compressed_elements=sum(tensor.numel() for tensor in compressed),
        )
