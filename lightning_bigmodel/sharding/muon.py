"""Muon on rows: each matrix is orthogonalised whole on one rank, and the matrices are shared out over the ranks.

Muon (https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by a nearly orthogonal one, found
with a few Newton-Schulz iterations on the whole matrix. Here every rank keeps the momentum of its own rows; the rows of
a matrix meet on the rank that it falls to, which iterates once for all, and the result goes back by rows.

Communication a step and process group: one all-reduce of 4 bytes a matrix, to agree on which have a gradient, and two
all-to-alls, there and back, in each of which a rank sends at most 2 bytes an element of its rows (the iterations run in
bf16 anyway). Three messages, however many matrices there are. Memory: twice 2 bytes an element of the matrices that
fall to this rank, and as much for its rows, during the step. Compute: that of one process divided by the ranks, as
evenly as whole matrices allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_bigmodel.sharding._row_sums import is_spread, parameters_with_gradient, sum_over_ranks
from lightning_bigmodel.sharding.rows import RowShard, rows_of

__all__ = ["check_muon", "step_torch_muon"]

_LEARNING_RATES = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class _Matrix:
    """One parameter with its options."""

    parameter: Tensor
    shard: RowShard | None
    options: Mapping[str, Any]

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape if self.shard is None else self.shard.shape

    @property
    def cost(self) -> int:
        """Of an iteration, in proportion."""
        return self.shape.numel() * min(self.shape)

    def num_elements(self, num_ranks: int, rank: int) -> int:
        """Elements of the rows of a rank."""
        return rows_of(self.shape[0], num_ranks, rank)[1] * self.shape[1]


def check_muon(optimizer: Optimizer) -> None:
    """Refuses what a newer torch may offer and `step_torch_muon` does not know.

    Raises:
        ValueError: If a group has another `adjust_lr_fn`.
    """
    for group in optimizer.param_groups:
        if group["adjust_lr_fn"] not in _LEARNING_RATES:
            raise ValueError(
                f"`Muon(adjust_lr_fn={group['adjust_lr_fn']!r})` is not known where each rank holds some rows of the "
                f"parameters only; choose one of {_LEARNING_RATES} or use `zero_stage=0`."
            )


def step_torch_muon(optimizer: Optimizer, shards: Mapping[int, RowShard]) -> None:
    """One step of `torch.optim.Muon` where each rank holds rows of the parameters.

    Args:
        optimizer: The optimizer. Its state gets the entry that its own step would give it, for the rows held here.
        shards: By id of the parameter, which rows it is.

    Raises:
        RuntimeError: If a gradient is set for some rows of a parameter only, is sparse, or complex.
    """
    matrices = [
        _Matrix(parameter, shards.get(id(parameter)), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    matrices = _with_gradient(optimizer, matrices)
    groups: dict[dist.ProcessGroup | None, list[_Matrix]] = {}
    for matrix in matrices:
        if matrix.shard is not None and is_spread(matrix.shard):
            groups.setdefault(matrix.shard.group, []).append(matrix)
        else:
            _apply(matrix, _orthogonalised(_momentum(optimizer, matrix), matrix))
    for group, spread in groups.items():
        _step_together(optimizer, spread, group)


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
    used = parameters_with_gradient(name, [matrix.shard for matrix in matrices], [total[0] for total in sums])
    return [matrix for matrix, is_used in zip(matrices, used, strict=True) if is_used]


def _momentum(optimizer: Optimizer, matrix: _Matrix) -> Tensor:
    """Follows the gradient; returns what is to be made orthogonal, for the rows here."""
    parameter, momentum = matrix.parameter, matrix.options["momentum"]
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
    update = gradient.lerp(average, momentum) if matrix.options["nesterov"] else average
    return update.to(torch.bfloat16, copy=True)


def _orthogonalised(whole: Tensor, matrix: _Matrix) -> Tensor:
    # The iteration has no public home (torch 2.11 - 2.14); its own first step is to go to bf16.
    from torch.optim._muon import _zeropower_via_newtonschulz

    options = matrix.options
    return _zeropower_via_newtonschulz(whole, options["ns_coefficients"], options["ns_steps"], options["eps"])


def _apply(matrix: _Matrix, rows: Tensor) -> None:
    rate = float(matrix.options["lr"])
    num_rows, num_columns = matrix.shape
    ratio = math.sqrt(max(1, num_rows / num_columns))
    if matrix.options["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(num_rows, num_columns))
    matrix.parameter.mul_(1 - rate * matrix.options["weight_decay"])
    matrix.parameter.add_(rows, alpha=-rate * ratio)


def _step_together(optimizer: Optimizer, matrices: Sequence[_Matrix], group: dist.ProcessGroup | None) -> None:
    """The step of matrices whose rows are spread over the same ranks."""
    shard = matrices[0].shard
    assert shard is not None
    num_ranks, rank = shard.num_ranks, shard.rank
    falling = _shared_out(matrices, num_ranks)
    mine = falling[rank]

    sent = [[_momentum(optimizer, matrix).flatten() for matrix in theirs] for theirs in falling]
    sizes = [sum(matrix.num_elements(num_ranks, source) for matrix in mine) for source in range(num_ranks)]
    received = _exchange(sent, sizes, matrices[0].parameter.device, group)
    by_source = [
        part.split([matrix.num_elements(num_ranks, source) for matrix in mine]) if mine else ()
        for source, part in enumerate(received)
    ]
    wholes = []
    for index, matrix in enumerate(mine):
        whole = torch.cat([parts[index] for parts in by_source]).view(matrix.shape)
        wholes.append(_orthogonalised(whole, matrix))

    back = [
        [whole.narrow(0, *rows_of(len(whole), num_ranks, target)).flatten() for whole in wholes]
        for target in range(num_ranks)
    ]
    sizes = [sum(matrix.parameter.numel() for matrix in theirs) for theirs in falling]
    for theirs, part in zip(falling, _exchange(back, sizes, matrices[0].parameter.device, group), strict=True):
        for matrix, rows in zip(theirs, part.split([each.parameter.numel() for each in theirs] or [0]), strict=False):
            _apply(matrix, rows.view(matrix.parameter.shape))


def _shared_out(matrices: Iterable[_Matrix], num_ranks: int) -> list[list[_Matrix]]:
    """Which matrices fall to which rank: the dearest first, each to the rank with the least to do."""
    falling: list[list[_Matrix]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        rank = loads.index(min(loads))
        falling[rank].append(matrix)
        loads[rank] += matrix.cost
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
