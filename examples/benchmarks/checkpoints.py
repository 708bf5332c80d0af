"""What does a checkpoint cost, against Lightning's own of FSDP2, and how long does training stand still for one?

Three measurements of the same model, weights and optimizer (AdamW with its moments) on the same ranks:

    save       `trainer.save_checkpoint`, until the files are on the disk: BigModelStrategy(zero_stage=3) against
               ModelParallelStrategy with `fully_shard` by hand in `configure_model`
    load       `strategy.load_checkpoint` with what Lightning then puts into the module and its optimizer
    stall      time in `trainer.save_checkpoint` with `async_checkpoint=True`, and how much longer the steps take that
               run beside the writing, against a synchronous save of this project

The sides of a pair take turns, in processes of their own: theirs, ours, ours, theirs,
theirs, ours. Seconds are those of a clock, of
the slowest rank, between two barriers; processor time is that of all ranks together. Before a save the system is told
to write what it still holds back.

    python examples/benchmarks/checkpoints.py --ranks 2
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from sharded_sides import FullyShardedGPT, TimedGPT
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import run_ranks

OTHER, OURS = "fully_shard", "zero_stage=3"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the work, and how often it is measured."""

    ranks: int = 2
    width: int = 768
    num_blocks: int = 15
    context: int = 64
    batch_size: int = 2  # of a rank
    rounds: int = 4
    steps_beside: int = 8  # of the measurement of stalls


def _now() -> float:
    dist.barrier()
    return time.perf_counter()


def _processor() -> float:
    """Processor time of all ranks together."""
    seconds = torch.tensor(time.process_time(), dtype=torch.float64)
    dist.all_reduce(seconds)
    return seconds.item()


def _settle() -> None:
    """Let the system write what it holds back, on one rank, before the clock starts."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()


class SaveAndLoad(Callback):
    """After one step: saves and loads, some rounds of it."""

    def __init__(self, rounds: int, directory: Path) -> None:
        self.rounds, self.directory = rounds, directory
        self.seconds: dict[str, list[float]] = {"save": [], "load": [], "save processor": [], "load processor": []}
        self.num_bytes = 0

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        path = self.directory / "measured.ckpt"
        for _ in range(self.rounds):
            _settle()
            before, begin = _processor(), _now()
            trainer.save_checkpoint(path)
            self.seconds["save"].append(_now() - begin)
            self.seconds["save processor"].append(_processor() - before)
            before, begin = _processor(), _now()
            connector = trainer._checkpoint_connector
            connector._loaded_checkpoint = trainer.strategy.load_checkpoint(path)
            connector.restore_model()
            connector.restore_optimizers()
            connector._loaded_checkpoint = {}
            self.seconds["load"].append(_now() - begin)
            self.seconds["load processor"].append(_processor() - before)
            if dist.get_rank() == 0:
                self.num_bytes = sum(file.stat().st_size for file in path.rglob("*"))
                shutil.rmtree(path)


class Stalls(Callback):
    """Times each step; in the middle it saves, in the background or not."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.settings, self.directory = settings, directory
        self.steps: list[float] = []
        self.call = self.until_complete = 0.0
        self.num_steps_beside = 0
        self._began = self._saved_at = 0.0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._began = _now()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.steps.append(_now() - self._began)
        step = len(self.steps)
        strategy: Any = trainer.strategy
        if step in (4, 4 + self.settings.steps_beside):  # the first one makes the memory for the copies
            strategy.finish_saving()
            _settle()
            self._saved_at = _now()
            trainer.save_checkpoint(self.directory / "stall.ckpt")
            self.call = _now() - self._saved_at
            self.until_complete = self.num_steps_beside = 0
        elif self._saved_at and not self.until_complete:
            self.num_steps_beside += 1
            # Whether it is complete on any rank is asked outside of the step's time.
            writing = torch.tensor(float(strategy._saver is not None and strategy._saver._is_writing))
            dist.all_reduce(writing)
            if not writing:
                self.until_complete = _now() - self._saved_at


def _fit(settings: Settings, strategy: Any, model_class: type, callback: Callback, num_steps: int) -> None:
    torch.manual_seed(1)
    model = model_class(width=settings.width, num_blocks=settings.num_blocks, context=settings.context)
    model.fused = True
    tokens = torch.randint(0, 256, (settings.ranks * settings.batch_size * num_steps, settings.context + 1))
    Trainer(
        accelerator="cpu",
        devices=settings.ranks,
        strategy=strategy,
        max_steps=num_steps,
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, DataLoader(TensorDataset(tokens), batch_size=settings.batch_size, collate_fn=_tokens))


def _tokens(rows: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.stack([row for (row,) in rows])
    return tokens[:, :-1], tokens[:, 1:]


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)


def measure_files(settings: Settings, side: str, directory: str) -> dict[str, Any]:
    """On one rank: seconds of the saves and loads of a side."""
    _quiet()
    measured = SaveAndLoad(settings.rounds, Path(directory))
    if side == OTHER:
        strategy: Any = ModelParallelStrategy(data_parallel_size=settings.ranks, tensor_parallel_size=1)
        _fit(settings, strategy, FullyShardedGPT, measured, 1)
    else:
        _fit(settings, BigModelStrategy(zero_stage=3), TimedGPT, measured, 1)
    return {**measured.seconds, "bytes": measured.num_bytes}


def measure_stall(settings: Settings, is_async: bool, directory: str) -> dict[str, Any]:
    """On one rank: how long training stands still."""
    _quiet()
    measured = Stalls(settings, Path(directory))
    strategy = BigModelStrategy(zero_stage=3, async_checkpoint=is_async)
    _fit(settings, strategy, TimedGPT, measured, 4 + 2 * settings.steps_beside)
    alone = statistics.median(measured.steps[-settings.steps_beside // 4 :])
    beside = measured.steps[4 + settings.steps_beside :][: measured.num_steps_beside]
    return {
        "call": measured.call,
        "step": alone,
        "steps beside": len(beside),
        "slower": sum(beside) - alone * len(beside),
        "complete": measured.until_complete or measured.call,
    }


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--directory", help="where to write; default: a temporary one")
    given = vars(parser.parse_args())
    place = given.pop("directory")
    settings = Settings(**given)
    files: dict[str, list[dict[str, Any]]] = {OTHER: [], OURS: []}
    stalls: dict[bool, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=place) as directory:
        for side in (OTHER, OURS, OURS, OTHER, OTHER, OURS):  # in turns, so that a machine that slows down meets both
            files[side] += run_ranks(measure_files, settings.ranks, settings, side, directory, timeout_seconds=1800)[:1]
        for is_async in (False, True):
            ranks = run_ranks(measure_stall, settings.ranks, settings, is_async, directory, timeout_seconds=1800)
            stalls[is_async] = ranks[0]
    print(
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"{files[OURS][0]['bytes'] / 1e6:.0f} MB ours, {files[OTHER][0]['bytes'] / 1e6:.0f} MB theirs")
    print("| what | side | min s | median s | ratio of minima | median ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for what in ("save", "load", "save processor", "load processor"):
        seconds = {side: [s for run in files[side] for s in run[what]] for side in files}
        for side in (OTHER, OURS):
            least, median = min(seconds[side]), statistics.median(seconds[side])
            ratios = ("", "")
            if side == OURS:
                ratios = (
                    f"{least / min(seconds[OTHER]):.3f}",
                    f"{median / statistics.median(seconds[OTHER]):.3f}",
                )
            print(f"| {what} | {side} | {least:.3f} | {median:.3f} | {ratios[0]} | {ratios[1]} |")
    sync, background = stalls[False], stalls[True]
    print(
        f"stall: call {background['call']:.3f} s of {sync['call']:.3f} s: {background['call'] / sync['call']:.3f}; "
        f"complete after {background['complete']:.2f} s and {background['steps beside']} steps of "
        f"{background['step']:.3f} s, which took {background['slower']:.2f} s longer together"
    )
    print(json.dumps({"settings": asdict(settings), "files": files, "stalls": list(stalls.values())}), file=sys.stderr)


if __name__ == "__main__":
    main()
