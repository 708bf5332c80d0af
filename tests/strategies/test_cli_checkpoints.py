"""`--ckpt_path` of LightningCLI with a sharded directory: the module that was saved, as with a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.checkpoint import convert_to_single_file
from lightning_bigmodel.testing import run_ranks

# Lightning calls what newer jsonargparse deprecates.
pytestmark = pytest.mark.filterwarnings(r"ignore:(?s).*(was deprecated in v4|JsonargparseDeprecationWarning)")


class Sized(LightningModule):
    """Has the width it is told."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Regression."""
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        """The plainest."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Parsed(LightningCLI):
    """Runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing."""


def _save(path: str) -> None:
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BigModelStrategy(zero_stage=1),
        max_epochs=1,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(Sized(7), DataLoader(TensorDataset(torch.ones(8, 7)), batch_size=2))
    trainer.save_checkpoint(path)


def _parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, Any]:
    monkeypatch.setattr(sys, "argv", ["train.py"])  # LightningCLI warns where the process has arguments too
    cli = Parsed(
        Sized,
        seed_everything_default=False,
        args=["fit", "--trainer.accelerator=cpu", "--trainer.logger=false", *arguments],
    )
    return cli.model.layers[0].in_features, cli.config["fit"]["ckpt_path"]


def test_hyper_parameters_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the default width, whose weights then do not fit; a path of ours in what the run is told."""
    sharded, single = str(tmp_path / "last.ckpt"), str(tmp_path / "one.ckpt")
    run_ranks(_save, 2, sharded)
    convert_to_single_file(sharded, single)
    assert _parsed(monkeypatch) == (3, None)
    assert _parsed(monkeypatch, f"--ckpt_path={single}") == (7, single)
    assert _parsed(monkeypatch, f"--ckpt_path={sharded}", "--model.width=5") == (7, sharded)
    assert _parsed(monkeypatch, "--ckpt_path=last") == (3, "last")
    (tmp_path / "last.ckpt" / "bigmodel.json").unlink()
    with pytest.raises(ValueError, match=r"last\.ckpt.*incomplete"):
        _parsed(monkeypatch, f"--ckpt_path={sharded}")
