"""Adafactor on rows and slices: what it takes from a whole parameter, summed over the ranks that hold parts of it.

Adafactor (https://arxiv.org/abs/1804.04235, algorithms 4 to 6) keeps of the squared gradients of a matrix only the
means of its rows R and of its columns C, and scales a step by the root mean square of the parameter and of the update.
A rank with some rows of a matrix has all of its part of R, but only a part of the sums behind C, behind the mean of R
and behind both root mean squares. Here those parts are summed:

1. one all-reduce of [gradient there?, sum of squared parameter, sum of R, column sums] of every parameter,
2. one all-reduce of the sum of the squared update of every parameter.

That makes two messages a step and process group, however many parameters there are: 4 * (columns + 4) bytes a matrix
and 16 bytes any other parameter, in fp32, against 4 * rows * columns bytes of the gradient itself. A tensor of three
dimensions or more is factored over its last two, of which each rank has all.

Under tensor parallelism the same two messages are summed over the tensor ranks afterwards, for the parameters that are
cut, without the column sums where columns are cut: each rank has its own. A rank with a part of each row (a `rowwise`
layer) has a part of R only; one message more over the tensor ranks, of 4 * rows bytes a matrix, comes before the
others. The state stays in parts: R of the rows here, C of the columns here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bigmodel.sharding._row_sums import parameters_with_gradient, sum_over_ranks
from lightning_bigmodel.sharding.rows import RowShard
from lightning_bigmodel.sharding.tensor_slices import HeldSlice

__all__ = ["step_torch_adafactor", "step_transformers_adafactor"]


def step_torch_adafactor(
    optimizer: Optimizer, shards: Mapping[int, RowShard], slices: Mapping[int, HeldSlice] | None = None
) -> None:
    """One step of `torch.optim.Adafactor` where each rank holds parts of the parameters.

    With `foreach=True` the updates of all parameters are held at once between the two messages, otherwise they are
    worked out twice, one parameter at a time. Where `eps[0]` is None, each parameter takes the eps of its own dtype.

    Args:
        optimizer: The optimizer. Its state gets the entries that its own step would give it, `row_var` for the rows
            held here and `col_var` the same on all ranks.
        shards: By id of the parameter, which rows it is.
        slices: By id of the parameter, which slice it is, or is of, under tensor parallelism.

    Raises:
        RuntimeError: If a gradient is set for some parts of a parameter only, is sparse, or complex.
    """
    _step(optimizer, shards, slices or {}, _TorchRule)


def step_transformers_adafactor(
    optimizer: Optimizer, shards: Mapping[int, RowShard], slices: Mapping[int, HeldSlice] | None = None
) -> None:
    """One step of `transformers.optimization.Adafactor` where each rank holds parts of the parameters.

    Args:
        optimizer: The optimizer. Its state gets the entries that its own step would give it, `exp_avg_sq_row` for the
            rows held here and `exp_avg_sq_col` the same on all ranks.
        shards: By id of the parameter, which rows it is.
        slices: By id of the parameter, which slice it is, or is of, under tensor parallelism.

    Raises:
        RuntimeError: If a gradient is set for some parts of a parameter only, is sparse, or complex.
    """
    _step(optimizer, shards, slices or {}, _TransformersRule)


def _step(
    optimizer: Optimizer, shards: Mapping[int, RowShard], slices: Mapping[int, HeldSlice], rule: type[_Rule]
) -> None:
    rules = [
        rule(optimizer, parameter, shards.get(id(parameter)), slices.get(id(parameter)), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    rules = [each for each in rules if each.numel]
    crossed = [each for each in rules if each.has_parts_of_rows]
    for each, total in zip(crossed, sum_over_ranks([(each.cut, each.own_row_sums()) for each in crossed]), strict=True):
        each.row_sums = total
    sums = _sum_all(rules, [each.statistics() for each in rules])
    used = parameters_with_gradient(
        type(optimizer).__name__, [(each.shard, each.cut) for each in rules], [statistics[0] for statistics in sums]
    )
    rules = [each for each, is_used in zip(rules, used, strict=True) if is_used]
    sums = [statistics for statistics, is_used in zip(sums, used, strict=True) if is_used]
    squares = [each.begin(statistics) for each, statistics in zip(rules, sums, strict=True)]
    for each, total in zip(rules, _sum_all(rules, squares), strict=True):
        each.finish(total)


def _sum_all(rules: Sequence[_Rule], parts: Sequence[Tensor]) -> list[Tensor]:
    """Sums what each parameter's rows and slices tell; what columns tell that are cut is not summed over slices."""
    sums = sum_over_ranks([(each.shard, part) for each, part in zip(rules, parts, strict=True)])
    lengths = [2 if each.has_parts_of_rows else len(total) for each, total in zip(rules, sums, strict=True)]
    across = sum_over_ranks([(r.cut, total[:length]) for r, total, length in zip(rules, sums, lengths, strict=True)])
    return [torch.cat([first, total[length:]]) for first, total, length in zip(across, sums, lengths, strict=True)]


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Of one element, in the dtype of messages."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=_message_dtype(tensor))
    return norm.square().view(1)


def _mean_squares(tensor: Tensor, dim: int) -> Tensor:
    """Means of the squares along a dimension, which is kept, without a tensor of the squares."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dim, keepdim=True)
    return norms.square_().div_(tensor.shape[dim])


def _message_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Rule:
    """The step of one parameter: statistics of the part here, then the update, then the change of the parameter.

    Nothing is written before the ranks have agreed that there is a gradient.
    """

    row_sums: Tensor | None = None

    def __init__(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        shard: RowShard | None,
        cut: HeldSlice | None,
        options: Mapping[str, Any],
    ) -> None:
        self.parameter = parameter
        self.shard = shard
        self.cut = cut
        self.options = options
        local_shape = parameter.shape if shard is None else shard.shape
        self.shape = local_shape if cut is None else cut.record.full_shape
        self.numel = self.shape.numel()
        self.states = optimizer.state
        if parameter.is_complex() or (parameter.grad is not None and parameter.grad.is_sparse):
            kind = "complex parameters" if parameter.is_complex() else "sparse gradients"
            raise RuntimeError(f"`{type(optimizer).__name__}` does not support {kind}.")

    @property
    def is_matrix(self) -> bool:
        """Whether the columns run over the ranks."""
        return len(self.shape) == 2

    @property
    def has_parts_of_rows(self) -> bool:
        """Whether other tensor ranks have further columns of the rows here."""
        return self.is_matrix and self.cut is not None and self.cut.cuts_columns

    @property
    def state(self) -> dict[str, Any]:
        # Asked for in this way, the state of a parameter that was never used stays absent.
        state: dict[str, Any] = self.states.get(self.parameter, {})
        return state

    @property
    def step(self) -> int:
        """Number of the step to be made."""
        return int(self.state.get("step", 0)) + 1

    @property
    def gradient(self) -> Tensor:
        """Of the part here; a rank without rows may have been given none."""
        gradient = self.parameter.grad
        return torch.zeros_like(self.parameter) if gradient is None else gradient

    def statistics(self) -> Tensor:
        """What to sum over the ranks, in one dimension."""
        dtype = _message_dtype(self.parameter)
        if self.parameter.grad is None or not self.parameter.numel():
            num_more = 1 + self.parameter.shape[1] if self.is_matrix else 0
            return self.parameter.new_zeros(2 + num_more, dtype=dtype)
        parts = [self.parameter.new_ones(1, dtype=dtype), _sum_of_squares(self.parameter)]
        if self.is_matrix:
            parts += [self.next_row_statistic().sum(dtype=dtype).view(1), self.column_sums().to(dtype)]
        return torch.cat(parts)

    def begin(self, statistics: Tensor) -> Tensor:
        """Takes the summed statistics over into the state; returns the sum of the squared update of the part here."""
        if not self.state:
            self.states[self.parameter] = self.first_state()
        self.root_mean_square = (statistics[1] / self.numel).sqrt()
        self.row_mean = statistics[2] / self.shape[0] if self.is_matrix else None
        self.write_state(statistics[3:] / self.shape[0] if self.is_matrix else None)
        return self.begin_update()

    def own_row_sums(self) -> Tensor:
        """For each row here, the sum over the columns here, in the dtype of messages."""
        raise NotImplementedError

    def row_means(self) -> Tensor | None:
        """For each row here, the mean over all columns; None where all are here, so that none had to be summed."""
        return None if self.row_sums is None else self.row_sums / self.shape[1]

    def next_row_statistic(self) -> Tensor:
        raise NotImplementedError

    def column_sums(self) -> Tensor:
        raise NotImplementedError

    def first_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def write_state(self, column_means: Tensor | None) -> None:
        raise NotImplementedError

    def begin_update(self) -> Tensor:
        raise NotImplementedError

    def finish(self, sum_of_squares: Tensor) -> None:
        raise NotImplementedError


class _TorchRule(_Rule):
    """`row_var` is of shape [..., rows, 1] and `col_var` of shape [..., 1, columns]."""

    kept: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        return -super().gradient if self.options["maximize"] else super().gradient

    @property
    def share(self) -> float:
        """Of the new in the running means."""
        return float(self.step ** self.options["beta2_decay"])

    def own_row_sums(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.gradient, dim=1, dtype=_message_dtype(self.parameter))
        return norms.square_()

    def next_row_statistic(self) -> Tensor:
        given = self.row_means()
        means = _mean_squares(self.gradient, -1) if given is None else given.view(-1, 1).to(self.parameter.dtype)
        return torch.lerp(self.state.get("row_var", torch.zeros_like(means)), means, self.share)

    def column_sums(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.gradient, dim=0, dtype=_message_dtype(self.parameter))
        return norms.square_()

    def first_state(self) -> dict[str, Any]:
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        state = {"step": torch.tensor(0.0, dtype=dtype)}
        shape = self.parameter.shape
        if len(self.shape) > 1:
            state["row_var"] = self.parameter.new_zeros((*shape[:-1], 1))
            state["col_var"] = self.parameter.new_zeros((*((1,) if self.is_matrix else (*shape[:-2], 1)), shape[-1]))
        else:
            state["variance"] = torch.zeros_like(self.parameter)
        return state

    def write_state(self, column_means: Tensor | None) -> None:
        state, share, gradient = self.state, self.share, self.gradient
        if len(self.shape) > 1:
            state["row_var"].copy_(self.next_row_statistic())
            if column_means is None:
                means = _mean_squares(gradient, -2)
            else:
                means = column_means.view(1, -1).to(state["col_var"].dtype)
            state["col_var"].lerp_(means, share)
        else:
            state["variance"].lerp_(gradient.square(), share)
        state["step"] += 1

    def begin_update(self) -> Tensor:
        self.done = int(self.state["step"])
        rate, decay = float(self.options["lr"]), self.options["weight_decay"]
        if decay != 0:
            self.parameter.mul_(1 - rate * decay)
        update = self.update()
        if self.options["foreach"]:
            self.kept = update
        return _sum_of_squares(update)

    def update(self) -> Tensor:
        state = self.state
        epsilon = self.options["eps"][0]
        if epsilon is None:
            epsilon = torch.finfo(self.parameter.dtype).eps
        if len(self.shape) > 1:
            row_var = state["row_var"]
            mean = row_var.mean(dim=-2, keepdim=True) if self.row_mean is None else self.row_mean.to(row_var.dtype)
            estimate: Tensor = (row_var @ state["col_var"]).div_(mean.clamp(min=epsilon))
        else:
            estimate = state["variance"].clone()
        estimate.clamp_(min=epsilon * epsilon)
        return estimate.rsqrt_().mul_(self.gradient)

    def finish(self, sum_of_squares: Tensor) -> None:
        clip = ((sum_of_squares / self.numel).sqrt() / self.options["d"]).clamp(min=1.0)
        rate = min(float(self.options["lr"]), 1 / math.sqrt(self.done))
        scale = self.root_mean_square.clamp(min=self.options["eps"][1]) * rate / clip
        update = self.update() if self.kept is None else self.kept
        self.parameter.sub_(update.mul_(scale.reshape(())).view_as(self.parameter))


class _TransformersRule(_Rule):
    """`exp_avg_sq_row` is of shape [..., rows] and `exp_avg_sq_col` of shape [..., columns]; all in fp32."""

    @property
    def gradient(self) -> Tensor:
        return super().gradient.to(_message_dtype(self.parameter))

    @property
    def share(self) -> float:
        return float(self.step ** self.options["decay_rate"])

    def own_row_sums(self) -> Tensor:
        sums: Tensor = (self.gradient.square() + self.options["eps"][0]).sum(dim=1)
        return sums

    def next_row_statistic(self) -> Tensor:
        given = self.row_means()
        means: Tensor = (self.gradient.square() + self.options["eps"][0]).mean(dim=-1) if given is None else given
        before: Tensor = self.state.get("exp_avg_sq_row", torch.zeros_like(means))
        return before * (1 - self.share) + means * self.share

    def column_sums(self) -> Tensor:
        sums: Tensor = (self.gradient.square() + self.options["eps"][0]).sum(dim=0)
        return sums

    def first_state(self) -> dict[str, Any]:
        gradient, state = self.gradient, dict[str, Any](step=0)
        shape = gradient.shape
        if self.options["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(gradient)
        if len(self.shape) > 1:
            state["exp_avg_sq_row"] = gradient.new_zeros(shape[:-1])
            state["exp_avg_sq_col"] = gradient.new_zeros((*(() if self.is_matrix else shape[:-2]), shape[-1]))
        else:
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        return {**state, "RMS": 0}

    def write_state(self, column_means: Tensor | None) -> None:
        state, share = self.state, self.share
        squares = self.gradient.square() + self.options["eps"][0]
        if len(self.shape) > 1:
            state["exp_avg_sq_row"] = self.next_row_statistic()
            means = squares.mean(dim=-2) if column_means is None else column_means
            state["exp_avg_sq_col"] = state["exp_avg_sq_col"].to(means) * (1 - share) + means * share
        else:
            state["exp_avg_sq"] = state["exp_avg_sq"].to(squares) * (1 - share) + squares * share
        state["step"] += 1
        state["RMS"] = self.root_mean_square

    def begin_update(self) -> Tensor:
        return _sum_of_squares(self.update())

    def update(self) -> Tensor:
        state = self.state
        if len(self.shape) > 1:
            rows = state["exp_avg_sq_row"]
            mean = rows.mean(dim=-1, keepdim=True) if self.row_mean is None else self.row_mean
            factor: Tensor = (rows / mean).rsqrt().unsqueeze(-1) * state["exp_avg_sq_col"].unsqueeze(-2).rsqrt()
        else:
            factor = state["exp_avg_sq"].rsqrt()
        return factor.mul_(self.gradient)

    def finish(self, sum_of_squares: Tensor) -> None:
        options, step = self.options, self.state["step"]
        rate = options["lr"]
        if options["relative_step"]:
            rate = min(1e-6 * step if options["warmup_init"] else 1e-2, 1 / math.sqrt(step))
        if options["scale_parameter"]:
            rate = self.root_mean_square.clamp(min=options["eps"][1]) * rate
        # A parameter without dimensions takes no factor of one element.
        clip = ((sum_of_squares / self.numel).sqrt() / options["clip_threshold"]).clamp(min=1.0).reshape(())
        update = self.update().mul_(rate / clip)
        if options["beta1"] is not None:
            average = self.state["exp_avg"] = self.state["exp_avg"].to(update)
            update = average.mul_(options["beta1"]).add_(update, alpha=1 - options["beta1"])
        wide = self.parameter.to(update.dtype)
        if options["weight_decay"] != 0:
            wide = wide - wide * (options["weight_decay"] * rate)
        self.parameter.copy_(wide - update)
