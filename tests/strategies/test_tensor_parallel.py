"""Tensor parallelism under the Trainer, alone and with every other axis: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import assert_parallel_equivalent
from tests.strategies.test_architectures import hf

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {}),
    "tensor_microbatches": (2, {"num_microbatches": 2}),
    "tensor_replicas": (4, {}),
    "tensor_zero1": (4, {"zero_stage": 1}),
    "tensor_zero2": (4, {"zero_stage": 2, "num_microbatches": 2}),
    "tensor_zero3": (4, {"zero_stage": 3}),
    "tensor_pipe": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "tensor_pipe_zero3": (8, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}),
}


def check(name: str, world_size: int, settings: dict[str, Any]) -> None:
    """Compare with one process."""
    module, batch, weight = hf(name, 8)
    strategy = BigModelStrategy(tensor_parallel_size=2, microbatch_weight=weight, **settings)
    report = assert_parallel_equivalent(
        module, batch, strategy, world_size=world_size, timeout_seconds=80.0, gradient_clip_val=0.05
    )
    assert report.num_parameters > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_axis_with_tensor_ranks(layout: str) -> None:
    """Gradients of replicated layers counted per tensor rank, batches that differ between them, norms of slices."""
    check("llama", *LAYOUTS[layout])


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt2", "tensor_zero3"), ("t5", "tensor_pipe"), ("vit", "tensor_zero2"), ("bert", "tensor_pipe")],
)
def test_architectures_with_tensor_ranks(name: str, layout: str) -> None:
    """Fused and biased layers, position biases, encoders cut by features and by layers."""
    check(name, *LAYOUTS[layout])
