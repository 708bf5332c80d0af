"""Unmodified models of many architectures train under a pipeline to the numbers of one process.

Compared after 4 AdamW steps in fp32 at 1e-5: every parameter and every logged metric, on every rank. Each model runs
under a schedule of one stage a rank, and under one of two stages a rank whose backward is split into its halves;
`tests/conformance/test_schedules.py` runs all schedules, on fewer models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import RanksFailedError, assert_parallel_equivalent
from tests.strategies import block_habits, hf_modules, own_modules, step_habits

OWN = {**own_modules.MODULES, **block_habits.HABITS, **step_habits.HABITS}
EQUAL_HF = [name for name in hf_modules.MODELS if name != "mixtral_router"]

ONE_STAGE = ("1F1B", "GPipe")
TWO_STAGES = ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")


def check(module: Any, batch: Any, schedule: str, *, pipe: int = 2, weight: Any = "samples", **options: Any) -> None:
    """Compare with one process; also that something was compared."""
    strategy = BigModelStrategy(
        pipeline_parallel_size=pipe, num_microbatches=2 * pipe, schedule=schedule, microbatch_weight=weight
    )
    report = assert_parallel_equivalent(module, batch, strategy, **options)
    assert report.num_parameters > 0
    assert report.num_metrics > 0


def hf(name: str, num_samples: int) -> tuple[Any, Any, Any]:
    """A transformers model, its batch and the weight of its micro-batches."""
    module, batch = hf_modules.build(name, num_samples)
    return module, batch, hf_modules.MODELS[name].weight


def own(name: str, num_samples: int) -> tuple[Any, Any]:
    """A module of this folder and its batch."""
    module = OWN[name]()
    return module, module.batch(torch.Generator().manual_seed(1), num_samples)


def turns(names: Any, schedules: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each name with one of the schedules, in turn."""
    return [(name, schedules[index % len(schedules)]) for index, name in enumerate(names)]


@pytest.mark.parametrize(("name", "schedule"), turns(EQUAL_HF, ONE_STAGE))
def test_transformers_models_one_stage_a_rank(name: str, schedule: str) -> None:
    """Tied weights, masks, biases of attention, encoder outputs and modalities that are lost at a cut."""
    module, batch, weight = hf(name, 8)
    check(module, batch, schedule, weight=weight)


@pytest.mark.parametrize(("name", "schedule"), turns(EQUAL_HF, TWO_STAGES))
def test_transformers_models_split_backward(name: str, schedule: str) -> None:
    """Weights of several layers counted twice or not at all when a backward is split; stages that share a rank."""
    module, batch, weight = hf(name, 8)
    check(module, batch, schedule, weight=weight, gradient_clip_val=0.05)


@pytest.mark.parametrize(("name", "schedule"), turns(OWN, ONE_STAGE))
def test_own_modules_one_stage_a_rank(name: str, schedule: str) -> None:
    """What the module's own docstring tells."""
    module, batch = own(name, 7)
    check(module, batch, schedule)


@pytest.mark.parametrize(("name", "schedule"), turns(OWN, TWO_STAGES))
def test_own_modules_split_backward(name: str, schedule: str) -> None:
    """What the module's own docstring tells, with stages that share a rank and run the step in turn."""
    module, batch = own(name, 8)
    check(module, batch, schedule)


@pytest.mark.parametrize("name", ["UNet", "Detector", "FunctionalHead", "Reversible", "Edits", "TwoBranches"])
def test_values_that_pass_over_stages(name: str) -> None:
    """A value made on the first of four stages, used on the third or fourth, and its gradient on the way back."""
    module, batch = own(name, 8)
    check(module, batch, "1F1B", pipe=4)


@pytest.mark.parametrize(("name", "schedule"), [("llama", "ZBVZeroBubble"), ("t5", "1F1B"), ("bart", "GPipe")])
def test_transformers_models_on_four_ranks(name: str, schedule: str) -> None:
    """Eight stages of one block each; cuts inside an encoder and inside its decoder."""
    module, batch, weight = hf(name, 8)
    check(module, batch, schedule, pipe=4, weight=weight)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradient_checkpointing_of_transformers(name: str) -> None:
    """Recomputation calls a block again in backward, when no stage is running."""
    module, batch, weight = hf(name, 8)
    module.checkpointing = True
    check(module, batch, "1F1B", weight=weight)


def test_a_loss_over_the_whole_batch_needs_one_micro_batch() -> None:
    """CLIP's own loss contrasts all pairs of a batch: exact when the batch stays whole, as GPipe lets it."""
    module, batch = hf_modules.PretrainedModule("clip", {"return_loss": True}), hf_modules.build("clip", 6)[1]
    strategy = BigModelStrategy(pipeline_parallel_size=2, num_microbatches=1, schedule="GPipe")
    assert_parallel_equivalent(module, batch, strategy)


def refusals(module: Any, batch: Any) -> list[str]:
    """What each rank said."""
    with pytest.raises(RanksFailedError) as caught:
        check(module, batch, "1F1B", timeout_seconds=60)
    return list(caught.value.failures.values())


def test_router_losses_are_refused_by_name() -> None:
    """A value that leaves a block by a hook: its gradient would be lost without a word."""
    module, batch, _ = hf("mixtral_router", 8)
    found = refusals(module, batch)
    assert len(found) == 2
    for message in found:
        assert "A value made inside `model.model.layers.0` (pipeline stage 0)" in message
        assert "as router losses are" in message


@pytest.mark.parametrize("name", step_habits.REFUSED)
def test_what_cannot_be_cut_is_refused_on_every_rank(name: str) -> None:
    """A hang, or a result that silently differs, where a block writes or returns what cannot travel."""
    make, message = step_habits.REFUSED[name]
    module = make()
    found = refusals(module, module.batch(torch.Generator().manual_seed(1), 8))
    assert len(found) == 2
    assert all(message in text for text in found)
