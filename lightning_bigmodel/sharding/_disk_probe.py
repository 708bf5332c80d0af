"""What an optimizer keeps of a parameter, and whether it may step its parameters piece by piece: found by trial."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bigmodel.sharding._probe import copy_optimizer, same_random_numbers
from lightning_bigmodel.sharding.optimizers import is_elementwise

__all__ = ["StateLayout", "raw_step", "state_layouts", "stepping"]

StateLayout = Mapping[tuple[int, int, torch.dtype], Mapping[str, torch.dtype]]
"""Group, dimensions and type of a parameter -> keys of its state tensors of the parameter's shape, and their types."""

_NUM_STEPS = 3
_SHAPE = (3, 2, 5, 7, 2, 3, 2, 3)
_REMEDY = 'Use `offload="cpu"`, or an optimizer that treats each element by itself, such as AdamW.'


def raw_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """`step` of the optimizer's class, without the hooks that run around it."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):  # torch's `profile_hook_step`, which runs them
        step = step.__wrapped__
    found: Callable[[Optimizer], Any] = step
    return found


@contextmanager
def stepping(optimizer: Optimizer, chunks: Sequence[Sequence[Tensor]]) -> Iterator[Callable[[int], None]]:
    """Gives a function that puts one chunk's parameters into the groups; the first takes all that are in none.

    Numbers an optimizer counts in its groups go on as by one step: each chunk sees those from before it.
    """
    chunk_of = {id(parameter): index for index, chunk in enumerate(chunks) for parameter in chunk}
    groups = list(optimizer.param_groups)
    lists = [group["params"] for group in groups]
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    parts: list[list[list[Tensor]]] = [[[] for _ in groups] for _ in chunks]
    for number, parameters in enumerate(lists):
        for parameter in parameters:
            parts[chunk_of.get(id(parameter), 0)][number].append(parameter)

    def select(index: int) -> None:
        for group, part, before in zip(groups, parts[index], options, strict=True):
            group.update(before)
            group["params"] = part

    try:
        yield select
    finally:
        for group, parameters in zip(groups, lists, strict=True):
            group["params"] = parameters


def state_layouts(optimizer: Optimizer, held: Collection[int]) -> StateLayout:
    """Steps a copy of the optimizer on small tensors at once, and another one parameter by parameter.

    Raises:
        ValueError: If the optimizer cannot be stepped piece by piece, with the reason.
    """
    name = type(optimizer).__name__
    if not is_elementwise(optimizer):
        raise ValueError(
            f"`{name}` cannot keep its state on a disk: it does not treat each element by itself, but its state is "
            f"read piece by piece. {_REMEDY}"
        )
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise ValueError(f"`{name}` cannot keep its state on a disk: it wraps another optimizer. {_REMEDY}")
    kinds = [
        sorted({(p.dim(), p.dtype) for p in group["params"] if id(p) in held}, key=str) or [(1, torch.float32)]
        for group in optimizer.param_groups
    ]
    try:
        with same_random_numbers(optimizer):
            together, layout = _run(optimizer, kinds, by_parameter=False)
            apart, _ = _run(optimizer, kinds, by_parameter=True)
    except Exception as error:  # whatever a third party raises
        reason = f"it could not be tried on small tensors: {type(error).__name__}: {error}"
        raise ValueError(f"`{name}` cannot keep its state on a disk: {reason}. {_REMEDY}") from error
    if not all(torch.allclose(one, other, 1e-6, 1e-6) for one, other in zip(together, apart, strict=True)):
        raise ValueError(
            f"`{name}` cannot keep its state on a disk: stepped one parameter at a time it gives other values than all "
            f"at once. {_REMEDY}"
        )
    return layout


def _run(
    optimizer: Optimizer, kinds: Sequence[Sequence[tuple[int, torch.dtype]]], *, by_parameter: bool
) -> tuple[list[Tensor], StateLayout]:
    """Parameters after some steps, then numbers of groups; and the state's layout."""
    generator = torch.Generator().manual_seed(0)
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))

    def drawn(dim: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(_SHAPE[:dim], generator=generator).to(device, dtype)

    parameters = [[nn.Parameter(drawn(dim, dtype)) for dim, dtype in group for _ in range(2)] for group in kinds]
    everything = [parameter for group in parameters for parameter in group]
    tried = copy_optimizer(optimizer, parameters)
    step = raw_step(tried)
    for _ in range(_NUM_STEPS):
        for parameter in everything:
            parameter.grad = drawn(parameter.dim(), parameter.dtype)
        with torch.no_grad(), stepping(tried, [[p] for p in everything] if by_parameter else [everything]) as select:
            for index in range(len(everything) if by_parameter else 1):
                select(index)
                step(tried)
    counts = [value for group in tried.param_groups for value in group.values() if isinstance(value, int | float)]
    layout: dict[tuple[int, int, torch.dtype], dict[str, torch.dtype]] = {}
    for number, group in enumerate(parameters):
        for parameter in group:
            layout[number, parameter.dim(), parameter.dtype] = {
                key: value.dtype
                for key, value in tried.state.get(parameter, {}).items()
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
            }
    return [*(parameter.detach() for parameter in everything), torch.tensor([float(count) for count in counts])], layout
