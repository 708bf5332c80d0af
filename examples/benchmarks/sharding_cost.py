"""What do replicas and shards of an unchanged LightningModule cost, against Lightning's DDP and FSDP2 by hand?

Pairs, all of them whole `Trainer.fit` loops over the same model, weights, batches and optimizer:

    replicas   BigModelStrategy()               against   Lightning's DDPStrategy()
    sharded    BigModelStrategy(zero_stage=3)   against   `fully_shard` of each block and of the root, by hand, in
                                                          `configure_model` under Lightning's ModelParallelStrategy
    kept       sharded, `keep_gathered=True`    against   sharded, `reshard_after_forward=False`

Both loops of a pair run in the same processes, each in a thread of its own, and take turns, a round of a few steps
each; while one has its turn the other waits without work. So whatever else the machine does meets both. Seconds are
those of a clock, of the slowest rank; processor time is that of all ranks together. After the last round one step of
each is counted. Memory is measured in further processes with one side each, three times: by how much the peak resident
size grew, the same where freed memory goes back to the system at once, and the peak of the bytes of live tensors.

    python examples/benchmarks/sharding_cost.py --ranks 2 --pairs replicas sharded kept
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import logging
import os
import platform
import resource
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from sharded_sides import PAIRS, LiveBytes, Side, Turns, make_side, whole_weights
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import CollectiveCounter, run_ranks

_MEMORY_STEPS = 4
_M_MMAP_THRESHOLD = -3  # of malloc.h


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the work, and how often it is measured."""

    ranks: int = 2
    pairs: tuple[str, ...] = ("replicas", "sharded")
    width: int = 256
    num_blocks: int = 8
    context: int = 128
    batch_size: int = 8  # of a rank
    rounds: int = 12
    steps_per_round: int = 2
    warmup_rounds: int = 2
    fused: bool = False


def _now() -> tuple[float, float]:
    """The clock and this process's processor time, on all ranks at once."""
    dist.barrier()
    return time.perf_counter(), time.process_time()


class Measure(Callback):
    """Keeps the seconds a step of one side, passes the turn on after each round, and counts the last step."""

    def __init__(self, settings: Settings, turns: Turns, thread: int) -> None:
        self.settings, self.turns, self.thread = settings, turns, thread
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.counter = CollectiveCounter()
        self._start = (0.0, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.turns.pass_on(self.thread)
        self._start = _now()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Called last in a step, so the time from one call to the next is all the Trainer does."""
        settings = self.settings
        if len(self.seconds) == settings.rounds + settings.warmup_rounds:  # the step after the last round
            self.counter.__exit__()
            return
        if trainer.global_step % settings.steps_per_round:
            return
        self.seconds.append((time.perf_counter() - self._start[0]) / settings.steps_per_round)
        self.processor_seconds.append((time.process_time() - self._start[1]) / settings.steps_per_round)
        self.turns.pass_on(self.thread)
        if len(self.seconds) == settings.rounds + settings.warmup_rounds:
            self.counter.__enter__()
        else:
            self._start = _now()


class Memory(Callback):
    """Reads the peak resident size at the end of the last step, and lets a peak of live bytes be that of later steps.

    The first steps make gradients and optimizer states, and what comes after the last makes sharded models whole again.

    Args:
        live: Counts live bytes; None leaves it out.
    """

    def __init__(self, live: LiveBytes | None) -> None:
        self.live = live
        self.num_bytes = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.live is not None and batch_idx == _MEMORY_STEPS - 2:
            self.live.peak_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.num_bytes = _peak_resident_bytes() if self.live is None else self.live.peak_bytes


def _side(settings: Settings, name: str) -> Side:
    torch.manual_seed(0)
    sizes = {key: getattr(settings, key) for key in ("width", "num_blocks", "context")}
    return make_side(name, settings.ranks, settings.fused, {**sizes, "learning_rate": 1e-4})


def _fit(settings: Settings, side: Side, num_steps: int, callback: Callback) -> Trainer:
    torch.set_num_threads(1)  # holds for a thread, not for a process
    torch.manual_seed(1)
    rows = torch.randint(0, 256, (num_steps * settings.ranks * settings.batch_size, settings.context + 1))
    data = TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    # Left alone, Lightning's strategies would shuffle the training data, and the sides would see other batches.
    sampler = None if isinstance(side.strategy, BigModelStrategy) else DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, settings.batch_size, sampler=sampler)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=settings.ranks,
            strategy=side.strategy,
            max_epochs=1,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(side.model, loader)
    return trainer


def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def measure_time(settings: Settings, pair: str) -> dict[str, Any]:
    """Runs both loops of a pair on this rank and returns what it saw."""
    _quiet()
    turns = Turns(2)
    measures = [Measure(settings, turns, thread) for thread in range(2)]
    weights: list[dict[str, Tensor]] = [{}, {}]
    losses = [0.0, 0.0]
    errors: list[BaseException] = []
    num_steps = (settings.rounds + settings.warmup_rounds) * settings.steps_per_round + 1

    def train(thread: int) -> None:
        try:
            with turns.taking_part(thread):
                side = _side(settings, PAIRS[pair][thread])
                trainer = _fit(settings, side, num_steps, measures[thread])
                weights[thread] = whole_weights(side.model)
                losses[thread] = float(trainer.callback_metrics["train_loss"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert weights[0].keys() == weights[1].keys(), "one model"
    # What one rank logs is its own loss by other hands, and that of all ranks together in ours.
    all_losses = torch.tensor(losses)
    dist.all_reduce(all_losses)
    return {
        "seconds": [measure.seconds for measure in measures],
        "processor_seconds": [measure.processor_seconds for measure in measures],
        "counts": [measure.counter.as_dict() for measure in measures],
        "weight_error": max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]),
        "losses": (all_losses / settings.ranks).tolist(),
    }


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _give_freed_memory_back() -> None:
    """Let glibc keep no freed blocks of 64 KiB and more, which it does to an extent that hides what is in use."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 64 * 1024)


def measure_memory(settings: Settings, name: str, kind: str) -> int:
    """Runs one side alone; returns its peak of live bytes in later steps, or how much its peak resident size grew."""
    _quiet()
    if kind == "returned":
        _give_freed_memory_back()
    memory = Memory(LiveBytes() if kind == "live" else None)
    before = 0 if kind == "live" else _peak_resident_bytes()
    with memory.live or nullcontext():
        _fit(settings, _side(settings, name), _MEMORY_STEPS, memory)
    return memory.num_bytes - before


def summarise(settings: Settings, pair: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts the ranks' numbers together: a step takes as long as on its slowest rank; processor time is summed."""

    def over_ranks(kind: str, join: Callable[[Iterable[float]], float], side: int) -> list[float]:
        of_ranks = [rank[kind][side][settings.warmup_rounds :] for rank in ranks]
        return [join(values) for values in zip(*of_ranks, strict=True)]

    theirs, ours = (over_ranks("seconds", max, side) for side in range(2))
    processor = [statistics.median(over_ranks("processor_seconds", sum, side)) for side in range(2)]
    memory = {
        kind: [
            max(run_ranks(measure_memory, settings.ranks, settings, name, kind, timeout_seconds=3600))
            for name in PAIRS[pair]
        ]
        for kind in ("resident", "returned", "live")
    }
    return {
        "pair": pair,
        "sides": PAIRS[pair],
        "min_seconds": [min(theirs), min(ours)],
        "median_seconds": [statistics.median(theirs), statistics.median(ours)],
        "ratio_of_minima": min(ours) / min(theirs),
        "median_of_ratios": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "processor_seconds": processor,
        "processor_ratio": processor[1] / processor[0],
        "peak_resident_growth_bytes": memory["resident"],
        "peak_returned_growth_bytes": memory["returned"],
        "peak_live_bytes": memory["live"],
        "messages": [[rank["counts"][side] for rank in ranks] for side in range(2)],
        "largest_weight_difference": max(rank["weight_error"] for rank in ranks),
        "last_loss": ranks[0]["losses"],
    }


_MEMORY_KINDS = ("peak_resident_growth_bytes", "peak_returned_growth_bytes", "peak_live_bytes")
_HEADER = (
    "| side | min ms | median ms | processor ms | grown MB | grown, freed returned MB | live MB | ratio of minima "
    "| median ratio | processor ratio |\n| --- |" + " ---: |" * 9
)


def _rows(result: dict[str, Any]) -> str:
    rows = []
    for side, name in enumerate(result["sides"]):
        ratios = [result[kind] for kind in ("ratio_of_minima", "median_of_ratios", "processor_ratio")]
        numbers = [
            *(f"{result[kind][side] * 1e3:.1f}" for kind in ("min_seconds", "median_seconds", "processor_seconds")),
            *(f"{result[kind][side] / 1e6:.1f}" for kind in _MEMORY_KINDS),
            *(f"{ratio:.3f}" if side else "" for ratio in ratios),
        ]
        rows.append(f"| {name} | " + " | ".join(numbers) + " |")
    return "\n".join(rows)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _settings(arguments: list[str]) -> tuple[Settings, str | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Settings()).items():
        if name not in ("pairs", "fused"):
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(Settings().pairs))
    parser.add_argument("--fused", action="store_true", help="let the optimizer be one kernel for all parameters")
    parser.add_argument("--json", default=None, help="also write the results to this file")
    given = vars(parser.parse_args(arguments))
    path = given.pop("json")
    return Settings(**{**given, "pairs": tuple(given["pairs"])}), path


def main(arguments: list[str]) -> int:
    """Measures each pair and prints a table. Returns 1 if the two sides of one did not learn the same."""
    settings, path = _settings(arguments)
    load = "" if not hasattr(os, "getloadavg") else f", load {os.getloadavg()[0]:.1f} at start"
    print(
        f"{datetime.datetime.now():%Y-%m-%d}, {os.cpu_count()} x {_cpu()}{load}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, lightning {lightning.__version__}; one thread a rank"
    )
    print(f"{settings}\n{_HEADER}", flush=True)
    results = []
    for pair in settings.pairs:
        ranks = run_ranks(measure_time, settings.ranks, settings, pair, timeout_seconds=3600)
        results.append(summarise(settings, pair, ranks))
        print(_rows(results[-1]), flush=True)
    for result in results:
        for name, counts in zip(result["sides"], result["messages"], strict=True):
            messages = ", ".join(f"{n} {kind} ({size} bytes)" for kind, (n, size) in counts[0].items())
            print(f"{name}: rank 0 issues {messages} a step")
        print(f"{result['pair']}: largest difference of a weight {result['largest_weight_difference']:.1e}")
    if path is not None:
        Path(path).write_text(json.dumps({"settings": asdict(settings), "results": results}, indent=1))
    return 0 if all(result["largest_weight_difference"] < 1e-5 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
