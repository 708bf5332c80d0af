"""What each rank of the demo does: an ordinary Lightning fit, reporting losses as it goes."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.demo.data import ByteWindows, read_texts, window_order
from lightning_bigmodel.demo.launch import Emit
from lightning_bigmodel.demo.model import ByteGPT, generate_text
from lightning_bigmodel.demo.settings import DemoSettings

__all__ = ["PROMPT", "LibraryBytes", "resume_ranks", "train_one_process", "train_ranks"]

PROMPT = "def __init__(self"

_Loader = DataLoader[tuple[Tensor, Tensor]]


class LibraryBytes(LightningDataModule):
    """The standard library's sources in windows; each epoch reads the next part of one order drawn for the whole run.

    Args:
        settings: The demo's settings.
        num_replicas: Replicas the global batch is spread over; each loads ``global_batch_size / num_replicas`` windows.
    """

    def __init__(self, settings: DemoSettings, num_replicas: int) -> None:
        super().__init__()
        self._settings = settings
        self._batch_size = settings.global_batch_size // num_replicas
        self._train_text, self._validation_text = read_texts()

    def train_dataloader(self) -> _Loader:
        """Batches of the trainer's current epoch."""
        settings = self._settings
        assert self.trainer is not None
        epoch = min(self.trainer.current_epoch, len(settings.epoch_ends) - 1)
        start, end = (0, *settings.epoch_ends)[epoch : epoch + 2]
        num_windows = ByteWindows(self._train_text, settings.context).num_windows
        order = window_order(num_windows, settings.num_steps * settings.global_batch_size, settings.seed)
        order = order[start * settings.global_batch_size : end * settings.global_batch_size]
        return DataLoader(ByteWindows(self._train_text, settings.context, order), batch_size=self._batch_size)

    def val_dataloader(self) -> _Loader:
        """The same batches in every epoch."""
        settings = self._settings
        num_windows = ByteWindows(self._validation_text, settings.context).num_windows
        order = window_order(num_windows, settings.num_validation_batches * settings.global_batch_size, seed=0)
        return DataLoader(ByteWindows(self._validation_text, settings.context, order), batch_size=self._batch_size)


class _Reporter(Callback):
    def __init__(self, emit: Emit, first_step: int = 0) -> None:
        self._emit = emit
        self._step = first_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, BigModelStrategy):
            self._emit("layout", trainer.strategy.describe_ranks())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step += 1
        self._emit("step", (self._step, float(trainer.callback_metrics["train_loss"])))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._emit("validation", (self._step, float(trainer.callback_metrics["val_loss"])))


def train_ranks(rank: int, emit: Emit, settings: DemoSettings) -> None:
    """Trains on this rank of the layout, saves a checkpoint after each epoch; rank 0 then writes some text."""
    # Epochs are saved when their training ends, before validation, so that resuming starts exactly with the next epoch.
    checkpoints = ModelCheckpoint(
        dirpath=settings.output / "checkpoints",
        filename="step-{step}",
        auto_insert_metric_name=False,
        save_top_k=-1,
        save_on_train_epoch_end=True,
    )
    model = _fit(settings, [_Reporter(emit), checkpoints], _layout(settings), settings.num_replicas)
    if rank == 0:
        emit("sample", generate_text(model, PROMPT, num_bytes=settings.num_sample_bytes, seed=settings.seed))


def resume_ranks(rank: int, emit: Emit, settings: DemoSettings) -> None:
    """Continues on this rank from the checkpoint in the middle to the end."""
    step = settings.resume_step
    path = str(settings.checkpoint_path(step))
    _fit(settings, [_Reporter(emit, first_step=step)], _layout(settings), settings.num_replicas, path)


def train_one_process(rank: int, emit: Emit, settings: DemoSettings) -> None:
    """The same run by plain Lightning on one process, with the whole global batch at once."""
    layout = {"devices": 1, "plugins": [LightningEnvironment()]}
    _fit(settings, [_Reporter(emit)], layout, num_replicas=1)


def _layout(settings: DemoSettings) -> dict[str, Any]:
    strategy = BigModelStrategy(
        pipeline_parallel_size=settings.num_stages,
        num_microbatches=settings.num_microbatches,
        schedule=settings.schedule,
    )
    return {"devices": settings.num_ranks, "strategy": strategy, "plugins": [TorchElasticEnvironment()]}


def _fit(
    settings: DemoSettings,
    callbacks: list[Callback],
    layout: dict[str, Any],
    num_replicas: int,
    ckpt_path: str | None = None,
) -> ByteGPT:
    _quieten()
    # Ranks share the machine's cores; the threads of one rank would take them from the others.
    torch.set_num_threads(1)
    seed_everything(settings.seed, verbose=False)
    model = ByteGPT(width=settings.width, num_blocks=settings.num_blocks, context=settings.context)
    trainer = Trainer(
        accelerator=settings.accelerator,
        callbacks=callbacks,
        max_epochs=len(settings.epoch_ends),
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **layout,
    )
    trainer.fit(model, datamodule=LibraryBytes(settings, num_replicas), ckpt_path=ckpt_path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return model


def _quieten() -> None:
    # Lightning's notes on devices found and its tips; warnings and errors still reach the rank's log.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        "The .*dataloader.* does not have many workers",
        "GPU available but not used",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        "Checkpoint directory .* exists and is not empty",
    ):
        warnings.filterwarnings("ignore", message=message)
