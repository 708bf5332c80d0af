"""A small module whose replicas get known batches, and the same training in a plain loop over all replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

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


class Stream(IterableDataset[Any]):
    """Batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class Net(LightningModule):
    """Blocks that a pipeline can cut, and a parameter without dimensions."""

    def __init__(
        self, optimizer: str = "sgd", num_batches: list[int] | None = None, left_out: int | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.optimizer, self.num_batches, self.left_out = optimizer, num_batches or [6], left_out
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(WIDTH, 3)
        self.losses: list[float] = []
        self.val_weights: list[Tensor] = []

    def loss_of(self, batch: Any) -> Tensor:
        """Classification."""
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x * self.scale), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Logs the mean over replicas."""
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """As logged."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """One number."""
        self.log("val_loss", self.loss_of(batch))

    def on_validation_epoch_end(self) -> None:
        """What evaluation has seen."""
        if not self.trainer.sanity_checking:
            self.val_weights.append(self.head.weight.detach().clone())

    def train_dataloader(self) -> Any:
        """Known batches of this data rank."""
        rank = self.trainer.strategy.mesh.data_rank  # type: ignore[union-attr]
        batches = sample_batches(self.num_batches[rank % len(self.num_batches)], rank)
        if self.left_out is not None:
            del batches[self.left_out]
        if len(set(self.num_batches)) > 1:  # ranks that run out at different times have no common length
            return DataLoader(Stream(batches), batch_size=None)
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        """The same on all ranks."""
        return DataLoader(sample_batches(2, 99), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        """By name."""
        return make_optimizer(self.parameters(), self.optimizer)


class SaveAt(Callback):
    """Saves once, after so many optimizer steps."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Between two steps."""
        if trainer.global_step == self.step and not Path(self.path).exists():
            trainer.save_checkpoint(self.path)


def train(
    settings: dict[str, Any],
    devices: int,
    module: dict[str, Any] | None = None,
    *,
    save: tuple[str, int] | None = None,
    ckpt_path: str | None = None,
    strategy: str | None = None,
    kind: type[Net] = Net,
    **options: Any,
) -> dict[str, Any]:
    """A run on this rank; what a user can read off after it."""
    net = kind(**(module or {}))
    run = Trainer(
        **{
            "accelerator": "cpu",
            "devices": devices,
            "strategy": strategy or BigModelStrategy(**settings),
            "max_epochs": 1,
            "logger": False,
            "callbacks": [] if save is None else [SaveAt(*save)],
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "use_distributed_sampler": False,  # the module hands out a data rank's batches itself
            **options,
        }
    )
    run.fit(net, ckpt_path=ckpt_path)
    found = {name: value.detach().clone() for name, value in net.named_parameters()}
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in run.optimizers[0].param_groups
    ]
    return {
        "weights": found,
        "val_weights": net.val_weights,
        "global_step": run.global_step,
        "groups": groups,
        "losses": net.losses,
    }


def simulate(
    num_replicas: int,
    num_steps: int,
    agree: Callable[[int, list[Net]], None],
    kind: str = "sgd",
    ranks_a_replica: int = 1,
    num_batches: list[int] | None = None,
) -> list[Net]:
    """Replicas in one process: each takes its own steps, then `agree(step, replicas)`."""
    replicas = [Net(kind) for _ in range(num_replicas)]
    optimizers = [make_optimizer(replica.parameters(), kind) for replica in replicas]
    num_ranks = num_replicas * ranks_a_replica
    counts = num_batches or [num_steps] * num_ranks
    data = [sample_batches(counts[rank], rank) for rank in range(num_ranks)]
    for step in range(num_steps):
        for index, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            ranks = data[index * ranks_a_replica : (index + 1) * ranks_a_replica]
            own = [batches[step] for batches in ranks if step < len(batches)]
            optimizer.zero_grad()
            replica.loss_of((torch.cat([x for x, _ in own]), torch.cat([y for _, y in own]))).backward()
            optimizer.step()
        agree(step + 1, replicas)
    return replicas


@torch.no_grad()
def average(replicas: list[Net], weights: tuple[float, ...] | None = None) -> None:
    """All weights become their means."""
    weights = weights or (1.0,) * len(replicas)
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        scaled = [parameter.data * weight for parameter, weight in zip(parameters, weights, strict=True)]
        mean = torch.stack(scaled).sum(0) / sum(weights)
        for parameter in parameters:
            parameter.copy_(mean)
