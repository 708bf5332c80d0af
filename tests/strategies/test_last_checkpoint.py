"""`ckpt_path="last"`: the newest complete checkpoint, decided by rank 0 for all, whatever died before."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.checkpoint import is_complete, load_sharded, read_index
from lightning_bigmodel.testing import RanksFailedError, TinyChain, run_ranks
from tests.strategies.trainer_modules import entries, trainer


class Counts(TinyChain):
    """Keeps what its weights were at each step, and where a run began."""

    began_at = -1

    def on_train_start(self) -> None:
        self.began_at = self.trainer.global_step


def rows(module: TinyChain, num: int = 1024) -> Any:
    return torch.utils.data.DataLoader(module.dataset(num), batch_size=4)


class Notes(Callback):
    """Writes what this rank holds to a file of the step, before it is saved.

    Some seconds after there is a first checkpoint it kills the ranks of `victims`.
    """

    def __init__(self, directory: str, seconds: float | None, victims: list[int]) -> None:
        self.directory, self.seconds, self.victims = Path(directory), seconds, victims
        self.pids: list[int] = []

    def kill(self) -> None:
        for rank in self.victims:
            os.kill(self.pids[rank], signal.SIGKILL)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.pids = trainer.strategy._from_all_ranks(os.getpid())

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        is_mine = self.seconds is not None and trainer.global_rank == 0
        if is_mine and is_complete(f"{str(self.directory).removesuffix('_notes')}/last.ckpt"):
            threading.Timer(self.seconds or 0.0, self.kill).start()
            self.seconds = None

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        held = trainer.strategy.held_parameters()
        torch.save(
            {name: value.clone() for name, value in held.items()},
            self.directory / f"{trainer.global_step}_{trainer.global_rank}.pt",
        )


def run(directory: str, is_async: bool, num_steps: int, seconds: float | None, victims: list[int]) -> int:
    keep = ModelCheckpoint(directory, filename="{step}", save_top_k=1, save_last="link", every_n_train_steps=1)
    notes = Notes(f"{directory}_notes", seconds, victims)
    strategy = BigModelStrategy(pipeline_parallel_size=2, async_checkpoint=is_async)
    module = Counts()
    fit = trainer(strategy, 2, max_steps=-1, max_epochs=-1, callbacks=[notes, keep], enable_checkpointing=True)
    if num_steps >= 0:
        fit.fit_loop.epoch_loop.max_steps = num_steps
    fit.fit(module, rows(module), ckpt_path="last")
    return module.began_at


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_killed_runs_go_on_from_a_complete_checkpoint(tmp_path: Path, is_async: bool) -> None:
    """A run that begins anew, or from a checkpoint with another step's values."""
    choose, directory, notes = random.Random(3), tmp_path / "saved", tmp_path / "saved_notes"
    notes.mkdir()
    for _ in range(3):
        with pytest.raises(RanksFailedError):
            run_ranks(run, 2, str(directory), is_async, -1, choose.uniform(0.0, 0.4), choose.choice([[0, 1], [1], [0]]))
        last = directory / "last.ckpt"
        step = read_index(last).global_step
        assert step
        loaded = load_sharded(last).model_state
        for rank in range(2):
            for name, value in torch.load(notes / f"{step}_{rank}.pt").items():
                assert (loaded[name] == value).all(), name
        assert run_ranks(run, 2, str(directory), is_async, step + 1, None, []) == [step, step]
        assert all(is_complete(directory / name) for name in entries(directory) if not name.startswith("."))


def links_at_removals(directory: str, is_async: bool) -> list[bool]:
    from lightning_bigmodel.strategies import saving

    remove, found = saving.remove_checkpoint, []

    def watched(path: Any) -> bool:
        is_removed = remove(path)
        found.append(is_complete(f"{directory}/last.ckpt"))
        return is_removed

    saving.remove_checkpoint = watched
    Path(f"{directory}_notes").mkdir(exist_ok=True)
    run(directory, is_async, 4, None, [])
    return found


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_the_last_one_is_there_at_every_removal(tmp_path: Path, is_async: bool) -> None:
    """A run killed between the removal of what `last.ckpt` leads to and the new link, which would begin anew."""
    found = run_ranks(links_at_removals, 2, str(tmp_path / "saved"), is_async)
    assert found == [[True] * 3, []]  # the first rank removes
    assert entries(tmp_path / "saved") == ["last.ckpt", "step=4.ckpt"]


def test_a_run_killed_before_its_second_link_goes_on_with_the_first(tmp_path: Path) -> None:
    """Another link, `last-v1.ckpt`, and a `last.ckpt` that leads nowhere."""
    (tmp_path / "saved_notes").mkdir()
    run_ranks(run, 2, str(tmp_path / "saved"), False, 1, None, [])
    (tmp_path / "saved" / "last.ckpt").unlink(missing_ok=True)
    (tmp_path / "saved" / "last.ckpt").symlink_to("step=1.ckpt")  # as after a kill, whose checkpoint knows of no link
    assert run_ranks(run, 2, str(tmp_path / "saved"), False, 3, None, []) == [1, 1]
    assert entries(tmp_path / "saved") == ["last.ckpt", "step=3.ckpt"]
    assert is_complete(tmp_path / "saved" / "last.ckpt")


def fit_last(directory: str, blind: list[int], num_steps: int) -> Any:
    """Fit from "last" where some ranks do not see the directory's entries."""
    import fsspec.implementations.local as local

    rank = int(os.environ["RANK"])
    if rank in blind:
        local.LocalFileSystem.ls = lambda self, path, detail=False, **_: []  # type: ignore[method-assign]
        Path.iterdir = lambda self: iter(())  # type: ignore[method-assign]
    keep = ModelCheckpoint(
        directory, filename="{step}", monitor="train_loss", save_top_k=2, save_last=True, every_n_train_steps=1
    )
    module = Logs()
    fit = trainer(
        BigModelStrategy(pipeline_parallel_size=2),
        2,
        max_steps=num_steps,
        max_epochs=None,
        callbacks=[keep],
        enable_checkpointing=True,
    )
    fit.fit(module, rows(module, 32), ckpt_path="last")
    return module.began_at, keep.best_model_path, sorted(keep.best_k_models), fit.ckpt_path


class Logs(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


@pytest.mark.filterwarnings("ignore")
def test_rank_0_decides(tmp_path: Path) -> None:
    """Ranks that see different directories would load different files, or some none, and hang."""
    nothing = run_ranks(fit_last, 2, str(tmp_path), [0], 2)
    assert [found[0] for found in nothing] == [0, 0]
    later = run_ranks(fit_last, 2, str(tmp_path), [1], 4)
    assert later[0] == later[1]
    assert later[0][0] == 2
    assert later[0][3] == str(tmp_path / "last.ckpt")
    # The other way round: rank 1 finds one, rank 0 none, so all begin anew.
    again = run_ranks(fit_last, 2, str(tmp_path), [0], 1)
    assert [found[0] for found in again] == [0, 0]


def _resume(directory: str) -> Any:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began, _, _, path = fit_last(directory, [], 6)
    return began, path, [str(warning.message) for warning in caught if "passed over" in str(warning.message)]


@pytest.mark.filterwarnings("ignore")
def test_an_incomplete_last_is_passed_over_and_named(tmp_path: Path) -> None:
    """The newest directory is the one a crash has left half written."""
    run_ranks(fit_last, 2, str(tmp_path), [], 2)
    (tmp_path / "last.ckpt").rename(tmp_path / "last-v1.ckpt")
    run_ranks(fit_last, 2, str(tmp_path / "other"), [], 3)
    (tmp_path / "other" / "last.ckpt").rename(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt" / "__0_0.distcp").unlink()
    for began, path, said in run_ranks(_resume, 2, str(tmp_path)):
        assert began == 2
        assert path == str(tmp_path / "last-v1.ckpt")
        assert any("last.ckpt` is passed over" in text and "`__0_0.distcp` is missing" in text for text in said)


@pytest.mark.filterwarnings("ignore")
def test_a_name_lost_in_an_exchange_is_found(tmp_path: Path) -> None:
    """Killed between two renames, nothing is called `last.ckpt`, though all of it is there."""
    run_ranks(fit_last, 2, str(tmp_path), [], 2)
    (tmp_path / "last.ckpt").rename(tmp_path / ".last.ckpt.writing-0123456789ab")
    for found in run_ranks(fit_last, 2, str(tmp_path), [], 4):
        assert found[0] == 2
