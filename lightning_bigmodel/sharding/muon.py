"""Muon on rows and slices: each matrix is orthogonalised whole on one rank, and the matrices are shared out.

Muon (https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by a nearly orthogonal one, found
with a few Newton-Schulz iterations on the whole matrix. Here every rank keeps the momentum of its own rows; the rows of
a matrix meet on the rank that it falls to, which iterates once for all, and the result goes back by rows.

Communication a step and process group: one all-reduce of 4 bytes a matrix, to agree on which have a gradient, and two
all-to-alls, there and back, in each of which a rank sends at most 2 bytes an element of its rows (the iterations run in
bf16 anyway). Three messages, however many matrices there are. Memory: twice 2 bytes an element of the matrices that
fall to this rank, and as much for its rows, during the step. Compute: that of one process divided by the ranks, as
evenly as whole matrices allow.

Under tensor parallelism the rows that have met make up a slice. The slices of a matrix lie on the tensor ranks of one
data rank, and meet in the same way on one of these: three messages more over the tensor ranks, the all-to-alls of at
most 2 bytes an element of the slices that fell to this data rank. A matrix that the plan does not cut is orthogonalised
on each tensor rank for itself, without these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_bigmodel.sharding._row_sums import is_spread, parameters_with_gradient, sum_over_ranks
from lightning_bigmodel.sharding.rows import RowShard, rows_of
from lightning_bigmodel.sharding.tensor_slices import HeldSlice, SlicedParameter

__all__ = ["check_muon", "step_torch_muon"]

_LEARNING_RATES = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class _Matrix:
    """One parameter with its options."""

    parameter: Tensor
    shard: RowShard | None
    cut: HeldSlice | None
    options: Mapping[str, Any]

    @property
    def slice_shape(self) -> torch.Size:
        """Shape of all rows on this tensor rank."""
        return self.parameter.shape if self.shard is None else self.shard.shape

    @property
    def shape(self) -> torch.Size:
        return self.slice_shape if self.cut is None else self.cut.record.full_shape

    @property
    def cost(self) -> int:
        """Of an iteration, in proportion."""
        return self.shape.numel() * min(self.shape)


class _Pieces(Protocol):
    """How a tensor is put together from what ranks have of it."""

    def numel(self, rank: int) -> int:
        """Elements of a rank's piece."""

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The tensor from the flat pieces of all ranks."""

    def piece(self, joined: Tensor, rank: int) -> Tensor:
        """A rank's piece of the tensor."""


@dataclass(frozen=True)
class _Rows:
    shape: torch.Size
    num_ranks: int

    def numel(self, rank: int) -> int:
        return rows_of(self.shape[0], self.num_ranks, rank)[1] * self.shape[1]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces)).view(self.shape)

    def piece(self, joined: Tensor, rank: int) -> Tensor:
        return joined.narrow(0, *rows_of(self.shape[0], self.num_ranks, rank))


@dataclass(frozen=True)
class _Slices:
    record: SlicedParameter

    def numel(self, rank: int) -> int:
        return self.record.local_shape.numel()

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return self.record.merge([piece.view(self.record.local_shape) for piece in pieces])

    def piece(self, joined: Tensor, rank: int) -> Tensor:
        return self.record.of_rank(rank).take(joined)


def check_muon(optimizer: Optimizer) -> None:
    """Refuses what a newer torch may offer and `step_torch_muon` does not know.

    Raises:
        ValueError: If a group has another `adjust_lr_fn`.
    """
    for group in optimizer.param_groups:
        if group["adjust_lr_fn"] not in _LEARNING_RATES:
            raise ValueError(
                f"`Muon(adjust_lr_fn={group['adjust_lr_fn']!r})` is not known where each rank holds a part of the "
                f"parameters only; choose one of {_LEARNING_RATES}, or train without `zero_stage` and "
                "`tensor_parallel_size`."
            )


def step_torch_muon(
    optimizer: Optimizer, shards: Mapping[int, RowShard], slices: Mapping[int, HeldSlice] | None = None
) -> None:
    """One step of `torch.optim.Muon` where each rank holds parts of the parameters.

    Args:
        optimizer: The optimizer. Its state gets the entry that its own step would give it, for the part held here.
        shards: By id of the parameter, which rows it is.
        slices: By id of the parameter, which slice it is, or is of, under tensor parallelism.

    Raises:
        RuntimeError: If a gradient is set for some parts of a parameter only, is sparse, or complex.
    """
    cuts = slices or {}
    matrices = [
        _Matrix(parameter, shards.get(id(parameter)), cuts.get(id(parameter)), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    matrices = _with_gradient(optimizer, matrices)
    groups: dict[dist.ProcessGroup | None, list[_Matrix]] = {}
    here = []
    for matrix in matrices:
        if matrix.shard is not None and is_spread(matrix.shard):
            groups.setdefault(matrix.shard.group, []).append(matrix)
        else:
            here.append(matrix)
    _apply_all(here, _orthogonalised_slices(here, [_momentum(optimizer, matrix) for matrix in here]))
    for group, spread in groups.items():
        shard = spread[0].shard
        assert shard is not None
        pieces = [_Rows(matrix.slice_shape, shard.num_ranks) for matrix in spread]
        rows = [_momentum(optimizer, matrix) for matrix in spread]
        _apply_all(spread, _together(spread, rows, pieces, shard.rank, shard.num_ranks, group, _orthogonalised_slices))


def _with_gradient(optimizer: Optimizer, matrices: Sequence[_Matrix]) -> list[_Matrix]:
    name = type(optimizer).__name__
    flags = []
    for matrix in matrices:
        parameter = matrix.parameter
        if parameter.is_complex() or (parameter.grad is not None and parameter.grad.is_sparse):
            kind = "complex parameters" if parameter.is_complex() else "sparse gradients"
            raise RuntimeError(f"`{name}` does not support {kind}.")
        is_set = parameter.grad is not None and parameter.shape[0] > 0
        flags.append(torch.full((1,), float(is_set), device=parameter.device))
    sums = sum_over_ranks([(matrix.shard, flag) for matrix, flag in zip(matrices, flags, strict=True)])
    sums = sum_over_ranks([(matrix.cut, total) for matrix, total in zip(matrices, sums, strict=True)])
    places = [(matrix.shard, matrix.cut) for matrix in matrices]
    used = parameters_with_gradient(name, places, [total[0] for total in sums])
    return [matrix for matrix, is_used in zip(matrices, used, strict=True) if is_used]


def _momentum(optimizer: Optimizer, matrix: _Matrix) -> Tensor:
    """Follows the gradient; returns what is to be made orthogonal, for the part here."""
    parameter, momentum = matrix.parameter, matrix.options["momentum"]
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
    update = gradient.lerp(average, momentum) if matrix.options["nesterov"] else average
    return update.to(torch.bfloat16, copy=True)


def _orthogonalised_slices(matrices: Sequence[_Matrix], updates: Sequence[Tensor]) -> list[Tensor]:
    """All rows of this tensor rank's slices, orthogonalised as parts of the whole matrices."""
    results: list[Tensor | None] = [None] * len(matrices)
    groups: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, matrix in enumerate(matrices):
        if matrix.cut is not None and is_spread(matrix.cut):
            groups.setdefault(matrix.cut.group, []).append(index)
        else:
            results[index] = _orthogonalised(matrix, updates[index])
    for group, indices in groups.items():
        spread, records = [], []
        for index in indices:
            cut = matrices[index].cut
            assert cut is not None
            spread.append(matrices[index])
            records.append(cut.record)
        found = _together(
            spread,
            [updates[index] for index in indices],
            [_Slices(record) for record in records],
            records[0].rank,
            records[0].size,
            group,
            lambda mine, wholes: [_orthogonalised(matrix, whole) for matrix, whole in zip(mine, wholes, strict=True)],
        )
        for index, result in zip(indices, found, strict=True):
            results[index] = result
    return [result for result in results if result is not None]


def _orthogonalised(matrix: _Matrix, whole: Tensor) -> Tensor:
    # The iteration has no public home (torch 2.11 - 2.14); its own first step is to go to bf16.
    from torch.optim._muon import _zeropower_via_newtonschulz

    options = matrix.options
    return _zeropower_via_newtonschulz(whole, options["ns_coefficients"], options["ns_steps"], options["eps"])


def _apply_all(matrices: Sequence[_Matrix], updates: Sequence[Tensor]) -> None:
    for matrix, update in zip(matrices, updates, strict=True):
        rate = float(matrix.options["lr"])
        num_rows, num_columns = matrix.shape
        ratio = math.sqrt(max(1, num_rows / num_columns))
        if matrix.options["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(num_rows, num_columns))
        matrix.parameter.mul_(1 - rate * matrix.options["weight_decay"])
        matrix.parameter.add_(update.view(matrix.parameter.shape), alpha=-rate * ratio)


def _together(
    matrices: Sequence[_Matrix],
    updates: Sequence[Tensor],
    pieces: Sequence[_Pieces],
    rank: int,
    num_ranks: int,
    group: dist.ProcessGroup | None,
    work: Callable[[Sequence[_Matrix], Sequence[Tensor]], Sequence[Tensor]],
) -> list[Tensor]:
    """Joins each matrix on one rank of a group, has it worked on there, and brings this rank's pieces back.

    Args:
        matrices: Those that the same ranks have pieces of.
        updates: This rank's pieces.
        pieces: How each is put together.
        rank: This rank.
        num_ranks: Ranks of the group.
        group: The ranks.
        work: Given what falls to this rank, joined; may be nothing.
    """
    falling = _shared_out(matrices, num_ranks)
    mine, device = falling[rank], matrices[0].parameter.device
    sent = [[updates[index].flatten() for index in theirs] for theirs in falling]
    received = _exchange(
        sent, [sum(pieces[i].numel(source) for i in mine) for source in range(num_ranks)], device, group
    )
    by_source = [
        part.split([pieces[index].numel(source) for index in mine]) if mine else ()
        for source, part in enumerate(received)
    ]
    joined = [pieces[index].join([parts[at] for parts in by_source]) for at, index in enumerate(mine)]
    done = work([matrices[index] for index in mine], joined)

    back = [
        [pieces[index].piece(whole, target).flatten() for index, whole in zip(mine, done, strict=True)]
        for target in range(num_ranks)
    ]
    sizes = [[updates[index].numel() for index in theirs] for theirs in falling]
    results: list[Tensor] = list(updates)
    for theirs, own, part in zip(falling, sizes, _exchange(back, list(map(sum, sizes)), device, group), strict=True):
        for index, piece in zip(theirs, part.split(own or [0]), strict=False):
            results[index] = piece.view(updates[index].shape)
    return results


def _shared_out(matrices: Sequence[_Matrix], num_ranks: int) -> list[list[int]]:
    """Which matrices fall to which rank: the dearest first, each to the rank with the least to do."""
    falling: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(matrices)), key=lambda index: -matrices[index].cost):
        rank = loads.index(min(loads))
        falling[rank].append(index)
        loads[rank] += matrices[index].cost
    return falling


def _exchange(
    sent: Sequence[Sequence[Tensor]], sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Sends each rank its tensors in one piece; returns the piece from each rank, of the given sizes."""
    empty = torch.empty(0, dtype=torch.bfloat16, device=device)
    outgoing = torch.cat([empty, *(part for parts in sent for part in parts)])
    incoming = outgoing.new_empty(sum(sizes))
    sent_sizes = [sum(part.numel() for part in parts) for parts in sent]
    dist.all_to_all_single(incoming, outgoing, list(sizes), sent_sizes, group=group)
    pieces: tuple[Tensor, ...] = incoming.split(list(sizes))
    return pieces
