"""`bigmodel inspect`: what there is, whether it is whole, and that looking runs nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_bigmodel.checkpoint import convert_checkpoint, inspect_checkpoint
from lightning_bigmodel.cli import main
from tests.checkpoint.test_convert import save_plainly

STATE = {"a.weight": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.bfloat16)}
SHAPES = {"a.weight": {"shape": [3, 2], "dtype": "float32"}, "b": {"shape": [2], "dtype": "bfloat16"}}


def _save(path: Path, kind: str) -> Path:
    if kind == "sharded":
        save_plainly(
            path / "dir",
            model_state=STATE,
            optimizer_states=None,
            metadata={"epoch": 2, "global_step": 7},
            layout={"pipe": 1},
        )
        return path / "dir"
    if kind == "ckpt":
        moments = {"state": {0: {"exp_avg": torch.ones(3, 2)}}, "param_groups": [{"params": [0]}]}
        state = {**STATE, "tied": STATE["a.weight"]}
        torch.save({"state_dict": state, "epoch": 2, "global_step": 7, "optimizer_states": [moments]}, path / "f.ckpt")
        return path / "f.ckpt"
    if kind == "safetensors":
        save_file(STATE, path / "f.safetensors", {"tied": "b"})
        return path / "f.safetensors"
    torch.save({"state_dict": STATE}, path / "f.ckpt")
    convert_checkpoint(path / "f.ckpt", path / "hub", to="safetensors", max_shard_size=20)
    return path / "hub"


@pytest.mark.parametrize("kind", ["sharded", "ckpt", "safetensors", "folder"])
def test_what_there_is(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report that misses a tensor, or says another step than the checkpoint's."""
    path = _save(tmp_path, kind)
    found = inspect_checkpoint(path)
    prefix = "state_dict." if kind in ("sharded", "ckpt") else ""
    assert {key: found["tensors"][prefix + key] for key in SHAPES} == SHAPES
    assert found["problems"] == []
    assert found["needs_code"] == {}
    if prefix:
        assert (found["epoch"], found["global_step"]) == (2, 7)
    if kind == "ckpt":
        assert found["tensors"]["optimizer_0.state.0.exp_avg"]["shape"] == [3, 2]
        assert found["same_tensor"] == {"tied": "a.weight"}
    if kind == "safetensors":
        assert found["same_tensor"] == {"tied": "b"}
    if kind == "sharded":
        assert (found["layout"], found["num_ranks"]) == ({"pipe": 1}, 1)
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"{prefix}a.weight" in text
    assert "float32 [3, 2]" in text
    assert text.rstrip().endswith("complete")
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize(
    ("kind", "file", "keep", "message"),
    [
        ("sharded", "__0_0.distcp", 100, "`__0_0.distcp` has 100 bytes instead of"),
        ("sharded", "metadata.pt", None, "`metadata.pt` is missing"),
        ("sharded", "bigmodel.json", None, "no completion mark"),
        ("sharded", "bigmodel.json", 10, "completion mark `bigmodel.json` is damaged"),
        ("ckpt", "", 300, "f.ckpt` is damaged"),
        ("safetensors", "", -2, "f.safetensors` has .* bytes instead of"),
        ("folder", "model-00002-of-00002.safetensors", None, "`model-00002-of-00002.safetensors` missing"),
        ("folder", "model-00002-of-00002.safetensors", -1, "model-00002-of-00002.safetensors` has"),
        ("folder", "model.safetensors.index.json", 5, "index.json` is damaged"),
    ],
)
def test_what_is_missing_or_truncated(
    kind: str, file: str, keep: int | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that is not whole must not look so to a script that goes by the exit code."""
    path = _save(tmp_path, kind)
    broken = path / file if file else path
    if keep is None:
        broken.unlink()
    else:
        broken.write_bytes(broken.read_bytes()[:keep])
    (problem,) = inspect_checkpoint(path)["problems"]
    assert main(["inspect", str(path)]) == 1
    assert f"NOT COMPLETE: {problem}" in capsys.readouterr().out
    assert re.search(message, problem), problem


def test_no_checkpoint_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and a failure for what is not there, or is something else."""
    assert main(["inspect", str(tmp_path / "missing")]) == 1
    assert "There is no checkpoint" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 1
    assert "a folder without a checkpoint" in capsys.readouterr().err


def test_a_file_that_needs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said by name, and read where it is asked for."""
    torch.save({"state_dict": STATE, "mine": _Own()}, tmp_path / "f.ckpt")
    assert main(["inspect", str(tmp_path / "f.ckpt")]) == 0
    text = capsys.readouterr().out
    assert "f.ckpt needs code to be loaded" in text
    assert "test_inspection._Own" in text
    assert main(["inspect", str(tmp_path / "f.ckpt"), "--allow-code"]) == 0
    assert "a.weight" in capsys.readouterr().out


class _Own:
    """Of the user's."""
