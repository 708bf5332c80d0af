"""Reduce gradients to rows while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel import _host
from lightning_bigmodel.sharding.flat import FlatRows, Pending
from lightning_bigmodel.sharding.zero import ZeroShards

__all__ = ["BucketReducer", "reduce_leftovers"]

_MAX_PENDING = 2


class BucketReducer:
    """Reduces gradients to rows, a bucket as soon as backward has made all of it, in one order on every rank.

    A bucket goes only after those before it: ranks whose branches differ, or that make gradients in another order,
    still issue the same messages. What is missing at the end of a backward counts as zeros; what comes after its bucket
    went (from a nested backward) stays in `parameter.grad` for the next `flush`.

    Args:
        shards: Holds the rows.
        parameters: Whose gradients; a bucket holds only those that take gradients at the time.
        while_backward: Whether buckets go as soon as they are complete; else all go at `flush`.
        divide: Divides parameters into buckets; default: by size, the last parameters first.
        advance: Called when a bucket is complete, in place of launching it after those before it.

    Communication a `flush`: one reduce-scatter a bucket. Memory: the messages of three buckets.
    """

    def __init__(
        self,
        shards: ZeroShards,
        parameters: Sequence[nn.Parameter],
        *,
        while_backward: bool,
        divide: Callable[[Sequence[nn.Parameter]], list[list[nn.Parameter]]] | None = None,
        advance: Callable[[], None] | None = None,
    ) -> None:
        self._shards, self.parameters, self._while_backward = shards, list(parameters), while_backward
        self._divide, self._advance = divide or shards.buckets, advance or self._launch_complete
        self._taking: tuple[bool, ...] | None = None
        self.buckets: list[tuple[list[nn.Parameter], FlatRows]] = []
        self._bucket_of: dict[int, int] = {}
        self._hooks: dict[int, Any] = {}
        self._missing: list[int] = []
        self._next = 0
        self._is_open = False
        self._waiting: list[tuple[list[nn.Parameter], FlatRows, Pending]] = []

    def divide_again(self) -> None:
        """The order of buckets has changed."""
        self._taking = None

    def open(self) -> None:
        """A backward begins."""
        taking = tuple(parameter.requires_grad for parameter in self.parameters)
        if taking != self._taking:
            self._taking = taking
            trained = [parameter for parameter in self.parameters if parameter.requires_grad]
            self.buckets = [(bucket, self._shards.rows_of(bucket)) for bucket in self._divide(trained)]
            self._bucket_of = {id(p): index for index, (bucket, _) in enumerate(self.buckets) for p in bucket}
            if self._while_backward:
                for parameter in trained:
                    if id(parameter) not in self._hooks:
                        self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._arrived)
        self._missing = [len(bucket) for bucket, _ in self.buckets]
        self._next = 0
        self._is_open = True

    def _arrived(self, parameter: Tensor) -> None:
        if not self._is_open:  # a backward nobody announced
            self.open()
            _host.queue_after_backward(self.flush)
        index = self._bucket_of.get(id(parameter))
        if index is not None:
            self._missing[index] -= 1
            if not self._missing[index]:
                self._advance()

    def is_complete(self, index: int) -> bool:
        """Whether backward has made all gradients of a bucket."""
        return self._missing[index] <= 0

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets) and self.is_complete(self._next):
            self.launch(self._next)

    @torch.no_grad()
    def launch(self, index: int) -> None:
        """Start to reduce a bucket, which must be the next one."""
        assert index == self._next, "all ranks launch buckets in one order"
        self._next += 1
        bucket, rows = self.buckets[index]
        gradients = [parameter.grad for parameter in bucket]
        self._refuse_sparse(bucket)
        self._shards.present.update(id(parameter) for parameter in bucket if parameter.grad is not None)
        self._waiting.append(
            (bucket, rows, rows.reduce_scatter(gradients, self._shards.sum_dtype(bucket[0]), bucket[0].device))
        )
        for parameter in bucket:
            parameter.grad = None
        if len(self._waiting) > _MAX_PENDING:
            self._finish()

    def _refuse_sparse(self, bucket: Sequence[nn.Parameter]) -> None:
        for parameter in bucket:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"The gradient of `{self._shards.records[id(parameter)].name}` is sparse, and sparse gradients are "
                    "not made into rows. Set `sparse=False` on the embedding, or use `zero_stage=0`."
                )

    def _finish(self) -> None:
        bucket, rows, pending = self._waiting.pop(0)
        self._shards.add_to_shards(bucket, rows, pending.wait())

    def flush(self) -> None:
        """Reduce what has not gone yet, and wait for all. Collective over the group of the shards."""
        if not self._is_open:
            self.open()
        self._is_open = False
        while self._next < len(self.buckets):
            self.launch(self._next)
        while self._waiting:
            self._finish()
        self._shards.land()

    def has_leftovers(self) -> bool:
        """Whether gradients came after their bucket went."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def abandon(self) -> None:
        """Forget a backward that failed. No communication."""
        self._is_open = False
        self._waiting.clear()

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._taking = None


def reduce_leftovers(reducers: Sequence[BucketReducer], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Reduce gradients that came after their bucket went, on any rank. Collective; one number where there are none."""
    late = torch.tensor(float(any(reducer.has_leftovers() for reducer in reducers)), device=device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(late, dist.ReduceOp.MAX, group=group)
    if late:
        for reducer in reducers:
            reducer.flush()
