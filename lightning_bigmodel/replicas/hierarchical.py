"""All-reduce in levels: little over the slow links between machines, much over the fast ones inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel._host import all_gather_flat, reduce_scatter_flat
from lightning_bigmodel.replicas._checks import check_count, float_type
from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, buckets_of, sum_dtype
from lightning_bigmodel.replicas.sync import GradientSync, NamedGradient, Replicas, StepProgress

__all__ = ["HierarchicalAllReduce"]

_TYPES = ("float32", "float16", "bfloat16")


class HierarchicalAllReduce(GradientSync):
    """Sums gradients inside each machine, then part by part across machines, then brings the parts together inside.

    For machines of several replicas behind one slow link each, on backends that do not know the machines (Gloo), and
    where each level is to have its own type, such as 16 bits across only. Not where NCCL sees all links: it chooses
    rings and trees over machines by itself. Where machines hold one replica each there is one level: use `AllReduce`.

    With g replicas inside, and V bytes of gradients: a reduce-scatter inside leaves each replica a g-th of its
    machine's sum; replicas with the same place in their machines all-reduce that; an all-gather inside ends it. While
    one message crosses, the next is being summed inside.

    Communication a step, sent by each of N replicas: 2 V (g - 1) / g inside, and 2 V / g (N/g - 1) / (N/g) across, in
    place of 2 V (N - 1) / N; three collectives a message. Memory: three messages.

    Args:
        ranks_inside: How many neighbouring replicas make a machine. Default: as many as share one.
        inside_dtype: Type in which gradients are sent and summed inside. Default: their own, at least float32.
        across_dtype: That across. Default: the one inside.
        bucket_bytes: Size of a message; a larger gradient is its own.

    Raises:
        ValueError: For settings out of range; by `begin`, if they do not divide the replicas or leave one level only.

    Example:
        >>> HierarchicalAllReduce(across_dtype="bfloat16").ranks_inside is None
        True
    """

    def __init__(
        self,
        ranks_inside: int | None = None,
        *,
        inside_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        across_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if ranks_inside is not None:
            check_count("ranks_inside", ranks_inside, 2)
        check_count("bucket_bytes", bucket_bytes, 1)
        self.ranks_inside = ranks_inside
        self._inside_dtype = float_type("inside_dtype", inside_dtype, _TYPES)
        self._across_dtype = float_type("across_dtype", across_dtype, _TYPES)
        self._bucket_bytes = bucket_bytes
        self._inside: dist.ProcessGroup | None = None
        self._across: dist.ProcessGroup | None = None
        self._num_inside = 1

    def begin(self, replicas: Replicas, parameters: Mapping[str, Tensor]) -> None:
        """Find the groups of both levels.

        Raises:
            ValueError: If there is one level only, or machines would have different numbers of replicas.
        """
        super().begin(replicas, parameters)
        inside = self.ranks_inside or replicas.ranks_a_machine
        given = f"`ranks_inside={self.ranks_inside}`" + (
            "" if self.ranks_inside else f" ({inside} replicas share a machine)"
        )
        if inside < 2 or inside >= replicas.size:
            raise ValueError(
                f"{given} of {replicas.size} replicas leaves one level, and `HierarchicalAllReduce` needs two: several "
                "replicas a machine, and several machines. Use `AllReduce`, or set `ranks_inside` between them."
            )
        if replicas.size % inside:
            choices = [number for number in range(2, replicas.size) if replicas.size % number == 0]
            raise ValueError(
                f"{given} does not divide the {replicas.size} replicas, and all machines must have as many. "
                + (f"Use one of {choices}." if choices else "Use another number of replicas, or `AllReduce`.")
            )
        self._num_inside = inside
        self._inside, self._across = replicas.levels(inside)

    def end(self) -> None:
        """Let go of the groups."""
        self._inside = self._across = None

    @torch.no_grad()
    def reduce(self, gradients: Sequence[NamedGradient], progress: StepProgress) -> None:
        """Replace each `value` by the sum over all replicas."""
        values = [gradient.value for gradient in gradients if gradient.value.numel()]
        running: list[Iterator[bool]] = []
        for bucket in buckets_of(values, self._bucket_bytes):
            running = [sums for sums in (*running, self._sums(bucket)) if next(sums, False)]
        while running:
            running = [sums for sums in running if next(sums, False)]

    def _sums(self, bucket: Sequence[Tensor]) -> Iterator[bool]:
        """Sums one bucket; stops, with True, each time that it has started one of its three collectives."""
        inside_type = sum_dtype(bucket[0].dtype, self._inside_dtype)
        num_elements = sum(value.numel() for value in bucket)
        length = -(-num_elements // self._num_inside)
        # Zeros fill up the last part: nothing of a bucket that does not divide evenly is left out.
        flat = bucket[0].new_zeros(length * self._num_inside, dtype=inside_type)
        torch.cat([value.reshape(-1).to(inside_type) for value in bucket], out=flat[:num_elements])
        part = flat.new_empty(length)
        work = reduce_scatter_flat(part, flat, self._inside)
        yield True
        _finish(work)
        crossing = part if self._across_dtype is None else part.to(self._across_dtype)
        work = dist.all_reduce(crossing, group=self._across, async_op=True)
        yield True
        _finish(work)
        part = crossing.to(inside_type)
        work = all_gather_flat(flat, part, self._inside)
        yield True
        _finish(work)
        for value, summed in zip(bucket, flat[:num_elements].split([v.numel() for v in bucket]), strict=True):
            value.copy_(summed.view(value.shape))


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
