"""Checkpoints of a pipelined run: resumed, converted, loaded by plain Lightning, and from a plain file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bigmodel.cli import main
from lightning_bigmodel.testing import TinyTransformer, run_ranks
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import Classifier, entries, loader, pipeline, trainer, weights


def train(strategy: Any, devices: int, batch_size: int, epochs: int, **options: Any) -> dict[str, Any]:
    """Train for some epochs, from a checkpoint where one is given."""
    resume = options.pop("resume", None)
    module = Classifier()
    run = trainer(strategy, devices, max_epochs=epochs)
    run.fit(module, loader(32, batch_size), loader(10, 4), ckpt_path=resume)
    return {"weights": weights(module), "losses": module.losses}


def _train(devices: int, batch_size: int, epochs: int, strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    return train(pipeline(**strategy), devices, batch_size, epochs, **options)


def _train_and_save(devices: int, batch_size: int, directory: str, strategy: dict[str, Any]) -> dict[str, Any]:
    module = Classifier()
    keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, save_last=True)
    run = trainer(pipeline(**strategy), devices, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, loader(32, batch_size), loader(10, 4))
    return {"weights": weights(module), "losses": module.losses}


@pytest.mark.parametrize("world_size", [2, 4])
def test_resume_equals_the_uninterrupted_run(world_size: int, tmp_path: Path) -> None:
    """Moments, group options, schedules or loop counters lost between save and load."""
    batch_size = 8 // (world_size // 2)
    saved = run_ranks(_train_and_save, world_size, world_size, batch_size, str(tmp_path), {})
    assert {"epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"} <= set(entries(tmp_path))
    assert (tmp_path / "epoch=0.ckpt").is_dir()
    resumed = run_ranks(_train, world_size, world_size, batch_size, 2, {}, resume=str(tmp_path / "epoch=0.ckpt"))
    for before, after in zip(saved, resumed, strict=True):
        assert after["losses"] == before["losses"][4:]
        for name, value in before["weights"].items():
            assert (after["weights"][name] == value).all(), name


def test_another_schedule_and_rank_count_resume_too(tmp_path: Path) -> None:
    """A checkpoint that only loads where it was written."""
    saved = run_ranks(_train_and_save, 2, 2, 8, str(tmp_path), {})
    path = str(tmp_path / "epoch=0.ckpt")
    elsewhere = run_ranks(
        _train, 4, 4, 8, 2, {"pipeline_parallel_size": 4, "schedule": "GPipe"}, resume=path
    ) + run_ranks(_train, 2, 2, 8, 2, {"schedule": "ZBVZeroBubble"}, resume=path)
    for result in elsewhere:
        assert_same_weights(result["weights"], saved[0]["weights"])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # resumed without its ModelCheckpoint
def test_converted_file_is_an_ordinary_lightning_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A consolidated file that lacks a weight, or whose optimizer state plain Lightning cannot use."""
    saved = run_ranks(_train_and_save, 2, 2, 8, str(tmp_path), {})
    output = tmp_path / "out.ckpt"
    assert main(["convert", str(tmp_path / "epoch=1.ckpt"), str(output)]) == 0
    module = Classifier.load_from_checkpoint(output)
    assert_same_weights(weights(module), saved[0]["weights"])
    first = tmp_path / "first.ckpt"
    assert main(["convert", str(tmp_path / "epoch=0.ckpt"), str(first)]) == 0
    resumed = train("auto", 1, 8, 2, resume=str(first))
    assert_same_weights(resumed["weights"], saved[0]["weights"])
    capsys.readouterr()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_plain_lightning_file_resumes_in_a_pipeline(tmp_path: Path) -> None:
    """A run begun on one device must go on in a pipeline from its own checkpoint."""
    module = Classifier()
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = trainer("auto", 1, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, loader(32, 8), loader(10, 4))
    for result in run_ranks(_train, 2, 2, 8, 2, {}, resume=str(tmp_path / "epoch=0.ckpt")):
        assert_same_weights(result["weights"], weights(module))


def _tied(directory: str) -> dict[str, Any]:
    module = TinyTransformer(tied_head=True)
    run = trainer(pipeline(), 2, max_steps=2, max_epochs=None)
    batches = torch.utils.data.DataLoader(module.dataset(16), batch_size=8)
    run.fit(module, batches)
    run.save_checkpoint(f"{directory}/tied.ckpt")
    same = module.get_parameter("embedding.weight") is module.get_parameter("head.weight")
    return {"weights": weights(module), "same": same}


def test_tied_parameter_stays_one_and_is_saved_under_both_names(tmp_path: Path) -> None:
    """A head that is silently untied, or missing from the checkpoint."""
    results = run_ranks(_tied, 2, str(tmp_path))
    assert all(result["same"] for result in results)
    output = tmp_path / "out.ckpt"
    assert main(["convert", str(tmp_path / "tied.ckpt"), str(output)]) == 0
    module = TinyTransformer(tied_head=True)
    state = torch.load(output, weights_only=False)["state_dict"]
    module.load_state_dict(state, strict=True)
    assert_same_weights(weights(module), results[0]["weights"])
