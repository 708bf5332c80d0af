"""Arguments of a wrong type, for every argument of every public class: the error says what was given and what to do."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import lightning_bigmodel

CLASSES = [name for name in lightning_bigmodel.__all__ if name != "__version__"]
# The types of its right values among `WRONG`. Right types out of range have tests beside their classes.
KINDS: dict[str, tuple[type, ...]] = {
    "AdaScale.scale": (int, float, type(None)),
    "AdaScale.smoothing": (int, float, type(None)),
    "AdaptiveAccumulation.schedule": (dict, type(None)),
    "AdaptiveAccumulation.unit": (str,),
    "AdaptiveAccumulation.min_window": (int,),
    "AdaptiveAccumulation.max_window": (int, type(None)),
    "AdaptiveAccumulation.every_num_steps": (int,),
    "AdaptiveAccumulation.lr_rule": (str, type(None)),
    "BigModelPrecision.precision": (str,),
    "BigModelPrecision.loss_scale": (str, int, float, type(None)),
    "BigModelPrecision.init_scale": (int, float, type(None)),
    "BigModelPrecision.growth_factor": (int, float, type(None)),
    "BigModelPrecision.backoff_factor": (int, float, type(None)),
    "BigModelPrecision.growth_interval": (int, type(None)),
    "BigModelPrecision.hysteresis": (int, type(None)),
    "BigModelPrecision.min_scale": (int, float, type(None)),
    "BigModelPrecision.max_scale": (int, float, type(None)),
    "BigModelPrecision.max_consecutive_skips": (int, type(None)),
    "BigModelPrecision.full_precision_ops": (list, tuple),
    "BigModelPrecision.half_precision_ops": (list, tuple),
    "BigModelPrecision.full_precision_modules": (list, tuple),
    "BigModelPrecision.full_precision_buffers": (list, tuple),
    "BigModelPrecision.reduce_dtype": (str, type(None)),
    "BigModelPrecision.matmul_precision": (str, type(None)),
    "BigModelPrecision.fp8_modules": (list, tuple, type(None)),
    "BigModelPrecision.fp8_emulate": (bool,),
    "BigModelStrategy.pipeline_parallel_size": (int,),
    "BigModelStrategy.num_microbatches": (int, type(None)),
    "BigModelStrategy.schedule": (str,),
    "BigModelStrategy.blocks": (str, list),
    "BigModelStrategy.tensor_parallel_size": (int,),
    "BigModelStrategy.tensor_plan": (dict,),
    "BigModelStrategy.zero_stage": (int,),
    "BigModelStrategy.data_replicate_size": (int, type(None)),
    "BigModelStrategy.keep_gathered": (bool,),
    "BigModelStrategy.reduce_every_microbatch": (bool, type(None)),
    "BigModelStrategy.offload": (str, type(None)),
    "BigModelStrategy.microbatch_weight": (str,),
    "BigModelStrategy.compile_blocks": (bool, dict),
    "BigModelStrategy.deferred_batch_norm": (bool,),
    "BigModelStrategy.batch_source": (str,),
    "BigModelStrategy.uneven_inputs": (str,),
    "BigModelStrategy.async_checkpoint": (bool,),
    "BigModelStrategy.checkpoint_format": (str,),
    "BigModelStrategy.checkpoint_parameters": (str,),
    "BigModelStrategy.process_group_backend": (str, type(None)),
    "BigModelStrategy.timeout": (type(None),),
    "BigModelStrategy.memory_limit_bytes": (int, type(None)),
    "BigModelStrategy.accelerator": (type(None),),
    "BigModelStrategy.parallel_devices": (type(None),),
    "BigModelStrategy.cluster_environment": (type(None),),
    "BigModelStrategy.checkpoint_io": (type(None),),
    "BigModelStrategy.precision_plugin": (type(None),),
    "ExponentialMovingAverage.decay": (int, float),
    "ExponentialMovingAverage.use_warmup": (bool,),
    "ExponentialMovingAverage.update_every_num_steps": (int,),
    "ExponentialMovingAverage.start_step": (int,),
    "ExponentialMovingAverage.dtype": (str, type(None)),
    "ExponentialMovingAverage.offload_to_host": (bool,),
    "ExponentialMovingAverage.average_buffers": (bool,),
    "ExponentialMovingAverage.evaluate_with_average": (bool,),
    "Full.every": (int,),
    "GradientNoiseScale.decay": (int, float),
    "GradientNoiseScale.confidence": (int, float),
    "Offload.prefetch": (int,),
    "Offload.saved": (str,),
    "Offload.min_bytes": (int,),
    "Offload.max_host_bytes": (int, type(None)),
    "Offload.max_in_flight_bytes": (int,),
    "Offload.path": (str, type(None)),
    "OffloadPolicy.kind": (str,),
    "OffloadPolicy.path": (str, type(None)),
    "OffloadPolicy.chunk_bytes": (int, type(None)),
    "Optimal.budget": (int,),
    "Optimal.keep": (list, tuple),
    "Optimal.prefetch": (int,),
    "PrecisionAudit.num_steps": (int,),
    "PrecisionAudit.every_num_steps": (int, type(None)),
    "PrecisionAudit.output_path": (str, type(None)),
    "PrecisionAudit.blocks": (str, list, tuple),
    "PrecisionAudit.tolerance": (int, float, type(None)),
    "PreemptionCheckpoint.signals": (list, tuple),
    "PreemptionCheckpoint.dirpath": (str, type(None)),
    "PreemptionCheckpoint.filename": (str,),
    "Recompute.policy": (type(None),),
    "Recompute.budget": (int, type(None)),
    "Recompute.blocks": (str, list, tuple),
    "Selective.keep": (list, tuple),
    "SquareRoot.segment": (int, type(None)),
    "TokenWeight.labels": (str, type(None)),
    "TokenWeight.shifted": (bool, type(None)),
    "TokenWeight.ignore_index": (int, type(None)),
}
# Without which an argument has no effect.
BESIDE: dict[str, dict[str, Any]] = {
    "AdaptiveAccumulation.schedule": {},
    "AdaptiveAccumulation.unit": {"schedule": {0: 1}},
    "AdaptiveAccumulation": {"max_window": 8},
    "BigModelPrecision": {"precision": "16-mixed"},
    "BigModelPrecision.full_precision_buffers": {"precision": "16-true"},
    "BigModelPrecision.fp8_modules": {"precision": "fp8"},
    "BigModelPrecision.fp8_emulate": {"precision": "fp8"},
    "BigModelStrategy.schedule": {"pipeline_parallel_size": 2},
    "BigModelStrategy.blocks": {"pipeline_parallel_size": 2},
    "BigModelStrategy.tensor_plan": {"tensor_parallel_size": 2},
    "BigModelStrategy.memory_limit_bytes": {"num_microbatches": "auto"},
    "BigModelStrategy": {"zero_stage": 3},
    "Optimal": {"budget": 1},
    "OffloadPolicy": {"kind": "disk", "path": "/tmp"},
}
WRONG = ["2", None, ["sqrt"], {"a": 1}, {1}, (1,), 2, 0.5, True, b"x", 1j, int, object()]


def test_every_argument_is_looked_at() -> None:
    """A new argument that takes whatever comes."""
    found = {
        f"{name}.{argument}"
        for name in CLASSES
        for argument in list(inspect.signature(getattr(lightning_bigmodel, name).__init__).parameters)[1:]
    }
    assert found == set(KINDS)


@pytest.mark.parametrize("place", KINDS)
def test_a_wrong_type_is_named(place: str) -> None:
    """An error of Python's own about `<`, or one at the first step, that names no argument."""
    name, argument = place.split(".")
    others = BESIDE.get(place, BESIDE.get(name, {}))
    for value in WRONG:
        if type(value) in KINDS[place]:
            continue
        with pytest.raises((ValueError, TypeError)) as caught:
            getattr(lightning_bigmodel, name)(**{**others, argument: value})
        said = str(caught.value)
        # What was given, in backticks; then the rule or the remedy.
        assert re.search(rf"`[^`]*\b{argument}={re.escape(repr(value))}\W.* (must|needs|Use|Leave)\b", said), said
