"""Averaged weights in checkpoints, and from one run to the next: in any layout, as one file, and forgotten in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_bigmodel import BigModelStrategy, ExponentialMovingAverage
from lightning_bigmodel.checkpoint import describe, read_index
from lightning_bigmodel.cli import main
from lightning_bigmodel.testing import run_ranks
from tests.callbacks.ema_runs import (
    DECAY,
    NUM_EPOCHS,
    PIPE,
    TOLERANCE,
    Averaged,
    arrays,
    assert_close,
    by_hand,
    check,
    fit,
    fit_on_ranks,
)
from tests.strategies.trainer_modules import loader, numbers, trainer, weights


def check_resumed(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """The second epoch, gone on with from the first one's checkpoint."""
    assert result["num_updates"] == 8
    assert_close(result["weights"], expected["weights"])
    # The sanity check of a resumed run evaluates with the loaded averages already.
    assert_close(result["evaluated"][-1], expected["averages"][-1], partly=True)
    assert result["val_losses"][-1] == pytest.approx(expected["val_losses"][-1], abs=TOLERANCE)
    assert result["test_loss"] == pytest.approx(expected["test_loss"], abs=TOLERANCE)


ELSEWHERE: list[tuple[int, int, dict[str, Any]]] = [
    (2, 4, {"zero_stage": 2}),
    (2, 8, PIPE),
]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resumes_in_other_layouts_and_converts(tmp_path: Path) -> None:
    """Averages that are lost, of the wrong rows, or readable only where they were written; a gather while saving."""
    strategy = {**PIPE, "zero_stage": 3}
    expected = by_hand()
    saved = run_ranks(fit_on_ranks, 4, 4, 4, strategy, directory=str(tmp_path), timeout_seconds=60)
    for result in saved:
        check(result, expected)
    path = str(tmp_path / "epoch=0.ckpt")
    index = read_index(path)
    sizes = [size for name, size in index.files.items() if name.endswith(".distcp")]
    assert len(sizes) == 4
    assert max(sizes) < sum(entry.num_bytes for entry in index.tensors.values()) / 2 + 1500 * len(index.tensors)
    assert describe(path)["extra"]["ema"]["num_elements"] == describe(path)["model"]["num_elements"]
    for world_size, batch_size, other in ELSEWHERE:
        for result in run_ranks(
            fit_on_ranks, world_size, world_size, batch_size, other, resume=path, timeout_seconds=60
        ):
            check_resumed(result, expected)

    single, averaged = tmp_path / "single.ckpt", tmp_path / "averaged.ckpt"
    assert main(["convert", path, str(single)]) == 0
    assert main(["convert", path, str(averaged), "--ema"]) == 0
    file = torch.load(single, weights_only=False)
    assert file["ema_state_dict"].keys() == file["state_dict"].keys() == Averaged().state_dict().keys()
    first = by_hand(num_epochs=1)
    assert_close({n: v.numpy() for n, v in file["state_dict"].items()}, first["weights"])
    assert_close({n: v.numpy() for n, v in file["ema_state_dict"].items()}, first["averages"][0])
    assert_close(weights(Averaged.load_from_checkpoint(averaged)), first["averages"][0])
    assert "optimizer_states" not in torch.load(averaged, weights_only=False)
    check_resumed(fit("auto", 1, 8, resume=str(single)), expected)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_ordinary_file_resumes_in_shards(tmp_path: Path) -> None:
    """A run begun on one device must go on in shards with its averages, each rank with its rows of them."""
    fit("auto", 1, 8, directory=str(tmp_path))
    path = str(tmp_path / "epoch=0.ckpt")
    for result in run_ranks(fit_on_ranks, 2, 2, 4, {"zero_stage": 3}, resume=path, timeout_seconds=60):
        check_resumed(result, by_hand())


class SavesWithin(Callback):
    """Saves while the averages are in place of the weights."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self._path)


def _save_within(devices: int, strategy: dict[str, Any], path: str) -> None:
    run = trainer(BigModelStrategy(**strategy), devices, callbacks=[ExponentialMovingAverage(DECAY), SavesWithin(path)])
    run.fit(Averaged(), loader(32, 8 // devices), loader(10, 4))


@pytest.mark.parametrize("strategy", [{"zero_stage": 1}, {"zero_stage": 3}])
def test_checkpoint_saved_within_an_evaluation(strategy: dict[str, Any], tmp_path: Path) -> None:
    """The averages saved as if they were the training weights: the run would go on from them."""
    path, output = str(tmp_path / "within.ckpt"), tmp_path / "single.ckpt"
    run_ranks(_save_within, 2, 2, strategy, path, timeout_seconds=60)
    assert main(["convert", path, str(output)]) == 0
    file, expected = torch.load(output, weights_only=False), by_hand(num_epochs=1)
    assert_close({n: v.numpy() for n, v in file["state_dict"].items()}, expected["weights"])
    assert_close({n: v.numpy() for n, v in file["ema_state_dict"].items()}, expected["averages"][0])


# -- one run after another ---------------------------------------------------------------------------------------------


def _test_elsewhere(devices: int) -> dict[str, Any]:
    module, average = Averaged(), ExponentialMovingAverage(DECAY)
    first = trainer(BigModelStrategy(**PIPE), devices, max_epochs=NUM_EPOCHS, callbacks=[average])
    first.fit(module, loader(32, 8), loader(10, 4))
    trained = weights(module)
    losses = []
    elsewhere = trainer(BigModelStrategy(zero_stage=3), devices, callbacks=[average])
    for run in (elsewhere, first):
        run.test(module, loader(10, 4), verbose=False)
        losses.append(numbers(run.callback_metrics)["test_loss"])
    after = weights(module)
    held = arrays(average.averages)
    first.fit_loop.max_epochs = NUM_EPOCHS + 1
    first.limit_train_batches = 1
    first.fit(module, loader(32, 8), loader(10, 4))
    rounds = {name: DECAY * value + (1 - DECAY) * weights(module)[name] for name, value in held.items()}
    return {"losses": losses, "trained": trained, "after": after, "by_hand": rounds, "held": arrays(average.averages)}


def test_goes_on_in_another_layout_after_fit() -> None:
    """Averages of another cut of the model in place of its weights, or ones that cannot be updated any more."""
    results = run_ranks(_test_elsewhere, 2, 2, timeout_seconds=60)
    for result in results:
        assert result["losses"] == pytest.approx([by_hand()["test_loss"]] * 2, abs=TOLERANCE)
        assert all((result["after"][name] == value).all() for name, value in result["trained"].items())
        assert_close(result["held"], result["by_hand"], partly=True)
    assert results[0]["held"].keys() | results[1]["held"].keys() == results[0]["trained"].keys()
    assert all(len(result["held"]) < len(result["trained"]) for result in results)


def test_averages_belong_to_their_run(tmp_path: Path) -> None:
    """Averages of an earlier run that go on in the next one, or stand in for weights that were loaded since."""
    module, average = Averaged(), ExponentialMovingAverage(DECAY)
    run = trainer("auto", 1, callbacks=[average])
    run.fit(module, loader(32, 8), loader(10, 4))
    assert_close(arrays(average.averages), by_hand(num_epochs=1)["averages"][0])
    run.fit_loop.max_epochs = NUM_EPOCHS
    run.fit(module, loader(32, 8), loader(10, 4))  # goes on with a new optimizer
    assert average.state_dict()["num_updates"] == 8

    again = Averaged()
    trainer("auto", 1, callbacks=[average]).fit(again, loader(32, 8), loader(10, 4))
    assert_close(arrays(average.averages), by_hand(num_epochs=1)["averages"][0])

    path = tmp_path / "weights.ckpt"
    other = trainer("auto", 1)
    other.fit(Averaged(), loader(8, 8))
    other.save_checkpoint(path, weights_only=True)
    run = trainer("auto", 1, callbacks=[average])
    with pytest.warns(UserWarning, match="has no averages"):
        run.test(again, loader(10, 4), ckpt_path=str(path), verbose=False, weights_only=False)
    assert average.averages == {}
