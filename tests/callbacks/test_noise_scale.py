"""The noise scale: exact against a plain loop under every layout, right on problems whose noise is known."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_bigmodel import BigModelStrategy, GradientNoiseScale
from lightning_bigmodel.callbacks._noise import RatioOfAverages
from lightning_bigmodel.testing import run_ranks
from tests.callbacks.noise_runs import LENGTHS, Noisy, by_hand, fit, fit_on_ranks, live_tokens, parts_of
from tests.strategies.trainer_modules import Sequences, loader, pad, trainer

PIPE: dict[str, Any] = {"pipeline_parallel_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*.mix": "colwise_gather"}}
TOLERANCE = 1e-6

# name: (ranks, data ranks, micro-batches, accumulated batches, settings)
LAYOUTS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "microbatches": (1, 1, 4, 1, {}),
    "accumulate": (1, 1, 1, 3, {}),
    "replicas": (2, 2, 1, 1, {}),
    "replicas_accumulate": (2, 2, 2, 3, {}),
    "zero1": (2, 2, 1, 3, {"zero_stage": 1}),
    "zero2": (2, 2, 2, 3, {"zero_stage": 2}),
    "zero3": (2, 2, 1, 3, {"zero_stage": 3}),
    "zero3_microbatches": (2, 2, 2, 1, {"zero_stage": 3}),
    "zero2_offload": (2, 2, 1, 1, {"zero_stage": 2, "offload": "cpu"}),
    "pipeline": (2, 1, 4, 3, PIPE),
    "zero_bubble": (2, 1, 4, 1, {**PIPE, "schedule": "ZBVZeroBubble"}),
    "pipeline_replicas": (4, 2, 2, 3, PIPE),
    "pipeline_zero3": (4, 2, 2, 1, {**PIPE, "zero_stage": 3}),
    "tensor": (2, 1, 2, 1, TENSOR),
    "tensor_zero3": (4, 2, 1, 1, {**TENSOR, "zero_stage": 3}),
    "tokens": (2, 2, 2, 3, {"microbatch_weight": live_tokens}),
    "tokens_zero3": (2, 2, 2, 3, {"zero_stage": 3, "microbatch_weight": live_tokens}),
    "equal": (2, 2, 1, 2, {"microbatch_weight": "equal"}),
}


def _check(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(result["steps"]) == len(expected["steps"]) > 1
    np.testing.assert_allclose(result["steps"], expected["steps"], rtol=TOLERANCE)
    assert result["noise_scale"] == pytest.approx(expected["noise_scale"], rel=TOLERANCE)
    assert result["logged"][-1] == pytest.approx(expected["noise_scale"], rel=TOLERANCE)
    for name, value in expected["weights"].items():
        np.testing.assert_allclose(result["weights"][name], value, rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    """A seed, a division by the window or another rank's part left in a norm; a parameter counted twice or not at all.

    The last batch is smaller, and the last window shorter.
    """
    ranks, data_size, num_microbatches, accumulate, settings = LAYOUTS[name]
    num_samples, batch_size = 38, 8 // data_size
    windows = parts_of(num_samples, batch_size, data_size, num_microbatches, accumulate)
    weight = settings.get("microbatch_weight")
    expected = by_hand(windows, weight if callable(weight) else None, equal=weight == "equal")
    results = run_ranks(
        fit_on_ranks,
        ranks,
        ranks,
        num_samples,
        batch_size,
        {"num_microbatches": num_microbatches, **settings},
        accumulate_grad_batches=accumulate,
        timeout_seconds=60,
    )
    for result in results:
        _check(result, expected)
        assert result["noise_scale"] == results[0]["noise_scale"]  # to the bit: ranks decide by it
        assert result["counts"] == [{"all_reduce": (1, 5 * 8)} if ranks > 1 else {}] * len(windows)


class Skipping(Noisy):
    """Has no loss for some micro-batches."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if _has_loss(int(batch["index"][0])) else None


def _has_loss(first: int) -> bool:
    return first % 6 != 4


@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, {"num_microbatches": 4}), (2, {"num_microbatches": 2, "zero_stage": 2})]
)
def test_micro_batches_without_a_loss_do_not_count(ranks: int, settings: dict[str, Any]) -> None:
    """A part of the weight for a gradient that is not there."""
    windows = parts_of(36, 8 // ranks, ranks, settings["num_microbatches"], 1)
    kept = [[part for part in window if _has_loss(part[0])] for window in windows]
    assert [len(window) for window in kept] != [len(window) for window in windows]
    arguments = (ranks, 36, 8 // ranks, settings)
    for result in run_ranks(fit_on_ranks, ranks, *arguments, module=Skipping(), timeout_seconds=60):
        _check(result, by_hand(kept))


def test_one_device_of_lightning() -> None:
    """Lightning divides the short last window by the whole of `accumulate_grad_batches`."""
    result = fit("auto", 1, 30, 6, accumulate_grad_batches=2)
    expected = by_hand(parts_of(24, 6, 1, 1, 2), equal=True)
    np.testing.assert_allclose(result["steps"], expected["steps"], rtol=TOLERANCE)
    short = fit("auto", 1, 30, 6, accumulate_grad_batches=3)["steps"]
    np.testing.assert_allclose(short, by_hand(parts_of(30, 6, 1, 1, 3), equal=True)["steps"], rtol=TOLERANCE)


def test_clipping_comes_after() -> None:
    """The norm of what clipping has left."""
    expected = by_hand(parts_of(16, 8, 1, 2, 1))["steps"][0]
    assert fit("auto", 1, 16, 4, accumulate_grad_batches=2, gradient_clip_val=1e-3)["steps"][0] == pytest.approx(
        expected
    )
    settings = {"zero_stage": 2, "num_microbatches": 2}
    expected = by_hand(parts_of(16, 4, 2, 2, 1))["steps"][0]
    for result in run_ranks(fit_on_ranks, 2, 2, 16, 4, settings, gradient_clip_val=1e-3, timeout_seconds=60):
        assert result["steps"][0] == pytest.approx(expected)


def _fit_ddp() -> dict[str, Any]:
    samples = Subset(Sequences(32, lengths=LENGTHS), range(dist.get_rank(), 32, 2))
    data = DataLoader(samples, batch_size=4, collate_fn=pad)
    return fit("ddp_find_unused_parameters_true", 2, 32, 4, data=data, accumulate_grad_batches=2)


def test_ddp_of_lightning() -> None:
    """Gradients after DDP has averaged them in place of each rank's own."""
    expected = by_hand(parts_of(32, 4, 2, 1, 2), equal=True)
    for result in run_ranks(_fit_ddp, 2, timeout_seconds=60):
        _check(result, expected)


class Tied(Noisy):
    """Its first and its last layer have one weight, which two stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8).double(), torch.nn.Linear(8, 8).double()
        self.last.weight = self.first.weight

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden = self.first(self.embed(batch["tokens"]))
        for block in self.blocks:
            hidden, mean = block(hidden, mask=batch["mask"])
        return self.head(self.last(mean))


def _fit_tied() -> dict[str, Any]:
    strategy = BigModelStrategy(pipeline_parallel_size=2, num_microbatches=4)
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="leaves out `first.weight`: several stages"):
            return fit(strategy, 2, 24, 8, module=Tied())
    return fit(strategy, 2, 24, 8, module=Tied())


def test_tied_weights_of_two_stages_are_left_out() -> None:
    """The square of one stage's part taken for that of the whole."""
    expected = by_hand(parts_of(24, 8, 1, 4, 1), module=Tied(), without=("first.weight",))
    for result in run_ranks(_fit_tied, 2, timeout_seconds=60):
        _check(result, expected)


# -- known noise -------------------------------------------------------------------------------------------------------

SPREAD = torch.tensor([1.0, 2.0, 0.5, 1.5])
MEAN = torch.tensor([0.3, -0.2, 0.4, 0.1])
TRUE_SCALE = float(SPREAD.square().sum() / MEAN.square().sum())


class Draws(Dataset[Tensor]):
    """Fresh samples of a normal distribution."""

    def __len__(self) -> int:
        return 16 * 150

    def __getitem__(self, index: int) -> Tensor:
        return MEAN + SPREAD * torch.randn(4, generator=torch.Generator().manual_seed(index))


class Linear(LightningModule):
    """The gradient of a sample is the sample; the weight stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch @ self.weight).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _known() -> tuple[float, tuple[float, float]]:
    noise = GradientNoiseScale(decay=0.99)
    run = trainer(BigModelStrategy(num_microbatches=4), 1, callbacks=noise)
    run.fit(Linear(), DataLoader(Draws(), batch_size=16))
    return noise.noise_scale, noise.interval


def test_a_known_noise_scale_lies_in_its_interval() -> None:
    """A wrong unit (batches for samples), a trace for a mean, a bias."""
    [(found, (low, high))] = run_ranks(_known, 1, timeout_seconds=60)
    assert low < TRUE_SCALE < high
    assert found == pytest.approx(TRUE_SCALE, rel=0.3)
    assert high - low < 2 * TRUE_SCALE


@pytest.mark.parametrize("decay", [0.9, 0.98])
def test_intervals_hold_the_truth_as_often_as_they_say(decay: float) -> None:
    """An interval that ignores the covariance of both series, or counts more steps than the average does."""
    rng = np.random.default_rng(3)
    covered, estimates = 0, []
    num_runs = 600
    for _ in range(num_runs):
        averages = RatioOfAverages(decay)
        for _ in range(150):
            common = rng.normal()
            averages.add(6.0 + 2.0 * common + rng.normal(), 2.0 + 0.5 * common + rng.normal())
        low, high = averages.interval(0.9)
        covered += low < 3.0 < high
        estimates.append(averages.averages)
    assert covered / num_runs == pytest.approx(0.9, abs=0.035)
    np.testing.assert_allclose(np.mean(estimates, axis=0), [6.0, 2.0], rtol=0.05)


def test_no_interval_where_the_gradient_is_lost_in_noise() -> None:
    """A finite interval around a quotient of noise."""
    averages = RatioOfAverages(0.9)
    for value in (1.0, -1.1, 0.9, -0.8, 1.0):
        averages.add(5.0, value)
    assert averages.interval(0.95) == (0.0, math.inf)
    averages.add(math.nan, 1.0)
    assert averages.num_values == 5


# -- states and refusals -----------------------------------------------------------------------------------------------


def _resume(directory: str) -> tuple[Any, Any]:
    strategy = {"num_microbatches": 2, "zero_stage": 1}
    whole = fit_on_ranks(2, 32, 4, strategy, max_epochs=2)
    first = GradientNoiseScale()
    run = trainer(BigModelStrategy(**strategy), 2, callbacks=[first])
    module = Noisy()
    run.fit(module, loader(32, 4, lengths=(3, 6, 5)))
    run.save_checkpoint(f"{directory}/half")
    again = fit_on_ranks(2, 32, 4, strategy, max_epochs=2, resume=f"{directory}/half", noise=GradientNoiseScale())
    return whole["state"], again["state"]


def test_a_resumed_run_goes_on_with_its_averages(tmp_path: Path) -> None:
    """Averages that begin anew, or lose their correction for the start."""
    for whole, again in run_ranks(_resume, 2, str(tmp_path), timeout_seconds=60):
        assert whole == again
        assert again["averages"]["num_values"] == 8


class Manual(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SecondOrder(Noisy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Reentrant(Noisy):
    """Its first block's weights are used within and outside of a reentrant checkpoint."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        norm = self.blocks[0].norm

        def inner(hidden: Tensor) -> Tensor:
            return norm(hidden)

        hidden = self.embed(batch["tokens"])
        return self.head((checkpoint(inner, hidden, use_reentrant=True) + norm(2 * hidden)).mean(1))


def _refused(settings: Any, module: str, **options: Any) -> str:
    strategy: Any = BigModelStrategy(**settings) if isinstance(settings, dict) else settings
    if strategy == "model_parallel":
        strategy = ModelParallelStrategy()
    try:
        fit(strategy, options.pop("devices", 1), 16, 4, module=globals()[module](), **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("settings", "module", "options", "says"),
    [
        ({}, "Noisy", {}, "ValueError: .*one part.*accumulate_grad_batches=2"),
        ({"num_microbatches": 2, "microbatch_weight": "sum"}, "Noisy", {}, "ValueError: .*microbatch_weight='samples'"),
        ({}, "Manual", {}, "ValueError: .*manual optimization"),
        ("auto", "Noisy", {}, "ValueError: .*one part.*num_microbatches=2"),
        ("auto", "SecondOrder", {"accumulate_grad_batches": 2}, "ValueError: .*LBFGS.*first-order"),
        ("model_parallel", "Noisy", {}, "ValueError: .*ModelParallelStrategy.*BigModelStrategy"),
        ({}, "Reentrant", {"accumulate_grad_batches": 2}, "RuntimeError: `blocks.0.norm.weight`.*use_reentrant=False"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: Any, module: str, options: dict[str, Any], says: str) -> None:
    """Numbers that mean something else, or none at all."""
    [message] = run_ranks(_refused, 1, settings, module, timeout_seconds=60, **options)
    assert re.match(says, message, re.DOTALL), message


@pytest.mark.parametrize("settings", [{"decay": 1.0}, {"decay": -0.1}, {"confidence": 1.0}, {"confidence": 0}])
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    """Averages that never move, or intervals of no width."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        GradientNoiseScale(**settings)
