"""ZeRO 1, 2, 3 and hybrid sharding under the Trainer: the numbers of one process, alone and inside a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import run_ranks
from tests.strategies.test_trainer import TOLERANCE, assert_same_numbers, assert_same_weights, fit


def _fit(devices: int, batch_size: int, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return fit(BigModelStrategy(**strategy), devices, batch_size, **options)


PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}
# name: (ranks, data ranks, strategy, Trainer options)
CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "zero1": (2, 2, {"zero_stage": 1}, {}),
    "zero2": (2, 2, {"zero_stage": 2}, {}),
    "zero3": (2, 2, {"zero_stage": 3}, {}),
    "zero3_one_rank": (1, 1, {"zero_stage": 3}, {}),
    "zero3_three_ranks": (3, 3, {"zero_stage": 3}, {"num_samples": 30}),
    "zero1_microbatches": (2, 2, {"zero_stage": 1, "num_microbatches": 2}, {}),
    "zero2_microbatches": (2, 2, {"zero_stage": 2, "num_microbatches": 2}, {}),
    "zero3_microbatches": (2, 2, {"zero_stage": 3, "num_microbatches": 2}, {}),
    "zero3_keeps": (2, 2, {"zero_stage": 3, "num_microbatches": 2, "keep_gathered": True}, {}),
    "zero2_reduces_once": (2, 2, {"zero_stage": 2, "reduce_every_microbatch": False}, {"accumulate_grad_batches": 2}),
    "zero3_reduces_once": (2, 2, {"zero_stage": 3, "reduce_every_microbatch": False}, {"accumulate_grad_batches": 2}),
    "zero1_accumulate_clip": (2, 2, {"zero_stage": 1}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "zero2_accumulate_clip": (2, 2, {"zero_stage": 2}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "zero3_accumulate_clip": (2, 2, {"zero_stage": 3}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "zero3_clip_value": (
        2,
        2,
        {"zero_stage": 3},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    ),
    "zero3_uneven": (2, 2, {"zero_stage": 3}, {"num_samples": 27}),
    "zero3_two_epochs": (2, 2, {"zero_stage": 3}, {"max_epochs": 2}),
    "hybrid1": (4, 4, {"zero_stage": 1, "data_replicate_size": 2}, {"gradient_clip_val": 0.05}),
    "hybrid3": (4, 4, {"zero_stage": 3, "data_replicate_size": 2}, {"gradient_clip_val": 0.05}),
    "pipe_zero1": (4, 2, {**PIPE, "zero_stage": 1}, {"gradient_clip_val": 0.05}),
    "pipe_zero2": (4, 2, {**PIPE, "zero_stage": 2}, {"gradient_clip_val": 0.05}),
    "pipe_zero3": (4, 2, {**PIPE, "zero_stage": 3}, {"gradient_clip_val": 0.05}),
    "pipe_zero3_uneven": (4, 2, {**PIPE, "zero_stage": 3}, {"num_samples": 26}),
    "pipe_zero3_accumulate": (4, 2, {**PIPE, "zero_stage": 3}, {"accumulate_grad_batches": 2}),
    "interleaved_zero3": (4, 2, {**PIPE, "schedule": "Interleaved1F1B", "zero_stage": 3}, {}),
    "gpipe_zero3": (4, 2, {**PIPE, "schedule": "GPipe", "zero_stage": 3}, {}),
    "zero_bubble_zero2": (4, 2, {**PIPE, "schedule": "ZBVZeroBubble", "zero_stage": 2}, {}),
    "zero_bubble_zero3": (4, 2, {**PIPE, "schedule": "ZBVZeroBubble", "zero_stage": 3, "keep_gathered": True}, {}),
    "pipe_hybrid3": (8, 4, {**PIPE, "num_microbatches": 2, "zero_stage": 3, "data_replicate_size": 2}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_fit_equals_one_process(name: str) -> None:
    """A gradient reduced twice or not at all, rows that go to another rank, a step before all gradients are there."""
    world_size, data_size, strategy, options = CASES[name]
    whole = 6 if data_size == 3 else 8
    expected = fit("auto", 1, whole, **options)
    results = run_ranks(_fit, world_size, world_size, whole // data_size, strategy, options)
    for result in results:
        assert_same_weights(result["weights"], expected["weights"])
        # A mean of means that the module takes itself over ranks with different numbers of samples.
        own = {"val_mean"} if data_size > 2 else set()
        assert_same_numbers(
            *({k: v for k, v in m.items() if k not in own} for m in (result["metrics"], expected["metrics"]))
        )
        assert result["calls"] == expected["calls"]
        assert result["rates"] == pytest.approx(expected["rates"])
        assert result["global_step"] == expected["global_step"]
        if data_size == 1:
            assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
