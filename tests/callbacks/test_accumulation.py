"""Windows that change: the weights of a plain loop with these windows, and the rules of who decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bigmodel import AdaptiveAccumulation, BigModelStrategy, GradientNoiseScale
from lightning_bigmodel.testing import run_ranks
from tests.callbacks.test_noise_scale import Draws, Linear
from tests.strategies.test_equal_weights import Squares as EqualSquares
from tests.strategies.trainer_modules import trainer, weights

NUM_BATCHES, BATCH_SIZE = 14, 4


class Squares(EqualSquares):
    """With a schedule in closed form and momentum."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def _data() -> Tensor:
    return torch.randn(NUM_BATCHES * BATCH_SIZE, 3, generator=torch.Generator().manual_seed(5))


def by_hand(epochs: list[list[int]], factor: Any = lambda window: 1.0, *, divides_by: Any = None) -> dict[str, Any]:
    """One process; `epochs` says how many batches each step takes, `divides_by` Lightning's division."""
    module = Squares()
    [optimizer], [schedule] = module.configure_optimizers()
    for number, windows in enumerate(epochs):
        batches = list(_data().split(BATCH_SIZE))
        for index, size in enumerate(windows):
            window, batches = batches[:size], batches[size:]
            of_window = size if divides_by is None else divides_by[number][index]
            for batch in window:
                (module.training_step(batch, 0) / of_window).backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = rate * factor(of_window)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
        assert not batches
        schedule.step()
    return weights(module)


class Windows(Callback):
    """The window at each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["accumulate_grad_batches"]))
        assert self.seen[-1] == trainer.accumulate_grad_batches
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _fit(devices: int, settings: Any, accumulation: dict[str, Any], **options: Any) -> dict[str, Any]:
    strategy = BigModelStrategy(**settings) if isinstance(settings, dict) else settings
    module, windows = Squares(), Windows()
    adaptive = AdaptiveAccumulation(**accumulation)
    resume = options.pop("resume", None)
    run = trainer(strategy, devices, callbacks=[adaptive, windows], **{"max_epochs": 2, **options})
    run.fit(module, DataLoader(_data(), batch_size=BATCH_SIZE // devices), ckpt_path=resume)
    return {"weights": weights(module), "windows": windows.seen, "rates": windows.rates, "after": run}


def _fit_on_ranks(*args: Any, **options: Any) -> dict[str, Any]:
    return {**_fit(*args, **options), "after": None}


def _assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


# After 3 steps of 2 batches the next batch has number 6, within a window of 4: so there is one more of 2. Batch 12 may
# begin a window of 3, which the epoch's end cuts short; and an epoch may begin with any.
BY_STEP = {"schedule": {0: 2, 3: 4, 5: 3}, "unit": "step"}
STEPS = [[2, 2, 2, 2, 4, 2], [3, 3, 3, 3, 2]]


@pytest.mark.parametrize(("devices", "settings"), [(1, {}), (2, {}), (2, {"zero_stage": 2, "num_microbatches": 2})])
def test_a_change_waits_for_a_common_border(devices: int, settings: dict[str, Any]) -> None:
    """A window that begins in the middle of another: its gradients come twice, or are forgotten."""
    for result in run_ranks(_fit_on_ranks, devices, devices, settings, BY_STEP, timeout_seconds=60):
        _assert_close(result["weights"], by_hand(STEPS))
        assert result["windows"] == [2.0] * 8 + [4.0] * 4 + [3.0] * 16


# After a step the next batch has number 3; number 4 would begin a window of 2, but is within one of 3.
WITHIN = {"schedule": {0: 3, 1: 2, 4: 4}, "unit": "step"}


@pytest.mark.parametrize(
    ("accumulation", "steps", "divides_by"),
    [
        (BY_STEP, STEPS, [[2, 2, 2, 2, 4, 3], [3] * 5]),
        (WITHIN, [[3, 3, 2, 2, 2, 2], [4, 4, 4, 2]], [[3, 3, 2, 2, 2, 4], [4] * 4]),
    ],
)
def test_one_device_of_lightning(accumulation: dict[str, Any], steps: Any, divides_by: Any) -> None:
    """The same; only that Lightning divides a short last window by the whole of `accumulate_grad_batches`."""
    result = _fit(1, "auto", accumulation)
    _assert_close(result["weights"], by_hand(steps, divides_by=divides_by))
    assert result["after"].accumulate_grad_batches == 1


@pytest.mark.parametrize(("rule", "power"), [("linear", 1.0), ("sqrt", 0.5)])
def test_the_learning_rate_follows_the_window(rule: str, power: float) -> None:
    """A factor that stays in the rate, that a schedule overwrites, or that counts against another window."""
    result = _fit(1, "auto", {"schedule": {0: 2, 1: 7}, "lr_rule": rule})
    epochs = [[2] * 7, [7, 7]]
    _assert_close(result["weights"], by_hand(epochs, lambda window: (window / 2) ** power))
    assert result["rates"] == pytest.approx([0.1] * 13 + [0.05] * 14 + [0.025])


def test_a_resumed_run_goes_on_with_its_window(tmp_path: Path) -> None:
    """The first window again, or a learning-rate rule that counts from the window of the checkpoint."""
    accumulation = {"schedule": {0: 1, 3: 2, 4: 7}, "unit": "step", "lr_rule": "linear"}
    whole = _fit(1, "auto", accumulation)
    path = str(tmp_path / "half.ckpt")
    first = AdaptiveAccumulation(**accumulation)
    run = trainer("auto", 1, callbacks=[first], max_epochs=1)
    run.fit(Squares(), DataLoader(_data(), batch_size=BATCH_SIZE))
    run.save_checkpoint(path)
    again = _fit(1, "auto", accumulation, resume=path)
    _assert_close(again["weights"], whole["weights"])
    assert again["windows"] == whole["windows"][14:]


class Half(Callback):
    """Saves within an epoch, while the old window goes on; notes where a run begins."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.first: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.first = batch_idx if self.first is None else self.first

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._path and trainer.current_epoch == 0 and batch_idx == 5:
            trainer.save_checkpoint(self._path)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_run_resumed_within_an_epoch_keeps_its_window(tmp_path: Path) -> None:
    """The first window in place of the one that still goes on."""
    accumulation: dict[str, Any] = {"schedule": {0: 1, 2: 2, 4: 4}, "unit": "step"}
    path = str(tmp_path / "half.ckpt")
    seen = []
    for resume, save in ((None, path), (path, None)):
        half, windows = Half(save), Windows()
        callbacks = [AdaptiveAccumulation(**accumulation), windows, half]
        run = trainer("auto", 1, callbacks=callbacks)
        run.fit(Squares(), DataLoader(_data(), batch_size=BATCH_SIZE), ckpt_path=resume)
        seen.append(windows.seen)
    assert half.first == 6
    assert seen[0] == [1.0] * 2 + [2.0] * 6 + [4.0] * 6
    assert seen[1] == [2.0] * 2 + [4.0] * (len(seen[1]) - 2)


# -- by the noise scale ------------------------------------------------------------------------------------------------


def _fit_by_noise(devices: int, accumulation: dict[str, Any]) -> list[float]:
    noise, windows = GradientNoiseScale(decay=0.98), Windows()
    callbacks = [AdaptiveAccumulation(**accumulation), windows, noise]
    strategy = BigModelStrategy(num_microbatches=2)
    run = trainer(strategy, devices, callbacks=callbacks, limit_train_batches=300)
    run.fit(Linear(), DataLoader(Draws(), batch_size=4 // devices))
    return windows.seen


def test_windows_follow_the_noise_scale() -> None:
    """Ranks that decide apart, a window that never grows, or one in batches where samples are meant.

    The true scale is 25 samples: 6.25 batches of 4, next to 8 on a logarithmic scale from 1, and beyond a limit of 4.
    """
    free = run_ranks(_fit_by_noise, 2, 2, {"max_window": 64, "every_num_steps": 50}, timeout_seconds=60)
    assert free[0] == free[1]
    assert free[0][0] == 1
    assert free[0][-1] in (4, 8)
    assert set(free[0]) <= {1, 2, 4, 8, 16}
    [limited] = run_ranks(_fit_by_noise, 1, 1, {"max_window": 3, "every_num_steps": 20}, timeout_seconds=60)
    assert limited[-1] == 2


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"schedule": {0: 0}}, "window 0"),
        ({"schedule": {0: -1}}, "window -1"),
        ({"schedule": {0: 1.5}}, "window 1.5"),
        ({"schedule": {0: True}}, "window True"),
        ({"schedule": {-1: 2}}, "key -1"),
        ({"schedule": {}}, "dict of epochs"),
        ({"schedule": {0: 1}, "unit": "batch"}, "unit='batch'"),
        ({"schedule": {0: 1}, "max_window": 4}, "Leave out"),
        ({"schedule": {0: 1}, "lr_rule": "cube"}, "lr_rule='cube'"),
        ({}, "max_window=None"),
        ({"max_window": 0}, "max_window=0"),
        ({"max_window": 4, "min_window": 8}, "min_window=8.*max_window=4"),
        ({"max_window": 4, "min_window": 0}, "min_window=0"),
        ({"max_window": 4, "every_num_steps": 0}, "every_num_steps=0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    """A division by zero in the middle of a run."""
    with pytest.raises(ValueError, match=says):
        AdaptiveAccumulation(**settings)


class Manual(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("callbacks", "options", "says"),
    [
        ([AdaptiveAccumulation(max_window=4, min_window=2)], {}, "GradientNoiseScale"),
        ([AdaptiveAccumulation(max_window=4), GradientNoiseScale()], {}, "min_window=2"),
        ([AdaptiveAccumulation({0: 2})], {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ([AdaptiveAccumulation({0: 2}), GradientAccumulationScheduler({0: 2})], {}, "GradientAccumulationScheduler"),
        ([AdaptiveAccumulation({0: 2})], {"module": Manual}, "manual optimization"),
    ],
)
def test_what_does_not_go_together(callbacks: list[Any], options: dict[str, Any], says: str) -> None:
    """Two that set one window, or nobody who decides."""
    module = options.pop("module", Squares)()
    run = trainer("auto", 1, callbacks=callbacks, **options)
    with pytest.raises(ValueError, match=says):
        run.fit(module, DataLoader(_data(), batch_size=BATCH_SIZE))


class Stepped(Squares):
    def configure_optimizers(self) -> Any:
        [optimizer], [schedule] = super().configure_optimizers()
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_schedules_by_steps_are_warned_of() -> None:
    """A schedule that ends after a part of its way, without a word."""
    run = trainer("auto", 1, callbacks=[AdaptiveAccumulation({0: 2})])
    with pytest.warns(UserWarning, match="estimated_stepping_batches"):
        run.fit(Stepped(), DataLoader(_data(), batch_size=BATCH_SIZE))
