"""A run with every kind of randomness and state, for tests that stop and resume it."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from lightning_bigmodel import BigModelPrecision, BigModelStrategy

WIDTH = 8


class Noisy(Dataset[Any]):
    """Samples with noise from every generator."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        x = torch.full((WIDTH,), float(index)).sin() + noise
        return x, torch.tensor(index % 3)


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, num_samples: int) -> None:
        self.samples = Noisy(num_samples)

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))


class Model(LightningModule):
    """Dropout within blocks and outside, means over the epoch, a metric, a schedule by step."""

    def __init__(self, probability: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.probability = probability
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(probability), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 3)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.losses: list[float] = []

    def _logits(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, self.probability / 2, self.training)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Classification."""
        logits = self._logits(batch[0]).float()
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("largest", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """One number."""
        self.log("val_loss", nn.functional.cross_entropy(self._logits(batch[0]).float(), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """As logged."""
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        """Moments and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Kept(torchmetrics.Metric):
    """The sum of the last values, and the least one, in attributes that are no states."""

    total: Tensor

    def __init__(self, num_kept: int) -> None:
        super().__init__()
        self.num_kept, self.values, self.least = num_kept, [], {"value": float("inf")}
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        """One more."""
        self.total += value
        self.values.append(value)
        self.least["value"] = min(self.least["value"], float(value))

    def compute(self) -> Tensor:
        """All of it in one number."""
        return self.total + 100 * sum(self.values[-self.num_kept :]) + 1000 * self.least["value"]


class Wrapped(Model):
    """Metrics that keep a part of what they know in plain attributes."""

    def __init__(self, probability: float = 0.2) -> None:
        super().__init__(probability)
        self.range = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.kept = Kept(3)
        self.recent = torchmetrics.wrappers.Running(torchmetrics.SumMetric(), window=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """They see the loss."""
        loss = super().training_step(batch, batch_idx)
        found = self.range(loss.detach())
        self.recent.update(loss.detach())
        self.log("lowest", found["min"])
        self.log("highest", found["max"])
        self.log("recent", self.recent.compute())
        self.kept.update(loss.detach())
        self.log("kept", self.kept.compute())
        return loss


class Follows(Model):
    """Half of it follows the other half in the hook that comes after the callbacks that save."""

    def __init__(self, probability: float = 0.2, ballast: int = 0) -> None:
        super().__init__(probability)
        self.ballast = ballast
        self.register_buffer("target", torch.zeros(3, WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The target has a part in the loss."""
        loss = super().training_step(batch, batch_idx)
        pull = (batch[0] @ self.target.t()).square().mean()
        return {"loss": loss + 0.1 * pull * self.head.bias.sum(), "pull": pull, "ballast": torch.ones(self.ballast)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """An average of weights, and what it was given."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            self.target.lerp_(self.head.weight, 0.5)
            seen = outputs["loss"].detach() + outputs["pull"].detach() + batch[0].mean()
            self.seen += self.all_gather(seen).mean() + batch_idx  # buffers are those of the first data rank
            self.target += 0.01 * self.seen.sin()
        self.log("seen", self.seen, on_step=True, on_epoch=True)


class SaveAt(Callback):
    """Saves once, after so many batches of the run or at the end of an epoch; keeps what each epoch logged."""

    def __init__(self, path: str, batch: int | None = None, hook: str | None = None) -> None:
        self.path, self.batch, self.hook = path, batch, hook
        self.num_batches = 0
        self.epochs: list[dict[str, float]] = []

    def _save(self, trainer: Trainer) -> None:
        if not Path(self.path).exists() and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the first step."""
        if self.hook == "start":
            self._save(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """In the middle of an epoch."""
        self.num_batches += 1
        if self.num_batches == self.batch:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As ModelCheckpoint does."""
        if self.hook == "validation":
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As ModelCheckpoint does without validation."""
        if self.hook == "epoch":
            self._save(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Means of the epoch before."""
        if trainer.current_epoch:
            self._keep(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Of the last one."""
        self._keep(trainer)
        if self.hook == "end":
            self._save(trainer)

    def _keep(self, trainer: Trainer) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Rows(Logger):
    """Keeps what it is given, with its step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = version = "rows"  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """A row."""
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """None."""


class CaptureLogs(logging.Handler):
    """The text of a logger within a `with`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.logger, self.text = logging.getLogger(name), ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.text += record.getMessage() + "\n"

    def __enter__(self) -> CaptureLogs:
        self.logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)


class Draws(Callback):
    """Draws where an epoch starts: after the loader has begun, before its first batch. A resumed epoch has no start."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Three numbers."""
        torch.rand(3)


class Unfreezes(BaseFinetuning):
    """Two blocks join in the second epoch, in a group of their own."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Before the optimizer is made."""
        self.freeze(pl_module.blocks[:2])  # type: ignore[arg-type, index]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        """Once."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[:2], optimizer, lr=0.001)  # type: ignore[arg-type, index]


class Quiet(Noisy):
    """Without noise, which workers of an earlier epoch would go on with."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), float(index)).sin(), torch.tensor(index % 3)


def _on_plateau(module: LightningModule, options: dict[str, Any]) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    # A threshold that no epoch reaches: each one halves the rate.
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", **options}}


def _loader_of(habit: str, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    if habit == "own_generator":
        return DataLoader(Noisy(48), batch_size=batch_size, shuffle=True, generator=generator)
    if habit == "weighted":
        sampler = WeightedRandomSampler([1.0 + index for index in range(48)], 48, generator=generator)
        return DataLoader(Noisy(48), batch_size=batch_size, sampler=sampler)
    if habit == "quiet":
        return DataLoader(Quiet(48), batch_size=batch_size)
    if habit == "persistent":
        return DataLoader(
            Noisy(48),
            batch_size=batch_size,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",  # a rank's own default imports torch once more in each worker
        )
    return DataLoader(Noisy(48), batch_size=batch_size, shuffle=True)


def fit(
    settings: dict[str, Any],
    devices: int,
    data_ranks: int,
    save: dict[str, Any] | None,
    path: str,
    precision: str = "32-true",
    *,
    num_workers: int = 0,
    stream: bool = False,
    shuffle: bool = True,
    seed: int = 5,
    probability: float = 0.2,
    extra: Sequence[Callback] = (),
    habit: str | None = None,
    schedule: dict[int, int] | None = None,
    unfreezes: bool = False,
    plateau: dict[str, Any] | None = None,
    wraps: bool = False,
    follows: bool = False,
    ballast: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """A run of two epochs that saves on its way, or that resumes from what was saved."""
    resumes = save is None
    seed_everything(seed + 100 * resumes, verbose=False)  # a resumed run must not need the seed
    keep = SaveAt(path, **(save or {}))
    module: Model = (Wrapped if wraps else Model)(probability)
    if follows:
        module = Follows(probability, ballast)
    rows = Rows()
    extra = [*extra, *([Draws()] if habit == "draws" else [])]
    extra += [GradientAccumulationScheduler(schedule)] if schedule else []
    extra += [Unfreezes()] if unfreezes else []
    if plateau is not None:
        module.configure_optimizers = functools.partial(_on_plateau, module, plateau)  # type: ignore[method-assign]
    if unfreezes:  # a schedule has one rate for each group of the beginning
        module.configure_optimizers = lambda: torch.optim.AdamW(  # type: ignore[method-assign]
            [p for p in module.parameters() if p.requires_grad], lr=0.01
        )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=BigModelStrategy(**settings),
        plugins=[BigModelPrecision(precision, init_scale=2.0**40)] if precision == "16-mixed" else [],
        callbacks=[*extra, keep],
        logger=rows,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_epochs": 2, **options},
    )
    data: Any = Stream(16) if stream else Noisy(48)
    loader = DataLoader(
        data,
        batch_size=8 // data_ranks if not stream else 2,
        shuffle=shuffle and not stream,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    if habit is not None:
        loader = _loader_of(habit, 8 // data_ranks)
    validated: Dataset[Any] = Quiet(8) if habit == "quiet" else Noisy(8)
    trainer.fit(module, loader, DataLoader(validated, batch_size=4), ckpt_path=path if resumes else None)
    weights = {name: p.detach().numpy().copy() for name, p in module.state_dict(keep_vars=True).items()}
    if plateau is not None:
        assert trainer.optimizers[0].param_groups[0]["lr"] < 0.01
    rates = len(trainer.optimizers[0].param_groups)
    return {
        "weights": weights,
        "losses": module.losses,
        "epochs": keep.epochs,
        "rates": rates,
        "rows": rows.rows,
        "batches": keep.num_batches,
    }
