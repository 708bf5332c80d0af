"""Frozen and trained weights of several types in one block, and branches that only some ranks take, under sharding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import CollectiveCounter
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.trainer_modules import trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)


class Adapted(nn.Module):
    """A frozen bf16 layer with a trained fp32 correction of low rank."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) / width)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, hidden: Tensor) -> Tensor:
        """A residual block."""
        base = self.base(hidden.bfloat16()).float()
        return hidden + torch.tanh(base + hidden @ self.down.T @ self.up.T)

    def merged(self) -> Tensor:
        """One weight."""
        return self.base.weight.float() + self.up @ self.down


class LowRank(LightningModule):
    """Only corrections are trained; with `frozen_start`, those of the later blocks only."""

    def __init__(self, frozen_start: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Adapted(16) for _ in range(4))
        self.head = nn.Linear(16, 3).requires_grad_(False)
        if frozen_start:
            self.blocks[:2].requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Classify."""
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        """What takes gradients."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Watch(Callback):
    """Counts the messages of the last batch, and what has gradients."""

    def __init__(self) -> None:
        self.sent: dict[str, tuple[int, int]] = {}
        self.with_gradient: set[str] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to count."""
        self.counter = CollectiveCounter().__enter__()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look."""
        self.with_gradient |= {name for name, p in pl_module.named_parameters() if p.grad is not None}
        holders = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.gradient_bytes = sum(p.grad.nbytes for p in holders)

    def on_train_batch_end(self, *_: Any) -> None:
        """End."""
        self.counter.__exit__(None, None, None)
        self.sent = self.counter.as_dict()


def data(batch_size: int) -> DataLoader[Any]:
    """Features and labels."""
    generator = torch.Generator().manual_seed(1)
    features, labels = torch.randn(16, 16, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    return DataLoader(TensorDataset(features, labels), batch_size=batch_size)


def low_rank(strategy: Any, devices: int, batch_size: int, frozen_start: bool) -> dict[str, Any]:
    """Train."""
    module, watch = LowRank(frozen_start), Watch()
    trainer(strategy, devices, max_epochs=2, callbacks=[watch]).fit(module, data(batch_size))
    return {
        "weights": weights(module),
        "dtypes": [str(p.dtype) for p in module.parameters()],
        "sent": watch.sent,
        "with_gradient": watch.with_gradient,
        "merged": [block.merged().detach().numpy() for block in module.blocks],
    }


def _low_rank(devices: int, batch_size: int, settings: dict[str, Any], frozen_start: bool) -> dict[str, Any]:
    return low_rank(BigModelStrategy(**settings), devices, batch_size, frozen_start)


@pytest.mark.parametrize("frozen_start", [False, True])
@pytest.mark.parametrize(
    ("devices", "data_size", "settings"),
    [
        (2, 2, {"zero_stage": 2}),
        (2, 2, {"zero_stage": 3}),
        (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
        (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}),
    ],
)
def test_only_what_is_trained_has_gradients(
    devices: int, data_size: int, settings: dict[str, Any], frozen_start: bool
) -> None:
    """Frozen weights of another type refused, trained, or paid for as if trained; stages without gradients."""
    expected = low_rank("auto", 1, 8, frozen_start)
    results = run_ranks(_low_rank, devices, devices, 8 // data_size, settings, frozen_start)
    trained = sum(4 * (2 * 16 + 16 * 2) for _ in range(2 if frozen_start else 4))
    for result in results:
        assert result["dtypes"] == expected["dtypes"]
        for name, value in expected["weights"].items():
            np.testing.assert_allclose(result["weights"][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
        for found, wanted in zip(result["merged"], expected["merged"], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert result["with_gradient"] <= expected["with_gradient"]
        assert "base" not in "".join(result["with_gradient"])
        if data_size == devices:  # one micro-batch of all blocks
            assert result["sent"]["reduce_scatter"][1] == trained
    assert set().union(*(result["with_gradient"] for result in results)) == expected["with_gradient"]


class Branches(LightningModule):
    """An encoder that only batches with images use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())  # noqa: E731  # short
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.images = nn.ModuleList(make() for _ in range(2))
        self.never = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The first feature says whether there are images."""
        hidden = batch[0]
        if float(hidden[:, 0].sum()) > 0:
            for block in self.images:
                hidden = hidden + block(hidden)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        """With weight decay, which would move what has a gradient of zero."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def branches(strategy: Any, devices: int, batch_size: int, *, split: int = 1) -> dict[str, Any]:
    """Train on batches of two halves: with images and without."""
    module = Branches()
    features = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
    features[:, 0] = torch.tensor([1.0, -1.0] * 12)  # data ranks take every second sample
    labels = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(3))
    run = trainer(strategy, devices, max_epochs=1, accumulate_grad_batches=split)
    run.fit(module, DataLoader(TensorDataset(features, labels), batch_size=batch_size))
    moments = [len(run.optimizers[0].state.get(p, {})) for p in run.optimizers[0].param_groups[0]["params"]]
    return {"weights": weights(module), "moments": moments}


def _branches(settings: dict[str, Any]) -> dict[str, Any]:
    return branches(BigModelStrategy(**settings), 2, 1)


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_branches_of_some_ranks(settings: dict[str, Any]) -> None:
    """A gather one rank waits for; a gradient divided by the ranks that took the branch; decay of unused weights."""
    # One process takes the samples one by one and accumulates two of them: the same sums.
    expected = branches("auto", 1, 1, split=2)
    for result in run_ranks(_branches, 2, settings):
        for name, value in expected["weights"].items():
            np.testing.assert_allclose(result["weights"][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
        assert [bool(count) for count in result["moments"]] == [bool(count) for count in expected["moments"]]


class Routes(LightningModule):
    """Each sample takes its own way through the blocks: twice through one, in another order, past its call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 3)
        self.how = how

    def forward(self, sample: Tensor, number: int) -> Tensor:
        """(16,) -> (1, 3)."""
        hidden, own, how = sample[None], number % 4, self.how
        if how == "penalty":
            hidden = hidden * self.blocks[number % 2][0].weight.square().mean()
        if how == "order":
            for index in range(4):
                hidden = hidden + self.blocks[(index + own) % 4](hidden)
        elif how == "one":
            hidden = hidden + self.blocks[own](hidden)
        elif how == "long" and not self.training:
            for _ in range(1 + own):  # as the generation of texts of several lengths
                for block in self.blocks:
                    hidden = hidden + block(hidden)
        else:
            for index, block in enumerate(self.blocks):
                hidden = hidden + block(hidden)
                again = {"twice": index == own, "late": number >= 8 and index == own and number % 2 == 0}
                if again.get(how):
                    hidden = hidden + block(hidden)
            if how == "penalty":
                hidden = hidden * self.blocks[number % 2][0].weight.square().mean()
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean loss of the samples."""
        logits = torch.cat([self(x, int(n)) for x, n in zip(batch[0], batch[2], strict=True)])
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs the same."""
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        """With momentum: one wrong gradient stays."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def routes(strategy: Any, devices: int, batch_size: int, how: str) -> dict[str, Any]:
    """Train and validate; a batch is one sample for each of two data ranks."""
    module = Routes(how)
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(
        torch.randn(16, 16, generator=generator), torch.randint(0, 3, (16,), generator=generator), torch.arange(16)
    )
    run = trainer(strategy, devices, max_epochs=2)
    run.fit(module, DataLoader(data, batch_size=batch_size), DataLoader(data, batch_size=batch_size))
    return {**weights(module), "val_loss": float(run.callback_metrics["val_loss"])}


def _routes(devices: int, settings: dict[str, Any], how: str) -> dict[str, Any]:
    return routes(BigModelStrategy(**settings), devices, 1, how)


@pytest.mark.parametrize("how", ["twice", "late", "one", "order", "penalty", "long"])
@pytest.mark.parametrize("settings", [{"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "keep_gathered": True}])
def test_ranks_may_use_blocks_differently(settings: dict[str, Any], how: str) -> None:
    """Parameters put together once more on one rank only: another rank's message in their place, or a hang."""
    expected = routes("auto", 1, 2, how)
    for result in run_ranks(_routes, 2, 2, settings, how):
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


class Skips(LightningModule):
    """Leaves marked samples out, and has no loss where none is left."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        """The mean over what is kept."""
        hidden = batch[0]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        kept = batch[2] > 0
        losses = nn.functional.cross_entropy(self.head(hidden), batch[1], reduction="none")
        return losses[kept].mean() if kept.any() else None

    def configure_optimizers(self) -> Any:
        """With momentum: a step too many would show."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def skips(strategy: Any, devices: int, batch_size: int, accumulate: int) -> dict[str, Any]:
    """Train on 12 batches of 2, of which ranks or all of them have none at times."""
    module = Skips()
    generator = torch.Generator().manual_seed(4)
    marks = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1])
    data = TensorDataset(
        torch.randn(24, 16, generator=generator), torch.randint(0, 3, (24,), generator=generator), marks
    )
    run = trainer(strategy, devices, accumulate_grad_batches=accumulate)
    run.fit(module, DataLoader(data, batch_size=batch_size))
    return weights(module)


def _skips(devices: int, batch_size: int, settings: dict[str, Any], accumulate: int) -> dict[str, Any]:
    return skips(BigModelStrategy(**settings), devices, batch_size, accumulate)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (2, {}),
        (2, {"zero_stage": 1}),
        (2, {"zero_stage": 2}),
        (2, {"zero_stage": 3}),
        (4, {"zero_stage": 3, "pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "GPipe"}),
    ],
)
def test_ranks_without_a_loss(devices: int, settings: dict[str, Any], accumulate: int) -> None:
    """A rank that skips its backward while others reduce theirs, or whose rows lose what the others had."""
    expected = _one_process(accumulate)
    for result in run_ranks(_skips, devices, devices, 1, settings, accumulate):
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def _one_process(accumulate: int) -> dict[str, Any]:
    """By hand: the mean over the kept samples of each window weighs each rank's batch by its one sample."""
    module = Skips()
    generator = torch.Generator().manual_seed(4)
    features, labels = torch.randn(24, 16, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    marks = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1])
    optimizer = module.configure_optimizers()
    size = 2 * accumulate
    for start in range(0, 24, size):
        part = slice(start, start + size)
        optimizer.zero_grad()
        if marks[part].any():
            module.training_step([features[part], labels[part], marks[part]], 0).backward()  # type: ignore[union-attr]
            optimizer.step()
    return weights(module)
