"""`async_checkpoint=True`: the files of a synchronous run, written while training goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.checkpoint import is_complete, load_sharded, read_index
from lightning_bigmodel.testing import RanksFailedError, run_ranks
from tests.checkpoint.pipe_model import same
from tests.checkpoint.slow_writer import writer
from tests.strategies.trainer_modules import Classifier, entries, loader, trainer, weights

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_size": 2, "num_microbatches": 4},
    "zero3": {"zero_stage": 3},
}


class Plain(Classifier):
    """With no schedule that waits for a validation."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rising(Plain):
    """A monitored value that gets better at some steps only; ModelCheckpoint sees it one step later."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("rank_of_step", [3.0, 9.0, 2.0, 1.0, 8.0, 7.0][self.trainer.global_step - 1])


def fit_and_save(directory: str, layout: str, is_async: bool, save_last: Any, resume: str | None = None) -> Any:
    module = Rising()
    keep = ModelCheckpoint(
        directory,
        filename="{step}",
        monitor="rank_of_step",
        mode="min",
        save_top_k=2,
        save_last=save_last,
        every_n_train_steps=1,
    )
    strategy = BigModelStrategy(**LAYOUTS[layout], async_checkpoint=is_async)
    run = trainer(strategy, 2, max_steps=6, max_epochs=None, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, loader(64, 4), ckpt_path=resume)
    paths = [keep.best_model_path, keep.last_model_path, keep.kth_best_model_path, *sorted(keep.best_k_models)]
    return [Path(path).name for path in paths], weights(module), module.losses


def steps_of(directory: Path) -> dict[str, int | None]:
    return {name: read_index(directory / name).global_step for name in entries(directory)}


@pytest.mark.parametrize(("layout", "save_last"), [("pipeline", True), ("pipeline", "link"), ("zero3", "link")])
def test_same_files_as_a_synchronous_run(tmp_path: Path, layout: str, save_last: Any) -> None:
    """`best`, `last` and the best k must name the same steps, complete, and hold the same values and states."""
    sync, background = tmp_path / "sync", tmp_path / "async"
    expected = run_ranks(fit_and_save, 2, str(sync), layout, False, save_last)
    found = run_ranks(fit_and_save, 2, str(background), layout, True, save_last)
    for before, after in zip(expected, found, strict=True):
        assert before[0] == after[0]
        assert same(before[2], after[2])
    assert entries(background) == entries(sync) == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
    assert (background / "last.ckpt").is_symlink() == (save_last == "link")
    assert steps_of(background) == steps_of(sync)
    for name in entries(sync):
        left, right = load_sharded(sync / name), load_sharded(background / name)
        assert same(left.model_state, right.model_state)
        assert same(left.optimizer_states, right.optimizer_states)
        assert same(left.metadata["loops"], right.metadata["loops"])


def fit_under_one_name(directory: str, is_async: bool) -> list[str]:
    keep = ModelCheckpoint(directory, filename="same", monitor="rank_of_step", save_top_k=-1, every_n_train_steps=1)
    strategy = BigModelStrategy(**LAYOUTS["pipeline"], async_checkpoint=is_async)
    run = trainer(strategy, 2, max_steps=3, max_epochs=None, callbacks=[keep], enable_checkpointing=True)
    with writer() as held:
        held.may_write.clear()
        release = threading.Timer(1.0, held.may_write.set)  # the first is in flight when the second gets its name
        release.start()
        run.fit(Rising(), loader(64, 4))
        release.join()
    return sorted(Path(path).name for path in keep.best_k_models)


def test_a_name_in_flight_is_taken(tmp_path: Path) -> None:
    """Two checkpoints of one name: the second would replace the first, which ModelCheckpoint believes to be kept."""
    found = run_ranks(fit_under_one_name, 2, str(tmp_path), True)
    assert found[0] == found[1] == ["same-v1.ckpt", "same.ckpt"]
    assert steps_of(tmp_path) == {"same.ckpt": 2, "same-v1.ckpt": 3}


class Watches(Callback):
    """Holds the writer up at one step, and looks at the directory meanwhile."""

    def __init__(self, directory: str, held: Any) -> None:
        self.directory, self.held, self.seen = Path(directory), held, []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        names = [path.name for path in self.directory.iterdir() if not path.name.startswith(".")]
        complete = sorted(name for name in names if is_complete(self.directory / name))
        self.seen.append((sorted(names), complete))
        if batch_idx == 3:
            trainer.strategy.finish_saving()
            self.held.may_write.clear()
        if batch_idx == 5:
            self.held.may_write.set()


def hold_up(directory: str, save_last: Any) -> Any:
    module = Plain()
    Path(directory).mkdir(exist_ok=True)
    keep = ModelCheckpoint(directory, filename="{step}", save_top_k=1, save_last=save_last, every_n_train_steps=2)
    strategy = BigModelStrategy(**LAYOUTS["pipeline"], async_checkpoint=True)
    with writer() as held:
        watch = Watches(directory, held)
        run = trainer(strategy, 2, max_steps=6, max_epochs=None, callbacks=[watch, keep], enable_checkpointing=True)
        held.may_write.set()
        begin = time.monotonic()
        run.fit(module, loader(64, 8))
        assert time.monotonic() - begin < 55  # nobody waited for a writer that was held up until its time was out
        return watch.seen, keep.best_model_path, held.most_in_flight


def test_the_old_checkpoint_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    """`save_top_k=1` that removes step 2 when step 4 is asked for leaves nothing if the run dies then."""
    for seen, best, most in run_ranks(hold_up, 2, str(tmp_path), "link"):
        assert seen[4] == seen[5] == (["last.ckpt", "step=2.ckpt"], ["last.ckpt", "step=2.ckpt"])
        assert Path(best).name == "step=6.ckpt"
        assert most == 1
    assert entries(tmp_path) == ["last.ckpt", "step=6.ckpt"]
    assert is_complete(tmp_path / "last.ckpt")


class FailsAt(Callback):
    """Raises on one rank, or all, while a save is held up."""

    def __init__(self, held: Any, ranks: tuple[int, ...]) -> None:
        self.held, self.ranks = held, ranks

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "good.ckpt")
            trainer.strategy.finish_saving()
            self.held.may_write.clear()
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "good.ckpt")
        if batch_idx == 2 and trainer.global_rank in self.ranks:
            raise KeyError("in the callback")


def fail_in_flight(directory: str, ranks: tuple[int, ...]) -> None:
    strategy = BigModelStrategy(**LAYOUTS["pipeline"], async_checkpoint=True)
    with writer() as held:
        run = trainer(strategy, 2, max_steps=6, max_epochs=None, default_root_dir=directory)
        run.callbacks.append(FailsAt(held, ranks))
        from lightning_bigmodel.strategies import saving

        saving._ABANDON_SECONDS = 0.5  # nobody lets the writer go on
        run.fit(Plain(), loader(64, 8))


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_an_exception_while_a_save_is_in_flight(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """What is half written must not replace the checkpoint before, nor keep a rank from ending."""
    begin = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(fail_in_flight, 2, str(tmp_path), ranks)
    assert time.monotonic() - begin < 40
    assert all("in the callback" in text for text in caught.value.failures.values())
    assert [name for name in entries(tmp_path) if not name.startswith(".")] == ["good.ckpt"]
    assert read_index(tmp_path / "good.ckpt").global_step == 1
    assert not any(is_complete(tmp_path / name) for name in entries(tmp_path) if name.startswith("."))


class SavesAndLoads(Callback):
    """Saves, and says how long each call took and whether a load waited."""

    def __init__(self, held: Any, then: str) -> None:
        self.held, self.then = held, then

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        path = Path(trainer.default_root_dir) / "mine.ckpt"
        if trainer.global_step == 2:
            trainer.save_checkpoint(path)
        if trainer.global_step == 3 and self.then == "load":
            assert trainer.strategy.load_checkpoint(path)["global_step"] == 2
        if trainer.global_step == 3 and self.then == "save":
            trainer.save_checkpoint(path)


def fail_to_write(directory: str, then: str) -> str:
    strategy = BigModelStrategy(**LAYOUTS["zero3"], async_checkpoint=True)
    with writer() as held:
        if then != "load":
            held.fail_at, held.fail_on_rank = {1}, 1
        run = trainer(strategy, 2, max_steps=4, max_epochs=None, default_root_dir=directory)
        run.callbacks.append(SavesAndLoads(held, then))
        try:
            run.fit(Plain(), loader(64, 8))
        except RuntimeError as error:
            return f"{run.global_step}: {error}"
        # After the run there is nobody to wait: such a save is complete when it returns.
        run.save_checkpoint(Path(directory) / "after.ckpt")
        assert is_complete(Path(directory) / "after.ckpt")
    return "nothing"


@pytest.mark.parametrize(("then", "step"), [("save", 3), ("nothing", 4)])
def test_an_error_of_the_writer_ends_the_run_on_all_ranks(tmp_path: Path, then: str, step: int) -> None:
    """A run that goes on to its end without checkpoints, or one rank that raises alone."""
    for said in run_ranks(fail_to_write, 2, str(tmp_path), then):
        assert said.startswith(f"{step}: Writing tensors failed on rank 1: OSError: [Errno 28]")
    assert entries(tmp_path) == []


def test_a_load_waits_for_what_is_in_flight(tmp_path: Path) -> None:
    """A checkpoint that was just saved must be there to be read."""
    assert run_ranks(fail_to_write, 2, str(tmp_path), "load") == ["nothing", "nothing"]
    assert entries(tmp_path) == ["after.ckpt", "mine.ckpt"]


def test_resume_from_an_asynchronous_run(tmp_path: Path) -> None:
    """Values copied at the call must go on exactly as those of a run that was never interrupted."""
    whole = run_ranks(fit_and_save, 2, str(tmp_path / "a"), "pipeline", True, "link")
    path = str(tmp_path / "a" / "step=4.ckpt")
    resumed = run_ranks(fit_and_save, 2, str(tmp_path / "b"), "pipeline", True, "link", path)
    for before, after in zip(whole, resumed, strict=True):
        assert len(after[2]) == 1 + 2  # the hook that records them was due for the last batch before
        assert all(torch.isfinite(torch.tensor(loss)) for loss in after[2])
        assert set(before[1]) == set(after[1])
