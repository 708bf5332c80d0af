"""Optimizers where each rank holds a part of every parameter: exact as in one process, or refused.

Under ZeRO (https://arxiv.org/abs/1910.02054) a rank keeps, and steps, the rows of each parameter that are its own,
under tensor parallelism a slice, or rows of a slice. Most optimizers treat every element by itself and need nothing for
it. Those that take norms, means or products of whole parameters would quietly train another model: each rank would take
its part for the parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bigmodel.sharding._bitsandbytes import (
    adapt_bitsandbytes,
    is_bitsandbytes,
    is_blockwise,
    why_bitsandbytes_needs_wholes,
)
from lightning_bigmodel.sharding._probe import fails_on_empty, state_keys, why_parameters_depend, why_rows_depend
from lightning_bigmodel.sharding._step import behaves_as, leave_out_empty, replace_step
from lightning_bigmodel.sharding.adafactor import step_torch_adafactor, step_transformers_adafactor
from lightning_bigmodel.sharding.muon import check_muon, step_torch_muon
from lightning_bigmodel.sharding.rows import RowShard
from lightning_bigmodel.sharding.tensor_slices import HeldSlice

__all__ = [
    "StateKind",
    "adapt_optimizer",
    "check_parts",
    "check_slices",
    "factored_shape",
    "factored_state",
    "is_elementwise",
    "state_keys",
    "state_layout",
]

StateKind = Literal["rows", "whole", "leading", "local"]
"""What a rank holds of one entry of a parameter's state.

* "rows": this rank's rows of a tensor of the parameter's shape.
* "leading": this rank's rows of a tensor of as many rows as the parameter; its other dimensions are the entry's own.
* "whole": a value that is equal on all ranks.
* "local": a value of this rank alone, which makes sense only with the same rows.
"""

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)
_NEEDS_WHOLES = {
    torch.optim.LBFGS: "it takes inner products over all parameters together",
    torch.optim.SparseAdam: "its gradients are sparse and cannot be cut into rows",
}
# Couple rows in rare cases only, which small tensors need not meet. By the names that packages give them.
_RARELY_COUPLED = {"adamp": "it projects an update by the gradient's angle to the whole parameter"}
_RARELY_COUPLED["sgdp"] = _RARELY_COUPLED["adamp"]
_REMEDY = (
    "Use `zero_stage=0`, so that every rank holds whole parameters, or an optimizer that treats each element by itself,"
    " such as AdamW."
)


def check_parts(optimizer: Optimizer) -> None:
    """Refuse an optimizer that looks at all parameters together, where each rank holds some of them whole.

    torch's and bitsandbytes' treat each parameter by itself; any other is tried on small tensors.

    Raises:
        ValueError: With the reason.
    """
    is_known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer) not in _NEEDS_WHOLES
    reason = None if is_known or is_bitsandbytes(optimizer) else why_parameters_depend(optimizer)
    if reason is not None:
        raise ValueError(
            f"`{type(optimizer).__name__}` cannot train where each rank of a pipeline holds some of the parameters: "
            f"{reason}. Set `pipeline_parallel_size=1`, or use an optimizer that treats each parameter by itself, such "
            "as AdamW."
        )


def check_slices(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot be made exact where each rank holds a slice of the parameters.

    Raises:
        ValueError: With the reason.
    """
    reason = _why_not_on_slices(optimizer)
    if reason is not None:
        raise ValueError(
            f"`{type(optimizer).__name__}` cannot train where `tensor_parallel_size` gives each rank a slice of the "
            f"parameters: {reason}. Use an elementwise optimizer such as AdamW, or Adafactor or Muon, or "
            "`zero_stage` in place of tensor parallelism."
        )


def _why_not_on_slices(optimizer: Optimizer) -> str | None:
    inner = _inner(optimizer) if _kind(optimizer) == "unknown" else None
    if inner is not None and (reason := _why_not_on_slices(inner)) is not None:
        return f"it wraps `{type(inner).__name__}`: {reason}"
    reason = _why_refused(optimizer, {})
    if reason is None and _kind(optimizer) == "unknown":
        # A norm of each row, say, is right on rows and wrong on the slices of a `rowwise` layer.
        inner_aside = inner is not None and _kind(inner) not in ("elementwise", "unknown")
        reason = why_rows_depend(optimizer, {}, inner_aside=inner_aside, columns=True)
    return reason


def adapt_optimizer(
    optimizer: Optimizer, shards: Mapping[int, RowShard], slices: Mapping[int, HeldSlice] | None = None
) -> None:
    """Makes `optimizer.step()` exact where its groups hold this rank's parts in place of whole parameters.

    The class, the groups, their options and the layout of the state stay; schedulers and hooks go on working. Called
    once on every rank alike, when the groups hold the parts and the state is empty still.

    * SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, ASGD, Adagrad and Adadelta of torch need nothing.
    * `torch.optim.Adafactor` and Adafactor of transformers sum their statistics over the ranks: two all-reduces a step,
      three more over tensor ranks (see `lightning_bigmodel.sharding.adafactor`).
    * `torch.optim.Muon` shares out its matrices over the ranks: one all-reduce and two all-to-alls a step, and as many
      over tensor ranks (see `lightning_bigmodel.sharding.muon`).
    * bitsandbytes' optimizers of 32 bits are exact. Those of 8 bits quantise blocks of 256 elements, which start with
      the rows or the slice of each rank: exact where these are runs of whole blocks, else equal within the error of the
      quantisation. The size of the whole parameter decides whether it is quantised (`min_8bit_size`). Its optimizers
      that take norms (LARS, LAMB) are refused, and overrides of single parameters by `GlobalOptimManager`.
    * Any other optimizer is tried on small tensors and refused if rows turn out to depend on each other. One that
      wraps another (`.optimizer`) is tried together with it; around Adafactor, Muon or bitsandbytes it is tried with
      SGD inside, and the wrapped one is adapted. Rare dependences may stay unseen.

    Args:
        optimizer: The optimizer.
        shards: By id of a parameter in the groups, which rows of what it is. Of others all rows are here.
        slices: By id of a parameter in the groups, which slice it is, or is of, under tensor parallelism.

    Raises:
        ValueError: If the optimizer needs whole parameters, or cannot be tried.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))  # the first rows of five
        >>> optimizer = torch.optim.AdamW([weight])
        >>> shard = RowShard(name="weight", shape=torch.Size((5, 2)), num_ranks=2, rank=0, group=None)
        >>> adapt_optimizer(optimizer, {id(weight): shard})
        >>> adapt_optimizer(torch.optim.LBFGS([weight]), {id(weight): shard})
        Traceback (most recent call last):
        ValueError: `LBFGS` cannot train parameters of which each rank holds some rows only: it takes inner products \
over all parameters together. Use `zero_stage=0`, so that every rank holds whole parameters, or an optimizer that \
treats each element by itself, such as AdamW.
    """
    reason = _why_refused(optimizer, shards)
    if reason is not None:
        raise ValueError(
            f"`{type(optimizer).__name__}` cannot train parameters of which each rank holds some rows only: {reason}. "
            f"{_REMEDY}"
        )
    shards, cuts = dict(shards), dict(slices or {})
    kind = _kind(optimizer)
    if kind == "adafactor":
        replace_step(optimizer, lambda each: step_torch_adafactor(each, shards, cuts))
    elif kind == "transformers adafactor":
        replace_step(optimizer, lambda each: step_transformers_adafactor(each, shards, cuts))
    elif kind == "muon":
        replace_step(optimizer, lambda each: step_torch_muon(each, shards, cuts))
    elif kind == "bitsandbytes":
        adapt_bitsandbytes(optimizer, shards, cuts)
    elif kind == "unknown":
        inner = _inner(optimizer)
        if inner is not None and _kind(inner) not in ("elementwise", "unknown"):
            adapt_optimizer(inner, shards, cuts)
        elif any(not each.numel() for group in optimizer.param_groups for each in group["params"]) and fails_on_empty(
            optimizer, shards
        ):
            leave_out_empty(optimizer)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer treats rows of its parameters just as it would among all others.

    Optimizers that are not known are tried on small tensors; see `adapt_optimizer`. The optimizer itself, its state and
    the random numbers of the process stay as they are.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> is_elementwise(torch.optim.SGD([weight])), is_elementwise(torch.optim.Adafactor([weight]))
        (True, False)
    """
    kind = _kind(optimizer)
    if kind == "bitsandbytes":
        return not is_blockwise(optimizer) and why_bitsandbytes_needs_wholes(optimizer) is None
    if kind != "unknown":
        return kind == "elementwise"
    inner = _inner(optimizer)
    return (inner is None or is_elementwise(inner)) and _why_refused(optimizer, {}) is None


def state_layout(optimizer: Optimizer, parameter: Tensor, shard: RowShard) -> dict[str, StateKind]:
    """What this rank holds of each entry of a parameter's state, for checkpoints.

    A parameter of which this rank has no rows may have no state here, namely where the optimizer fails on tensors
    without elements; the first rank of the group has rows of every parameter and so all entries.

    Args:
        optimizer: The optimizer, adapted.
        parameter: The rows in its groups.
        shard: Which rows they are.

    Returns:
        For each key of the state the kind of its entry (`StateKind`). "rows" and "leading" can be put together, and cut
        anew for another number of ranks; "local" goes back to the same rows only.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> weight.grad = torch.ones(3, 2)
        >>> optimizer = torch.optim.Adam([weight])
        >>> optimizer.step()
        >>> shard = RowShard(name="weight", shape=torch.Size((5, 2)), num_ranks=2, rank=0, group=None)
        >>> state_layout(optimizer, weight, shard)
        {'step': 'whole', 'exp_avg': 'rows', 'exp_avg_sq': 'rows'}
    """
    inner = _inner(optimizer)
    if inner is not None and parameter not in optimizer.state:
        return state_layout(inner, parameter, shard)
    kind = _kind(optimizer)
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    factored = factored_state(optimizer, len(shard.shape))
    return {
        key: factored.get(key) or _kind_of_entry(key, value, shard, kind == "bitsandbytes")
        for key, value in state.items()
    }


def factored_state(optimizer: Optimizer, num_dims: int) -> dict[str, StateKind]:
    """Kinds of the entries that an optimizer keeps in another shape than the parameter's, as far as names tell.

    "whole" here is an entry whose last dimension is the parameter's: under tensor parallelism a rank has those columns
    of it that it has of the parameter.

    Args:
        optimizer: The optimizer.
        num_dims: Dimensions of the parameter.
    """
    inner = _inner(optimizer)
    if inner is not None:
        return factored_state(inner, num_dims)
    if _kind(optimizer) not in ("adafactor", "transformers adafactor"):
        return {}
    columns: StateKind = "whole" if num_dims == 2 else "leading"
    return {"row_var": "leading", "exp_avg_sq_row": "leading", "col_var": columns, "exp_avg_sq_col": columns}


def factored_shape(key: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of an entry of `factored_state` for a whole parameter of two dimensions or more.

    Example:
        >>> factored_shape("col_var", (4, 3)), factored_shape("exp_avg_sq_row", (4, 3))
        ((1, 3), (4,))
    """
    outer = tuple(shape[:-2])
    return {
        "row_var": (*outer, shape[-2], 1),
        "col_var": (*outer, 1, shape[-1]),
        "exp_avg_sq_row": (*outer, shape[-2]),
        "exp_avg_sq_col": (*outer, shape[-1]),
    }[key]


def _kind_of_entry(key: str, value: Any, shard: RowShard, is_of_bitsandbytes: bool) -> StateKind:
    if is_of_bitsandbytes and (key.startswith("absmax") or (isinstance(value, Tensor) and value.dtype == torch.uint8)):
        return "local"
    if isinstance(value, Tensor) and value.shape == shard.local_shape:
        return "rows"
    is_number = value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float)
    return "whole" if is_number or (is_of_bitsandbytes and key.startswith("qmap")) else "local"


def _kind(optimizer: Optimizer) -> str:
    if any(behaves_as(optimizer, kind) for kind in _ELEMENTWISE):
        return "elementwise"
    if any(behaves_as(optimizer, kind) for kind in _NEEDS_WHOLES):
        return "refused"
    if behaves_as(optimizer, torch.optim.Adafactor):
        return "adafactor"
    if behaves_as(optimizer, torch.optim.Muon):
        return "muon"
    transformers = sys.modules.get("transformers.optimization")
    if transformers is not None and behaves_as(optimizer, transformers.Adafactor):
        return "transformers adafactor"
    return "bitsandbytes" if is_bitsandbytes(optimizer) else "unknown"


def _inner(optimizer: Optimizer) -> Optimizer | None:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else None


def _why_refused(optimizer: Optimizer, shards: Mapping[int, RowShard]) -> str | None:
    """Returns why an optimizer cannot be made exact, or None if it can."""
    kind = _kind(optimizer)
    if kind == "refused":
        return next(reason for each, reason in _NEEDS_WHOLES.items() if behaves_as(optimizer, each))
    if kind == "bitsandbytes":
        return why_bitsandbytes_needs_wholes(optimizer)
    if kind == "muon":
        check_muon(optimizer)
    if kind != "unknown":
        return None
    inner = _inner(optimizer)
    if inner is not None and (reason := _why_refused(inner, shards)) is not None:
        return f"it wraps `{type(inner).__name__}`: {reason}"
    for each in type(optimizer).__mro__:
        if (reason := _RARELY_COUPLED.get(each.__name__.lower())) is not None:
            return reason
    inner_aside = inner is not None and _kind(inner) not in ("elementwise", "unknown")
    return why_rows_depend(optimizer, shards, inner_aside=inner_aside)
