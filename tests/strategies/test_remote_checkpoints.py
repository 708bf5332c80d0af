"""A Trainer whose checkpoints are in an object store."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bigmodel.testing import run_ranks
from tests.checkpoint.bucket import objects
from tests.strategies.test_checkpoint_kinds import LAYOUTS, fit

FOLDER = "bucket://store/run"


class Counts(Callback):
    """How many batches a run trains on."""

    num_batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches += 1


def fit_remote(layout: str, settings: dict[str, Any], resumes: str | None, epochs: int, saves_last: bool) -> Any:
    """Train with `save_top_k=1`, or go on."""
    tempfile.tempdir = None  # of the environment of this rank
    keep = ModelCheckpoint(dirpath=FOLDER, monitor="loss", filename="{epoch}", save_top_k=1, save_last=saves_last)
    path = f"{FOLDER}/own.ckpt" if resumes is None else resumes
    counts = Counts()
    options = {"callbacks": [keep, counts], "enable_checkpointing": True}
    weights = fit(layout, path, settings, resumes is not None, epochs, **options)
    return weights, keep.best_model_path, counts.num_batches


@pytest.mark.parametrize(
    ("layout", "other", "settings", "resumes"),
    [
        ("zero3", "pipe", {}, "last"),
        ("pipe", "zero1", {"async_checkpoint": True}, f"{FOLDER}/own.ckpt"),
        ("zero1", "zero3", {"checkpoint_format": "single"}, f"{FOLDER}/last.ckpt"),
    ],
)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_goes_on_from_the_store(
    layout: str, other: str, settings: dict[str, Any], resumes: str, tmp_path: Path
) -> None:
    """A local folder of the name `bucket:`, old checkpoints that stay, or a run that begins anew."""
    root, local = tmp_path / "root", tmp_path / "local"
    root.mkdir()
    local.mkdir()
    env = {"BUCKET_ROOT": str(root), "TMPDIR": str(local)}
    straight = run_ranks(fit, 1, "one", str(tmp_path / "straight.ckpt"), {}, False, 3)[0]
    for _, best, _ in run_ranks(fit_remote, LAYOUTS[layout][0], layout, settings, None, 2, True, env=env):
        assert best == f"{FOLDER}/epoch=1.ckpt"
    names = {name.split("/")[2] for name in objects(root)}
    assert names == {"epoch=1.ckpt", "last.ckpt", "own.ckpt"}
    for found, _, num_batches in run_ranks(fit_remote, LAYOUTS[other][0], other, settings, resumes, 3, True, env=env):
        assert num_batches == 4  # those of the third epoch
        for name, value in straight.items():
            assert found[name] == pytest.approx(value, abs=1e-5), name
    assert {name.split("/")[2] for name in objects(root)} == {"epoch=2.ckpt", "last.ckpt", "own.ckpt"}
    assert not list(local.glob("bigmodel-*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local", "log.txt", "root", "straight.ckpt"]
