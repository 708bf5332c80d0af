"""Converting and inspecting what lies in a remote place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_bigmodel.checkpoint import convert_checkpoint, inspect_checkpoint, save_sharded
from lightning_bigmodel.cli import main
from tests.checkpoint.pipe_model import same

ROOT = "memory://formats"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A sharded directory of one rank; the remote place is empty."""
    store = fsspec.filesystem("memory")
    if store.exists(ROOT):
        store.rm(ROOT, recursive=True)
    content: dict[str, Any] = {
        "model_state": {"net.weight": torch.randn(3, 2), "net.bias": torch.randn(3)},
        "optimizer_states": None,
        "metadata": {"epoch": 1, "global_step": 8},
        "rank_state": {},
    }
    save_sharded(tmp_path / "saved.ckpt", **content)
    return tmp_path / "saved.ckpt"


def names(url: str) -> list[str]:
    store = fsspec.filesystem("memory")
    return sorted(entry["name"].rpartition("/")[2] for entry in store.ls(url)) if store.exists(url) else []


def test_every_kind_there_and_back(saved: Path, tmp_path: Path) -> None:
    """Content lost on the way, or pieces left in the store."""
    convert_checkpoint(saved, tmp_path / "expected.ckpt")
    expected = torch.load(tmp_path / "expected.ckpt", weights_only=True)
    convert_checkpoint(saved, f"{ROOT}/file.ckpt")
    convert_checkpoint(f"{ROOT}/file.ckpt", f"{ROOT}/folder.ckpt")
    convert_checkpoint(f"{ROOT}/folder.ckpt", tmp_path / "back.ckpt")
    found = torch.load(tmp_path / "back.ckpt", weights_only=True)
    assert all(same(found[key], expected[key]) for key in expected)
    convert_checkpoint(f"{ROOT}/folder.ckpt", f"{ROOT}/hub", to="safetensors", max_shard_size=24)
    convert_checkpoint(f"{ROOT}/hub", tmp_path / "weights.ckpt")
    assert same(torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"], expected["state_dict"])
    assert names(ROOT) == ["file.ckpt", "folder.ckpt", "hub"]
    assert "bigmodel.unfinished" not in names(f"{ROOT}/folder.ckpt")
    convert_checkpoint(f"{ROOT}/hub", f"{ROOT}/folder.ckpt", to="sharded", overwrite=True)
    assert inspect_checkpoint(f"{ROOT}/folder.ckpt")["global_step"] == 0  # that of weights alone
    assert names(ROOT) == ["file.ckpt", "folder.ckpt", "hub"]


def test_what_is_there_stays(saved: Path) -> None:
    """An older checkpoint that is gone, or half of two."""
    convert_checkpoint(saved, f"{ROOT}/file.ckpt")
    convert_checkpoint(saved, f"{ROOT}/hub", to="safetensors")
    before = fsspec.filesystem("memory").cat_file(f"{ROOT}/file.ckpt")
    for name, overwrite in (("file.ckpt", False), ("hub", True)):
        with pytest.raises(FileExistsError, match=f"{ROOT}/{name}` exists"):
            convert_checkpoint(saved, f"{ROOT}/{name}", to="safetensors", overwrite=overwrite)
    with pytest.raises(FileNotFoundError, match=f"no checkpoint `{ROOT}/none.ckpt`"):
        convert_checkpoint(f"{ROOT}/none.ckpt", f"{ROOT}/file.ckpt", overwrite=True)
    assert fsspec.filesystem("memory").cat_file(f"{ROOT}/file.ckpt") == before
    assert names(ROOT) == ["file.ckpt", "hub"]


def test_what_is_inside(saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are fetched to read their names; a missing file that nobody notices."""
    store = fsspec.filesystem("memory")
    assert main(["convert", str(saved), f"{ROOT}/copy.ckpt", "--to", "ckpt"]) == 0
    convert_checkpoint(f"{ROOT}/copy.ckpt", f"{ROOT}/last.ckpt", to="sharded")
    local = inspect_checkpoint(saved)
    taken: list[str] = []
    get_file = type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda *args: taken.append(args[1]) or get_file(*args))
    found = inspect_checkpoint(f"{ROOT}/last.ckpt")
    assert found["path"] == f"{ROOT}/last.ckpt"
    for key in ("kind", "tensors", "global_step", "tensor_bytes", "problems"):
        assert found[key] == local[key], key
    assert taken
    assert not [name for name in taken if name.endswith(".distcp")]
    part = next(name for name in names(f"{ROOT}/last.ckpt") if name.endswith(".distcp"))
    store.rm_file(f"{ROOT}/last.ckpt/{part}")
    capsys.readouterr()
    assert main(["inspect", f"{ROOT}/last.ckpt"]) == 1
    assert f"`{part}` is missing" in capsys.readouterr().out
