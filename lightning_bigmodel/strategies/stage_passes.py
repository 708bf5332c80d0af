"""What sharding does in each stage of a pipeline: the passes it takes part in, and what it gathers there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_bigmodel.pipeline.engine import PipelineEngine
from lightning_bigmodel.pipeline.ownership import ParameterShare
from lightning_bigmodel.pipeline.passes import Passes
from lightning_bigmodel.sharding.gather import Unit
from lightning_bigmodel.sharding.passes import GatherPasses
from lightning_bigmodel.sharding.reduce import BucketReducer
from lightning_bigmodel.sharding.units import find_blocks

__all__ = ["ReducePasses", "StageGatherPasses", "distinct_units", "stage_parts"]


class ReducePasses(Passes):
    """Stage 2: whole parameters, gradients reduced after each micro-batch."""

    def __init__(self, reducer: BucketReducer) -> None:
        self._reducer = reducer

    @override
    def begin_backward(self, microbatch: Any) -> None:
        self._reducer.open()

    @override
    def end_backward(self, microbatch: Any) -> None:
        self._reducer.flush()


class StageGatherPasses(Passes):
    """Stage 3, as a stage calls it."""

    def __init__(self, passes: GatherPasses) -> None:
        self._passes = passes

    @override
    def forward(self, microbatch: Any) -> AbstractContextManager[Any]:
        return self._passes.forward(microbatch)

    @override
    def begin_backward(self, microbatch: Any) -> None:
        self._passes.begin_backward(microbatch)

    @override
    def pause_backward(self, microbatch: Any) -> None:
        self._passes.pause_backward()

    @override
    def end_backward(self, microbatch: Any) -> None:
        self._passes.end_backward(microbatch)


def distinct_units(units_by_stage: list[list[Unit]]) -> list[Unit]:
    """All units; those of one parameter that two stages of this rank use are the first stage's in both."""
    unit_of: dict[int, Unit] = {}
    for units in units_by_stage:
        for unit in list(units):
            shared = [p for p in unit.parameters if id(p) in unit_of]
            if shared:
                unit.parameters = [p for p in unit.parameters if id(p) not in unit_of]
                for owner in dict.fromkeys(unit_of[id(p)] for p in shared):
                    owner.modules += [module for module in unit.modules if module not in owner.modules]
                    units.append(owner)
            for parameter in unit.parameters:
                unit_of[id(parameter)] = unit
        units[:] = [unit for unit in units if unit.parameters]
    return list(dict.fromkeys(unit for units in units_by_stage for unit in units))


def stage_parts(
    engine: PipelineEngine,
    share: ParameterShare,
    held: Sequence[nn.Parameter],
    blocks: Mapping[str, nn.Module] | None,
) -> list[tuple[dict[str, nn.Module], list[nn.Parameter]]]:
    """For each stage of this rank its modules by name, and its parameters."""
    ownership = engine.planner.ownership
    assert ownership is not None, "sharded after the model was cut"
    if engine.num_stages == 1:
        return [(dict(blocks) if blocks is not None else find_blocks(engine.root), list(held))]
    names = {module: name for name, module in engine.root.named_modules()}
    parts = []
    for index in engine.stage_indices:
        modules = {names[module]: module for module, stages in ownership.stage_of_unit.items() if index in stages}
        parameters = [p for p in held if index in ownership.stages_of_parameter[id(p)]]
        parts.append((modules, parameters))
    return parts
