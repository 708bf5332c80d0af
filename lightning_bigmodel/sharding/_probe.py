"""Finds out by trial whether an optimizer treats each row of a parameter by itself."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_bigmodel.sharding.rows import RowShard

__all__ = [
    "copy_optimizer",
    "fails_on_empty",
    "same_random_numbers",
    "state_keys",
    "why_parameters_depend",
    "why_rows_depend",
]

# More than the five or six steps after which wrappers such as Lookahead do something else for once.
_NUM_STEPS = 7
_TOLERANCE = 1e-6
# Below this, nothing has been seen.
_LEAST_CHANGE = 1e-4
# Learning rates start from next to nothing under a warm-up; then nothing would be seen either.
_LEAST_RATE = 1e-2
# By number of dimensions, the shapes of what is tried and how many rows the first of two ranks has. The large one is
# past the sizes up to which optimizers that factor or precondition matrices leave them alone.
_SHAPES: dict[int, list[tuple[tuple[int, ...], int]]] = {
    0: [((1,), 1)],
    1: [((5,), 3)],
    2: [((5, 4), 3), ((260, 132), 140)],
    3: [((5, 3, 4), 3)],
}


def why_rows_depend(
    optimizer: Optimizer, shards: Mapping[int, RowShard], *, inner_aside: bool = False, columns: bool = False
) -> str | None:
    """Steps copies of an optimizer on small tensors, whole and cut in two by rows, and compares.

    In the second step the gradients of the first part are a thousand times larger. What is seen may be less than what
    there is: an optimizer that couples rows only in rare cases passes.

    Args:
        optimizer: The optimizer. It, its options and the random numbers of the process stay as they are.
        shards: By id of a parameter, which rows it is; for the number of dimensions of each.
        inner_aside: Whether to put SGD in the place of the optimizer that this one wraps.
        columns: Whether to cut matrices by columns.

    Returns:
        Why a part of the rows cannot be treated alone, or None if that gives the same.
    """
    try:
        with same_random_numbers(optimizer):
            dims = _dims(optimizer, shards)
            whole, first, last = (
                _run(optimizer, dims, part, inner_aside, columns) for part in ("whole", "first", "last")
            )
    except Exception as error:  # whatever a third party raises
        return f"it could not be tried on small tensors: {type(error).__name__}: {error}"
    return _difference(
        whole, first, last, [[cut for dim in group for _, cut in _SHAPES[dim]] for group in dims], columns
    )


def why_parameters_depend(optimizer: Optimizer) -> str | None:
    """Steps copies of an optimizer on two small tensors a group, together and one by one, and compares.

    In the second step the gradients of the first are a thousand times larger.

    Returns:
        Why a part of the parameters cannot be stepped alone, or None if that gives the same.
    """
    try:
        with same_random_numbers(optimizer):
            together, first, last = (_run_some(optimizer, which) for which in ((0, 1), (0,), (1,)))
    except Exception as error:  # whatever a third party raises
        return f"it could not be tried on small tensors: {type(error).__name__}: {error}"
    for index, (expected, alone) in enumerate(zip(together, [*first, *last], strict=True)):
        apart = float((expected - alone).abs().max() / expected.abs().max().clamp(min=1.0))
        if not apart <= _TOLERANCE:
            which = "first" if index < len(first) else "second"
            return f"the {which} of two parameters takes other values alone than with the other (by {apart:.1e})"
    return None


def _run_some(optimizer: Optimizer, which: Sequence[int]) -> list[Tensor]:
    """The first parameters of all groups after all steps, if asked for, and then the second."""
    device = next((each.device for group in optimizer.param_groups for each in group["params"]), torch.device("cpu"))

    def drawn(index: int, step: int, group: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * group + 10 * step + index)
        scale = 1e3 if step == 2 and index == 0 else 1.0
        return (scale * torch.randn(5, 4, generator=generator)).to(device)

    groups = range(len(optimizer.param_groups))
    parameters = [[nn.Parameter(drawn(index, 0, group)) for index in which] for group in groups]
    tried = copy_optimizer(optimizer, parameters, False)
    for step in range(1, _NUM_STEPS + 1):
        for group, some in enumerate(parameters):
            for index, parameter in zip(which, some, strict=True):
                parameter.grad = drawn(index, step, group)
        tried.step()
    return [some[at].detach() for at in range(len(which)) for some in parameters]


def state_keys(optimizer: Optimizer) -> set[str] | None:
    """What an optimizer keeps of a parameter after a step, by trial on a small tensor; None if it cannot be tried."""
    try:
        with same_random_numbers(optimizer):
            device = next((each.device for group in optimizer.param_groups for each in group["params"]), None)
            parameters = [[nn.Parameter(torch.ones(5, 4, device=device))] for _ in optimizer.param_groups]
            tried = copy_optimizer(optimizer, parameters)
            for (parameter,) in parameters:
                parameter.grad = torch.ones_like(parameter)
            tried.step()
            return {str(key) for (parameter,) in parameters for key in tried.state.get(parameter, {})}
    except Exception:  # whatever a third party raises
        return None


def fails_on_empty(optimizer: Optimizer, shards: Mapping[int, RowShard]) -> bool:
    """Whether a copy of an optimizer raises, or gives nonsense, where some parameters have no elements."""
    try:
        with same_random_numbers(optimizer):
            parameters, _ = _run(optimizer, _dims(optimizer, shards), "whole and none", False)
    except Exception:  # whatever a third party raises
        return True
    return not all(parameter.isfinite().all() for group in parameters for parameter in group)


_Outcome = tuple[list[list[Tensor]], list[dict[str, float]]]


def _dims(optimizer: Optimizer, shards: Mapping[int, RowShard]) -> list[list[int]]:
    """Numbers of dimensions of the whole parameters of each group; all above three are treated as three."""
    result = []
    for group in optimizer.param_groups:
        shapes = [shards[id(each)].shape if id(each) in shards else each.shape for each in group["params"]]
        result.append(sorted({min(len(shape), 3) for shape in shapes}) or [2])
    return result


def _halves(tensor: Tensor, cut: int, columns: bool) -> tuple[Tensor, Tensor]:
    """The first `cut` rows and the others, or, of a matrix, the halves by columns."""
    if columns and tensor.dim() == 2:
        cut = tensor.shape[1] // 2
        return tensor[:, :cut], tensor[:, cut:]
    return tensor[:cut], tensor[cut:]


def _run(
    optimizer: Optimizer, dims: Sequence[Sequence[int]], part: str, inner_aside: bool, columns: bool = False
) -> _Outcome:
    """Returns the parameters of each group, and its numbers, after all steps."""
    generator = torch.Generator().manual_seed(0)
    device = next((each.device for group in optimizer.param_groups for each in group["params"]), torch.device("cpu"))

    def drawn(shape: tuple[int, ...], cut: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator)
        first, last = _halves(values, cut, columns)
        first *= scale
        rows = {"first": first, "last": last}.get(part, values)
        return rows.clone().to(device)

    shapes = [[(shape, cut) for dim in group for shape, cut in _SHAPES[dim]] for group in dims]
    parameters = [[nn.Parameter(drawn(shape, cut)) for shape, cut in group] for group in shapes]
    empties = [[nn.Parameter(each[:0].detach().clone()) for each in group] for group in parameters]
    if part != "whole and none":
        empties = [[] for _ in parameters]
    given = [[*some, *none] for some, none in zip(parameters, empties, strict=True)]
    tried = copy_optimizer(optimizer, given, inner_aside)
    for step in range(_NUM_STEPS):
        for group, some, none in zip(shapes, parameters, empties, strict=True):
            for parameter, (shape, cut) in zip(some, group, strict=True):
                gradient = drawn(shape, cut, 1e3 if step == 1 else 1.0)
                parameter.grad = gradient if gradient.numel() else None
            for parameter in none:
                parameter.grad = torch.zeros_like(parameter)
        tried.step()
    numbers = [
        {
            key: float(value)
            for key, value in group.items()
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        for group in tried.param_groups
    ]
    return [[parameter.detach() for parameter in group] for group in parameters], numbers


def _difference(
    whole: _Outcome, first: _Outcome, last: _Outcome, cuts: Sequence[Sequence[int]], columns: bool
) -> str | None:
    name = "columns" if columns else "rows"
    generator = torch.Generator().manual_seed(0)
    starts = [[torch.randn(each.shape, generator=generator).to(each.device) for each in group] for group in whole[0]]
    for index, groups in enumerate(zip(whole[0], first[0], last[0], cuts, starts, strict=True)):
        change = 0.0
        for together, upper, lower, cut, start in zip(*groups, strict=True):
            for expected, got in zip(_halves(together, cut, columns), (upper, lower), strict=True):
                if not got.numel():
                    continue
                if not (expected.isfinite().all() and got.isfinite().all()):
                    return "it gives values that are not finite on small tensors, so nothing can be told"
                error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0))
                if error > _TOLERANCE:
                    return f"a part of the {name} alone gives other values than among all {name} (by {error:.1e})"
            change = max(change, float((together - start).abs().max()))
        if change < _LEAST_CHANGE:
            return f"it moves small tensors by {change:.1e} only in {_NUM_STEPS} steps, so nothing can be told"
        for key, value in whole[1][index].items():
            for other in (first[1][index].get(key), last[1][index].get(key)):
                if other is None or abs(other - value) > _TOLERANCE * max(1e-30, abs(value)):
                    return f"its option `{key}` takes other values for a part of the {name} than for all"
    return None


class _Plain(Optimizer):
    """What any optimizer has from its base class."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def copy_optimizer(
    optimizer: Optimizer, parameters: Sequence[Sequence[nn.Parameter]], inner_aside: bool = False
) -> Optimizer:
    """An optimizer of the same class, options and attributes for other parameters; hooks stay behind."""
    memo: dict[int, Any] = {}
    groups = []
    for group, new in zip(optimizer.param_groups, parameters, strict=True):
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        rate = options.get("lr")
        if isinstance(rate, Tensor):
            options["lr"] = rate.detach().clone().clamp(min=_LEAST_RATE)
        elif isinstance(rate, float | int):
            options["lr"] = max(float(rate), _LEAST_RATE)
        groups.append({**options, "params": list(new)})
        # An attribute may lead to a parameter; it is then led to one of the new ones.
        for parameter in group["params"]:
            memo[id(parameter)] = next((each for each in new if each.dim() == parameter.dim()), new[0])
    plain = _Plain(groups, dict(optimizer.defaults))
    return _with_attributes(optimizer, vars(plain), memo, inner_aside)


def _with_attributes(
    optimizer: Optimizer, own: dict[str, Any], memo: dict[int, Any], inner_aside: bool = False
) -> Optimizer:
    result = object.__new__(type(optimizer))
    memo |= {id(optimizer): result, id(optimizer.param_groups): own["param_groups"], id(optimizer.state): own["state"]}
    for old, new in zip(optimizer.param_groups, own["param_groups"], strict=True):
        memo[id(old)] = new
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        own_of_inner = {**own, "defaults": dict(inner.defaults)}
        if inner_aside:
            memo[id(inner)] = SGD(own["param_groups"], lr=_LEAST_RATE)
            memo[id(inner)].param_groups = own["param_groups"]
        else:
            memo[id(inner)] = _with_attributes(inner, own_of_inner, memo)
    others = {key: value for key, value in vars(optimizer).items() if key not in own and key != "step"}
    vars(result).update({**copy.deepcopy(others, memo), **own})
    return result


@contextlib.contextmanager
def same_random_numbers(optimizer: Optimizer) -> Iterator[None]:
    """The random numbers of the process go on as if nothing within had drawn any."""
    devices = {each.device for group in optimizer.param_groups for each in group["params"]}
    state = random.getstate()
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(state)
