"""Every schedule trains to the numbers of one process; a new entry of `SCHEDULES` is tested without new code.

The optimizer is SGD, unlike in the tests of architectures: Adam divides each gradient by its own size and would hide a
factor that all gradients share, such as a mean over micro-batches that became a sum.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.pipeline.schedules import SCHEDULES, check_schedule, rank_of_stage, stages_of_rank
from lightning_bigmodel.testing import (
    TinyChain,
    TinyEncoderDecoder,
    TinySkips,
    TinyTransformer,
    assert_parallel_equivalent,
)
from tests.strategies import hf_modules, own_modules


class _Sgd:
    """Mixed into a module: SGD with momentum."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # type: ignore[attr-defined]


class Tied(_Sgd, TinyTransformer):
    """A head tied to the embedding: one parameter on the first stage and the last."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8, tied_head=True)


class EncoderDecoder(_Sgd, TinyEncoderDecoder):
    """A value that every decoder block reads."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)


class Skips(_Sgd, TinySkips):
    """A value that passes over all blocks between."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8)


class Chain(_Sgd, TinyChain):
    """The plain case."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8)


class Net(_Sgd, own_modules.UNet):
    """Skips of all lengths."""

    def example_batch(self, num_samples: int, seed: int = 0) -> Any:
        """A batch of images."""
        return self.batch(torch.Generator().manual_seed(seed), num_samples)


class T5(_Sgd, hf_modules.PretrainedModule):
    """One embedding shared by encoder, decoder and head, and biases of the first block used in all others."""

    def __init__(self) -> None:
        super().__init__("t5")

    def example_batch(self, num_samples: int, seed: int = 0) -> Any:
        """A batch of pairs of sequences."""
        return hf_modules.build("t5", num_samples)[1]


def check(
    make: Any, schedule: str, *, pipe: int = 2, world_size: int | None = None, num_samples: int = 8, **options: Any
) -> None:
    """As many micro-batches as stages, which every schedule takes."""
    num_microbatches = pipe * SCHEDULES[schedule].stages_per_rank
    strategy = BigModelStrategy(pipeline_parallel_size=pipe, num_microbatches=num_microbatches, schedule=schedule)
    module = make()
    batch = module.example_batch(num_samples, seed=0)
    report = assert_parallel_equivalent(module, batch, strategy, world_size=world_size, **options)
    assert report.num_parameters > 0
    assert report.num_metrics > 0


@pytest.mark.parametrize("make", [Tied, EncoderDecoder, Skips, Net, T5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_equals_one_process(schedule: str, make: Any) -> None:
    """A schedule that runs a backward twice, leaves one out, or hands a gradient to the wrong stage."""
    check(make, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulated_batches_with_clipping(schedule: str) -> None:
    """Gradients divided by the window at every schedule call; a norm over one rank; tied gradients counted twice."""
    check(Tied, schedule, accumulate_grad_batches=3, gradient_clip_val=0.05, num_steps=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks(schedule: str) -> None:
    """Orders of communication that two ranks cannot get wrong."""
    check(Skips, schedule, pipe=4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_times_two_replicas(schedule: str) -> None:
    """Gradients summed over the wrong group, and data ranks weighed alike that have different numbers of samples."""
    check(Tied, schedule, world_size=4, num_samples=15, gradient_clip_val=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clipping_by_value_and_uneven_micro_batches(schedule: str) -> None:
    """Micro-batches of unequal size weighed alike; fewer samples than micro-batches, whose slots stay empty."""
    check(Chain, schedule, num_samples=7, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    check(Chain, schedule, num_samples=1, num_steps=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_has_one_rank(schedule: str) -> None:
    """A stage that no rank holds, or two do: a hang in the first step."""
    for size in (2, 3, 4, 8):
        spec = check_schedule(schedule, size, 4 * size)
        held = [stages_of_rank(schedule, size, rank) for rank in range(size)]
        assert sorted(stage for stages in held for stage in stages) == list(range(size * spec.stages_per_rank))
        for rank, stages in enumerate(held):
            assert len(stages) == spec.stages_per_rank
            assert all(rank_of_stage(schedule, size, stage) == rank for stage in stages)


def legal_numbers(schedule: str, size: int) -> list[int]:
    """Numbers of micro-batches the schedule takes; each other one must be refused with one of these."""
    legal: list[int] = []
    for number in range(1, 4 * size):
        with contextlib.suppress(ValueError):
            check_schedule(schedule, size, number)
            legal.append(number)
            continue
        with pytest.raises(ValueError, match=f"`num_microbatches={number}`") as caught:
            check_schedule(schedule, size, number)
        check_schedule(schedule, size, int(str(caught.value).split("Set `num_microbatches=")[1].split("`")[0]))
    return legal


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_of_micro_batches_are_taken_or_refused_with_a_legal_one(schedule: str, size: int) -> None:
    """A refusal whose advice is refused too, or a schedule that refuses everything."""
    assert 2 * size in legal_numbers(schedule, size)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_odd_number_of_micro_batches_runs(schedule: str) -> None:
    """A number that our check takes and torch's schedule refuses, or hangs on, in the first step."""
    number = max(number for number in legal_numbers(schedule, 2) if number % 2)
    module = Chain()
    strategy = BigModelStrategy(pipeline_parallel_size=2, num_microbatches=number, schedule=schedule)
    assert_parallel_equivalent(module, module.example_batch(9, seed=0), strategy, num_steps=2)
