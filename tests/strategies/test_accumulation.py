"""Accumulation windows: short ones, their messages and calls, windows that change, means over uneven ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import CollectiveCounter
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)
_WIDTH = 8
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {"num_microbatches": 2}),
    "replicas": (2, 2, {}),
    "zero2": (2, 2, {"zero_stage": 2}),
    "zero3": (2, 2, {"zero_stage": 3, "num_microbatches": 2}),
    "tensor": (2, 1, {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*": "colwise_gather"}}),
    "pipe": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "pipe_data": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


class Chain(LightningModule):
    """Linear layers, and a parameter whose gradient is one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.offset = nn.Parameter(torch.zeros(2))
        self.seen: list[float] = []
        self.calls: dict[str, int] = {}
        self.sent: list[int] = []
        self.counter: CollectiveCounter | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A mean over samples."""
        hidden = batch
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return (hidden - 1).square().mean() + self.offset.sum()

    def on_train_batch_start(self, *args: Any) -> None:
        """Counts messages of a batch, the step included."""
        self.counter = CollectiveCounter().__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        """Large ones: gradients and parameters."""
        assert self.counter is not None
        self.counter.__exit__()
        self.sent.append(sum(size for name, size in self.counter.payload_bytes.items() if name in _OF_GRADIENTS))

    def configure_optimizers(self) -> Any:
        """A schedule that steps with each update."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counting(Chain):
    """Counts what the host calls, and sees the gradient."""

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Once a window."""
        self._count("on_before_optimizer_step")
        gradient: Any = self.offset.grad
        strategy = self.trainer.strategy
        if isinstance(strategy, BigModelStrategy):
            gradient = strategy.whole_gradient(self.offset)
        self.seen.append(float("nan") if gradient is None else float(gradient.mean()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Once a window."""
        self._count("on_before_zero_grad")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Once a window."""
        self._count("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def lr_scheduler_step(self, *args: Any, **kwargs: Any) -> None:
        """Once a window."""
        self._count("lr_scheduler_step")
        super().lr_scheduler_step(*args, **kwargs)


_OF_GRADIENTS = ("all_reduce", "reduce_scatter")


class Rows(Dataset[Tensor]):
    """Numbered samples."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(_WIDTH, generator=torch.Generator().manual_seed(index))


class Unsized(IterableDataset[Tensor]):
    """The samples of one data rank of several, without a length."""

    def __init__(self, num_samples: int, rank: int, num_ranks: int) -> None:
        self.num_samples, self.rank, self.num_ranks = num_samples, rank, num_ranks

    def __iter__(self) -> Iterator[Tensor]:
        rows = Rows(self.num_samples)
        for index in range(self.rank, self.num_samples, self.num_ranks):
            yield rows[index]


class Streamed(Counting):
    """From a loader of unknown length."""

    def train_dataloader(self) -> Any:
        """Of this data rank."""
        mesh = getattr(self.trainer.strategy, "mesh", None)
        rank, size = (0, 1) if mesh is None else (mesh.data_rank, mesh.data_size)
        return DataLoader(Unsized(24, rank, size), batch_size=4 // size)


# name: samples, accumulated batches, Trainer's options; batches are of 4 samples of all ranks
WINDOWS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "short_last": (24, 4, {}),
    "short_epoch": (8, 4, {"max_epochs": 2}),
    "limited": (24, 4, {"limit_train_batches": 5}),
    "stopped": (24, 4, {"max_epochs": 3, "max_steps": 3}),
    "unknown_length": (0, 4, {}),
    "odd_batch": (22, 3, {}),
}


def fit(strategy: Any, devices: int, batch_size: int, name: str) -> dict[str, Any]:
    """Train in these windows."""
    num_samples, accumulate, options = WINDOWS[name]
    module = Counting() if num_samples else Streamed()
    data = DataLoader(Rows(num_samples), batch_size=batch_size) if num_samples else None
    run = trainer(strategy, devices, accumulate_grad_batches=accumulate, **{"max_epochs": 1, **options})
    run.fit(module, data)
    return {"weights": weights(module), "seen": module.seen, "calls": module.calls, "step": run.global_step}


def _fit(settings: dict[str, Any], devices: int, batch_size: int, name: str) -> dict[str, Any]:
    return fit(BigModelStrategy(**settings), devices, batch_size, name)


def _by_hand(name: str) -> tuple[dict[str, Any], int]:
    """Windows of pooled samples, stepped by hand."""
    num_samples, accumulate, options = WINDOWS[name]
    num_samples = num_samples or 24
    module = Chain()
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    rows, num_steps = Rows(num_samples), 0
    for _ in range(options.get("max_epochs", 1)):
        batches = [list(range(at, min(at + 4, num_samples))) for at in range(0, num_samples, 4)]
        batches = batches[: options.get("limit_train_batches")]
        for at in range(0, len(batches), accumulate):
            if num_steps == options.get("max_steps", -1):
                break
            indices = [index for batch in batches[at : at + accumulate] for index in batch]
            optimizer.zero_grad()
            module.training_step(torch.stack([rows[index] for index in indices]), 0).backward()
            optimizer.step()
            schedule.step()
            num_steps += 1
    return weights(module), num_steps


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_are_means_over_their_samples(layout: str, name: str) -> None:
    """A short window divided by the full number of batches; hooks that fire for each batch or micro-batch."""
    devices, data_size, settings = LAYOUTS[layout]
    expected, num_steps = _by_hand(name)
    for found in run_ranks(_fit, devices, settings, devices, 4 // data_size, name):
        assert_same_weights(found["weights"], expected)
        assert found["step"] == num_steps
        assert found["calls"] == dict.fromkeys(found["calls"], num_steps)
        assert set(found["calls"]) >= {"optimizer_step", "on_before_optimizer_step", "on_before_zero_grad"}
        seen = [value for value in found["seen"] if value == value]  # no number where another stage has it
        assert seen == pytest.approx([1.0] * len(seen))


def scheduled(strategy: Any, devices: int, batch_size: int) -> dict[str, Any]:
    """Windows of one batch, then of three, then of two, by epoch."""
    module = Chain()
    callback = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
    run = trainer(strategy, devices, max_epochs=3, callbacks=[callback])
    run.fit(module, DataLoader(Rows(24), batch_size=batch_size))
    return {"weights": weights(module), "step": run.global_step}


def _scheduled(settings: dict[str, Any], devices: int, batch_size: int) -> dict[str, Any]:
    return scheduled(BigModelStrategy(**settings), devices, batch_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_that_change_by_epoch(layout: str) -> None:
    """Weights taken relative to a window of the size the run began with."""
    expected = scheduled("auto", 1, 4)
    devices, data_size, settings = LAYOUTS[layout]
    for found in run_ranks(_scheduled, devices, settings, devices, 4 // data_size):
        assert_same_weights(found["weights"], expected["weights"])
        assert found["step"] == expected["step"] == 6 + 2 + 3


def _sent(settings: dict[str, Any]) -> tuple[list[int], int]:
    module = Chain()
    run = trainer(BigModelStrategy(**settings), 2, accumulate_grad_batches=3, max_epochs=1)
    run.fit(module, DataLoader(Rows(24), batch_size=4))
    return module.sent, sum(parameter.numel() * 4 for parameter in module.parameters())


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 1}, {"zero_stage": 2, "reduce_every_microbatch": False}])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_are_sent_once_a_window(settings: dict[str, Any], num_microbatches: int) -> None:
    """A message of all gradients for each batch or micro-batch."""
    for sent, num_bytes in run_ranks(_sent, 2, {**settings, "num_microbatches": num_microbatches}):
        assert all(size < 1024 < num_bytes for size in (sent[0], sent[1]))
        assert num_bytes <= sent[2] < num_bytes + 1024


class Logs(Chain):
    """Logs a constant, and a mean over samples, with batches of its own size."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Synchronised, as the host's documentation says."""
        self.log("one", 1.0, sync_dist=True, batch_size=len(batch))
        self.log("mean", batch.mean(), sync_dist=True, batch_size=len(batch))


def _logged(settings: dict[str, Any], devices: int) -> dict[str, float]:
    module = Logs()
    mesh_rows = [[0], [1], [2]], [[3, 4], [5, 6], [7, 8]]
    rows = Rows(9)

    class Own(Dataset[Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Tensor:
            batch = mesh_rows[run.strategy.mesh.data_rank][index]  # type: ignore[attr-defined]
            return torch.stack([rows[row] for row in batch])

    run = trainer(BigModelStrategy(**settings), devices, use_distributed_sampler=False)
    (found,) = run.validate(module, DataLoader(Own(), batch_size=None), verbose=False)
    return dict(found)


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3}])
def test_means_over_ranks_with_unequal_batches(settings: dict[str, Any]) -> None:
    """A mean of whole numbers that is rounded on the way: 1.125 for a constant of one."""
    expected = torch.stack([Rows(9)[index] for index in range(9)]).mean()
    for found in run_ranks(_logged, 2, settings, 2):
        assert found["one"] == 1.0
        assert found["mean"] == pytest.approx(float(expected), rel=1e-6)
