"""Manual optimization with two optimizers under replicas and ZeRO: a GAN, clipping and accumulation by hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)


def layers(*widths: int) -> nn.Sequential:
    """Two composite blocks, so that stage 3 has units."""
    pairs = zip(widths, widths[1:], strict=False)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs))


class Gan(LightningModule):
    """Alternate steps, toggled, with clip values of their own; the generator accumulates over two batches."""

    def __init__(self, accumulate: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.generator, self.critic = layers(3, 7, 5), layers(5, 6, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Critic first, then the generator."""
        noise, real = batch
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]  # two
        self.toggle_optimizer(of_critic)
        loss = self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_critic, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        other = -self.critic(self.generator(noise)).mean() + self.generator(noise).square().mean()
        self.manual_backward(other)
        if not self.accumulate or batch_idx % 2:
            self.clip_gradients(of_generator, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            of_generator.step()
            of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.log_dict({"critic": loss, "generator": other}, on_step=False, on_epoch=True, batch_size=len(noise))

    def configure_optimizers(self) -> Any:
        """SGD and Adam."""
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        ]


def data(batch_size: int, num_samples: int = 24) -> DataLoader[Any]:
    """Noise and real samples."""
    generator = torch.Generator().manual_seed(5)
    noise, real = torch.randn(num_samples, 3, generator=generator), torch.randn(num_samples, 5, generator=generator)
    return DataLoader(TensorDataset(noise, real), batch_size=batch_size)


def fit(strategy: Any, devices: int, batch_size: int, accumulate: bool, num_samples: int = 24) -> dict[str, Any]:
    """Train for two epochs."""
    module = Gan(accumulate)
    run = trainer(strategy, devices, max_epochs=2)
    run.fit(module, data(batch_size, num_samples))
    return {"weights": weights(module), "metrics": {k: float(v) for k, v in run.callback_metrics.items()}}


def _fit(devices: int, batch_size: int, strategy: dict[str, Any], *args: Any) -> dict[str, Any]:
    return fit(BigModelStrategy(**strategy), devices, batch_size, *args)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "data_replicate_size": 2}],
)
def test_gan_equals_one_process(strategy: dict[str, Any], accumulate: bool) -> None:
    """Optimizers mixed up, gradients summed twice while accumulating, toggles that do not reach the parameters."""
    devices = 4 if strategy.get("data_replicate_size") else 2
    expected = fit("auto", 1, 4, accumulate)
    for result in run_ranks(_fit, devices, devices, 4 // devices, strategy, accumulate):
        assert_same_weights(result["weights"], expected["weights"])
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("strategy", [{}, {"zero_stage": 2}])
def test_uneven_batches_weigh_by_their_samples(strategy: dict[str, Any]) -> None:
    """A mean of means over ranks with different numbers of samples."""
    expected = fit("auto", 1, 4, False, 23)
    for result in run_ranks(_fit, 2, 2, 2, strategy, False, 23):
        assert_same_weights(result["weights"], expected["weights"])


def _saved(directory: str, devices: int, batch_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    module = Gan()
    keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    run = trainer(BigModelStrategy(**strategy), devices, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, data(batch_size))
    return weights(module)


def _resumed(path: str, devices: int, batch_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    module = Gan()
    trainer(BigModelStrategy(**strategy), devices, max_epochs=2).fit(module, data(batch_size), ckpt_path=path)
    return weights(module)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_each_optimizer_gets_its_own_state_back(tmp_path: Path) -> None:
    """States of two optimizers swapped or lost on resume."""
    expected = run_ranks(_saved, 2, str(tmp_path), 2, 2, {"zero_stage": 3})[0]
    for strategy in ({"zero_stage": 3}, {"zero_stage": 1}, {}):
        for result in run_ranks(_resumed, 2, str(tmp_path / "epoch=0.ckpt"), 2, 2, strategy):
            assert_same_weights(result, expected)


class Late(Gan):
    """Both losses first, each in a backward of its own, and both steps after every second batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Accumulation by hand over two optimizers."""
        x, _ = batch
        made = self.generator(x)
        self.manual_backward(nn.functional.softplus(self.critic(made.detach())).mean() / 2)
        self.manual_backward(made.square().mean() / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


def _fit_late(devices: int, batch_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    module = Late()
    trainer(BigModelStrategy(**strategy), devices).fit(module, data(batch_size))
    return weights(module)


@pytest.mark.parametrize("strategy", [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_a_backward_keeps_gradients_of_other_parameters(strategy: dict[str, Any]) -> None:
    """What an earlier backward gave to parameters that the present one does not reach."""
    expected = run_ranks(_fit_late, 1, 1, 6, {})[0]
    for found in run_ranks(_fit_late, 2, 2, 3, strategy):
        assert_same_weights(found, expected)
