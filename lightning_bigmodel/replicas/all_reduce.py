"""Sum gradients over replicas, a few large messages instead of one a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["BUCKET_BYTES", "all_reduce_sum", "buckets_of", "sum_dtype"]

_T = TypeVar("_T", bound=Tensor)

BUCKET_BYTES = 25 * 1024 * 1024


def buckets_of(tensors: Sequence[_T], bucket_bytes: int) -> Iterator[list[_T]]:
    """Consecutive tensors of one dtype and device, up to `bucket_bytes` together; a larger tensor is its own bucket."""
    bucket: list[_T] = []
    num_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        changed = bool(bucket) and (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (changed or num_bytes + size > bucket_bytes):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += size
    if bucket:
        yield bucket


def sum_dtype(own: torch.dtype, chosen: torch.dtype | None) -> torch.dtype:
    """The type in which gradients of type `own` are sent and summed: as chosen, else their own but at least fp32."""
    if chosen is not None:
        return chosen
    return torch.promote_types(own, torch.float32) if own.is_floating_point else own


@torch.no_grad()
def all_reduce_sum(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    factor: float = 1.0,
) -> None:
    """Replace each tensor by its sum over `group`, in place. Every rank must pass equal shapes in the same order.

    Args:
        tensors: What to sum.
        group: The ranks.
        bucket_bytes: Size of a message; a larger tensor is its own.
        dtype: See `sum_dtype`.
        factor: What this rank's tensors are multiplied by before, in the type of the sum.

    Communication: one all-reduce a bucket; bytes of all tensors once, in the type of the sum. Memory: two buckets.

    Raises:
        ValueError: For a `bucket_bytes` below one.

    Example:
        >>> all_reduce_sum([p.grad for p in module.parameters()], group)  # doctest: +SKIP
    """
    if bucket_bytes < 1:
        raise ValueError(f"`bucket_bytes={bucket_bytes}` must be at least 1.")
    pending: list[tuple[list[Tensor], Tensor, dist.Work | None]] = []
    for bucket in buckets_of(tensors, bucket_bytes):
        wide = sum_dtype(bucket[0].dtype, dtype)
        if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].dtype == wide:
            flat = bucket[0]
        else:
            flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket])
        if factor != 1.0:
            flat.mul_(factor)
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
        if len(pending) > 1:
            _finish(*pending.pop(0))
    for waiting in pending:
        _finish(*waiting)


def _finish(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    if flat is bucket[0]:
        return
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
