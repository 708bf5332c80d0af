"""Does training stay as good when replicas send less? Real data, equal samples, each way to agree against dense sums.

Two tasks: `digits` (scikit-learn's handwritten digits, a small convolution net, SGD with momentum) and `text` (the
byte-level GPT of the demo on the sources of Python's standard library, AdamW). Each way to agree trains the same model
on the same samples over four replicas; the curves are written beside this file.

    python examples/slow_networks/train.py digits
    python examples/slow_networks/train.py text
"""

from __future__ import annotations

import argparse
import csv
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import DGC, AllReduce, BigModelStrategy, DiLoCo, LocalSGD
from lightning_bigmodel.demo.data import ByteWindows, read_texts
from lightning_bigmodel.demo.model import ByteGPT
from lightning_bigmodel.testing import run_ranks

_REPLICAS = 4
_HERE = Path(__file__).parent
_TASKS: dict[str, dict[str, Callable[[], Any]]] = {
    "digits": {
        "AllReduce": AllReduce,
        "DGC(sparsity=0.999)": lambda: DGC(sparsity=0.999, warmup_epochs=4),
    },
    "text": {
        "AllReduce": AllReduce,
        "LocalSGD(period=8)": lambda: LocalSGD(period=8),
        "DiLoCo(period=50)": lambda: DiLoCo(period=50),
    },
}


class Digits(LightningModule):
    """A convolution net of 0.6 million parameters."""

    def __init__(self, num_epochs: int = 30) -> None:
        super().__init__()
        self.num_epochs = num_epochs
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 16, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Cross entropy, and the part of images that are named right."""
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        """SGD with momentum, whose rate falls to zero."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.num_epochs)]


class Curve(Callback):
    """Keeps what each validation logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One row."""
        if not trainer.sanity_checking:
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")}
            self.rows.append({"step": trainer.global_step, **metrics})


def digits(seed: int) -> tuple[LightningModule, DataLoader[Any], DataLoader[Any], dict[str, Any]]:
    """Every fifth image validates."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    validates = torch.arange(len(labels)) % 5 == 0
    seed_everything(seed, verbose=False)
    train = DataLoader(TensorDataset(images[~validates], labels[~validates]), batch_size=16, shuffle=True)
    validation = DataLoader(TensorDataset(images[validates], labels[validates]), batch_size=90)
    return Digits(), train, validation, {"max_epochs": 30, "check_val_every_n_epoch": 3}


def text(seed: int) -> tuple[LightningModule, DataLoader[Any], DataLoader[Any], dict[str, Any]]:
    """800 steps of 4 x 8 windows of 64 bytes."""
    train_text, validation_text = read_texts()
    seed_everything(seed, verbose=False)
    model = ByteGPT()
    train = DataLoader(ByteWindows(train_text, model.context), batch_size=8, shuffle=True)
    validation = DataLoader(ByteWindows(validation_text, model.context), batch_size=64)
    return model, train, validation, {"max_steps": 800, "val_check_interval": 100, "limit_val_batches": 8}


def run(task: str, name: str, seed: int, max_steps: int | None = None) -> list[dict[str, float]]:
    """One replica of one training."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, train, validation, options = (digits if task == "digits" else text)(seed)
    if max_steps is not None:
        options["max_steps"] = max_steps
    curve = Curve()
    trainer = Trainer(
        accelerator="cpu",
        devices=_REPLICAS,
        strategy=BigModelStrategy(replica_sync=_TASKS[task][name]()),
        logger=False,
        callbacks=[curve],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(model, train, validation)
    trainer.validate(model, validation, verbose=False)  # what training ends with
    final = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")}
    return [*(row for row in curve.rows if row["step"] < trainer.global_step), {"step": trainer.global_step, **final}]


def main() -> None:
    """Reads the arguments; writes the curves and prints how each way to agree ends."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=list(_TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int, help="to stop early")
    parser.add_argument("--output", type=Path, default=_HERE)
    given = parser.parse_args()
    metric = "val_accuracy" if given.task == "digits" else "val_loss"
    ends: dict[str, list[float]] = {}
    with (given.output / f"{given.task}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sync", "seed", "step", metric])
        for name in _TASKS[given.task]:
            for seed in range(given.seeds):
                begun = time.monotonic()
                rows = run_ranks(run, _REPLICAS, given.task, name, seed, given.max_steps, timeout_seconds=3600.0)[0]
                writer.writerows([name, seed, row["step"], f"{row[metric]:.5f}"] for row in rows)
                file.flush()
                ends.setdefault(name, []).append(rows[-1][metric])
                print(f"{name}, seed {seed}: {rows[-1][metric]:.4f} ({time.monotonic() - begun:.0f} s)", flush=True)
    dense = statistics.mean(ends["AllReduce"])
    print(f"| sync | {metric}, mean of {given.seeds} seeds | against AllReduce |\n| --- | ---: | ---: |")
    for name, values in ends.items():
        mean = statistics.mean(values)
        change = 100 * (mean - dense if given.task == "digits" else mean / dense - 1)
        print(f"| `{name}` | {mean:.4f} | {change:+.2f} {'points' if given.task == 'digits' else '%'} |")


if __name__ == "__main__":
    main()
