"""Sum gradients over replicas while backward computes the ones that are still missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, all_reduce_sum, buckets_of, sum_dtype

__all__ = ["OverlappedAllReduce"]


class OverlappedAllReduce:
    """All-reduces gradients bucket by bucket, a bucket as soon as backward has made all of it.

    All ranks issue the buckets in one order, the last parameters first (PyTorch Distributed, arXiv 2006.15704). What a
    rank has no gradient of counts as zeros; a gradient that comes after its bucket went (from a nested backward) stays
    apart for `add_late`.

    Args:
        parameters: Whose gradients; of these, what takes gradients at the time. Alike on all ranks.
        names: id(parameter) -> its name.
        group: The ranks to sum over.
        bucket_bytes: Size of a message; a larger gradient is its own.
        dtype: In which gradients are sent and summed; see `sum_dtype`.

    Communication: bytes of all gradients once. Memory: the messages, which become the gradients; besides, one bucket.

    Example:
        >>> reduction = OverlappedAllReduce(list(module.parameters()), names, group)  # doctest: +SKIP
        >>> reduction.begin(); loss.backward(); reduction.launch(); reduction.complete()  # doctest: +SKIP
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: dict[int, str],
        group: dist.ProcessGroup | None,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._parameters, self._names, self._group = list(parameters), names, group
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self.covers = frozenset(id(parameter) for parameter in parameters)
        self.present: set[int] = set()  # ids of parameters that had a gradient here
        self._taking: tuple[bool, ...] | None = None
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[int, int] = {}
        self._missing: list[int] = []
        self._next = 0
        self._is_open = False
        self._waiting: list[tuple[list[nn.Parameter], list[Tensor | None], Tensor, dist.Work | None]] = []
        self._late: dict[int, Tensor] = {}
        self._hooks: dict[int, Any] = {}

    def begin(self) -> None:
        """The last backward before the optimizer's step begins."""
        taking = tuple(parameter.requires_grad for parameter in self._parameters)
        if taking != self._taking:
            self._taking = taking
            trained = [parameter for parameter in reversed(self._parameters) if parameter.requires_grad]
            self._buckets = list(buckets_of(trained, self._bucket_bytes))
            self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
            for parameter in trained:
                if id(parameter) not in self._hooks:
                    self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._arrived)
        self.present.clear()
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next, self._is_open = 0, True

    def _arrived(self, parameter: Tensor) -> None:
        index = self._bucket_of.get(id(parameter)) if self._is_open else None
        if index is None:
            return
        self._missing[index] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        gradients = [parameter.grad for parameter in bucket]
        for parameter, gradient in zip(bucket, gradients, strict=True):
            if gradient is not None:
                self._refuse_sparse(parameter, gradient)
                self.present.add(id(parameter))
            parameter.grad = None
        if len(bucket) == 1 and gradients[0] is not None and gradients[0].is_contiguous():
            flat = gradients[0].view(-1)
        else:
            parts = [
                torch.zeros_like(parameter).reshape(-1) if gradient is None else gradient.reshape(-1)
                for parameter, gradient in zip(bucket, gradients, strict=True)
            ]
            flat = torch.cat(parts)
        flat = flat.to(sum_dtype(flat.dtype, self._dtype))
        # Where memory has another order than the message, the gradient itself stays, and takes the sum back.
        kept = [
            None if parameter.is_contiguous() else gradient
            for parameter, gradient in zip(bucket, gradients, strict=True)
        ]
        self._waiting.append((bucket, kept, flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def _refuse_sparse(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if gradient.layout != torch.strided:
            raise ValueError(
                f"The gradient of `{self._names[id(parameter)]}` is sparse, and sparse gradients are not summed over "
                "replicas. Set `sparse=False` on the embedding."
            )

    @torch.no_grad()
    def launch(self) -> None:
        """Send what has not gone yet. Collective."""
        if not self._is_open:
            self.begin()
        self._is_open = False
        while self._next < len(self._buckets):
            self._launch_next()
        self._late = {id(p): p.grad for bucket, *_ in self._waiting for p in bucket if p.grad is not None}
        self.present |= self._late.keys()

    @torch.no_grad()
    def complete(self) -> None:
        """Wait for the sums, which are the gradients from then on."""
        for bucket, kept, flat, work in self._waiting:
            if work is not None:
                work.wait()
            for parameter, gradient, part in zip(bucket, kept, flat.split([p.numel() for p in bucket]), strict=True):
                summed = part.view(parameter.shape).to(parameter.dtype)
                parameter.grad = summed if gradient is None else gradient.copy_(summed)
        self._waiting.clear()

    @property
    def has_late(self) -> bool:
        """Whether gradients came after their bucket went; if so on any rank, all call `add_late`."""
        return bool(self._late)

    @torch.no_grad()
    def add_late(self) -> None:
        """Sum those too. Collective."""
        parameters = [parameter for bucket in self._buckets for parameter in bucket]
        late = [self._late.get(id(parameter), torch.zeros_like(parameter)) for parameter in parameters]
        all_reduce_sum(late, self._group, self._bucket_bytes, self._dtype)
        for parameter, gradient in zip(parameters, late, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._late.clear()

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._taking = None
