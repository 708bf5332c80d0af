"""Checkpoints with a wrong byte somewhere: an error that names the file, never other values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bigmodel.checkpoint import load_sharded, save_sharded
from lightning_bigmodel.testing import run_ranks
from tests.checkpoint.pipe_model import same

WEIGHTS = {"layer.weight": torch.arange(512.0).view(64, 8), "layer.bias": torch.arange(8.0)}


def _save(path: Path) -> None:
    moments = {name: {"exp_avg": -value, "step": torch.tensor(3.0)} for name, value in WEIGHTS.items()}
    save_sharded(
        path,
        model_state=WEIGHTS,
        optimizer_states=[{"state": moments, "param_groups": [{"params": list(WEIGHTS), "lr": 0.1}]}],
        metadata={"global_step": 3, "hyper_parameters": {"width": 1.5}},
        rank_state={"random": torch.arange(100)},
    )


def _load(path: Path) -> Any:
    return load_sharded(path, model_names=list(WEIGHTS), optimizer_names=list(WEIGHTS))


def _is_whole(loaded: Any) -> bool:
    return (
        same(dict(loaded.model_state), WEIGHTS)
        and all(same(loaded.optimizer_states[0]["state"][name]["exp_avg"], -value) for name, value in WEIGHTS.items())
        and loaded.metadata == {"global_step": 3, "hyper_parameters": {"width": 1.5}}
        and same(loaded.rank_state, {"random": torch.arange(100)})
    )


def _said(path: Path) -> str | None:
    """What loading says; None if it gives what was saved."""
    try:
        loaded = _load(path)
    except (ValueError, FileNotFoundError) as error:  # a table may name a file that is not there
        return str(error)
    assert _is_whole(loaded)
    return None


@pytest.mark.filterwarnings("ignore")  # of torch, of what it takes for old files
@pytest.mark.parametrize("name", ["metadata.pt", "rank_00000.pt", "__0_0.distcp", ".metadata"])
def test_a_wrong_byte_anywhere(name: str, tmp_path: Path) -> None:
    """Weights or random states that are silently others, or an error of a pickle that names nothing."""
    path = tmp_path / "last.ckpt"
    _save(path)
    assert _is_whole(_load(path))
    raw, seen = (path / name).read_bytes(), 0
    for at in range(0, len(raw), max(len(raw) // 97, 1)):
        wrong = bytearray(raw)
        wrong[at] ^= 0x41
        (path / name).write_bytes(bytes(wrong))
        said = _said(path)
        assert said is None or str(path) in said, at
        seen += said is not None
    assert seen > 20


@pytest.mark.parametrize("old", ['"tensors"', '"torch_version"', '"shape"', "float32", '"objects"'])
def test_a_damaged_mark(old: str, tmp_path: Path) -> None:
    """A bare KeyError."""
    path = tmp_path / "last.ckpt"
    _save(path)
    mark = path / "bigmodel.json"
    mark.write_text(mark.read_text().replace(old, old.replace("o", "p").replace("t", "u").replace("s", "z")))
    with pytest.raises(ValueError, match=r"bigmodel\.json.*Copy it again"):
        _load(path)


def _load_on_each(path: Path) -> str:
    with pytest.raises(ValueError, match="damaged") as caught:
        _load(path)
    return str(caught.value)


def test_all_ranks_say_the_same(tmp_path: Path) -> None:
    """One rank that ends alone, and one that waits."""
    path = tmp_path / "last.ckpt"
    _save(path)
    file = path / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    at = raw.index(WEIGHTS["layer.weight"].numpy().tobytes()[:512])
    raw[at + 256] ^= 1
    file.write_bytes(bytes(raw))
    said = run_ranks(_load_on_each, 2, path)
    assert said[0] == said[1]
    assert "ranks 0, 1" in said[0]
    assert str(file) in said[0]
