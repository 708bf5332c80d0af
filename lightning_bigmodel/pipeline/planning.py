"""From a module and a batch to stages: trace, partition, and plans for every batch shape that comes along."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_bigmodel.pipeline.blocks import UnitTree, find_units
from lightning_bigmodel.pipeline.dataflow import Dataflow, FlowRecord
from lightning_bigmodel.pipeline.gate import StagePlan
from lightning_bigmodel.pipeline.partition import Ownership, cut_points, parameter_owners, stage_of_positions
from lightning_bigmodel.pipeline.shapes import SizeRules
from lightning_bigmodel.pipeline.trace import StepTrace, TraceError, call_order, trace_step
from lightning_bigmodel.pipeline.tree import map_tensors, structure, tensor_leaves

__all__ = ["Planner"]

_MAX_PLANS = 32


@dataclass
class _Known:
    """What is known of one kind of step at one batch structure."""

    trace: StepTrace
    rules: SizeRules


class Planner:
    """Knows, for every kind of step and batch shape, what each stage does.

    Args:
        root: The user's module.
        num_stages: Stages in the pipeline.
        blocks: `"auto"` or names and patterns (see `blocks.find_units`).
        device: Where stages compute.
    """

    def __init__(self, root: nn.Module, num_stages: int, blocks: str | Sequence[str], device: torch.device) -> None:
        self.num_stages = num_stages
        self.num_traces = 0
        self.tree: UnitTree | None = None
        self.ownership: Ownership | None = None
        self.first_trace: StepTrace | None = None
        self.first_stages: list[int] = []
        self.trained: set[int] = set()  # ids of parameters a traced loss depended on
        self.tracing: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around every trace
        self._root, self._blocks, self._device = root, blocks, device
        self._known: dict[Any, _Known] = {}
        self._plans: OrderedDict[Any, list[StagePlan]] = OrderedDict()

    def partition(self, microbatch: Any, step: Callable[[Any], Any]) -> Ownership:
        """Trace `step` on one micro-batch with the whole model at hand, and cut it.

        Raises:
            ValueError, PartitionError, TraceError: Where the model cannot be cut, with the reason.
        """
        if self.num_stages == 1:
            self.ownership = Ownership(1, {}, {id(parameter): (0,) for parameter in self._root.parameters()})
            return self.ownership
        try:
            order, fake = call_order(self._root, lambda: step(_copied(microbatch)), self._device), True
        except Exception as error:
            order, fake = self._order_for_real(microbatch, step, error), False
        self.tree = find_units(self._root, order, self._blocks, self.num_stages)
        trace = self._trace(microbatch, step, fake=fake)
        starts = cut_points(trace, self.num_stages)
        stages = [sum(start <= position for start in starts) - 1 for position in range(trace.end)]
        self.ownership = parameter_owners(self._root, trace, stages, self.num_stages)
        self.first_trace, self.first_stages = trace, stages
        self.trained |= trace.trained
        return self.ownership

    def _order_for_real(self, microbatch: Any, step: Callable[[Any], Any], error: Exception) -> list[nn.Module]:
        parameter = next(self._root.parameters(), None)
        if parameter is None or parameter.is_meta:
            raise _untraceable(error) from error
        try:
            given = _copied(microbatch, parameter.device)
            return call_order(self._root, lambda: step(given), parameter.device, fake=False)
        except Exception:
            raise _untraceable(error) from error

    def _trace(self, microbatch: Any, step: Callable[[Any], Any], *, fake: bool) -> StepTrace:
        assert self.tree is not None, "`partition` comes first"
        self.num_traces += 1
        device = self._device if fake else next(self._root.parameters()).device

        def log(flow: Dataflow) -> Callable[..., None]:
            return lambda name, value, *args, **options: flow.consume(value, flow.position)

        given = _copied(microbatch, device)
        versions = [tensor._version for tensor in tensor_leaves(given)]
        trace = trace_step(
            self._root,
            lambda: step(given),
            {module: self.tree.names[module] for module in self.tree.candidates},
            self.tree.blocks,
            device,
            log=log,
            fake=fake,
        )
        return replace(trace, edits_batch=versions != [tensor._version for tensor in tensor_leaves(given)])

    def plans(self, kind: str, microbatch: Any, step: Callable[[Any], Any]) -> list[StagePlan]:
        """The plan of every stage for one micro-batch. Traces only where nothing known so far tells its shapes.

        Raises:
            TraceError: Where a trace is needed and fails.
            PartitionError: Where the step calls modules in an order the cut cannot follow.
        """
        if self.num_stages == 1:
            return [StagePlan.build(_WHOLE, 0, 0)]
        form, sizes = structure(microbatch)
        # Users freeze and unfreeze between epochs: what takes gradients decides what flows back over a cut.
        takes_gradients = hash(tuple(parameter.requires_grad for parameter in self._root.parameters()))
        key = (kind, torch.is_grad_enabled(), takes_gradients, form)
        plans = self._plans.get((key, sizes))
        if plans is not None:
            self._plans.move_to_end((key, sizes))
            return plans
        known = self._known.get(key)
        predicted = known.rules.predict(sizes) if known is not None else None
        if known is not None and predicted is not None:
            trace = known.trace.with_sizes(predicted)
        else:
            try:
                with self.tracing():
                    trace = self._trace(microbatch, step, fake=True)
            except TraceError:
                raise
            except Exception as error:
                raise _untraceable(error) from error
            self.trained |= trace.trained
        plans = self._cut(trace)
        if not trace.shapes_depend_on_data:
            if predicted is None:
                if known is None or [call.module for call in known.trace.units] != [
                    call.module for call in trace.units
                ]:
                    known = self._known[key] = _Known(trace, SizeRules())
                known.rules.add(sizes, trace.sizes())
            self._plans[key, sizes] = plans
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plans

    def _cut(self, trace: StepTrace) -> list[StagePlan]:
        assert self.ownership is not None, "`partition` comes first"
        stages = stage_of_positions(trace, self.ownership.stage_of_unit, self.num_stages)
        parameter_owners(self._root, trace, stages, self.num_stages)  # refuses leaks that only this step has
        borders = [sum(stage < index for stage in stages) for index in range(self.num_stages)] + [trace.end]
        for index in range(self.num_stages):
            if borders[index] == borders[index + 1]:
                raise TraceError(
                    f"This step calls no module of pipeline stage {index}. Every stage must take part in every step: "
                    "call the blocks of the training step in validation, test and predict steps too."
                )
        return [StagePlan.build(trace, borders[index], borders[index + 1]) for index in range(self.num_stages)]


_WHOLE = StepTrace((), FlowRecord(), frozenset(), False)


def _copied(microbatch: Any, device: torch.device | None = None) -> Any:
    """A micro-batch that a step may write into, of tensors that keep a version (inference tensors do not)."""
    with torch.inference_mode(False):
        return map_tensors(lambda tensor: tensor.detach().to(device or tensor.device, copy=True), microbatch)


def _untraceable(error: Exception) -> TraceError:
    return TraceError(
        f"The step could not be traced to find where it may be cut: {type(error).__name__}: {error}. If this is not an "
        "error of the step itself: the trace runs before the hooks `on_fit_start` and `on_train_start`, so what the "
        "step needs must exist after `__init__`, `setup` and `configure_optimizers`; and steps whose Python code "
        "depends on computed values (`if loss > 1`, `.numpy()`, `.tolist()` of an activation) cannot be followed "
        "without running the whole model: move such code out of the step."
    )
