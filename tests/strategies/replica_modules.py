"""A small module whose replicas get known batches, and the same training in a plain loop over all replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy

WIDTH = 6
ROWS = 4  # samples a batch of one replica


def make_optimizer(parameters: Any, kind: str = "sgd") -> torch.optim.Optimizer:
    """As the module makes it."""
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    momentum = 0.9 if kind == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=0.05, momentum=momentum, weight_decay=0.01)


def sample_batches(num_batches: int, replica: int, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    """Those of one replica."""
    generator = torch.Generator().manual_seed(17 + replica)
    return [
        (torch.randn(rows, WIDTH, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(num_batches)
    ]


class Net(LightningModule):
    """Blocks that a pipeline can cut; one parameter without dimensions, one that only some batches use."""

    def __init__(self, optimizer: str = "sgd", num_batches: list[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.optimizer, self.num_batches = optimizer, num_batches or [6]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(WIDTH, 3)
        self.val_losses: list[float] = []
        self.val_weights: list[Tensor] = []

    def _loss(self, batch: Any) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x * self.scale), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Classification."""
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """One number."""
        self.log("val_loss", self._loss(batch))

    def on_validation_epoch_end(self) -> None:
        """What evaluation has seen."""
        if not self.trainer.sanity_checking:
            self.val_weights.append(self.head.weight.detach().clone())

    def _replica(self) -> tuple[int, int]:
        mesh = self.trainer.strategy.mesh
        return mesh.data_rank, mesh.data_size

    def train_dataloader(self) -> Any:
        """Known batches of this data rank."""
        replica, _ = self._replica()
        return DataLoader(sample_batches(self.num_batches[replica % len(self.num_batches)], replica), batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        """The same on all ranks."""
        return DataLoader(sample_batches(2, 99), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        """By name."""
        return make_optimizer(self.parameters(), self.optimizer)


def train(
    settings: dict[str, Any], devices: int, module: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """A run on this rank; what a user can read off after it."""
    net = Net(**(module or {}))
    run = Trainer(
        **{
            "accelerator": "cpu",
            "devices": devices,
            "strategy": BigModelStrategy(**settings),
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "use_distributed_sampler": False,  # the module hands out a replica's batches itself
            **options,
        }
    )
    ckpt_path = options.pop("ckpt_path", None)
    run.fit(net, ckpt_path=ckpt_path)
    return {
        "weights": {name: value.detach().clone() for name, value in net.named_parameters()},
        "val_weights": net.val_weights,
        "global_step": run.global_step,
    }


def simulate(
    num_replicas: int,
    num_steps: int,
    agree: Callable[[int, list[Net]], None],
    kind: str = "sgd",
) -> list[Net]:
    """Replicas in one process: each takes its own steps, then `agree(step, replicas)`."""
    replicas = [copy.deepcopy(Net(kind)) for _ in range(num_replicas)]
    optimizers = [make_optimizer(replica.parameters(), kind) for replica in replicas]
    data = [sample_batches(num_steps, index) for index in range(num_replicas)]
    for step in range(num_steps):
        for replica, optimizer, batches in zip(replicas, optimizers, data, strict=True):
            optimizer.zero_grad()
            replica._loss(batches[step]).backward()
            optimizer.step()
        agree(step + 1, replicas)
    return replicas


@torch.no_grad()
def average(replicas: list[Net]) -> None:
    """All weights become their means."""
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        mean = torch.stack([parameter.data for parameter in parameters]).mean(0)
        for parameter in parameters:
            parameter.copy_(mean)
