"""What does cutting an unchanged LightningModule cost, against a pipeline written by hand?

Both sides train the same model from the same weights on the same batches, cut at the same blocks, under the same
schedule of `torch.distributed.pipelining`, in the same processes. They take turns, a round of a few steps each, so
that whatever else the machine does meets both. Two pairs are timed:

    loop   `Trainer.fit` with BigModelStrategy   against   a bare loop: batch, schedule.step, optimizer.step
    step   `engine.train` alone                  against   schedule.step alone

and for one step of each loop the point-to-point messages and their bytes are counted, which must be equal. Seconds are
those of a clock; where the machine has other work too, compare the processor time, which all ranks together spent and
nobody else.

    python examples/benchmarks/pipeline_cost.py --ranks 2 --schedules GPipe 1F1B Interleaved1F1B
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from hand_written import HandWrittenLoop, first_block_of_stage
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.demo.model import ByteGPT
from lightning_bigmodel.testing import CollectiveCounter, run_ranks

_STAGES_PER_RANK = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the work, and how often it is measured."""

    ranks: int = 2
    schedules: tuple[str, ...] = ("1F1B",)
    width: int = 256
    num_blocks: int = 8
    context: int = 128
    batch_size: int = 16
    num_microbatches: int = 8
    rounds: int = 10
    steps_per_round: int = 2
    warmup_rounds: int = 2


def _now() -> tuple[float, float]:
    """The clock and this process's processor time, on all ranks at once."""
    dist.barrier()
    return time.perf_counter(), time.process_time()


class Measure(Callback):
    """Lets the hand-written loop take turns with the Trainer's, and keeps the seconds a step of both."""

    def __init__(self, settings: Settings, hand: HandWrittenLoop, batch: Any) -> None:
        self.settings, self.hand, self.batch = settings, hand, batch
        names = ("loop ours", "loop hand", "step ours", "step hand")
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.processor_seconds: dict[str, list[float]] = {name: [] for name in names}
        self.counts: dict[str, dict[str, tuple[int, int]]] = {}
        self._start = (0.0, 0.0)
        self._counter: CollectiveCounter | None = None

    def _timed(self, name: str, step: Callable[[], object]) -> None:
        start = _now()
        for _ in range(self.settings.steps_per_round):
            step()
        self._keep(name, start)

    def _keep(self, name: str, start: tuple[float, float]) -> None:
        self.seconds[name].append((time.perf_counter() - start[0]) / self.settings.steps_per_round)
        self.processor_seconds[name].append((time.process_time() - start[1]) / self.settings.steps_per_round)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = _now()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Called last in a step of the Trainer, so the time from one call to the next is all the Trainer does."""
        if self._counter is not None:  # the step after the last round
            self._counter.__exit__()
            self.counts["ours"] = self._counter.as_dict()
            with CollectiveCounter() as counter:
                self.hand.step()
            self.counts["hand"] = counter.as_dict()
            return
        if trainer.global_step % self.settings.steps_per_round:
            return
        self._keep("loop ours", self._start)
        self._timed("loop hand", self.hand.step)
        self._timed("step ours", lambda: self._engine_step(trainer, pl_module))
        self._timed("step hand", self._schedule_step)
        self._start = _now()
        if len(self.seconds["loop ours"]) == self.settings.rounds + self.settings.warmup_rounds:
            self._counter = CollectiveCounter().__enter__()

    def _engine_step(self, trainer: Trainer, module: LightningModule) -> None:
        # Called outside of a training step: gradients are thrown away, so that the run goes on as if nothing had been.
        engine = trainer.strategy.engine  # type: ignore[attr-defined]  # BigModelStrategy's
        engine.train(self.batch, lambda microbatch: module.training_step(microbatch, 0))
        for parameter in engine.trained_parameters():
            parameter.grad = None

    def _schedule_step(self) -> None:
        self.hand.schedule_step(self.batch)
        for parameter in self.hand.parameters:
            parameter.grad = None


def measure_rank(settings: Settings, schedule: str) -> dict[str, Any]:
    """Runs both loops on this rank and returns what it saw."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    model = ByteGPT(width=settings.width, num_blocks=settings.num_blocks, context=settings.context, learning_rate=1e-4)
    by_hand = copy.deepcopy(model)
    rows = torch.randint(0, 256, (8 * settings.batch_size, settings.context + 1))
    loader = DataLoader(TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), settings.batch_size)
    batch = next(iter(loader))
    stages_per_rank = _STAGES_PER_RANK[schedule]
    starts = first_block_of_stage(settings.num_blocks, settings.ranks * stages_per_rank)
    hand = HandWrittenLoop(by_hand, schedule, stages_per_rank, settings.num_microbatches, batch, loader)
    measure = Measure(settings, hand, batch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=settings.ranks,
            strategy=BigModelStrategy(
                pipeline_parallel_size=settings.ranks,
                num_microbatches=settings.num_microbatches,
                schedule=schedule,
                blocks=[f"blocks.{start}" for start in starts],
            ),
            max_epochs=-1,
            max_steps=(settings.rounds + settings.warmup_rounds) * settings.steps_per_round + 1,
            callbacks=[measure],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(model, loader)
    trained = dict(model.named_parameters())
    error = max(float((trained[name].detach() - value).abs().max()) for name, value in hand.state().items())
    losses = {"ours": float(trainer.callback_metrics["train_loss"]), "hand": hand.last_loss}
    return {
        "seconds": measure.seconds,
        "processor_seconds": measure.processor_seconds,
        "counts": measure.counts,
        "weight_error": error,
        "losses": losses,
    }


def summarise(settings: Settings, schedule: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts the ranks' numbers together: a step takes as long as on its slowest rank; the rest is summed over ranks."""

    def over_ranks(kind: str, join: Callable[[Iterable[float]], float], name: str) -> list[float]:
        of_ranks = [rank[kind][name][settings.warmup_rounds :] for rank in ranks]
        return [join(values) for values in zip(*of_ranks, strict=True)]

    result: dict[str, Any] = {"schedule": schedule}
    for pair in ("loop", "step"):
        ours, hand = (over_ranks("seconds", max, f"{pair} {side}") for side in ("ours", "hand"))
        processor = [statistics.median(over_ranks("processor_seconds", sum, f"{pair} {s}")) for s in ("ours", "hand")]
        result[pair] = {
            "ours_min_seconds": min(ours),
            "hand_min_seconds": min(hand),
            "ratio_of_minima": min(ours) / min(hand),
            "median_of_ratios": statistics.median(a / b for a, b in zip(ours, hand, strict=True)),
            "ours_processor_seconds": processor[0],
            "hand_processor_seconds": processor[1],
            "processor_ratio": processor[0] / processor[1],
        }
    for side in ("ours", "hand"):
        kinds = sorted({kind for rank in ranks for kind in rank["counts"][side]})
        result[f"{side}_messages"] = {
            kind: [sum(rank["counts"][side].get(kind, (0, 0))[i] for rank in ranks) for i in (0, 1)] for kind in kinds
        }
    result["largest_weight_difference"] = max(rank["weight_error"] for rank in ranks)
    result["last_loss"] = {"ours": ranks[-1]["losses"]["ours"], "hand": ranks[-1]["losses"]["hand"]}
    return result


def _rows(result: dict[str, Any]) -> str:
    rows = []
    for pair in ("loop", "step"):
        times = result[pair]
        rows.append(
            f"| {result['schedule']}, {pair} "
            f"| {times['hand_min_seconds'] * 1e3:.1f} | {times['ours_min_seconds'] * 1e3:.1f} "
            f"| {times['ratio_of_minima']:.3f} | {times['median_of_ratios']:.3f} "
            f"| {times['hand_processor_seconds'] * 1e3:.1f} | {times['ours_processor_seconds'] * 1e3:.1f} "
            f"| {times['processor_ratio']:.3f} |"
        )
    return "\n".join(rows)


_HEADER = (
    "| schedule, pair | by hand ms | ours ms | ratio of minima | median ratio | processor ms by hand | ours | ratio |"
    "\n| --- |" + " ---: |" * 7
)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _settings(arguments: list[str]) -> tuple[Settings, str | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Settings()).items():
        if name != "schedules":
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--schedules", nargs="+", choices=list(_STAGES_PER_RANK), default=["1F1B"])
    parser.add_argument("--json", default=None, help="also write the results to this file")
    given = vars(parser.parse_args(arguments))
    path = given.pop("json")
    return Settings(**{**given, "schedules": tuple(given["schedules"])}), path


def main(arguments: list[str]) -> int:
    """Measures each schedule and prints a table. Returns 1 if the two sides did not send or learn the same."""
    settings, path = _settings(arguments)
    load = "" if not hasattr(os, "getloadavg") else f", load {os.getloadavg()[0]:.1f} at start"
    print(
        f"{datetime.datetime.now():%Y-%m-%d}, {os.cpu_count()} x {_cpu()}{load}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, lightning {lightning.__version__}; one thread a rank"
    )
    print(f"{settings}\n{_HEADER}", flush=True)
    results = []
    for schedule in settings.schedules:
        ranks = run_ranks(measure_rank, settings.ranks, settings, schedule, timeout_seconds=3600)
        results.append(summarise(settings, schedule, ranks))
        print(_rows(results[-1]), flush=True)
    for result in results:
        for side in ("hand", "ours"):
            messages = ", ".join(f"{n} {kind} ({size} bytes)" for kind, (n, size) in result[f"{side}_messages"].items())
            print(f"{result['schedule']}, {side}: {messages} a step")
        print(f"{result['schedule']}: largest difference of a weight {result['largest_weight_difference']:.1e}")
    if path is not None:
        Path(path).write_text(json.dumps({"settings": asdict(settings), "results": results}, indent=1))
    same = all(
        result["ours_messages"].get("send") == result["hand_messages"].get("send")
        and result["largest_weight_difference"] < 1e-4
        for result in results
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
