"""Weighted means over replicas, in place: the weights first, then the tensors in a few large messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, buckets_of, sum_dtype

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
    pending: list[tuple[list[Tensor], Tensor, dist.Work | None]] = []
    for bucket in buckets_of([tensor.detach() for tensor in tensors if tensor.numel()], bucket_bytes):
        wide = sum_dtype(bucket[0].dtype, None)
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket]).mul_(share)
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
        if len(pending) > 1:
            _finish(*pending.pop(0))
    for waiting in pending:
        _finish(*waiting)


def _finish(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view(tensor.shape))
