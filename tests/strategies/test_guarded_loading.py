"""Resuming runs no code from a checkpoint, and still brings back what Lightning and its callbacks keep."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    Timer,
)

from lightning_bigmodel import BigModelStrategy, ExponentialMovingAverage
from lightning_bigmodel.testing import RanksFailedError, run_ranks
from tests.strategies.trainer_modules import Classifier, loader, trainer, weights


class Scheduled(Classifier):
    """Hyper-parameters and schedules of many classes; metrics whose states are saved."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.val_accuracy.persistent(True)
        self.val_scores.persistent(True)

    def configure_optimizers(self) -> Any:
        """Schedules within a schedule, one with milestones (a `Counter`), one of a function."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        first = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        second = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], 0.5)
        chain = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": chain, "interval": "step"}}


class Keeps(Callback):
    """A callback of the user's with plain values."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": {1, 2}, "path": Path("/a"), "scores": [torch.ones(2)]}

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Back again."""
        self.state = state_dict


def _callbacks(directory: Path) -> list[Callback]:
    return [
        ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, monitor="val_loss"),
        EarlyStopping("val_loss", patience=9),
        Timer(timedelta(hours=1)),
        GradientAccumulationScheduler({0: 1, 1: 2}),
        ExponentialMovingAverage(decay=0.5),
        Keeps(),
    ]


def _save_and_load(kind: str, tmp_path: Path) -> None:
    config = {"model": AttributeDict(width=8), "args": argparse.Namespace(a=[AttributeDict(b=1)]), "path": Path("/x")}
    options = {"enable_checkpointing": True}
    strategy: Any = BigModelStrategy() if kind == "sharded" else "auto"
    first = _callbacks(tmp_path)
    run = trainer(strategy, 1, max_epochs=2, callbacks=first, **options)
    run.fit(Scheduled(config), loader(32, 8), loader(10, 4))
    path = tmp_path / "epoch=0.ckpt"
    assert path.is_dir() == (kind == "sharded")
    module, second = Scheduled(config), _callbacks(tmp_path)
    again = trainer(BigModelStrategy(), 1, max_epochs=2, callbacks=second, **options)
    again.fit(module, loader(32, 8), loader(10, 4), ckpt_path=str(path))
    assert again.global_step == run.global_step
    schedules = [each.lr_scheduler_configs[0].scheduler for each in (run, again)]
    assert schedules[0].last_epoch == schedules[1].last_epoch > 0
    rates = [each.get_last_lr() for each in schedules]
    assert rates[0] == rates[1], rates
    assert second[1].best_score == first[1].best_score  # type: ignore[attr-defined]
    assert second[5].state["path"] == Path("/a")  # type: ignore[attr-defined]
    averages, expected = second[4].averages, first[4].averages  # type: ignore[attr-defined]
    assert averages.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(averages[name], value)


@pytest.mark.parametrize("kind", ["sharded", "file"])
def test_states_of_lightning_and_its_callbacks_load(kind: str, tmp_path: Path) -> None:
    """Weights only as the rule must not cost the state of an ordinary run."""
    run_ranks(_save_and_load, 1, kind, tmp_path)


class RunsCode:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


class Poisons(Callback):
    """Puts code into a checkpoint."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """As anybody who can write the file could."""
        checkpoint["poison"] = RunsCode()


def _save_poisoned(path: str, devices: int) -> None:
    strategy: Any = BigModelStrategy() if path.endswith("dir") else "auto"
    run = trainer(strategy, devices, callbacks=[Poisons()])
    run.fit(Classifier(), loader(32, 4), loader(10, 4))
    run.save_checkpoint(path)


def _load(path: str, devices: int, weights_only: bool | None) -> dict[str, Any]:
    module = Classifier()
    before = weights(module)
    run = trainer(BigModelStrategy(), devices, max_epochs=2)
    try:
        run.fit(module, loader(32, 4), loader(10, 4), ckpt_path=path, weights_only=weights_only)
    except ValueError:
        assert all((value == before[name]).all() for name, value in weights(module).items())
        raise
    return {"step": run.global_step}


@pytest.mark.parametrize(("name", "devices"), [("dir", 2), ("file.ckpt", 1)])
def test_poison_is_refused_on_every_rank(
    name: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank that refuses alone leaves the others waiting; one that does not is taken over."""
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / name)
    run_ranks(_save_poisoned, devices, path, devices)
    file = "metadata.pt" if name == "dir" else name
    for weights_only in (None, True):
        with pytest.raises(RanksFailedError, match=rf"{file}` holds more than tensors.*getattr") as error:
            run_ranks(_load, 2, path, 2, weights_only)
        assert set(error.value.failures) == {0, 1}
        assert not (tmp_path / "ran").exists()
    assert run_ranks(_load, 2, path, 2, False)[0]["step"] > 0
    assert (tmp_path / "ran").exists()
