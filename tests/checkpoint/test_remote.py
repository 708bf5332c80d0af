"""Checkpoints in an object store: complete or not there, at every moment, and read by any other layout."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel.checkpoint import (
    BackgroundSaver,
    interrupted_names,
    is_remote,
    load_sharded,
    local_copy,
    local_path,
    newest_complete,
    remove_checkpoint,
    save_sharded,
    save_single,
)
from lightning_bigmodel.checkpoint.remote import write_file
from lightning_bigmodel.testing import RanksFailedError, run_ranks
from tests.checkpoint.bucket import objects, operations

URL = "bucket://store/run/last.ckpt"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store's folder; the folder of local copies is beside it."""
    root, local = tmp_path / "root", tmp_path / "local"
    root.mkdir()
    local.mkdir()
    monkeypatch.setenv("BUCKET_ROOT", str(root))
    monkeypatch.setenv("TMPDIR", str(local))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return root


def _environment(root: Path, **more: str) -> dict[str, str]:
    return {"BUCKET_ROOT": str(root), "TMPDIR": str(root.parent / "local"), **more}


def _content(step: int, rank: int) -> dict[str, Any]:
    own = torch.full((50,), float(step))
    return {
        "model_state": {f"own_{rank}": own, "shared": torch.full((4,), float(step))},
        "optimizer_states": [
            {"state": {f"own_{rank}": {"exp_avg": -own}}, "param_groups": [{"params": ["own_0", "own_1"], "lr": 0.1}]}
        ],
        "metadata": {"global_step": step},
        "rank_state": {"rank": rank},
    }


def save(step: int, kind: str = "sharded", url: str = URL) -> str | None:
    """Save one step; the error's text if it fails."""
    tempfile.tempdir = None  # of the environment of this rank
    rank = dist.get_rank()
    try:
        if kind == "async":
            saver = BackgroundSaver(dist.new_group(backend="gloo"))
            saver.save(url, **_content(step, rank))
            saver.finish()
        else:
            (save_sharded if kind == "sharded" else save_single)(url, **_content(step, rank))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def step_of(url: str = URL) -> int:
    """The step a checkpoint is of; all of it must be."""
    with local_copy(url) as copy:
        loaded = load_sharded(copy.path, fetch=copy.fetch)
    assert set(loaded.model_state) == {"own_0", "own_1", "shared"}
    step = loaded.metadata["global_step"]
    assert all((value == step).all() for value in loaded.model_state.values())
    assert all((entry["exp_avg"] == -step).all() for entry in loaded.optimizer_states[0]["state"].values())
    return int(step)


def _read_part() -> tuple[list[str], Any]:
    tempfile.tempdir = None
    with local_copy(URL) as copy:
        loaded = load_sharded(copy.path, model_names=["own_0"], optimizer_names=(), fetch=copy.fetch)
        dist.barrier()
        return sorted(path.name for path in copy.path.iterdir()), loaded.rank_state


def test_each_rank_uploads_its_own_and_a_machine_fetches_what_it_reads_once(root: Path) -> None:
    """Files that another rank's disk does not have; a mark before the rest; all tensors fetched by each rank."""
    assert run_ranks(save, 2, 1, env=_environment(root)) == [None, None]
    done = operations(root)
    puts = [(rank, path.rsplit("/", 1)[1]) for operation, rank, path in done if operation == "put"]
    assert {name for rank, name in puts if rank == 1} == {"rank_00001.pt", "__1_0.distcp"}
    assert puts[-1] == (0, "bigmodel.json")
    assert not [entry for entry in done if entry[0] in ("copy", "get")]  # a free name is written to directly
    assert objects(root) == [
        f"store/run/last.ckpt/{name}"
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "bigmodel.json", "metadata.pt", "rank_00000.pt")
    ] + ["store/run/last.ckpt/rank_00001.pt"]
    for rank, (files, rank_state) in enumerate(run_ranks(_read_part, 2, env=_environment(root))):
        assert "__0_0.distcp" in files
        assert "__1_0.distcp" not in files
        assert rank_state == {"rank": rank}
    got = [path for operation, _, path in operations(root) if operation == "get"]
    assert len(got) == len(set(got)) == 6
    assert step_of() == 1
    assert not list((root.parent / "local").glob("bigmodel-*"))


@pytest.mark.parametrize("kind", ["sharded", "async"])
@pytest.mark.filterwarnings("ignore:.*is gone. a run died while it was replaced")
def test_death_at_every_moment_of_a_replacement(root: Path, kind: str) -> None:
    """Old and new both lost, or a mixture of them that passes for a checkpoint."""
    run_ranks(save, 2, 1, env=_environment(root))
    shutil.copytree(root, root.parent / "keep")
    operations(root)
    run_ranks(save, 2, 2, kind, env=_environment(root))
    num_operations = len([entry for entry in operations(root) if entry[1] == 0])
    assert step_of() == 2
    found = []
    moments = range(1, num_operations + 1) if kind == "sharded" else (1, num_operations // 2, num_operations)
    for at in moments:
        shutil.rmtree(root)
        shutil.copytree(root.parent / "keep", root)
        with pytest.raises(RanksFailedError):
            run_ranks(save, 2, 2, kind, env=_environment(root, BUCKET_KILL_AT=str(at)))
        shutil.rmtree(root.parent / "local")
        (root.parent / "local").mkdir()
        found.append(step_of())
        listed = [URL, *interrupted_names("bucket://store/run")]
        assert newest_complete(listed) == URL
    assert found == sorted(found)
    assert {1, 2} == set(found)
    # The next save leaves nothing of the dead ones.
    run_ranks(save, 2, 3, env=_environment(root))
    assert step_of() == 3
    assert len(objects(root)) == 7


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_one_rank_that_dies_before_it_has_uploaded(root: Path) -> None:
    """A name that was free is taken by what is half written."""
    with pytest.raises(RanksFailedError):
        run_ranks(save, 2, 1, env=_environment(root, BUCKET_KILL_AT="1", BUCKET_RANK="1"))
    assert newest_complete([URL]) is None
    run_ranks(save, 2, 2, env=_environment(root))
    assert step_of() == 2


@pytest.mark.parametrize("kind", ["sharded", "async", "single"])
def test_an_upload_that_fails_on_one_rank(root: Path, kind: str) -> None:
    """One rank that raises alone, or an old checkpoint that is gone."""
    assert run_ranks(save, 2, 1, "sharded", env=_environment(root)) == [None, None]
    before = objects(root)
    url = URL if kind != "single" else "bucket://store/run/one.ckpt"
    said = run_ranks(save, 2, 2, kind, url, env=_environment(root, BUCKET_RANK="1", BUCKET_FAIL="__1_0"))
    assert said[0] == said[1]
    assert "rank 1" in str(said[0])
    assert "the store does not answer" in str(said[0])
    assert "bucket://store/run/" in str(said[0])
    assert objects(root) == before
    assert step_of() == 1


def test_one_file(root: Path) -> None:
    """Parts that stay; a file that is there before it is whole; a folder that a file replaces."""
    url = "bucket://store/run/one.ckpt"
    for step in (1, 2):
        assert run_ranks(save, 2, step, "single", url, env=_environment(root)) == [None, None]
        assert objects(root) == ["store/run/one.ckpt"]
        with local_copy(url) as copy:
            loaded = torch.load(copy.path, weights_only=True)
        assert loaded["global_step"] == step
        assert (loaded["state_dict"]["own_1"] == step).all()
    # A folder takes the place of a file, but not the other way.
    assert run_ranks(save, 2, 3, "sharded", url, env=_environment(root)) == [None, None]
    assert step_of(url) == 3
    for said in run_ranks(save, 2, 4, "single", url, env=_environment(root)):
        assert "FileExistsError" in str(said)
        assert url in str(said)
    assert step_of(url) == 3


def _write(text: str) -> None:
    def make(folder: Path) -> Path:
        (folder / "made").write_text(text)
        return folder / "made"

    write_file("bucket://store/run/one.ckpt", make)


def test_death_at_every_moment_of_a_file(root: Path) -> None:
    """The old one gone before the new one has its name; files of dead runs that pile up in the store."""
    run_ranks(_write, 1, "old", env=_environment(root))
    operations(root)
    run_ranks(_write, 1, "new", env=_environment(root))
    num_operations = len(operations(root))
    assert num_operations >= 3  # up, into place, and the first one removed
    found = []
    for at in range(1, num_operations + 1):
        run_ranks(_write, 1, "old", env=_environment(root))
        assert objects(root) == ["store/run/one.ckpt"]
        with pytest.raises(RanksFailedError):
            run_ranks(_write, 1, "new", env=_environment(root, BUCKET_KILL_AT=str(at)))
        found.append(fsspec.filesystem("bucket").cat_file("store/run/one.ckpt").decode())
    assert found == sorted(found, reverse=True)
    assert set(found) == {"old", "new"}


def test_a_move_that_fails_half_way(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one removed though the old one is damaged."""
    _write("old")
    store = type(fsspec.filesystem("bucket"))

    def half(self: Any, source: str, target: str) -> None:
        self.pipe_file(target, b"ne")
        raise ConnectionError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(store, "mv", half)
        with pytest.raises(OSError, match="could not be replaced.*does not answer.*is whole in `bucket://") as said:
            _write("new")
    beside = re.search(r"is whole in `([^`]+)`", str(said.value))
    assert beside is not None
    assert fsspec.filesystem("bucket").cat_file(beside[1]) == b"new"
    _write("newer")
    assert objects(root) == ["store/run/one.ckpt"]


def test_what_is_no_checkpoint_stays(root: Path) -> None:
    """Data that a name happened to belong to."""
    (root / "store%2Frun%2Flast.ckpt%2Fprecious.txt").write_text("x")
    for said in run_ranks(save, 2, 1, env=_environment(root)):
        assert "FileExistsError" in str(said)
    assert not remove_checkpoint(URL)
    assert objects(root) == ["store/run/last.ckpt/precious.txt"]


def test_removal_and_a_missing_one(root: Path) -> None:
    """Half of a checkpoint that still counts as one."""
    run_ranks(save, 2, 1, env=_environment(root))
    operations(root)
    assert remove_checkpoint(URL)
    removed = [path for operation, _, path in operations(root) if operation == "remove"]
    assert removed[0].endswith("bigmodel.json")
    assert objects(root) == []
    with pytest.raises(FileNotFoundError, match=URL), local_copy(URL):
        pass
    with pytest.raises(ValueError, match=r"nowhere://store/x\.ckpt.*s3fs"), local_copy("nowhere://store/x.ckpt"):
        pass
    with pytest.raises(ValueError, match="no last part"), local_copy("bucket://store"):
        pass


def test_a_copy_that_is_not_whole(root: Path) -> None:
    """A truncated upload that is read."""
    run_ranks(save, 2, 1, env=_environment(root))
    file = root / "store%2Frun%2Flast.ckpt%2F__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"bucket://store/run/last\.ckpt.*__1_0\.distcp.*instead of"):
        step_of()


def test_what_is_remote(tmp_path: Path) -> None:
    """`file://` in a folder named `file:`."""
    assert not is_remote(tmp_path)
    assert not is_remote(f"file://{tmp_path}/x.ckpt")
    assert is_remote("s3://bucket/x.ckpt")
    assert local_path(f"file://{tmp_path}/x.ckpt") == tmp_path / "x.ckpt"
    save_sharded(f"file://{tmp_path}/x.ckpt", **_content(1, 0))
    assert (tmp_path / "x.ckpt" / "bigmodel.json").is_file()
