"""What each recompute policy keeps, runs and takes: bytes and operations counted, times on a GPU.

    python activations.py bytes                 # peak bytes, block forwards and operations of one step
    python activations.py micro-batch           # the largest micro-batch within the bytes of --limit
    python activations.py time --device cuda --width 2560 --context 1024 --batch-size 8 --dtype bfloat16

The model is the chain of blocks of a GPT. Bytes are those of the storages that autograd keeps for the blocks, each
once, and with `Offload` those of moved ones that are on the device. Times are medians of rounds in which all sides take
turns; "by hand" is `torch.utils.checkpoint` around each block.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_bigmodel import Full, Offload, Optimal, Selective, SquareRoot
from lightning_bigmodel.recompute.choose import BudgetError
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.moved import MovedTensors
from lightning_bigmodel.recompute.policy import Block, Chain, RecomputePolicy
from lightning_bigmodel.testing import SavedBytes, TinyTransformer


class CountedOffload(Offload):
    """Remembers what moves the tensors."""

    made: MovedTensors | None = None

    def moved(self, device: torch.device) -> MovedTensors:
        """As its class makes it."""
        self.made = super().moved(device)
        return self.made


class Side:
    """One model under one policy."""

    def __init__(self, options: argparse.Namespace, policy: RecomputePolicy | None, *, by_hand: bool = False) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = torch.device(options.device), getattr(torch, options.dtype)
        model = TinyTransformer(options.width, options.num_blocks, options.num_heads, num_positions=options.context)
        self.blocks: Any = model.blocks.to(self.device, self.dtype)
        self.shape = (options.context, options.width)
        self.policy, self.by_hand = policy, by_hand
        self.num_forwards = 0
        for block in self.blocks:
            block.norm_hook = block.attention_norm.register_forward_pre_hook(self._count)
        self.chain = Chain([Block(f"blocks.{i}", block, i) for i, block in enumerate(self.blocks)])
        self.treated = None if policy is None else TreatedBlocks(self.chain, policy.treatments(self.chain))

    def _count(self, module: nn.Module, args: Any) -> None:
        self.num_forwards += 1

    def step(self, batch_size: int) -> None:
        """Forward and backward."""
        hidden: Tensor = torch.ones(batch_size, *self.shape, device=self.device, dtype=self.dtype, requires_grad=True)
        hidden = hidden * 1
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.by_hand else block(hidden)
        hidden.float().mean().backward()
        self.blocks.zero_grad()
        if self.policy is not None and self.treated is not None:
            revised = self.policy.revised(self.chain, lambda own: [copy.deepcopy(own)])
            if revised is not None:
                self.treated.treat(revised)

    def settle(self, batch_size: int) -> None:
        """Let a plan be found."""
        for _ in range(3 if isinstance(self.policy, Optimal) else 0):
            self.step(batch_size)

    def peak_bytes(self, batch_size: int) -> int:
        """Most that is kept in a step."""
        self.settle(batch_size)
        with SavedBytes() as saved:
            self.step(batch_size)
        moved = (
            self.policy.made.peak_device_bytes if isinstance(self.policy, CountedOffload) and self.policy.made else 0
        )
        return saved.peak_bytes + moved


def policies(budget: int | None) -> dict[str, Callable[[], RecomputePolicy | None]]:
    """Name -> what makes it."""
    made: dict[str, Callable[[], RecomputePolicy | None]] = {
        "none": lambda: None,
        "full": Full,
        "full, every second": lambda: Full(every=2),
        "square root": SquareRoot,
        "selective": Selective,
        "offload": lambda: CountedOffload(min_bytes=0),
        "offload, inputs": lambda: CountedOffload(min_bytes=0, saved="inputs"),
    }
    if budget is not None:
        made["optimal"] = lambda: Optimal(budget)
    return made


def count_bytes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak bytes, block forwards and operations of one step; the budget is half of what is kept without a policy."""
    whole = Side(options, None).peak_bytes(options.batch_size)
    results = []
    for name, make in policies(whole // 2).items():
        side = Side(options, make())
        peak = side.peak_bytes(options.batch_size)
        side.num_forwards = 0
        with FlopCounterMode(display=False) as counter:
            side.step(options.batch_size)
        results.append(
            {
                "policy": name if name != "optimal" else "optimal, half the bytes",
                "peak_bytes": peak,
                "share": peak / whole,
                "forwards": side.num_forwards,
                "flops": counter.get_total_flops(),
            }
        )
    return results


def largest_microbatch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The largest number of samples whose peak is within the limit, by bisection."""
    results = []
    for name, make in policies(options.limit).items():

        def fits(batch_size: int, make: Any = make) -> bool:
            try:
                return Side(options, make()).peak_bytes(batch_size) <= options.limit
            except BudgetError:
                return False

        most, too_many = 0, 1
        while fits(too_many):
            most, too_many = too_many, 2 * too_many
        while too_many - most > 1:
            middle = (most + too_many) // 2
            most, too_many = (middle, too_many) if fits(middle) else (most, middle)
        results.append({"policy": name, "samples": most})
    return results


def measure_time(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a step and peak memory, each side by itself on the device, in turns."""
    sides: dict[str, Callable[[], Side]] = {
        name: lambda make=make: Side(options, make())  # type: ignore[misc]  # bound now
        for name, make in policies(options.limit).items()
    }
    sides["by hand"] = lambda: Side(options, None, by_hand=True)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peaks = dict.fromkeys(sides, 0)
    is_cuda = options.device == "cuda"
    for _ in range(options.rounds):
        for name, make in sides.items():
            side = make()
            side.settle(options.batch_size)
            side.step(options.batch_size)
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            for _ in range(options.steps):
                side.step(options.batch_size)
            if is_cuda:
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated()
            seconds[name].append((time.perf_counter() - began) / options.steps)
            if side.treated is not None:
                side.treated.close()
            del side
    base = statistics.median(seconds["none"])
    return [
        {
            "policy": name,
            "seconds": statistics.median(times),
            "ratio": statistics.median(times) / base,
            "peak_memory_bytes": peaks[name],
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "micro-batch", "time"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--num-blocks", type=int, default=24)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--limit", type=int, default=64 * 2**20, help="bytes that blocks may keep")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = {"bytes": count_bytes, "micro-batch": largest_microbatch, "time": measure_time}
    results = work[options.what](options)
    names = list(results[0])
    print(" | ".join(names))
    for result in results:
        print(" | ".join(f"{result[n]:.4g}" if isinstance(result[n], float) else str(result[n]) for n in names))
    if options.json is not None:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": None}, "results": results}))


if __name__ == "__main__":
    main()
