"""Unmodified models of many architectures train sharded to the numbers of one process, alone and inside a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import assert_parallel_equivalent
from tests.strategies.test_architectures import EQUAL_HF, OWN, hf, own

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_stage": 3}),
    (2, {"zero_stage": 3, "num_microbatches": 2}),
    (4, {"zero_stage": 3, "pipeline_parallel_size": 2, "num_microbatches": 2}),
    (4, {"zero_stage": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}),
    (2, {"zero_stage": 1, "num_microbatches": 2}),
]


def check(module: Any, batch: Any, layout: tuple[int, dict[str, Any]], weight: Any = "samples") -> None:
    """Compare with one process."""
    world_size, settings = layout
    strategy = BigModelStrategy(**settings, microbatch_weight=weight)
    report = assert_parallel_equivalent(
        module, batch, strategy, world_size=world_size, timeout_seconds=60.0, gradient_clip_val=0.05
    )
    assert report.num_parameters > 0


@pytest.mark.parametrize(("name", "index"), [(name, index) for index, name in enumerate(EQUAL_HF)])
def test_transformers_models(name: str, index: int) -> None:
    """Tied weights, raw parameters, buffers and outer layers that are in no unit, or in two."""
    module, batch, weight = hf(name, 8)
    check(module, batch, LAYOUTS[index % len(LAYOUTS)], weight)


# "MLPMixer" logs what its rank alone returns.
@pytest.mark.parametrize(("index", "name"), list(enumerate(name for name in OWN if name != "MLPMixer"))[::3])
def test_own_modules(index: int, name: str) -> None:
    """What the module's own docstring tells."""
    module, batch = own(name, 8)
    check(module, batch, LAYOUTS[index % len(LAYOUTS)])
