"""Tensor parallelism under the strategy: when a plan is found, applied and undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_bigmodel.checkpoint import Region, RegionLayout
from lightning_bigmodel.mesh import RankMesh
from lightning_bigmodel.pipeline.microbatch import batch_size, split_batch
from lightning_bigmodel.pipeline.trace import call_order
from lightning_bigmodel.pipeline.tree import map_tensors
from lightning_bigmodel.sharding.optimizers import check_slices
from lightning_bigmodel.sharding.plan_calls import describe_call
from lightning_bigmodel.sharding.plan_check import Judgement, judge_plan
from lightning_bigmodel.sharding.plan_search import record_calls
from lightning_bigmodel.sharding.plans import find_tensor_plan
from lightning_bigmodel.sharding.tensor import SlicedParameter, TensorSlices, apply_tensor_plan
from lightning_bigmodel.sharding.tensor_guard import SliceGuard
from lightning_bigmodel.sharding.tensor_slices import HeldSlice

__all__ = ["TensorRun", "check_tensor_settings", "find_plan", "log_untried", "try_given_plan"]


def check_tensor_settings(size: Any, plan: Any) -> None:
    """Refuse settings that are no size and no plan, or a plan without ranks to cut over.

    Raises:
        ValueError: With what to change.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"`tensor_parallel_size={size!r}` must be a whole number of at least 1.")
    if plan != "auto" and not (
        isinstance(plan, Mapping) and plan and all(isinstance(word, str) for pair in plan.items() for word in pair)
    ):
        raise ValueError(
            f"`tensor_plan={plan!r}` must be 'auto' or a dict of module name patterns to styles, such as "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}."
        )
    if size == 1 and plan != "auto":
        raise ValueError(
            "`tensor_plan` cuts layers over ranks, but `tensor_parallel_size=1`. Set `tensor_parallel_size` to 2 or "
            "more, or leave the plan out."
        )


def find_plan(
    module: nn.Module, size: int, batch: Any, step: Callable[[Any], Any], device: torch.device
) -> dict[str, str]:
    """The plan found on one batch, while the model is whole.

    Raises:
        ValueError: Where none is found; the message shows how to write one.
    """

    def run_step() -> None:
        call_order(module, lambda: step(map_tensors(lambda t: t.detach().to(device, copy=True), batch)), device)

    return find_tensor_plan(module, run_step, size)


def try_given_plan(
    module: nn.Module,
    plan: Mapping[str, str],
    size: int,
    batch: Any,
    step: Callable[[Any], Any],
    method: tuple[str, Sequence[Any]],
    device: torch.device,
    *,
    tries: bool,
) -> Judgement:
    """Try a plan that was given on two samples of a batch, while the model is whole.

    Args:
        module: The module.
        plan: Pattern -> style.
        size: Number of tensor ranks.
        batch: A batch.
        step: The step, of a batch alone.
        method: Name of the module's method that is the step, and its arguments after the batch.
        device: Where steps run.
        tries: Whether this rank does the trials. All ranks run the step once on fake tensors, as it may talk to others.

    Raises:
        ValueError: If the plan cannot be followed at all.
    """
    num_samples = batch_size(batch) or 1
    few = split_batch(batch, max(1, num_samples // 2))[0]
    failure = ""
    for part in (few, batch):

        def run_step(part: Any = part) -> None:
            call_order(module, lambda: step(map_tensors(lambda t: t.detach().to(device, copy=True), part)), device)

        try:
            calls = record_calls(module, run_step)[0]
        except Exception as error:  # whatever user code raises on fake tensors; a batch norm on few samples, say
            failure = failure or f"{type(error).__name__}: {error}"
            continue
        if not tries:
            return Judgement()
        name, rest = method
        try:
            whole_step = describe_call((map_tensors(lambda t: t.detach().cpu(), part), *rest), {}, name)
            return judge_plan(module, plan, size, calls, whole_step)
        except Exception as error:  # whatever a module does that is looked at; a check must not end what is right
            return Judgement(untried=(f"{type(module).__name__}: {type(error).__name__}: {error}",))
    return Judgement(untried=(f"the step cannot be run without values ({failure})",))


def log_untried(reasons: Sequence[str]) -> None:
    """Say on the first rank which pairs of a plan are taken at their word."""
    rank_zero_info(
        "`tensor_plan` is taken at its word where it could not be tried out: what lies between a `colwise` and a "
        f"`rowwise` layer must treat each feature by itself. {'; '.join(reasons)}."
    )


class TensorRun:
    """Slices of one rank.

    Args:
        module: The user's module, cut over the pipeline already.
        plan: Pattern -> style.
        mesh: This rank's place.
    """

    def __init__(self, module: nn.Module, plan: Mapping[str, str], mesh: RankMesh) -> None:
        self.plan = dict(plan)
        self.slices: TensorSlices = apply_tensor_plan(
            module, plan, mesh.tensor_group, mesh.tensor_rank, mesh.layout.tensor
        )
        self._is_first = mesh.tensor_rank == 0
        self._group = mesh.tensor_group
        self._layouts = {record.name: _layout(record) for record in self.slices.records.values()}
        self.is_restored = False
        names = {key: record.name for key, record in self.slices.records.items()}
        self._guard = SliceGuard(module, names, self.slices.checks_after_step)

    def watching(self) -> AbstractContextManager[None]:
        """Around a user's step: slices are read by their own layers only."""
        return self._guard.watching()

    def layouts(self) -> dict[str, RegionLayout]:
        """Parameter name -> how this rank's slice lies in the whole; also after `restore`, for optimizer states."""
        return dict(self._layouts)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this tensor rank answers for a parameter where each counts once."""
        return self._is_first or self.slices.is_sliced(parameter)

    def hand_to(self, optimizer: torch.optim.Optimizer) -> None:
        """State that an optimizer has from its construction becomes slices, as its parameters have.

        Raises:
            ValueError: For an optimizer that looks at whole parameters, and cannot be made exact.
        """
        check_slices(optimizer)
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, nn.Parameter) and self.slices.is_sliced(parameter):
                full_shape = self.slices.full_shape(parameter)
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == full_shape:
                        state[key] = self.slices.slice_full(parameter, value)

    def held(self, holder: Callable[[nn.Parameter], nn.Parameter]) -> dict[int, HeldSlice]:
        """By id of what optimizers hold, `holder(parameter)`, which slice it is or is of."""
        return {
            id(holder(parameter)): HeldSlice(self.slices.records[id(parameter)], self._group)
            for parameter in self.slices.parameters
        }

    def restore(self) -> None:
        """Whole parameters again. Collective over the tensor ranks."""
        self.is_restored = True
        self._guard.close()
        self.slices.restore()

    def give_up(self) -> None:
        """After a failure: undo hooks and attributes, without the other ranks."""
        self._guard.close()
        self.slices.remove()


def _layout(record: SlicedParameter) -> RegionLayout:
    regions = [Region(r.full_offsets, r.local_offsets, r.sizes) for r in record.regions]
    return RegionLayout(tuple(record.full_shape), tuple(record.local_shape), tuple(regions))
