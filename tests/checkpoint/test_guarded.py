"""No file of a checkpoint runs code when it is loaded, and the values that Lightning keeps load all the same."""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import pathlib
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict

from lightning_bigmodel.checkpoint import (
    convert_checkpoint,
    convert_to_single_file,
    inspect_checkpoint,
    load_sharded,
    read_rank_state,
)
from lightning_bigmodel.cli import main
from tests.checkpoint.pipe_model import make_net, same
from tests.checkpoint.test_convert import save_plainly


class RunsCode:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def _poisoned(directory: Path, where: str) -> Path:
    """A checkpoint with code in one of its pickled parts, its mark in order."""
    target = directory / "last.ckpt"
    if where == "a file":
        torch.save({"state_dict": make_net().state_dict(), "mine": RunsCode()}, target)
        return target
    save_plainly(
        target,
        metadata={"epoch": 0, "mine": RunsCode()} if where == "metadata.pt" else {"epoch": 0},
        rank_state={"mine": RunsCode()} if where == "rank_00000.pt" else {},
        **({"model_state": {"_extra_state": RunsCode()}} if where == "state_dict._extra_state" else {}),
    )
    if where == ".metadata":
        (target / where).write_bytes(pickle.dumps(RunsCode()))
        mark = json.loads((target / "bigmodel.json").read_text())
        mark["files"][where] = (target / where).stat().st_size
        (target / "bigmodel.json").write_text(json.dumps(mark))
    return target


PARTS = ["metadata.pt", "rank_00000.pt", ".metadata", "state_dict._extra_state", "a file"]


@pytest.mark.parametrize("where", PARTS)
def test_no_code_unless_it_is_asked_for(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint from elsewhere that takes over the machine when it is loaded, converted or only looked at."""
    monkeypatch.chdir(tmp_path)
    source = _poisoned(tmp_path, where)
    named = "last.ckpt" if where == "a file" else where.replace(".", r"\.")
    tried: list[Any] = [lambda: convert_checkpoint(source, tmp_path / "out", to="safetensors")]
    if where != "a file":
        tried += [lambda: load_sharded(source), lambda: convert_to_single_file(source, tmp_path / "out.ckpt")]
    else:
        tried += [lambda: convert_checkpoint(source, tmp_path / "out.ckpt")]
    if where == "rank_00000.pt":  # conversions need nothing of the ranks' own
        tried = [lambda: load_sharded(source), lambda: read_rank_state(source, 0)]
    if where == "state_dict._extra_state":  # safetensors has no place for it, so it is not read
        tried = tried[1:]
    for attempt in tried:
        with pytest.raises(ValueError, match=f"{named}.*weights_only"):
            attempt()
    report = inspect_checkpoint(source)
    assert not (tmp_path / "ran").exists()
    if where in ("metadata.pt", "rank_00000.pt", "a file"):
        assert report["needs_code"] == {"last.ckpt" if where == "a file" else where: ["builtins.getattr"]}
    assert bool(report["problems"]) == (where == ".metadata")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt"]


@pytest.mark.parametrize("where", ["metadata.pt", "a file"])
def test_code_runs_where_it_is_asked_for(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A guard that cannot be lifted by name would be lifted by hand."""
    monkeypatch.chdir(tmp_path)
    source = _poisoned(tmp_path, where)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 1
    assert "Use `weights_only=False` if you trust" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "out"), "--allow-code"]) == 0
    assert (tmp_path / "ran").exists()


def _values() -> dict[str, Any]:
    counts = collections.defaultdict(list)
    counts["a"].append(1)
    return {
        "namespace": argparse.Namespace(lr=0.1, nested=AttributeDict(width=[AttributeDict(deep=2)])),
        "attributes": AttributeDict(a=1, b=argparse.Namespace(c=counts)),
        "default": counts,
        "simple": types.SimpleNamespace(q=(1, AttributeDict(x=1))),
        "path": pathlib.Path("/data/train"),
        "times": [datetime.timedelta(3), datetime.datetime(2026, 1, 2)],
        "numpy": [np.float64(2.5), np.int64(3), np.bool_(True), np.str_("abc")],
        "array": np.arange(6.0).reshape(2, 3),
        "sets": ({1, 2}, frozenset([3]), slice(1, 2), range(3), 1j, b"raw"),
        "torch": [torch.device("cpu"), torch.bfloat16, torch.Size([2]), torch.ones(2)],
        "counter": collections.Counter([1, 1, 2]),
        "counter beside others": [collections.Counter([1, 1, 2]), AttributeDict(a=collections.OrderedDict(b=counts))],
    }


@pytest.mark.parametrize("name", list(_values()))
def test_values_of_harmless_classes_load(name: str, tmp_path: Path) -> None:
    """Hyper-parameters that loaded yesterday, refused or of another type today."""
    value = _values()[name]
    save_plainly(tmp_path / "dir", metadata={"hyper_parameters": {"mine": value}}, rank_state={"mine": value})
    loaded = load_sharded(tmp_path / "dir")
    for found in (loaded.metadata["hyper_parameters"]["mine"], (loaded.rank_state or {})["mine"]):
        assert type(found) is type(value)
        if isinstance(value, np.ndarray):
            assert np.array_equal(found, value)
        elif name == "torch":
            assert same(found, value)
        else:
            assert found == value
            assert repr(found) == repr(value)


def test_what_the_user_allowed_stays_allowed(tmp_path: Path) -> None:
    """Torch takes away what a context manager was given, also what was there before."""
    torch.serialization.add_safe_globals([pathlib.PosixPath])
    try:
        save_plainly(tmp_path / "dir", metadata={"path": pathlib.Path("/a"), "values": argparse.Namespace()})
        before = set(torch.serialization.get_safe_globals())
        assert load_sharded(tmp_path / "dir").metadata["path"] == pathlib.Path("/a")
        assert set(torch.serialization.get_safe_globals()) == before
    finally:
        torch.serialization.clear_safe_globals()


def test_a_class_that_the_user_allowed_loads(tmp_path: Path) -> None:
    """Torch's own way to trust one class without trusting the file."""
    save_plainly(tmp_path / "dir", metadata={"mine": Own(3)})
    with pytest.raises(ValueError, match=r"metadata\.pt` holds more .*test_guarded\.Own"):
        load_sharded(tmp_path / "dir")
    with torch.serialization.safe_globals([Own]):
        assert load_sharded(tmp_path / "dir").metadata["mine"].value == 3


class Own:
    def __init__(self, value: int) -> None:
        self.value = value


def test_omegaconf(tmp_path: Path) -> None:
    """The configuration of Hydra users, with an interpolation."""
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"lr": 0.1, "layers": [1, {"name": "x"}], "same": "${lr}", "none": None})
    save_plainly(tmp_path / "dir", metadata={"hyper_parameters": config, "hparams_type": type(config)})
    found = load_sharded(tmp_path / "dir").metadata
    assert found["hyper_parameters"] == config
    assert found["hyper_parameters"].same == 0.1
    assert found["hparams_type"] is type(config)
