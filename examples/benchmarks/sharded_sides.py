"""The sides of `sharding_cost.py`: layouts of the same training in this project, and the same by other hands."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.demo.model import ByteGPT

__all__ = ["PAIRS", "LiveBytes", "Side", "Turns", "make_side", "whole_weights"]

# Name of a pair -> (its side by other hands, our side).
PAIRS = {
    "replicas": ("DDPStrategy", "zero_stage=0"),
    "sharded": ("fully_shard", "zero_stage=3"),
    "kept": ("fully_shard, no reshard", "zero_stage=3, keep_gathered"),
}


class TimedGPT(ByteGPT):
    """The demo's model, whose optimizer may be one kernel for all parameters.

    By default AdamW goes from parameter to parameter on a CPU. Those of FSDP2 are DTensors, each operation on which
    takes longer than the arithmetic; with `fused` the optimizer is the same small part of every side's step.
    """

    fused: bool | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), fused=self.fused)


class FullyShardedGPT(TimedGPT):
    """The model with what a user adds to it by hand for FSDP2: each block a unit, the rest the root's.

    `training_step` is not `forward`, but calls it, so the root's hooks see it.
    """

    reshard_after_forward = True

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        fully_shard(self, mesh=mesh, reshard_after_forward=self.reshard_after_forward)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A model and the strategy that trains it."""

    model: ByteGPT
    strategy: Strategy


def make_side(name: str, num_ranks: int, fused: bool, sizes: Mapping[str, Any]) -> Side:
    """A side by its name in `PAIRS`; `sizes` are the model's. Equal random states give equal weights."""
    strategy: Strategy
    if name.startswith("fully_shard"):
        model: TimedGPT = FullyShardedGPT(**sizes)
        model.reshard_after_forward = not name.endswith("no reshard")
        strategy = ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1)
    else:
        model = TimedGPT(**sizes)
        stage = 3 if name.startswith("zero_stage=3") else 0
        keeps = name.endswith("keep_gathered")
        strategy = DDPStrategy() if name == "DDPStrategy" else BigModelStrategy(zero_stage=stage, keep_gathered=keeps)
    model.fused = fused or None
    return Side(model=model, strategy=strategy)


def whole_weights(model: ByteGPT) -> dict[str, Tensor]:
    """Name -> whole parameter. Collective where the model is sharded."""
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
    }


class Turns:
    """Lets one of several threads run at a time, so that whole training loops can alternate in one process.

    A thread that waits for its turn uses no processor time, and ranks that pass their turns on at the same points of
    the same loops never wait for a collective of another loop's.

    Args:
        num_threads: Threads that take part, numbered from 0; thread 0 begins.
    """

    def __init__(self, num_threads: int) -> None:
        self._condition = threading.Condition()
        self._running = list(range(num_threads))
        self._failed = False

    @contextmanager
    def taking_part(self, thread: int) -> Any:
        """Run within this thread's turns; afterwards the others go on without it."""
        self._wait(thread)
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._condition:
                self._running.remove(thread)
                self._condition.notify_all()

    def pass_on(self, thread: int) -> None:
        """Let the next thread run, and come back when it is this one's turn again."""
        with self._condition:
            self._running.append(self._running.pop(0))
            self._condition.notify_all()
        self._wait(thread)

    def _wait(self, thread: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._failed or self._running[0] == thread)
        if self._failed:
            raise RuntimeError("The other side of the comparison failed.")


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators in this thread have made and that are still alive, and their peak.

    Each operator is preceded and followed by a look at the sizes, since storages are also resized without one. Not
    seen: what operators and the communication library keep to themselves. It slows each operation; do not time it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        self._look()
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        self._look()
        return result

    def _look(self) -> None:
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, total)
