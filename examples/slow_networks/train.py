"""Does training stay as good when replicas send less? Real data, equal samples, each way to agree against dense sums.

Two tasks: `digits` (scikit-learn's handwritten digits, a small convolution net, SGD with momentum) and `text` (the
byte-level GPT of the demo on the sources of Python's standard library, AdamW). Each way to agree trains the same model
on the same samples over four replicas; the curves are written beside this file. As in the papers on local steps, `text`
begins with dense steps (400 of 1200), which all sides share.

    python examples/slow_networks/train.py digits
    python examples/slow_networks/train.py text
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import math
import statistics
import tempfile
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
_DENSE_STEPS = 400
_HERE = Path(__file__).parent
_TASKS: dict[str, dict[str, Callable[[], Any]]] = {
    "digits": {
        "AllReduce": AllReduce,
        "DGC(sparsity=0.999)": lambda: DGC(sparsity=0.999, warmup_epochs=4),
    },
    "text": {
        "AllReduce": AllReduce,
        "LocalSGD(period=8)": lambda: LocalSGD(period=8),
        "LocalSGD(period=8, optimizer_state=average)": lambda: LocalSGD(period=8, optimizer_state="average"),
        "DiLoCo(period=50)": lambda: DiLoCo(period=50),
    },
}
# Factors of the learning rate. Adam divides by the root of the mean square of gradients, most of which is noise; a
# replica that steps alone has that of a quarter of the samples, so its steps are up to half as long. Each side of
# `text` is compared at its best rate of these.
_RATES = {"digits": [1.0], "text": [1.0, 2.0, 4.0, 8.0]}


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


class Text(ByteGPT):
    """The demo's model, its learning rate raised for 20 steps and then lowered to zero along a cosine."""

    def __init__(self, num_steps: int, rate: float) -> None:
        super().__init__(width=64, learning_rate=3e-3 * rate)
        self.num_steps = num_steps

    def configure_optimizers(self) -> Any:
        """By step."""
        optimizer = super().configure_optimizers()

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.num_steps)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Curve(Callback):
    """Keeps what each validation logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One row."""
        if not trainer.sanity_checking:
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")}
            self.rows.append({"step": trainer.global_step, **metrics})


def digits(seed: int, rate: float = 1.0) -> tuple[LightningModule, DataLoader[Any], DataLoader[Any], dict[str, Any]]:
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


def text(seed: int, rate: float = 1.0) -> tuple[LightningModule, DataLoader[Any], DataLoader[Any], dict[str, Any]]:
    """800 steps of 4 x 8 windows of 64 bytes."""
    train_text, validation_text = read_texts()
    seed_everything(seed, verbose=False)
    model = Text(800, rate)
    train = DataLoader(ByteWindows(train_text, model.context), batch_size=8, shuffle=True)
    validation = DataLoader(ByteWindows(validation_text, model.context), batch_size=64)
    return model, train, validation, {"max_steps": 800, "val_check_interval": 100, "limit_val_batches": 8}


def trainer_of(sync: Any, **options: Any) -> Trainer:
    """Four replicas and nothing else."""
    return Trainer(
        accelerator="cpu",
        devices=_REPLICAS,
        strategy=BigModelStrategy(replica_sync=sync),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def begin_dense(seed: int, num_steps: int, path: str) -> None:
    """The common beginning of all sides of `text`; the first replica saves the weights."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, train, _, _ = text(seed)
    trainer = trainer_of(AllReduce(), max_steps=num_steps)
    trainer.fit(model, train)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), path)


def run(
    task: str, name: str, rate: float, seed: int, begun: str | None, max_steps: int | None = None
) -> list[dict[str, float]]:
    """One replica of one training."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, train, validation, options = (digits if task == "digits" else text)(seed, rate)
    if max_steps is not None:
        options["max_steps"] = max_steps
    curve = Curve()
    if begun is not None:
        model.load_state_dict(torch.load(begun, weights_only=True))
        seed_everything(1000 + seed, verbose=False)  # other samples than at the beginning
    trainer = trainer_of(_TASKS[task][name](), callbacks=[curve], **options)
    trainer.fit(model, train, validation)
    trainer.validate(model, validation, verbose=False)  # what training ends with
    final = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")}
    return [*(row for row in curve.rows if row["step"] < trainer.global_step), {"step": trainer.global_step, **final}]


def main() -> None:
    """Reads the arguments; writes the curves and prints how each way to agree ends."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=list(_TASKS))
    parser.add_argument("--sides", nargs="+", help="ways to agree, of those of the task; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", type=float, help="factors of the learning rate")
    parser.add_argument("--max-steps", type=int, help="to stop early")
    parser.add_argument("--output", type=Path, default=_HERE)
    given = parser.parse_args()
    sides = given.sides or list(_TASKS[given.task])
    if unknown := set(sides) - _TASKS[given.task].keys():
        parser.error(f"`--sides` has {sorted(unknown)}; `{given.task}` has {list(_TASKS[given.task])}.")
    metric = "val_accuracy" if given.task == "digits" else "val_loss"
    ends: dict[tuple[str, float], list[float]] = {}
    begun: dict[int, str] = {}
    scratch = tempfile.TemporaryDirectory()
    for seed in range(given.seeds) if given.task == "text" else ():
        begun[seed] = str(Path(scratch.name, f"{seed}.pt"))
        num_steps = given.max_steps or _DENSE_STEPS
        run_ranks(begin_dense, _REPLICAS, seed, num_steps, begun[seed], timeout_seconds=3600.0)
    with scratch, (given.output / f"{given.task}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sync", "rate", "seed", "step", metric])
        for name, rate, seed in itertools.product(sides, given.rates or _RATES[given.task], range(given.seeds)):
            start = time.monotonic()
            arguments = (given.task, name, rate, seed, begun.get(seed), given.max_steps)
            rows = run_ranks(run, _REPLICAS, *arguments, timeout_seconds=3600.0)[0]
            writer.writerows([name, rate, seed, row["step"], f"{row[metric]:.5f}"] for row in rows)
            file.flush()
            ends.setdefault((name, rate), []).append(rows[-1][metric])
            seconds = time.monotonic() - start
            print(f"{name}, rate x {rate:g}, seed {seed}: {rows[-1][metric]:.4f} ({seconds:.0f} s)", flush=True)
    print(f"| sync | rate | {metric}, mean of {given.seeds} seeds | against AllReduce |\n| --- | ---: | ---: | ---: |")
    best = max if given.task == "digits" else min
    means = {side: statistics.mean(values) for side, values in ends.items()}
    dense = best((mean for (name, _), mean in means.items() if name == "AllReduce"), default=math.nan)
    for name in sides:
        mean, rate = best((mean, rate) for (other, rate), mean in means.items() if other == name)
        change = 100 * (mean - dense if given.task == "digits" else mean / dense - 1)
        unit = "points" if given.task == "digits" else "%"
        print(f"| `{name}` | x {rate:g} | {mean:.4f} | {change:+.2f} {unit} |")


if __name__ == "__main__":
    main()
