"""Weighted means over replicas, in place: the weights first, then the tensors in a few large messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, all_reduce_sum

__all__ = ["average_in_place", "share_of", "sum_numbers"]


def sum_numbers(numbers: Sequence[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Sums of a few numbers over `group`, in fp64. One message; the device is waited for."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=group)
    return [float(value) for value in sums.tolist()]


def share_of(weight: float, total: float, count: float) -> float:
    """What a rank's tensors are multiplied by in a mean of `count` ranks; equal shares if no rank weighs anything."""
    return weight / total if total else 1.0 / count


@torch.no_grad()
def average_in_place(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None, share: float, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each tensor by the sum over `group` of all ranks' tensors times their shares.

    Args:
        tensors: Alike in shape and order on all ranks; of any layout in memory, also empty.
        group: The ranks.
        share: This rank's factor; those of all ranks sum up to 1.
        bucket_bytes: Size of a message; a larger tensor is its own.

    Communication: bytes of all tensors once, in at least fp32. Memory: two messages.
    """
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    all_reduce_sum(filled, group, bucket_bytes, factor=share)
