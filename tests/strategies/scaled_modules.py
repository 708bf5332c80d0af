"""Modules and runs for the tests of loss scales: gradients that overflow where and when a test says."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 16
NUM_BATCHES = 14
BATCH = 8


class Pair(nn.Module):
    """Two linear layers, the second of which takes what the first gives feature by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Overflowing(LightningModule):
    """Four blocks; gradients of `bad_parameter` become infinite on `bad_rank` at `bad_batches`."""

    def __init__(
        self,
        bad_batches: tuple[int, ...] = (),
        bad_rank: int = 0,
        bad_parameter: str = "blocks.3.up.weight",
        interval: str = "step",
    ) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.bad_batches, self.bad_rank, self.bad_parameter = bad_batches, bad_rank, bad_parameter
        self.interval = interval
        self.is_bad = False
        self.seen: list[dict[str, float]] = []
        self.steps: list[float] = []

    def on_train_start(self) -> None:
        """Hooks on parameters stay on one rank: what layers exchange is not touched."""
        if self.global_rank == self.bad_rank:
            parameter = dict(self.named_parameters())[self.bad_parameter]
            self.hook = parameter.register_hook(lambda g: g * float("inf") if self.is_bad else g)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """When to overflow."""
        self.is_bad = batch_idx in self.bad_batches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Regression; the loss is in fp32."""
        x, y = batch
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.mse_loss(x.float(), y.float())
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Only real steps come here."""
        self.steps.append(float(self.trainer.global_step))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What moved."""
        metrics = self.trainer.callback_metrics
        self.seen.append(
            {
                "scale": float(metrics.get("loss_scale", 0.0)),
                "skipped": float(metrics.get("skipped_steps", 0.0)),
                "global_step": float(self.trainer.global_step),
                "lr": float(self.trainer.optimizers[0].param_groups[0]["lr"]),
                "loss": float(metrics["loss"]),
            }
        )

    def on_train_end(self) -> None:
        """The module can go through another run."""
        if self.global_rank == self.bad_rank:
            self.hook.remove()

    def configure_optimizers(self) -> Any:
        """Momentum and a schedule by step."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def batches(batch_size: int, num_samples: int = NUM_BATCHES * BATCH) -> DataLoader[Any]:
    """Equal samples in equal order, whatever the batch size."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=batch_size)


def trainer(strategy: Strategy | str, devices: int, precision: Precision | str, **options: Any) -> Trainer:
    """A silent Trainer."""
    plugins = [precision] if isinstance(precision, Precision) else []
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=plugins,
        precision=None if plugins else precision,  # type: ignore[arg-type]
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": 1, **options},
    )


def run(
    module: LightningModule,
    precision: Precision | str,
    strategy: Strategy | None = None,
    devices: int = 1,
    data_ranks: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Train; weights, and what the module saw."""
    accumulate = options.get("accumulate_grad_batches", 1)
    fit = trainer(strategy or SingleDeviceStrategy("cpu"), devices, precision, **options)
    fit.fit(module, batches(BATCH // data_ranks // accumulate))
    weights = {name: p.detach().float().numpy().copy() for name, p in module.named_parameters()}
    return {"weights": weights, "seen": getattr(module, "seen", []), "steps": getattr(module, "steps", [])}


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-3) -> None:
    """Every weight."""
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
