"""What tensor-parallel ranks send each other in a step: six autograd functions, each the conjugate of another.

The letters f and g are those of Megatron-LM (https://arxiv.org/abs/1909.08053, section 3); the two functions over the
sequence dimension are g-bar of "Reducing Activation Recomputation" (https://arxiv.org/abs/2205.05198, section 4.2.2).

| function           | forward        | backward       | between                                          |
|--------------------|----------------|----------------|--------------------------------------------------|
| `copy_in`  (f)     | identity       | all-reduce     | whole activations -> sharded layers              |
| `sum_out`  (g)     | all-reduce     | identity       | partial sums -> whole activations                |
| `gather_out`       | all-gather     | own slice      | sharded -> whole activations                     |
| `split_in`         | own slice      | all-gather     | whole -> sharded activations                     |
| `gather_in`        | all-gather     | reduce-scatter | sharded activations -> sharded layers            |
| `scatter_out`      | reduce-scatter | all-gather     | partial sums -> sharded activations              |

The backward of each is another one of them (identity is `copy_in` or, where gradients are summed, `sum_out`), so that
gradients can be differentiated any number of times; a second backward sends what the first forward and backward sent.

A fake tensor has shapes only; nothing is sent for it, because steps are traced on fake tensors by each rank alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_bigmodel import _host

__all__ = [
    "Exchange",
    "GroupExchange",
    "copy_in",
    "gather_in",
    "gather_out",
    "own_slice",
    "scatter_out",
    "split_in",
    "sum_out",
]


class Exchange(Protocol):
    """How the ranks that share a layer talk; `rank` of `size`."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks. May reuse the memory of `tensor`."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, joined along `dim`."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice along `dim` of the sum over ranks."""


class GroupExchange:
    """Over a process group. `n` bytes in: all-reduce sends about `2 n (size - 1) / size`, the other two half of it.

    Args:
        group: The ranks that share layers.
        rank: This rank in it.
        size: Number of its ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in the memory of `tensor` where that is contiguous."""
        if _host.is_fake(tensor):
            return tensor
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, joined along `dim`."""
        own = tensor.movedim(dim, 0).contiguous()
        whole = own.new_empty((own.shape[0] * self.size, *own.shape[1:]))
        if not _host.is_fake(tensor):
            _host.all_gather_flat(whole.view(-1), own.view(-1), self.group).wait()
        return whole.movedim(0, dim).contiguous()

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice along `dim` of the sum over ranks."""
        whole = tensor.movedim(dim, 0).contiguous()
        own = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        if not _host.is_fake(tensor):
            _host.reduce_scatter_flat(own.view(-1), whole.view(-1), self.group).wait()
        return own.movedim(0, dim).contiguous()


def own_slice(tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
    """This rank's equal part of `tensor` along `dim`, as a view.

    Raises:
        ValueError: If the dimension does not divide.
    """
    length = tensor.shape[dim]
    if length % exchange.size:
        raise ValueError(
            f"Dimension {dim} of an activation of shape {tuple(tensor.shape)} has length {length}, which "
            f"`tensor_parallel_size={exchange.size}` does not divide. Pad the batch, or use a plan that does not split "
            "this dimension."
        )
    part = length // exchange.size
    return tensor.narrow(dim, exchange.rank * part, part)


def copy_in(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Identity; sums the gradients that the ranks' shares of the next layers give."""
    result: Tensor = _CopyIn.apply(tensor, exchange)  # type: ignore[no-untyped-call]
    return result


def sum_out(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Sums what the ranks' shares of a layer gave, in the memory of `tensor`, which nobody else may hold."""
    result: Tensor = _SumOut.apply(tensor, exchange)  # type: ignore[no-untyped-call]
    return result


def gather_out(tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
    """Joins slices for layers that every rank computes alike."""
    result: Tensor = _GatherOut.apply(tensor, dim, exchange)  # type: ignore[no-untyped-call]
    return result


def split_in(tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
    """Takes this rank's slice of what every rank computed alike."""
    result: Tensor = _SplitIn.apply(tensor, dim, exchange)  # type: ignore[no-untyped-call]
    return result


def gather_in(tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
    """Joins slices for layers of which every rank computes its share."""
    result: Tensor = _GatherIn.apply(tensor, dim, exchange)  # type: ignore[no-untyped-call]
    return result


def scatter_out(tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
    """Sums what the ranks' shares of a layer gave, and keeps this rank's slice."""
    result: Tensor = _ScatterOut.apply(tensor, dim, exchange)  # type: ignore[no-untyped-call]
    return result


# Each backward is itself one of the functions, as a penalty on a norm of gradients differentiates them again.


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # Not in place: autograd may hand one tensor to several functions.
        return sum_out(gradient.clone(), ctx.exchange), None


class _SumOut(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        total = exchange.all_reduce(tensor.detach())
        # An input returned as it is would be taken for a view of itself.
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return copy_in(gradient, ctx.exchange), None


class _GatherOut(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
        ctx.dim, ctx.exchange = dim, exchange
        return exchange.all_gather(tensor, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return split_in(gradient, ctx.dim, ctx.exchange), None, None


class _SplitIn(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
        ctx.dim, ctx.exchange = dim, exchange
        return own_slice(tensor, dim, exchange).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gather_out(gradient, ctx.dim, ctx.exchange), None, None


class _GatherIn(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
        ctx.dim, ctx.exchange = dim, exchange
        return exchange.all_gather(tensor, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return scatter_out(gradient, ctx.dim, ctx.exchange), None, None


class _ScatterOut(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, exchange: Exchange) -> Tensor:
        ctx.dim, ctx.exchange = dim, exchange
        own_slice(tensor, dim, exchange)  # refuses a length that does not divide
        return exchange.reduce_scatter(tensor, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gather_in(gradient, ctx.dim, ctx.exchange), None, None
