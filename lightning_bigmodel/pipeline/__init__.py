"""Pipelines of unchanged steps, in plain torch: trace, cut, gate, schedule, and put results together again."""

from lightning_bigmodel.pipeline.blocks import UnitTree, find_units
from lightning_bigmodel.pipeline.engine import PipelineEngine, StepOutcome
from lightning_bigmodel.pipeline.partition import PartitionError
from lightning_bigmodel.pipeline.schedules import SCHEDULES
from lightning_bigmodel.pipeline.trace import StepTrace, TraceError, trace_step

__all__ = [
    "SCHEDULES",
    "PartitionError",
    "PipelineEngine",
    "StepOutcome",
    "StepTrace",
    "TraceError",
    "UnitTree",
    "find_units",
    "trace_step",
]
