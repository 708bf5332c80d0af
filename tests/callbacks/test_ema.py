"""Averaged weights: the numbers of a plain loop in one process, under every layout and with every option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy, ExponentialMovingAverage
from lightning_bigmodel.callbacks._average import placed_averages, update_averages
from lightning_bigmodel.testing import run_ranks
from tests.callbacks.ema_runs import (
    DECAY,
    PIPE,
    Averaged,
    Before,
    arrays,
    assert_close,
    by_hand,
    check,
    fit,
    fit_on_ranks,
    same_bits,
    snapshot,
)
from tests.strategies.trainer_modules import loader, trainer

# name: (ranks, data ranks, strategy, accumulated batches)
CASES: dict[str, tuple[int, int, dict[str, Any] | str, int]] = {
    "ddp": (2, 1, "ddp_find_unused_parameters_true", 1),
    "replicas": (2, 2, {}, 2),
    "zero1": (2, 2, {"zero_stage": 1}, 1),
    "zero2": (2, 2, {"zero_stage": 2}, 2),
    "zero3": (2, 2, {"zero_stage": 3}, 1),
    "zero3_keeps": (2, 2, {"zero_stage": 3, "keep_gathered": True, "num_microbatches": 2}, 2),
    "pipeline": (2, 1, PIPE, 2),
    "pipeline_zero3": (4, 2, {**PIPE, "zero_stage": 3}, 1),
}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_device(accumulate: int) -> None:
    """Averages after each batch in place of each step, or an evaluation with the training weights."""
    check(fit("auto", 1, 8, accumulate_grad_batches=accumulate), by_hand(accumulate))


@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str) -> None:
    """Rows averaged with others' rows, old weights in an evaluation, training weights lost, a gather in an update."""
    world_size, data_size, strategy, accumulate = CASES[name]
    expected = by_hand(accumulate)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    if isinstance(strategy, str):
        options["use_distributed_sampler"] = False  # it shuffles; so each rank sees all samples
    results = run_ranks(fit_on_ranks, world_size, world_size, 8 // data_size, strategy, **options, timeout_seconds=60)
    for result in results:
        check(result, expected)
        counts = result["counts"]
        assert counts["update"] == [{}] * 8
        assert counts["end"] == [{}] * 3
        publishes = isinstance(strategy, dict) and strategy.get("zero_stage") in (1, 2)
        # The sanity check comes before the first average.
        assert [list(count) for count in counts["start"]] == [[], *[["all_gather"] if publishes else []] * 2]
        assert all(count["all_gather"][0] == 1 for count in counts["start"] if count)


# -- errors in an evaluation -------------------------------------------------------------------------------------------


class Raises(Averaged):
    """The second rank's evaluation fails after training."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.sanity_checking and self.trainer.global_rank == self.trainer.world_size - 1:
            raise KeyError("evaluation")
        return super().validation_step(batch, batch_idx)


class OnException(Callback):
    """What a rank computes with once the average has seen the error, as `OnExceptionCheckpoint` would save it."""

    seen: dict[str, torch.Tensor]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.seen = snapshot(trainer, pl_module)


def _raise(devices: int, strategy: dict[str, Any] | str) -> bool:
    chosen = BigModelStrategy(**strategy) if isinstance(strategy, dict) else strategy
    before, after = Before(), OnException()
    module = Raises()
    run = trainer(chosen, devices, callbacks=[before, ExponentialMovingAverage(DECAY), after])
    with pytest.raises((KeyError, RuntimeError)):
        run.fit(module, loader(32, 8 // devices), loader(10, 2))
    return same_bits(after.seen, before.seen)


@pytest.mark.parametrize("strategy", [{"zero_stage": 2}, {"zero_stage": 3}])
def test_training_weights_are_back_after_an_error_on_one_rank(strategy: dict[str, Any]) -> None:
    """Averages left in the module, or ranks that wait for one that has failed."""
    assert run_ranks(_raise, 2, 2, strategy, timeout_seconds=60) == [True, True]


def test_training_weights_are_back_after_an_error_on_one_device() -> None:
    """Averages left in the module."""
    assert _raise(1, "auto")


# -- options -----------------------------------------------------------------------------------------------------------


class ByHand(Callback):
    """The same average from the parameters after each batch; `decay` by the number of updates so far."""

    def __init__(self, decay: Any, start: int = 0, every: int = 1) -> None:
        self._decay, self._start, self._every = decay, start, every
        self.averages: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._start == 0:
            self._copy(pl_module)

    def _copy(self, module: Any) -> None:
        self.averages = {name: p.detach().float().clone() for name, p in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == self._start:
            self._copy(pl_module)
        elif step > self._start and (step - self._start) % self._every == 0:
            decay = self._decay((step - self._start) // self._every - 1)
            for name, parameter in pl_module.named_parameters():
                self.averages[name] = decay * self.averages[name] + (1 - decay) * parameter.detach().float()


OPTIONS: dict[str, tuple[dict[str, Any], ByHand]] = {
    "warm_up": ({"use_warmup": True}, ByHand(lambda n: min(DECAY, (1 + n) / (10 + n)))),
    "start": ({"start_step": 3}, ByHand(lambda n: DECAY, start=3)),
    "every": ({"update_every_num_steps": 3}, ByHand(lambda n: DECAY, every=3)),
    "start_every": ({"update_every_num_steps": 2, "start_step": 3}, ByHand(lambda n: DECAY, start=3, every=2)),
    "host": ({"offload_to_host": True}, ByHand(lambda n: DECAY)),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_options(name: str, precision: Any) -> None:
    """A schedule that is one step off, or averages that lose what a bf16 parameter's steps add up to."""
    options, hand = OPTIONS[name]
    average = ExponentialMovingAverage(DECAY, **options)
    run = trainer("auto", 1, max_epochs=3, callbacks=[hand, average], precision=precision)
    run.fit(Averaged(), loader(32, 8), loader(10, 4))
    assert {tensor.dtype for tensor in average.averages.values()} == {torch.float32}
    assert_close(arrays(average.averages), arrays(hand.averages))


def test_a_narrow_type_is_kept() -> None:
    """A `dtype` that does nothing."""
    average = ExponentialMovingAverage(DECAY, dtype="bfloat16")
    trainer("auto", 1, callbacks=[average]).fit(Averaged(), loader(32, 8))
    assert {tensor.dtype for tensor in average.averages.values()} == {torch.bfloat16}


def test_averages_placed_in_an_evaluation_can_be_updated() -> None:
    """Tensors made in inference mode, which Lightning evaluates in, take no update outside of it."""
    values = {"weight": torch.ones(2)}
    with torch.inference_mode():
        averages = placed_averages({}, values, None, to_host=False)
    update_averages(averages, {"weight": torch.zeros(2)}, DECAY)
    torch.testing.assert_close(averages["weight"], torch.full((2,), DECAY))
    assert torch.equal(values["weight"], torch.ones(2))


class WithStatistics(LightningModule):
    """BatchNorm, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.means: list[torch.Tensor] = []
        self.evaluated: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.norm(batch)).square().mean()
        self.means.append(self.norm.running_mean.detach().clone())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.evaluated.append(self.norm.running_mean.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _statistics(strategy: Any, average_buffers: bool, path: str) -> None:
    module, average = WithStatistics(), ExponentialMovingAverage(DECAY, average_buffers=average_buffers)
    run = trainer(strategy, 1, callbacks=[average], num_sanity_val_steps=0)
    run.fit(module, DataLoader(torch.randn(48, 4), 8), DataLoader(torch.randn(8, 4), 8))
    expected = torch.zeros(4)
    for mean in module.means:
        expected = DECAY * expected + (1 - DECAY) * mean
    torch.testing.assert_close(module.evaluated[0], expected if average_buffers else module.means[-1])
    assert torch.equal(module.norm.running_mean, module.means[-1])
    statistics = {"norm.running_mean", "norm.running_var"} if average_buffers else set()
    assert average.averages.keys() == dict(module.named_parameters()).keys() | statistics

    run.save_checkpoint(path)
    resumed = ExponentialMovingAverage(DECAY, average_buffers=True)
    run = trainer(strategy, 1, callbacks=[resumed])
    run.validate(WithStatistics(), DataLoader(torch.randn(8, 4), 8), ckpt_path=path, verbose=False)
    saved = expected if average_buffers else module.means[-1]
    torch.testing.assert_close(resumed.averages["norm.running_mean"], saved)


@pytest.mark.parametrize("average_buffers", [False, True])
def test_statistics(average_buffers: bool, tmp_path: Path) -> None:
    """Statistics averaged that should be as they are, or the other way round; counters and constants averaged."""
    _statistics("auto", average_buffers, str(tmp_path / "plain.ckpt"))
    run_ranks(_statistics, 1, "bigmodel_zero1", average_buffers, str(tmp_path / "sharded.ckpt"), timeout_seconds=60)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "`decay=1.0` must be a number of at least 0 and below 1"),
        ({"decay": -0.1}, "`decay=-0.1`"),
        ({"decay": float("nan")}, "`decay=nan`"),
        ({"update_every_num_steps": 0}, "`update_every_num_steps=0` must be a whole number of at least 1"),
        ({"start_step": -1}, "`start_step=-1`"),
        ({"dtype": "int8"}, "`dtype='int8'` is no floating-point type"),
        ({"dtype": "floaty"}, "`dtype='floaty'`"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    """An average that never changes, found out after a week."""
    with pytest.raises(ValueError, match=message):
        ExponentialMovingAverage(**options)


@pytest.mark.parametrize("other", [WeightAveraging, EMAWeightAveraging])
def test_two_averages_are_refused(other: type[Callback]) -> None:
    """Two callbacks that swap the weights back in the wrong order."""
    run = trainer("auto", 1, callbacks=[ExponentialMovingAverage(), other()])
    with pytest.raises(ValueError, match=f"and `{other.__name__}` both put averages"):
        run.fit(Averaged(), loader(8, 8))


def test_foreign_shards_are_refused() -> None:
    """An average of flat parts of parameters that is saved under no name."""
    run = trainer("auto", 1, callbacks=[ExponentialMovingAverage()])
    run.strategy.__class__ = type("OtherStrategy", (type(run.strategy).__mro__[1],), {})
    with pytest.raises(ValueError, match="under `OtherStrategy`"):
        ExponentialMovingAverage().setup(run, Averaged(), "fit")
