"""Say in words and numbers what each rank of a run holds."""

from __future__ import annotations

import itertools
from typing import Any

from lightning_bigmodel.mesh import RankMesh
from lightning_bigmodel.pipeline.engine import PipelineEngine
from lightning_bigmodel.pipeline.schedules import rank_of_stage

__all__ = ["describe_ranks"]


def describe_ranks(engine: PipelineEngine, mesh: RankMesh) -> list[dict[str, Any]]:
    """One entry a rank, in rank order: its place, its stages and what it owns. Every rank knows this of all others."""
    ownership = engine.planner.ownership
    assert ownership is not None, "described after the model was cut"
    parameters = list(engine.root.parameters())
    trace, stages = engine.planner.first_trace, engine.planner.first_stages

    def of_pipe_rank(pipe_rank: int) -> dict[str, Any]:
        held = [
            stage
            for stage in range(engine.num_stages)
            if engine.num_stages == 1 or rank_of_stage(engine.schedule, mesh.pipe_size, stage) == pipe_rank
        ]
        owned = [p for p in parameters if set(ownership.stages_of_parameter.get(id(p), ())) & set(held)]
        calls = (
            []
            if trace is None
            else [call.name for call, stage in zip(trace.units, stages, strict=True) if stage in held]
        )
        return {
            "pipe_rank": pipe_rank,
            "stages": held,
            "modules": list(dict.fromkeys(calls)) or [type(engine.root).__name__],
            "num_parameters": sum(p.numel() for p in owned),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in owned),
        }

    by_pipe_rank = [of_pipe_rank(index) for index in range(mesh.pipe_size)]
    places = itertools.product(range(mesh.pipe_size), range(mesh.data_size), range(mesh.layout.tensor))
    return [
        {"rank": rank, "data_rank": data_rank, "tensor_rank": tensor_rank, **by_pipe_rank[pipe_rank]}
        for rank, (pipe_rank, data_rank, tensor_rank) in enumerate(places)
    ]
