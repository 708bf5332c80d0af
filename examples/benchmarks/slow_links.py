"""What do replicas that send less gain where the network is the wall, against Lightning's DDPStrategy?

Four hosts (network namespaces) with one rank each, joined by links of a given speed, train the same model on the same
batches. Sides: Lightning's DDP, and `BigModelStrategy` with each way to agree. Each side is a `Trainer.fit` of its own
processes; all sides of a speed run one after the other, `--rounds` times. A step's time is the mean over whole periods
after warm-up on the slowest rank; bytes are what the rank's link has sent in these steps, headers included.

    sudo python examples/benchmarks/slow_links.py --rates 100mbit 1gbit

Needs Linux, root, and `ip` and `tc` (Debian's iproute2).
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from linked_hosts import LINK, address_of, linked_hosts, sent_bytes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import DGC, AllReduce, BigModelStrategy, DiLoCo, LocalSGD, PowerSGD

_HOSTS = 4
_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way to agree: steps before the measured ones, and how many are measured."""

    warmup: int
    steps: int
    sync: Any = None


SIDES: dict[str, Side] = {
    "DDPStrategy": Side(warmup=1, steps=3),
    "AllReduce": Side(warmup=1, steps=3, sync=lambda: AllReduce()),
    "AllReduce bf16": Side(warmup=1, steps=3, sync=lambda: AllReduce(dtype="bfloat16")),
    "PowerSGD rank 4": Side(warmup=4, steps=20, sync=lambda: PowerSGD(rank=4, begin_step=2)),
    "DGC 99.9 %": Side(warmup=4, steps=20, sync=lambda: DGC(sparsity=0.999)),
    "LocalSGD 16": Side(warmup=16, steps=32, sync=lambda: LocalSGD(period=16)),
    "DiLoCo 50": Side(warmup=50, steps=50, sync=lambda: DiLoCo(period=50)),
}


class Layers(LightningModule):
    """A chain of wide layers: 10.5 million parameters, little to compute on a batch."""

    def __init__(self, width: int = 1024, num_layers: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Squares of what the last layer gives."""
        x = batch[0]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        """What DGC takes; one kernel, as it is not the optimizer that is measured."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=True)


class Clock(Callback):
    """Seconds and sent bytes of the measured steps."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.begun = self.ended = (0.0, 0)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Marks the first and the last of them."""
        if trainer.global_step == self.side.warmup:
            self.begun = (time.perf_counter(), sent_bytes())
        if trainer.global_step == self.side.warmup + self.side.steps:
            self.ended = (time.perf_counter(), sent_bytes())


def work(name: str, batch_size: int, width: int, output: Path) -> None:
    """One rank of one side."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    side = SIDES[name]
    clock, num_steps = Clock(side), side.warmup + side.steps
    strategy: Any = DDPStrategy() if name == "DDPStrategy" else BigModelStrategy(replica_sync=side.sync())
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=_HOSTS,
        strategy=strategy,
        max_steps=num_steps,
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Layers(width)
    data = TensorDataset(torch.randn(_HOSTS * batch_size * num_steps, model.layers[0].in_features))  # type: ignore[arg-type]
    trainer.fit(model, DataLoader(data, batch_size=batch_size))
    (begin, before), (end, after) = clock.begun, clock.ended
    found = {
        "seconds": (end - begin) / side.steps,
        "bytes": (after - before) / side.steps,
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }
    (output / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def measure(name: str, hosts: Any, batch_size: int, width: int) -> dict[str, float]:
    """Start one side on all hosts and wait for it; seconds of the slowest rank, bytes of the one that sent most."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for index, host in enumerate(hosts):
            environment = {
                **os.environ,
                "MASTER_ADDR": address_of(0),
                "MASTER_PORT": str(_PORT),
                "WORLD_SIZE": str(_HOSTS),
                "RANK": str(index),
                "NODE_RANK": str(index),
                "GROUP_RANK": str(index),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "TORCHELASTIC_RUN_ID": "slow_links",
                "GLOO_SOCKET_IFNAME": LINK,
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # these hosts have no names, of which torch would warn
            }
            own = [sys.executable, __file__, "--work", name, "--output", folder, "--batch-size", str(batch_size)]
            own += ["--width", str(width)]
            command = ["ip", "netns", "exec", host, *own]
            processes.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"`{name}` ended with exit codes {codes}.")
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def main() -> None:
    """Reads the arguments; prints a table for each speed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4, help="of a rank")
    parser.add_argument("--width", type=int, default=1024, help="of the ten layers")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.batch_size, given.width, given.output)
        return
    print(
        f"{datetime.date.today()}, {os.cpu_count()} x {platform.processor() or platform.machine()}, load "
        f"{os.getloadavg()[0]:.1f} at start, Python {platform.python_version()}, torch {torch.__version__}, lightning "
        f"{lightning.__version__}; {_HOSTS} hosts, one rank and one thread each, batch {given.batch_size} a rank"
    )
    print("| link | side | ms a step | bytes sent a step | faster than DDP | fewer bytes |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for rate in given.rates:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in given.sides}
        with linked_hosts(_HOSTS, None if rate == "none" else rate) as hosts:
            for _ in range(given.rounds):
                for name in given.sides:
                    found[name].append(measure(name, hosts, given.batch_size, given.width))
                    print(f"{rate}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
        medians = {
            name: {key: statistics.median(run[key] for run in runs) for key in ("seconds", "bytes")}
            for name, runs in found.items()
        }
        base = medians.get("DDPStrategy")
        for name, run in medians.items():
            ratios = (
                "|  "
                if base is None
                else f"{base['seconds'] / run['seconds']:.2f} | {base['bytes'] / run['bytes']:.1f}"
            )
            print(f"| {rate} | {name} | {1000 * run['seconds']:.1f} | {run['bytes']:.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
