"""A LightningModule with the habits of real ones, and the runs that the Trainer tests compare with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bigmodel import BigModelStrategy

NUM_CLASSES = 5


class Sequences(Dataset[dict[str, Any]]):
    """Classification of padded sequences: samples of one length, or of a length that grows with the index."""

    def __init__(self, num_samples: int, *, lengths: tuple[int, ...] = (6,)) -> None:
        self.num_samples, self.lengths = num_samples, lengths

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = self.lengths[index % len(self.lengths)]
        return {
            "tokens": torch.randint(1, 20, (length,), generator=generator),
            "label": torch.randint(0, NUM_CLASSES, (), generator=generator),
            "index": index,
        }


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A dict batch with a mask, an int tensor, a plain int and None."""
    longest = max(len(sample["tokens"]) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["tokens"])] = sample["tokens"]
    return {
        "tokens": tokens,
        "mask": (tokens > 0).float(),
        "label": torch.stack([sample["label"] for sample in samples]),
        "index": torch.tensor([sample["index"] for sample in samples]),
        "length": longest,
        "extra": None,
    }


class Block(nn.Module):
    """Mixes positions under a mask; keyword arguments and a tuple output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, *, mask: Tensor, scale: int | None = None) -> tuple[Tensor, Tensor]:
        """`(samples, positions, width)` in and out, with the mean over positions beside it."""
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return hidden + torch.tanh(self.mix(self.norm(hidden + mean[:, None]))), mean


class Classifier(LightningModule):
    """Embedding, blocks in a ModuleList, head; metrics, lists kept for the epoch's end, a counter."""

    def __init__(self, num_blocks: int = 4, width: int = 8, learning_rate: float = 1e-2, fail_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(7)
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, NUM_CLASSES)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=NUM_CLASSES)
        self.val_accuracy = torchmetrics.Accuracy("multiclass", num_classes=NUM_CLASSES)
        self.val_scores = torchmetrics.MeanMetric()
        self.val_losses: list[Tensor] = []
        self.seen_indices: list[int] = []
        self.num_samples_seen = 0
        self.losses: list[float] = []
        self.calls: dict[str, int] = {}

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Logits, `(samples, classes)`."""
        hidden = self.embed(batch["tokens"])
        for block in self.blocks:
            hidden, mean = block(hidden, mask=batch["mask"], scale=batch["extra"])
        logits: Tensor = self.head(mean)
        return logits

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Logs a tensor, a number and a metric object; returns a dict."""
        if batch_idx == self.hparams["fail_at"] and self.trainer.global_rank == 1:
            raise ValueError("boom")
        size = len(batch["label"])
        self.log("length", batch["length"], on_step=True, on_epoch=True, batch_size=size)
        logits = self(batch)
        loss = nn.functional.cross_entropy(logits, batch["label"])
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, batch_size=size)
        self.log_dict({"train_loss": loss}, on_step=True, on_epoch=True, prog_bar=True, batch_size=size)
        self.log("num_samples", float(size), reduce_fx="sum", on_step=True, on_epoch=True, batch_size=size)
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What callbacks would see."""
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The documented pattern of keeping outputs for the epoch's end."""
        logits = self(batch)
        loss = nn.functional.cross_entropy(logits, batch["label"])
        self.val_accuracy.update(logits, batch["label"])
        self.val_scores.update(logits.max(1).values)
        self.log("val_loss", loss, prog_bar=True, batch_size=len(logits))
        self.log("val_accuracy", self.val_accuracy, batch_size=len(logits))
        self.val_losses.append(loss * len(logits))
        self.seen_indices += batch["index"].tolist()
        self.num_samples_seen += len(logits)
        return loss

    def on_validation_epoch_start(self) -> None:
        """A metric the module computes by itself is reset by itself."""
        self.val_scores.reset()

    def on_validation_epoch_end(self) -> None:
        """Reads what the steps kept, on every rank."""
        self.log("val_mean", torch.stack(self.val_losses).sum() / self.num_samples_seen, sync_dist=True)
        self.log("val_score", self.val_scores.compute(), sync_dist=True)
        self.val_losses.clear()
        self.num_samples_seen = 0

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs with another reduction."""
        logits = self(batch)
        size = len(logits)
        self.log("test_loss", nn.functional.cross_entropy(logits, batch["label"]), batch_size=size)
        self.log("test_count", float(size), reduce_fx="sum", batch_size=size)
        self.log("test_index_sum", batch["index"].sum().float(), reduce_fx="sum", batch_size=size)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """One row a sample."""
        return {"index": batch["index"], "logits": self(batch)}

    def configure_optimizers(self) -> Any:
        """Parameter groups by name and shape; a schedule on a monitored metric."""
        decayed = [
            parameter for name, parameter in self.named_parameters() if parameter.ndim >= 2 and "embed" not in name
        ]
        embedding = [parameter for name, parameter in self.named_parameters() if "embed" in name]
        rest = [parameter for name, parameter in self.named_parameters() if parameter.ndim < 2 and "embed" not in name]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.1},
                {"params": embedding, "lr": 3e-3, "weight_decay": 0.0},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=self.hparams["learning_rate"],
            eps=1e-6,
        )
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Counted."""
        self._count("zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Counted."""
        self._count("optimizer_step")

    def on_after_backward(self) -> None:
        """Counted."""
        self._count("after_backward")


def loader(
    num_samples: int, batch_size: int, *, shuffle: bool = False, lengths: tuple[int, ...] = (6,)
) -> DataLoader[Any]:
    """A loader of padded sequences."""
    return DataLoader(Sequences(num_samples, lengths=lengths), batch_size=batch_size, shuffle=shuffle, collate_fn=pad)


def trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    """A quiet CPU Trainer."""
    settings: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, **{**settings, **options})


def pipeline(**options: Any) -> BigModelStrategy:
    """Two stages, four micro-batches."""
    return BigModelStrategy(**{"pipeline_parallel_size": 2, "num_microbatches": 4, **options})


def weights(module: nn.Module) -> dict[str, Any]:
    """Parameters as arrays."""
    return {name: parameter.detach().double().numpy().copy() for name, parameter in module.named_parameters()}


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics as floats."""
    return {name: float(value) for name, value in metrics.items()}


def entries(directory: str | Path) -> list[str]:
    """Names in a directory."""
    return sorted(path.name for path in Path(directory).iterdir())
