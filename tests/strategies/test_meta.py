"""Models built on the meta device: each rank makes what it holds, and the values do not depend on the layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import RanksFailedError
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)


class Table(nn.Module):
    """A buffer that its own method fills."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(width))

    def reset_parameters(self) -> None:
        """Fill the buffer."""
        self.scale.copy_(torch.linspace(0.5, 1.5, len(self.scale)))

    def forward(self, hidden: Tensor) -> Tensor:
        """Scale."""
        return hidden * self.scale


class Block(nn.Module):
    """Linear layers with a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """A residual block."""
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Large(LightningModule):
    """Built in `configure_model`, on the meta device; tied head."""

    def __init__(self, stubborn: bool = False) -> None:
        super().__init__()
        self.stubborn = stubborn

    def configure_model(self) -> None:
        """The documented hook for large models."""
        if hasattr(self, "embed"):
            return
        with torch.device("meta"):
            self.embed, self.table = nn.Embedding(16, 8), Table(8)
            self.blocks = nn.ModuleList(Block(8) for _ in range(4))
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight
            if self.stubborn:
                self.raw = nn.ParameterList([nn.Parameter(torch.ones(3))])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Predict the token itself."""
        hidden = self.table(self.embed(batch))
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        """Made while parameters are on the meta device."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data(batch_size: int) -> DataLoader[Any]:
    """Tokens."""
    return DataLoader(torch.randint(0, 16, (16, 5), generator=torch.Generator().manual_seed(0)), batch_size=batch_size)


def _fit(devices: int, batch_size: int, settings: dict[str, Any], seed: int = 3, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = Large()
    run = trainer(BigModelStrategy(**settings), devices)
    run.fit(module, data(batch_size), **options)
    assert module.head.weight is module.embed.weight
    return weights(module)


@pytest.mark.parametrize(
    ("devices", "data_size", "settings"),
    [
        (2, 2, {}),
        (2, 2, {"zero_stage": 1}),
        (2, 2, {"zero_stage": 3}),
        (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
        (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}),
        (2, 1, {"tensor_parallel_size": 2}),
        (4, 2, {"tensor_parallel_size": 2, "zero_stage": 3}),
    ],
)
def test_values_do_not_depend_on_the_layout(devices: int, data_size: int, settings: dict[str, Any]) -> None:
    """Memory that is never filled, parameters that the optimizer does not hold any more, ties that break."""
    expected = run_ranks(_fit, 1, 1, 8, {})[0]
    for result in run_ranks(_fit, devices, devices, 8 // data_size, settings):
        assert_same_weights(result, expected)


def _load(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    return _fit(2, 4, settings, seed=99, ckpt_path=path)


def _save(path: str) -> dict[str, Any]:
    torch.manual_seed(3)
    module = Large()
    run = trainer(BigModelStrategy(zero_stage=3), 2)
    run.fit(module, data(4))
    run.save_checkpoint(path)
    return weights(module)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("settings", [{"zero_stage": 3}, {"pipeline_parallel_size": 2, "num_microbatches": 2}])
def test_values_come_from_a_checkpoint(settings: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint loaded into parameters that are not there."""
    saved = run_ranks(_save, 2, str(tmp_path / "run.ckpt"))[0]
    for result in run_ranks(_load, 2, str(tmp_path / "run.ckpt"), settings):
        assert_same_weights(result, saved)


def _stubborn() -> None:
    trainer(BigModelStrategy(zero_stage=3), 2).fit(Large(stubborn=True), data(4))


def test_modules_without_first_values_are_named() -> None:
    """Training on memory that nobody has written."""
    with pytest.raises(RanksFailedError, match="`raw`.*has no `reset_parameters`"):
        run_ranks(_stubborn, 2)
