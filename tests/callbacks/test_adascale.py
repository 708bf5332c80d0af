"""AdaScale: the gains and the weights of fairscale's own optimizer, under every layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_bigmodel import AdaptiveAccumulation, AdaScale, BigModelStrategy
from lightning_bigmodel.testing import run_ranks
from tests.callbacks.fairscale_runs import (
    ACCUMULATE,
    BATCH_SIZE,
    CASES,
    NUM_SAMPLES,
    run_fairscale,
    run_fairscale_ddp,
)
from tests.callbacks.noise_runs import LENGTHS, Noisy
from tests.strategies.trainer_modules import loader, trainer, weights

# fairscale sums squares in single precision.
TOLERANCE = 2e-5


class Gains(Callback):
    """What each step used, and the rates that monitors and schedules see."""

    def __init__(self, scale: AdaScale) -> None:
        self._scale = scale
        self.gains: list[list[float]] = []
        self.rates: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[1]["lr"])
        if trainer.global_step > len(self.gains):
            self.gains.append([*self._scale.gains, self._scale.gain])
            self.logged.append(float(trainer.callback_metrics["adascale_gain"]))


class Scheduled(Noisy):
    """A schedule that multiplies the rate it finds."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _fit(devices: int, batch_size: int, settings: Any, scale: dict[str, Any], **options: Any) -> dict[str, Any]:
    adascale = AdaScale(**scale)
    gains = Gains(adascale)
    strategy = BigModelStrategy(**settings) if isinstance(settings, dict) else settings
    module = options.pop("module", Noisy)()
    num_samples, resume = options.pop("num_samples", NUM_SAMPLES), options.pop("resume", None)
    run = trainer(
        strategy, devices, **{"callbacks": [adascale, gains], "accumulate_grad_batches": ACCUMULATE, **options}
    )
    run.fit(module, loader(num_samples, batch_size, lengths=LENGTHS), ckpt_path=resume)
    if directory := options.get("default_root_dir"):
        run.save_checkpoint(f"{directory}/saved")
    return {
        "gains": gains.gains,
        "logged": gains.logged,
        "rates": gains.rates,
        "steps": adascale.scale_invariant_steps,
        "state": adascale.state_dict(),
        "sum": float(sum(abs(value).sum() for value in weights(module).values())),
    }


@functools.cache
def _fairscale(case: str) -> dict[str, Any]:
    """What fairscale does now, in this process or on two ranks."""
    if case == "ddp":
        return run_ranks(run_fairscale_ddp, 2, timeout_seconds=60)[0]
    return run_fairscale(**CASES[case])


def _check(result: dict[str, Any], case: str) -> None:
    expected = _fairscale(case)
    assert len(result["gains"]) == len(expected["gains"])
    for found, gains in zip(result["gains"], expected["gains"], strict=True):
        assert found == pytest.approx(gains, rel=TOLERANCE)
    assert result["logged"] == pytest.approx([gains[-1] for gains in expected["gains"]], rel=TOLERANCE)
    assert result["steps"] == pytest.approx(sum(gains[-1] for gains in expected["gains"]), rel=TOLERANCE)
    assert result["sum"] == pytest.approx(expected["sum"], rel=1e-7)
    assert set(result["rates"]) == {0.1}


@pytest.mark.parametrize("case", CASES)
def test_one_device_against_fairscale(case: str) -> None:
    """Another formula, another average, another learning rate of the step, or one that stays."""
    _check(_fit(1, BATCH_SIZE, "auto", CASES[case]), case)


# The parts of fairscale's run, dealt out in other ways: as micro-batches of one batch over stages.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], int]] = {
    "accumulate": (1, BATCH_SIZE, {}, ACCUMULATE),
    "microbatches": (1, 3 * BATCH_SIZE, {"num_microbatches": 3}, 1),
    "pipeline": (2, 3 * BATCH_SIZE, {"num_microbatches": 3, "pipeline_parallel_size": 2}, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_against_fairscale(layout: str) -> None:
    """Gains that count stages or micro-batches as data ranks."""
    ranks, batch_size, settings, accumulate = LAYOUTS[layout]
    scale = {"scale": 5.0, "smoothing": 0.6}
    arguments = (ranks, batch_size, settings, scale)
    for result in run_ranks(_fit, ranks, *arguments, accumulate_grad_batches=accumulate, timeout_seconds=60):
        _check(result, "scaled")


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 1}, {"zero_stage": 3}])
def test_data_ranks_against_fairscale_under_ddp(settings: dict[str, Any]) -> None:
    """Groups of an optimizer that holds rows, mistaken for others; gradients seen after they were averaged."""
    arguments = (2, BATCH_SIZE, settings, {})
    for result in run_ranks(_fit, 2, *arguments, accumulate_grad_batches=1, timeout_seconds=60):
        _check(result, "ddp")


def test_the_scale_counts_data_ranks() -> None:
    """Stages or micro-batches taken for ranks with batches of their own."""
    settings = {"num_microbatches": 2, "pipeline_parallel_size": 2}
    found, expected = (
        run_ranks(_fit, 2, 2, 8, settings, scale, accumulate_grad_batches=2, timeout_seconds=60)[0]
        for scale in ({}, {"scale": 2.0})
    )
    assert found["gains"] == expected["gains"]


def test_schedules_go_on() -> None:
    """A gain that stays in the rate, which a schedule then multiplies again."""
    result = _fit(1, BATCH_SIZE, "auto", {}, module=Scheduled)
    assert result["rates"] == pytest.approx([0.1 * 0.5 ** ((index + 1) // ACCUMULATE) for index in range(12)])


def test_a_short_last_window_has_the_scale_it_has() -> None:
    """The gain of a whole window for a part of one."""
    [*_, last] = _fit(1, BATCH_SIZE, "auto", {}, num_samples=NUM_SAMPLES + BATCH_SIZE)["gains"]
    assert last == pytest.approx([1.0] * 3)


def _resume(directory: str) -> list[Any]:
    settings: tuple[Any, ...] = (2, BATCH_SIZE, {"zero_stage": 2}, {})
    whole = _fit(*settings, max_epochs=2)
    _fit(*settings, default_root_dir=directory)
    again = _fit(*settings, max_epochs=2, resume=f"{directory}/saved")
    return [whole["state"], again["state"], whole["sum"], again["sum"]]


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """Averages or steps that begin anew."""
    for whole, again, total, total_again in run_ranks(_resume, 2, str(tmp_path), timeout_seconds=60):
        assert whole == again
        assert total == total_again


@pytest.mark.parametrize("settings", [{"scale": 0.5}, {"scale": True}, {"smoothing": 1.0}, {"smoothing": -0.1}])
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    """A gain below 1, or averages that never move."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        AdaScale(**settings)


def _refused(settings: dict[str, Any], scale: dict[str, Any], **options: Any) -> str:
    try:
        _fit(1, BATCH_SIZE, settings, scale, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_what_cannot_be_scaled_is_refused() -> None:
    """A gain of 1 for ever, because nothing says that the batch has grown."""
    one, two = {"accumulate_grad_batches": 1}, {"num_microbatches": 2}
    assert "Set `scale`" in run_ranks(_refused, 1, two, {}, timeout_seconds=60, **one)[0]
    assert "one part" in run_ranks(_refused, 1, {}, {"scale": 2.0}, timeout_seconds=60, **one)[0]
    both = [AdaScale(), AdaptiveAccumulation({0: 2}, lr_rule="linear")]
    with pytest.raises(ValueError, match="lr_rule=None"):
        _fit(1, BATCH_SIZE, "auto", {}, callbacks=both, accumulate_grad_batches=1)
