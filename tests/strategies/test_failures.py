"""Errors: clear, on every rank, within seconds, never a hang, never a wrong number."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import RanksFailedError, TinyChain, run_ranks
from tests.strategies.trainer_modules import Classifier, loader, pipeline, trainer


class Sometimes(TinyChain):
    """Reads block 0's output in the loss at every batch but the first: the trace cannot know."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        first = hidden = self.blocks[0](inputs)
        for block in list(self.blocks)[1:]:
            hidden = block(hidden)
        loss = nn.functional.mse_loss(hidden, targets)
        return loss + first.square().mean() if batch_idx > 0 else loss


class SometimesCompares(Sometimes):
    """Reads it through a comparison, in which NaN would get lost."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        first = hidden = self.blocks[0](inputs)
        for block in list(self.blocks)[1:]:
            hidden = block(hidden)
        loss = nn.functional.mse_loss(hidden, targets)
        return loss * (1 + (first > 0).float().mean()) if batch_idx > 0 else loss


class Swallows(TinyChain):
    """A bare `except` around the forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return self.loss(batch)
        except:  # noqa: E722  # what users write
            return None


class Swallows2(TinyChain):
    """Goes on with the blocks after swallowing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, _ = batch
        for block in self.blocks:
            with contextlib.suppress(BaseException):
                inputs = block(inputs)
        return inputs.mean()


class Diverges(TinyChain):
    """A loss that is NaN in one process too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * float("nan")


class FailsInCallback(Callback):
    """An error outside of the step, on one rank."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1:
            raise KeyError("in the callback")


def rows(module: TinyChain) -> Any:
    """Two batches of eight."""
    return torch.utils.data.DataLoader(module.dataset(16), batch_size=8)


def _run(module_class: type[TinyChain], strategy: dict[str, Any]) -> None:
    module = module_class()
    trainer(pipeline(**strategy), 2).fit(module, rows(module))


def _fail_in_step(world_size: int) -> None:
    module = Classifier(fail_at=1)
    trainer(pipeline(), world_size).fit(module, loader(32, 8), loader(8, 4))


def _fail_in_callback(world_size: int) -> None:
    module = TinyChain()
    trainer(pipeline(), world_size, callbacks=[FailsInCallback()]).fit(module, rows(module))


def messages(function: Any, world_size: int, *args: Any, within_seconds: float = 40.0) -> list[str]:
    """The error of each rank; all ranks must have failed, in time."""
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(function, world_size, *args, timeout_seconds=100)
    assert time.monotonic() - start < within_seconds
    assert len(caught.value.failures) == world_size
    return [caught.value.failures[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_error_in_one_ranks_step_ends_all(world_size: int) -> None:
    """The others would wait for half an hour."""
    found = messages(_fail_in_step, world_size, world_size)
    assert "ValueError: boom" in found[1]
    for text in found:
        assert "boom" in text


def test_an_error_in_one_ranks_callback_ends_all() -> None:
    """Errors outside of steps hang the others just as well."""
    for text in messages(_fail_in_callback, 2, 2):
        assert "in the callback" in text


@pytest.mark.parametrize("module_class", [Sometimes, SometimesCompares])
def test_a_stand_in_that_reaches_the_loss_is_named(module_class: type[TinyChain]) -> None:
    """The loss would be NaN, or worse, a wrong number."""
    found = messages(_run, 2, module_class, {})
    assert "The step reads the output of `blocks.0`" in found[1]
    assert "The step reads the output of `blocks.0`" in found[0]


def test_a_loss_that_is_nan_by_itself_is_left_alone() -> None:
    """A diverging run must not be blamed on the pipeline."""
    run_ranks(_run, 2, Diverges, {})


@pytest.mark.parametrize("module_class", [Swallows, Swallows2])
def test_a_step_that_swallows_the_border_is_refused(module_class: type[TinyChain]) -> None:
    """The stage would go on with stand-ins."""
    for text in messages(_run, 2, module_class, {}):
        assert "swallowed the signal" in text


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"pipeline_parallel_size": 0}, "`pipeline_parallel_size=0`"),
        ({"pipeline_parallel_size": True}, "`pipeline_parallel_size=True`"),
        ({"num_microbatches": 0}, "`num_microbatches=0`"),
        ({"num_microbatches": "automatic"}, "`num_microbatches='automatic'`"),
        ({"memory_limit_bytes": 10**6}, 'Set `num_microbatches="auto"`'),
        ({"num_microbatches": "auto", "memory_limit_bytes": 0}, "`memory_limit_bytes=0`"),
        ({"pipeline_parallel_size": 2, "schedule": "1F1"}, "Did you mean '1F1B'"),
        ({"pipeline_parallel_size": 4, "num_microbatches": 2}, "num_microbatches=4"),
        ({"pipeline_parallel_size": 4, "num_microbatches": 9, "schedule": "Interleaved1F1B"}, "`num_microbatches="),
        ({"pipeline_parallel_size": 2, "num_microbatches": 3, "schedule": "DualPipeV"}, "at least 4"),
        ({"schedule": "GPipe"}, "`pipeline_parallel_size=1`"),
        ({"microbatch_weight": "token"}, "`microbatch_weight='token'`"),
        ({"batch_source": "shared"}, "`batch_source='shared'`"),
        ({"pipeline_parallel_size": 2, "blocks": []}, "`blocks=[]`"),
        ({"schedule": None}, "`schedule=None`"),
        ({"timeout": 30}, "`timeout=30` must be a `datetime.timedelta`"),
        ({"timeout": timedelta(0)}, "above zero"),
        ({"process_group_backend": "glo"}, "`process_group_backend='glo'`"),
        ({"process_group_backend": "cpu:gloo,cuda:ncl"}, "not available here"),
        ({"process_group_backend": 3}, "`process_group_backend=3`"),
        ({"compile_blocks": {"modes": "default"}}, "'modes', which `torch.compile` does not know"),
    ],
)
def test_bad_settings_are_refused_at_construction(settings: dict[str, Any], fault: str) -> None:
    """A setting found out on one rank, in the middle of a run."""
    with pytest.raises(ValueError, match=".*") as caught:
        BigModelStrategy(**settings)
    assert fault in str(caught.value)


def test_a_world_that_does_not_factor_is_refused_on_every_rank() -> None:
    """Ranks left over would hang in the first group."""
    for text in messages(_run, 2, TinyChain, {"pipeline_parallel_size": 3, "num_microbatches": 3}):
        for part in ("3", "2", "`pipeline_parallel_size"):
            assert part in text


def test_more_stages_than_blocks_is_refused_on_every_rank() -> None:
    """A stage without a block."""
    for text in messages(_run, 2, TinyChain, {"schedule": "Interleaved1F1B", "blocks": ["blocks.0", "blocks.1"]}):
        assert "needs 4 pipeline stages" in text


def test_unknown_block_names_are_refused_with_the_nearest() -> None:
    """A typo that silently cuts elsewhere."""
    for text in messages(_run, 2, TinyChain, {"blocks": ["block.*"]}):
        assert "`blocks` names 'block.*'" in text
        assert "Nearest names: 'blocks." in text


class CallsOutside(Callback):
    """Uses the model between steps, as sampling callbacks do."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.blocks(torch.zeros(2, 8))


def _call_outside() -> None:
    module = TinyChain()
    trainer(pipeline(), 2, callbacks=[CallsOutside()]).fit(module, rows(module))


def test_a_call_outside_of_steps_is_refused() -> None:
    """Blocks of other ranks would compute with NaN."""
    for text in messages(_call_outside, 2):
        assert "is called outside of a training, validation, test or predict step" in text
