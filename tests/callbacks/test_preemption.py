"""A signal to one rank: one save of all ranks at one step, a clean end, and a run that goes on as if nothing was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy, PreemptionCheckpoint
from lightning_bigmodel.checkpoint import read_index
from lightning_bigmodel.strategies.preemption import PreemptedExit
from lightning_bigmodel.testing import run_ranks
from tests.strategies.trainer_modules import Classifier, Sequences, pad, trainer, weights

NUM_BATCHES = 4


class PositionedLoader(DataLoader[Any]):
    """Goes on where it was, as Lightning asks of loaders that resume within an epoch."""

    taken = start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        self.taken = start
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.taken += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken % NUM_BATCHES}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["taken"]


def batches() -> PositionedLoader:
    return PositionedLoader(Sequences(32), batch_size=32 // NUM_BATCHES, collate_fn=pad)


class Signals(Callback):
    """Sends a signal to this process at a batch, after what this batch tells the other ranks or before it."""

    def __init__(self, name: str, rank: int, step: int, before: bool = True) -> None:
        self.name, self.rank, self.step, self.before = name, rank, step, before

    def _send(self, trainer: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.Signals[self.name])

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.before:
            self._send(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if not self.before:
            self._send(trainer)


def fit(
    directory: str, strategy: dict[str, Any], send: Signals | None, callbacks: tuple[Any, ...] = (), **options: Any
) -> dict[str, Any]:
    keep = PreemptionCheckpoint()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    module = Classifier()
    run = trainer(
        BigModelStrategy(**strategy),
        2,
        max_epochs=2,
        default_root_dir=directory,
        callbacks=[*callbacks, *([send] if send else []), keep],
        num_sanity_val_steps=0,
        **options,
    )
    code: Any = None
    said = ""
    try:
        run.fit(module, batches(), DataLoader(Sequences(10), batch_size=4, collate_fn=pad), ckpt_path="last")
    except SystemExit as ending:
        code, said = ending.code, str(ending)
        assert isinstance(ending, PreemptedExit)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    assert after == before, "the handlers of before the run are not back"
    return {
        "code": code,
        "said": said,
        "step": run.global_step,
        "losses": module.losses,
        "weights": weights(module) if code is None else {},
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
    }


PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Nothing interrupts it."""
    return run_ranks(fit, 2, str(tmp_path_factory.mktemp("whole")), PIPELINE, None)


@pytest.mark.parametrize(
    ("name", "rank", "step", "before"),
    [
        ("SIGTERM", 1, 1, True),
        ("SIGUSR1", 0, 2, False),
        ("SIGTERM", 1, 2, False),
        ("SIGUSR1", 1, 3, True),  # the last batch of an epoch, with a validation to come
        ("SIGTERM", 0, 4, True),
    ],
)
def test_the_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, whole_run: list[dict[str, Any]], name: str, rank: int, step: int, before: bool
) -> None:
    """A signal to one rank: the others must stop at the same step, and nothing may be lost or done twice."""
    first = run_ranks(fit, 2, str(tmp_path), PIPELINE, Signals(name, rank, step, before))
    path = tmp_path / "preempted.ckpt"
    saved_at = step + 1
    for found in first:
        assert found["code"] == 128 + signal.Signals[name]
        assert found["said"] == f'{name} asked this run to stop: saved to {path}; start again with `ckpt_path="last"`.'
        assert found["step"] == saved_at
    assert read_index(path).global_step == saved_at
    second = run_ranks(fit, 2, str(tmp_path), PIPELINE, None)
    for begun, resumed, whole in zip(first, second, whole_run, strict=True):
        assert resumed["code"] is None
        # The module's own hook runs after those of callbacks: the step that saved has not told its loss yet.
        assert begun["losses"] == whole["losses"][: saved_at - 1]
        assert resumed["losses"] == whole["losses"][saved_at:]
        for key, value in whole["weights"].items():
            assert (resumed["weights"][key] == value).all(), key
        for key in ("val_loss", "val_accuracy"):
            assert resumed["metrics"][key] == whole["metrics"][key]
