"""fp16 with a loss scale under every layout: one rank overflows, all skip, and the numbers are those of one process."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_bigmodel import BigModelPrecision, BigModelStrategy, ExponentialMovingAverage, GradientNoiseScale
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.scaled_modules import WIDTH, Overflowing, assert_close, run

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
# name -> (ranks, data ranks, settings, the rank that overflows)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], int]] = {
    "replicas": (2, 2, {}, 1),
    "microbatches": (1, 1, {"num_microbatches": 4}, 0),
    "zero1": (2, 2, {"zero_stage": 1}, 1),
    "zero2": (2, 2, {"zero_stage": 2, "num_microbatches": 2}, 0),
    "zero3": (2, 2, {"zero_stage": 3}, 1),
    "zero3_offload": (2, 2, {"zero_stage": 3, "offload": "cpu"}, 1),
    "pipe": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 4}, 1),
    "tensor": (2, 1, {"tensor_parallel_size": 2, "tensor_plan": PLAN}, 1),
    "pipe_zero3": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}, 3),
    "tensor_zero1": (4, 2, {"tensor_parallel_size": 2, "tensor_plan": PLAN, "zero_stage": 1}, 2),
}
BAD = (0, 3, 4)


def _precision(**settings: Any) -> BigModelPrecision:
    return BigModelPrecision("16-mixed", **{"init_scale": 2048.0, "growth_interval": 4, **settings})


def _fit(layout: str, bad: tuple[int, ...], **options: Any) -> dict[str, Any]:
    devices, data_ranks, settings, rank = LAYOUTS[layout]
    module = Overflowing(bad, rank)
    return run(module, _precision(), BigModelStrategy(**settings), devices, data_ranks, **options)


def _fit_alone(bad: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return run(Overflowing(bad), _precision(), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_skip_together(layout: str) -> None:
    """One rank that skips alone; a scale that only one rank shrinks; steps or schedules that count a skipped one."""
    expected = run_ranks(_fit_alone, 1, BAD)[0]
    assert [seen["scale"] for seen in expected["seen"][:6]] == [1024.0, 1024.0, 1024.0, 512.0, 256.0, 256.0]
    assert expected["seen"][-1]["global_step"] == len(expected["steps"]) == 11
    found = run_ranks(_fit, LAYOUTS[layout][0], layout, BAD)
    for of_rank in found:
        for seen, wanted in zip(of_rank["seen"], expected["seen"], strict=True):
            assert {k: v for k, v in seen.items() if k != "loss"} == {k: v for k, v in wanted.items() if k != "loss"}
            assert seen["loss"] == pytest.approx(wanted["loss"], rel=2e-3)
        assert of_rank["steps"] == expected["steps"]
        assert_close(of_rank["weights"], expected["weights"])
        assert_close(of_rank["weights"], found[0]["weights"], 0.0)


@pytest.mark.parametrize("layout", ["microbatches", "zero2", "pipe_zero3"])
def test_accumulated_batches_skip_as_one_step(layout: str) -> None:
    """A scale that changes within a window; a window that loses its first half only."""
    expected = run_ranks(_fit_alone, 1, (3, 9), accumulate_grad_batches=2)[0]
    assert expected["seen"][-1]["global_step"] == 12
    devices = LAYOUTS[layout][0]
    for found in run_ranks(_fit, devices, layout, (3, 9), accumulate_grad_batches=2):
        assert found["steps"] == expected["steps"]
        assert [seen["lr"] for seen in found["seen"]] == [seen["lr"] for seen in expected["seen"]]
        assert_close(found["weights"], expected["weights"])


def _like_torch(is_own: bool, alone: bool) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=5)
    precision = BigModelPrecision("16-mixed", init_scale=4096.0, growth_interval=5)
    # Lightning moves a schedule by step at skipped ones too.
    module = Overflowing((2, 5), interval="epoch")
    plugin = precision if is_own else MixedPrecision("16-mixed", "cpu", scaler)
    found = run(module, plugin, None if alone else BigModelStrategy(), gradient_clip_val=0.1)
    return {**found, "scale": precision.scale if is_own else scaler.get_scale()}


def test_the_default_is_torchs_own_scaler() -> None:
    """Another order of scaling, unscaling, clipping and skipping than that of `torch.amp.GradScaler`."""
    expected = run_ranks(_like_torch, 1, False, True)[0]
    for alone in (True, False):
        found = run_ranks(_like_torch, 1, True, alone)[0]
        assert found["scale"] == expected["scale"] != 4096.0
        assert_close(found["weights"], expected["weights"], 0.0)


class Tiny(Overflowing):
    """A loss so small that its gradients are no numbers of fp16, and steps as much larger."""

    factor = 2.0**-22

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The same mean, smaller."""
        return super().training_step(batch, batch_idx) * self.factor

    def configure_optimizers(self) -> Any:
        """The factor cancels."""
        return torch.optim.SGD(self.parameters(), lr=0.1 / self.factor, momentum=0.9)


def _fit_tiny(precision: Any, settings: dict[str, Any], devices: int, data_ranks: int = 1) -> list[float]:
    strategy = BigModelStrategy(**settings) if settings else None
    found = run(Tiny(), precision, strategy, devices, data_ranks, max_epochs=4)
    return [seen["loss"] for seen in found["seen"]]


@pytest.mark.parametrize("layout", ["pipe", "zero3", "pipe_zero3"])
def test_gradients_that_would_vanish_train(layout: str) -> None:
    """A scale that multiplies the loss behind the schedule, where gradients are zero already."""
    devices, data_ranks, settings, _ = LAYOUTS[layout]
    expected = run_ranks(_fit_tiny, 1, "32-true", {}, 1)[0]
    assert expected[-1] < 0.7 * expected[0]
    unscaled = BigModelPrecision("16-mixed", loss_scale=1.0)
    stuck = run_ranks(_fit_tiny, devices, unscaled, settings, devices, data_ranks)[0]
    assert abs(stuck[-1] - expected[-1]) > 0.1 * expected[-1]
    for found in run_ranks(_fit_tiny, devices, "16-mixed", settings, devices, data_ranks):
        assert found[-1] == pytest.approx(expected[-1], rel=0.02)


def _fit_without_end(settings: dict[str, Any], devices: int, data_ranks: int) -> str:
    module = Overflowing(tuple(range(100)), devices - 1)
    precision = BigModelPrecision("16-mixed", init_scale=4.0, min_scale=1.0, max_consecutive_skips=3)
    with pytest.raises(RuntimeError) as caught:
        run(module, precision, BigModelStrategy(**settings), devices, data_ranks)
    assert len(module.seen) == 4  # two that shrink the scale, three at its minimum, of which the last ends the run
    return str(caught.value)


@pytest.mark.parametrize("layout", ["replicas", "pipe", "zero3"])
def test_a_run_that_only_skips_ends_with_names(layout: str) -> None:
    """A run that skips for ever; one rank that stops alone, or does not know what overflowed elsewhere."""
    devices, data_ranks, settings, _ = LAYOUTS[layout]
    messages = run_ranks(_fit_without_end, devices, settings, devices, data_ranks)
    for message in messages:
        assert "3 step(s) in a row" in message
        assert "`blocks.3.up.weight`" in message
        assert "blocks.0" not in message


def _resume(layout: str, path: str, first: bool) -> dict[str, Any]:
    devices, data_ranks, settings, rank = LAYOUTS[layout]
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": path}
    from tests.strategies.scaled_modules import batches, trainer

    module, precision = Overflowing((1, 2), rank), _precision(hysteresis=2)
    fit = trainer(BigModelStrategy(**settings), devices, precision, max_epochs=1 if first else 2, **options)
    fit.fit(module, batches(8 // data_ranks), ckpt_path=None if first else f"{path}/saved.ckpt")
    assert precision.loss_scale is not None
    if first:
        fit.save_checkpoint(f"{path}/saved.ckpt")
    return {"state": precision.state_dict(), "scales": [seen["scale"] for seen in module.seen]}


def test_the_scale_goes_on_where_it_was(tmp_path: Any) -> None:
    """A scale, its counters or its patience that begin again with the run, or that another layout does not find."""
    before = run_ranks(_resume, 2, "zero3", str(tmp_path), True)[0]
    # Straight through two epochs, in one process.
    straight = BigModelPrecision("16-mixed", init_scale=2048.0, growth_interval=4, hysteresis=2)
    module = Overflowing((1, 2))
    run(module, straight, max_epochs=2)
    assert before["scales"] == [seen["scale"] for seen in module.seen[: len(before["scales"])]]
    for layout in ("zero3", "pipe"):
        for after in run_ranks(_resume, 2, layout, str(tmp_path), False):
            assert after["scales"] == [seen["scale"] for seen in module.seen[-len(after["scales"]) :]]
            assert after["state"] == straight.state_dict()


def _fit_watched(precision: Any, settings: dict[str, Any], devices: int, data_ranks: int, bad: Any) -> dict[str, Any]:
    average, noise = ExponentialMovingAverage(decay=0.5), GradientNoiseScale(decay=0.9)
    save = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}")
    with tempfile.TemporaryDirectory() as path:
        found = run(
            Overflowing(bad, devices - 1),
            precision,
            BigModelStrategy(**settings),
            devices,
            data_ranks,
            callbacks=[average, noise, save] if devices == 1 else [average, noise],
            enable_checkpointing=devices == 1,
            default_root_dir=path,
        )
        saved = sorted(int(file.stem.partition("=")[2]) for file in Path(path).rglob("*.ckpt"))
    return {
        **found,
        "updates": average.state_dict()["num_updates"],
        "noise": (noise.noise_trace, noise.gradient_square, noise.state_dict()["averages"]),
        "saved": saved,
    }


@pytest.mark.parametrize("layout", ["microbatches", "replicas", "zero3", "pipe"])
def test_callbacks_do_not_count_a_skipped_step(layout: str) -> None:
    """An average that moves, a noise scale of infinite or scaled gradients, a checkpoint saved twice."""
    devices, data_ranks, settings, _ = LAYOUTS[layout]
    settings = {"num_microbatches": 2, **settings}
    found = run_ranks(_fit_watched, devices, _precision(), settings, devices, data_ranks, (0, 3))
    in_full = run_ranks(_fit_watched, devices, "32-true", settings, devices, data_ranks, ())
    for result, full in zip(found, in_full, strict=True):
        assert result["updates"] == 12
        assert full["updates"] == 14
        assert all(map(math.isfinite, result["noise"][:2]))
        # Two of fourteen steps are missing, and the others begin from other weights.
        assert result["noise"][0] == pytest.approx(full["noise"][0], rel=0.15)
        if devices == 1:
            assert result["saved"] == list(range(1, 13))


class Rivals(LightningModule):
    """Two networks and two optimizers; the gradients of one of them overflow on the last rank."""

    def __init__(self, bad_batches: tuple[int, ...] = (), bad_rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.makes, self.judges = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.bad_batches, self.bad_rank, self.is_bad = bad_batches, bad_rank, False
        self.seen: list[tuple[float, int]] = []
        self.largest: list[float] = []

    def on_train_start(self) -> None:
        """On one rank."""
        if self.global_rank == self.bad_rank:
            self.hook = self.judges.weight.register_hook(lambda g: g * float("nan") if self.is_bad else g)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """As in the documentation; the first optimizer's gradients come in two backwards."""
        x, y = batch
        first, second = self.optimizers()
        fake = self.makes(x)
        self.is_bad = batch_idx in self.bad_batches
        first.zero_grad()
        self.manual_backward(nn.functional.softplus(self.judges(fake.detach()).float()).mean())
        self.manual_backward(nn.functional.softplus(-self.judges(y).float()).mean())
        self.is_bad = False
        if self.judges.weight.grad is not None:
            self.largest.append(float(self.judges.weight.grad.abs().max()))
        first.step()
        second.zero_grad()
        self.manual_backward(nn.functional.mse_loss(fake.float(), y) - 0.01 * self.judges(fake).float().mean())
        second.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Scale and counted steps."""
        self.seen.append((float(self.trainer.callback_metrics["loss_scale"]), self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        """One each."""
        return torch.optim.SGD(self.judges.parameters(), lr=0.1), torch.optim.SGD(self.makes.parameters(), lr=0.1)


def _fit_rivals(settings: dict[str, Any] | None, devices: int, data_ranks: int) -> dict[str, Any]:
    module = Rivals((1, 2), devices - 1)
    strategy = BigModelStrategy(**settings) if settings is not None else None
    found = run(module, _precision(growth_interval=100), strategy, devices, data_ranks)
    return {**found, "largest": module.largest}


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_each_of_two_optimizers_skips_its_own_step(settings: dict[str, Any]) -> None:
    """Gradients that user code sees scaled, or scaled twice; the other optimizer's step skipped too."""
    expected = run_ranks(_fit_rivals, 1, None, 1, 1)[0]
    assert expected["seen"][-1] == (512.0, 2 * 14 - 2)
    for found in run_ranks(_fit_rivals, 2, settings, 2, 2):
        assert found["seen"] == expected["seen"]
        assert_close(found["weights"], expected["weights"])
        assert found["largest"][0] < 1.0  # not times the scale


def _fit_true(settings: dict[str, Any] | None, devices: int, data_ranks: int) -> dict[str, Any]:
    precision = BigModelPrecision("16-true", init_scale=2048.0, growth_interval=100)
    strategy = BigModelStrategy(**settings) if settings is not None else None
    return run(Overflowing((2,), devices - 1), precision, strategy, devices, data_ranks)


@pytest.mark.parametrize("layout", ["replicas", "zero3", "pipe"])
def test_half_precision_weights_may_have_a_scale_too(layout: str) -> None:
    """A scale that only mixed precision has; a seed that is no number of fp16."""
    devices, data_ranks, settings, _ = LAYOUTS[layout]
    expected = run_ranks(_fit_true, 1, None, 1, 1)[0]
    for found in run_ranks(_fit_true, devices, settings, devices, data_ranks):
        assert [seen["scale"] for seen in found["seen"]] == [seen["scale"] for seen in expected["seen"]]
        assert found["seen"][-1]["global_step"] == 13
        assert_close(found["weights"], expected["weights"], 5e-3)


class Narrow(Overflowing):
    """One more layer, of which only the first of several ranks has a row."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.last = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Added to the loss."""
        return super().training_step(batch, batch_idx) + 0.1 * self.last(batch[0]).float().mean()


def _fit_narrow(settings: dict[str, Any] | None, devices: int) -> dict[str, Any]:
    strategy = BigModelStrategy(**settings) if settings is not None else None
    return run(Narrow(BAD, 0, "last.weight"), _precision(), strategy, devices, devices)


def test_ranks_without_a_row_skip_too() -> None:
    """A rank that has nothing to look at and steps."""
    expected = run_ranks(_fit_narrow, 1, None, 1)[0]
    for found in run_ranks(_fit_narrow, 4, {"zero_stage": 3}, 4):
        assert found["steps"] == expected["steps"]
        assert [seen["scale"] for seen in found["seen"]] == [seen["scale"] for seen in expected["seen"]]
        assert_close(found["weights"], expected["weights"])


def _fit_ddp(bad: tuple[int, ...]) -> dict[str, Any]:
    # Both ranks get all samples.
    strategy = DDPStrategy(process_group_backend="gloo")
    return run(Overflowing(bad, 1), _precision(), strategy, 2, use_distributed_sampler=False)


def test_the_plugin_works_under_lightnings_own_strategies() -> None:
    """Gradients that nobody unscales, or a rank that steps alone."""
    expected = run_ranks(_fit_alone, 1, BAD)[0]
    for found in run_ranks(_fit_ddp, 2, BAD):
        assert found["steps"] == expected["steps"]
        assert_close(found["weights"], expected["weights"])
