"""A save that dies at any moment leaves the checkpoint before, whole, or the new one, whole."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_bigmodel.checkpoint import (
    find_checkpoint,
    interrupted_names,
    is_complete,
    load_sharded,
    newest_complete,
    remove_checkpoint,
    save_sharded,
)
from lightning_bigmodel.testing import RanksFailedError, run_ranks
from tests.checkpoint.killed_saves import save_steps, step_of, values

NUM_MOMENTS = 30  # of each kind of save


def resumable(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*.ckpt") if is_complete(path)] + interrupted_names(directory)


@pytest.mark.filterwarnings("ignore:.*is gone. a run died while it was replaced")
@pytest.mark.parametrize("is_async", [False, True])
def test_killed_at_random_moments(tmp_path: Path, is_async: bool) -> None:
    """SIGKILL of one rank or all, at an operation on a file or a time: there is always one whole checkpoint."""
    choose = random.Random(7 + is_async)
    step, saves = 1, 3
    num_events = run_ranks(save_steps, 2, tmp_path, step, saves, is_async, None, [], 0)
    assert min(num_events) > 3 * saves  # moments to choose from
    step += saves
    kinds = set()
    for number in range(NUM_MOMENTS):
        own = choose.randrange(2)
        victims = choose.choice([[own], [0, 1]])
        is_timed = number % 3 == 2
        at = choose.uniform(0.0, 0.1) if is_timed else choose.randrange(1, num_events[own] + 1)
        num_steps = 500 if is_timed else saves
        before = step_of(find_checkpoint(tmp_path / "last.ckpt"))
        begin = time.monotonic()
        with pytest.raises(RanksFailedError) as caught:
            run_ranks(save_steps, 2, tmp_path, step, num_steps, is_async, at, victims, own)
        assert time.monotonic() - begin < 30
        # The survivor raised by itself, and was not found waiting.
        assert not any("still running" in text for text in caught.value.failures.values()), caught.value
        (found,) = resumable(tmp_path)
        assert newest_complete([found]) == found
        asked = json.loads((tmp_path / "asked.json").read_text())
        now = step_of(find_checkpoint(found))
        # The one of before, or one whose save had begun: the last that was noted, or the one after it.
        assert now == before or step <= now <= max(asked + 1, step)
        kinds.add(("last.ckpt" if (tmp_path / "last.ckpt").exists() else "exchange", now > before))
        assert not [path for path in tmp_path.glob("*.ckpt") if not is_complete(path)]
        step += num_steps
    assert {now_later for _, now_later in kinds} == {False, True}  # moments before and after a completion
    run_ranks(save_steps, 2, tmp_path, step, 1, is_async, None, [], 0)
    assert step_of(tmp_path / "last.ckpt") == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked.json", "last.ckpt"]


@pytest.mark.filterwarnings("ignore:.*is gone. a run died while it was replaced")
def test_every_moment_of_an_exchange(tmp_path: Path) -> None:
    """The two renames leave a moment without the name, which random moments may miss."""
    run_ranks(save_steps, 2, tmp_path, 1, 1, False, None, [], 0)
    keep = tmp_path / "keep"
    shutil.copytree(tmp_path, keep, ignore=lambda *_: ["keep"])
    num_events = run_ranks(save_steps, 2, tmp_path, 2, 1, False, None, [], 0)[0]
    seen = set()
    for at in range(num_events - 14, num_events + 1):
        directory = tmp_path / f"at_{at}"
        shutil.copytree(keep, directory)
        with pytest.raises(RanksFailedError):
            run_ranks(save_steps, 2, directory, 2, 1, False, at, [0, 1], 0)
        (found,) = resumable(directory)
        seen.add((step_of(find_checkpoint(found)), (directory / "last.ckpt").exists()))
    assert {(1, True), (2, False), (2, True)} <= seen


def full_disk(directory: Path, how: str, is_async: bool) -> str:
    if how == "quota" and dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        save_steps(directory, 2, 1, is_async, None, [], 0)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("the save did not fail")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return said


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 256 KiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs the rights of root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(directory: Path, except_bytes: int) -> None:
    """Leave so many bytes free."""
    free = shutil.disk_usage(directory).free
    (directory / "filler").write_bytes(b"x" * max(free - except_bytes, 0))


@pytest.mark.parametrize("is_async", [False, True])
def test_quota_of_one_rank(tmp_path: Path, is_async: bool) -> None:
    """One rank that cannot write must stop the others, and the checkpoint before stays."""
    run_ranks(save_steps, 2, tmp_path, 1, 1, is_async, None, [], 0)
    said = run_ranks(full_disk, 2, tmp_path, "quota", is_async)
    assert said[0] == said[1]
    assert "failed on rank 1: " in said[0]
    assert os.strerror(errno.EFBIG) in said[0]
    assert step_of(tmp_path / "last.ckpt") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    run_ranks(save_steps, 2, tmp_path, 3, 1, is_async, None, [], 0)
    assert step_of(tmp_path / "last.ckpt") == 3


@pytest.mark.parametrize("free_bytes", [0, 8192, 16384])
def test_full_disk(small_disk: Path, free_bytes: int) -> None:
    """A disk that is full at the tensors, at a rank's own file or at the mark leaves nothing that looks complete."""
    run_ranks(save_steps, 2, small_disk, 1, 1, False, None, [], 0)
    fill(small_disk, free_bytes)
    for text in run_ranks(full_disk, 2, small_disk, "disk", False):
        assert os.strerror(errno.ENOSPC) in text
    assert step_of(small_disk / "last.ckpt") == 1
    (small_disk / "filler").unlink()
    run_ranks(save_steps, 2, small_disk, 3, 1, False, None, [], 0)
    assert step_of(small_disk / "last.ckpt") == 3


def save_alone(path: Path, step: int) -> None:
    state = {**values(step, 0), **values(step, 1)}
    optimizer: Any = {"state": {}, "param_groups": []}
    save_sharded(path, model_state=state, optimizer_states=[optimizer], metadata={"global_step": step}, rank_state={})


def test_the_newest_complete(tmp_path: Path) -> None:
    """A half directory, a dangling link or a cut file that is newer must not be taken, nor passed over in silence."""
    for number, name in enumerate(("a.ckpt", "b.ckpt", "c.ckpt")):
        save_alone(tmp_path / name, number)
        stamp = 1_000_000_000 + number
        os.utime(tmp_path / name / "bigmodel.json", (stamp, stamp))
    names = ["a.ckpt", "b.ckpt", "c.ckpt", "cut.ckpt", "gone.ckpt", "link.ckpt", "other.ckpt"]
    paths = [tmp_path / name for name in names]
    assert newest_complete(paths[:3]) == tmp_path / "c.ckpt"
    (tmp_path / "c.ckpt" / "bigmodel.json").unlink()
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04 and no end")
    (tmp_path / "link.ckpt").symlink_to("not there")
    (tmp_path / "other.ckpt").mkdir()
    with pytest.warns(UserWarning, match="is passed over") as caught:
        assert newest_complete(paths) == tmp_path / "b.ckpt"
    said = "\n".join(str(warning.message) for warning in caught)
    for name in ("c.ckpt", "cut.ckpt", "link.ckpt", "other.ckpt"):
        assert f"{name}` is passed over" in said
    assert newest_complete([]) is None


def test_what_is_no_checkpoint_is_neither_removed_nor_replaced(tmp_path: Path) -> None:
    """A name that happens to be that of a folder of the user's must not cost that folder."""
    foreign = tmp_path / "results.ckpt"
    foreign.mkdir()
    (foreign / "paper.tex").write_text("years of work")
    assert not remove_checkpoint(foreign)
    assert not remove_checkpoint(foreign / "paper.tex")
    with pytest.raises(FileExistsError, match="is a directory that is no checkpoint"):
        save_alone(foreign, 1)
    assert (foreign / "paper.tex").read_text() == "years of work"
    save_alone(tmp_path / "a.ckpt", 1)
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    assert remove_checkpoint(tmp_path / "link.ckpt")
    assert is_complete(tmp_path / "a.ckpt")
    assert remove_checkpoint(tmp_path / "a.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.ckpt"]


def test_a_removal_that_is_cut_short_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a checkpoint under its own name would be found as `last`."""
    save_alone(tmp_path / "a.ckpt", 1)
    save_alone(tmp_path / "b.ckpt", 2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert remove_checkpoint(tmp_path / "a.ckpt")
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["b.ckpt"]
    monkeypatch.undo()
    assert remove_checkpoint(tmp_path / "b.ckpt")  # which cleans up after the other
    assert list(tmp_path.iterdir()) == []


def test_load_of_a_name_lost_in_an_exchange(tmp_path: Path) -> None:
    """The content is there: a run must go on from it without the user's help."""
    save_alone(tmp_path / "last.ckpt", 1)
    (tmp_path / "last.ckpt").rename(tmp_path / ".last.ckpt.writing-0123456789ab")
    assert interrupted_names(tmp_path) == [tmp_path / "last.ckpt"]
    with pytest.warns(UserWarning, match="is gone"):
        assert newest_complete(interrupted_names(tmp_path)) == tmp_path / "last.ckpt"
    with pytest.warns(UserWarning, match="is gone"):
        assert load_sharded(tmp_path / "last.ckpt").metadata["global_step"] == 1
