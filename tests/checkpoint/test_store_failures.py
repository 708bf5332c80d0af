"""What fails on one rank while saving is an error on all ranks at once, and the previous checkpoint stays."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel.checkpoint import is_complete, load_sharded, save_sharded
from lightning_bigmodel.checkpoint.store import _replace
from lightning_bigmodel.testing import RanksFailedError, run_ranks
from tests.checkpoint.test_store import check_loaded, save_on_rank


class Failure(Exception):
    """As some libraries' errors: it holds what cannot be pickled, so that it cannot be sent as it is."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class FailsOnSave:
    def __reduce__(self) -> Any:
        raise Failure("disk quota exceeded")


class Dies:
    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class UnreadableTensor(torch.Tensor):
    def detach(self) -> torch.Tensor:
        raise Failure("this tensor cannot be read")


def failing_parts(where: str) -> dict[str, Any]:
    """What rank 1 gives for the save to fail in this place."""
    state = {"param_groups": [], "state": {"a": {"b": FailsOnSave()}}}
    return {
        "value": {"optimizer_states": [state]},
        "tensor": {"model_state": {"body.weight": UnreadableTensor(torch.ones(4))}},
        "rank state": {"rank_state": {"mine": FailsOnSave()}},
        "optimizers": {"optimizer_states": []},
    }[where]


def fail_on_rank_1(directory: Path, where: str) -> tuple[str, str, float]:
    changed = failing_parts(where) if dist.get_rank() == 1 else {}
    begin = time.monotonic()
    try:
        save_on_rank(directory, 2, 5, **changed)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    raise AssertionError("the save did not fail")


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ("value", "RuntimeError", "Writing tensors failed on rank 1: Failure: disk quota exceeded"),
        ("tensor", "RuntimeError", "Writing tensors failed on rank 1: Failure: this tensor cannot be read"),
        ("rank state", "RuntimeError", "Writing the rank's own files failed on rank 1: Failure: disk quota exceeded"),
        ("optimizers", "ValueError", "`optimizer_states` has different lengths on different ranks: [1, 0]"),
    ],
)
def test_failure_on_one_rank_is_an_error_on_all(tmp_path: Path, where: str, kind: str, message: str) -> None:
    """One rank raising alone leaves the others waiting; a half-written checkpoint must not replace a good one."""
    directory = tmp_path / "last.ckpt"
    run_ranks(save_on_rank, 2, directory, 2)
    for found_kind, found, seconds in run_ranks(fail_on_rank_1, 2, directory, where):
        assert found_kind == kind
        assert message in found
        assert seconds < 60  # the process group would wait for 120
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    check_loaded(load_sharded(directory))


def fail_on_rank_0(directory: Path, where: str) -> str:
    changed: dict[str, Any] = {}
    if where == "metadata":
        changed = {"metadata": {"mine": FailsOnSave()}}
    elif where == "rename" and dist.get_rank() == 0:

        def refuse(written: Path, target: Path) -> None:
            raise PermissionError(f"may not rename {target.name}")

        _replace.finish_writing = refuse
    try:
        save_on_rank(directory, 2, 5, **changed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the save did not fail")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("metadata", "RuntimeError: Completing the checkpoint failed on rank 0: Failure: disk quota exceeded"),
        ("rename", "PermissionError: Completing the checkpoint failed on rank 0: may not rename last.ckpt"),
        ("parent", "FileExistsError: Preparing the checkpoint failed on rank 0:"),
    ],
)
def test_failure_of_rank_0_alone(tmp_path: Path, where: str, message: str) -> None:
    """What only rank 0 does must stop the others as well."""
    directory = tmp_path / "last.ckpt"
    run_ranks(save_on_rank, 2, directory, 2)
    (tmp_path / "a file").touch()
    target = tmp_path / "a file" / "last.ckpt" if where == "parent" else directory
    found = run_ranks(fail_on_rank_0, 2, target, where)
    assert found[0].startswith(message)
    assert found[0] == found[1]
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "a file"}
    check_loaded(load_sharded(directory))


def not_shared(directory: Path) -> str:
    from lightning_bigmodel.checkpoint import store

    store._VISIBLE_WITHIN_SECONDS = 0.2
    if dist.get_rank() == 1:
        # What a machine with its own disk sees.
        Path.is_dir = lambda self, **options: not self.name.startswith(".last")  # type: ignore[method-assign]
    try:
        save_on_rank(directory, 2)
    except FileNotFoundError as error:
        return str(error)
    raise AssertionError("the save did not fail")


def test_storage_that_is_not_shared(tmp_path: Path) -> None:
    """Ranks that write to disks of their own would leave a checkpoint that nobody can read."""
    for message in run_ranks(not_shared, 2, tmp_path / "last.ckpt"):
        assert "failed on rank 1: Rank 0 made" in message
        assert "need storage that all machines share" in message
    assert list(tmp_path.iterdir()) == []


def die_while_writing(directory: Path, dying: list[int]) -> None:
    state = {"param_groups": [], "state": {f"a{dist.get_rank()}": {"b": Dies()}}}
    save_on_rank(directory, 2, 5, **({"optimizer_states": [state]} if dist.get_rank() in dying else {}))


@pytest.mark.parametrize("dying", [[1], [0, 1]])
def test_killed_while_writing(tmp_path: Path, dying: list[int]) -> None:
    """A killed rank must not hang the other, nor its half directory pass for a checkpoint or stop the next save."""
    directory = tmp_path / "last.ckpt"
    run_ranks(save_on_rank, 2, directory, 2)
    begin = time.monotonic()
    with pytest.raises(RanksFailedError) as error:
        run_ranks(die_while_writing, 2, directory, dying)
    assert time.monotonic() - begin < 60
    assert all("SIGKILL" in error.value.failures[rank] for rank in dying)
    # The one that lives raised by itself rather than being found waiting.
    assert not any("still running" in text for text in error.value.failures.values())
    check_loaded(load_sharded(directory))
    half_written = [path for path in tmp_path.iterdir() if path != directory]
    assert len(half_written) == (1 if 0 in dying else 0)
    assert not any(is_complete(path) for path in half_written)
    assert list(tmp_path.glob("*.ckpt")) == [directory]
    run_ranks(save_on_rank, 2, directory, 2, 4)
    check_loaded(load_sharded(directory), steps=4)
    assert list(tmp_path.iterdir()) == [directory]


def load_with_one_wrong_name(directory: Path) -> str:
    names = ["body.weight"] if dist.get_rank() == 0 else ["body.wieght"]
    try:
        load_sharded(directory, model_names=names)
    except ValueError as error:
        return str(error)
    raise AssertionError("the load did not fail")


def test_failure_of_one_rank_while_loading(tmp_path: Path) -> None:
    """A rank that trains on while another raised hangs in its next collective."""
    run_ranks(save_on_rank, 2, tmp_path / "last.ckpt", 2)
    found = run_ranks(load_with_one_wrong_name, 2, tmp_path / "last.ckpt")
    assert found[0] == found[1]
    assert "failed on rank 1:" in found[0]
    assert "(nearest: `body.weight`)" in found[0]


def save_in_a_subgroup(directory: Path) -> str:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ""
    try:
        save_sharded(
            directory,
            model_state={"a": torch.ones(2)},
            optimizer_states=None,
            metadata={},
            rank_state={"mine": FailsOnSave()} if dist.get_rank() == 2 else {},
            process_group=group,
        )
    except RuntimeError as error:
        return str(error)
    raise AssertionError("the save did not fail")


def test_message_has_the_rank_in_the_world(tmp_path: Path) -> None:
    """A rank counted within the group points at the wrong machine."""
    found = run_ranks(save_in_a_subgroup, 3, tmp_path / "last.ckpt")
    assert "failed on rank 2: Failure: disk quota exceeded" in found[1]
    assert found[1] == found[2]
