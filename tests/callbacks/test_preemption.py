"""A signal to one rank: one save of all ranks at one step, a clean end, and a run that goes on as if nothing was."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy, PreemptionCheckpoint
from lightning_bigmodel.checkpoint import is_complete, read_index
from lightning_bigmodel.strategies.preemption import PreemptedExit
from lightning_bigmodel.testing import CollectiveCounter, TinyChain, run_ranks
from tests.strategies.trainer_modules import Classifier, Sequences, entries, pad, trainer, weights

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


def batches(num_samples: int = 32) -> PositionedLoader:
    return PositionedLoader(Sequences(num_samples), batch_size=32 // NUM_BATCHES, collate_fn=pad)


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


class Validations(Callback):
    """What came of each validation, and each end of an epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.current_epoch)


def fit(
    directory: str, strategy: dict[str, Any], send: Signals | None, num_samples: int = 32, **options: Any
) -> dict[str, Any]:
    keep = PreemptionCheckpoint()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    module, validations = Classifier(), Validations()
    run = trainer(
        BigModelStrategy(**strategy),
        2,
        max_epochs=2,
        default_root_dir=directory,
        callbacks=[keep, *([send] if send else []), validations],
        num_sanity_val_steps=0,
        **options,
    )
    code: Any = None
    said = ""
    try:
        run.fit(module, batches(num_samples), DataLoader(Sequences(10), batch_size=4, collate_fn=pad), ckpt_path="last")
    except PreemptedExit as ending:
        code, said = ending.code, str(ending)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    assert after == before, "the handlers of before the run are not back"
    return {
        "code": code,
        "said": said,
        "step": run.global_step,
        "losses": module.losses,
        "validations": validations.seen,
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
        # The module's own hook runs after those of callbacks: that of the step that saved runs in the second run.
        assert begun["losses"] == whole["losses"][: saved_at - 1]
        assert begun["losses"] + resumed["losses"] == whole["losses"]
        for key, value in whole["weights"].items():
            assert (resumed["weights"][key] == value).all(), key
        assert begun["validations"] + resumed["validations"] == whole["validations"]
        for key in ("val_loss", "val_accuracy"):
            assert resumed["metrics"][key] == whole["metrics"][key]


def fit_other(directory: str, strategy: dict[str, Any], send: Signals, **options: Any) -> tuple[Any, int, int | None]:
    found = fit(directory, strategy, send, **options)
    path = Path(directory) / "preempted.ckpt"
    return found["code"], found["step"], read_index(path).global_step if path.exists() else None


@pytest.mark.parametrize(
    ("strategy", "options", "step"),
    [
        ({"zero_stage": 3}, {"num_samples": 64}, 2),
        ({}, {"num_samples": 64}, 2),
        (
            {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*.mix": "colwise_gather"}},
            {},
            2,
        ),  # no message to travel with
        ({"zero_stage": 1, "async_checkpoint": True}, {"num_samples": 64}, 2),  # complete when the run ends
        ({"zero_stage": 1}, {"num_samples": 64, "accumulate_grad_batches": 2}, 1),  # not in the middle of a window
    ],
)
def test_other_layouts(tmp_path: Path, strategy: dict[str, Any], options: dict[str, Any], step: int) -> None:
    """Ranks that do not hear of the signal hang in the save; half a window cannot be saved."""
    send = Signals("SIGTERM", 1, step - 1)
    found = run_ranks(fit_other, 2, str(tmp_path), strategy, send, **options)
    assert found == [(128 + signal.SIGTERM, step, step)] * 2
    assert entries(tmp_path) == ["preempted.ckpt"]


def test_the_end_of_the_run_needs_no_save(tmp_path: Path) -> None:
    """A run that has done all there is to do is not interrupted any more; what it leaves is complete."""
    found = run_ranks(fit_other, 2, str(tmp_path), PIPELINE, Signals("SIGTERM", 1, 7))
    assert found == [(None, 8, 8)] * 2
    assert is_complete(tmp_path / "preempted.ckpt")


def count(directory: str, with_callback: bool) -> dict[str, int]:
    callbacks = [PreemptionCheckpoint(dirpath=directory)] if with_callback else []
    run = trainer(BigModelStrategy(**PIPELINE), 2, default_root_dir=directory, callbacks=callbacks)
    with CollectiveCounter() as counter:
        run.fit(Classifier(), batches(), DataLoader(Sequences(10), batch_size=4, collate_fn=pad))
    return dict(counter.num_calls)


def test_it_costs_no_collective(tmp_path: Path) -> None:
    """A message a step for what happens once in a run."""
    assert run_ranks(count, 2, str(tmp_path), True) == run_ranks(count, 2, str(tmp_path), False)


SCRIPT = """
import os, signal, sys, threading
from lightning.pytorch import Trainer
from lightning_bigmodel import BigModelStrategy, PreemptionCheckpoint
from lightning_bigmodel.testing import TinyChain
import torch

if __name__ == "__main__":
    module = TinyChain()
    rank = os.environ.get("LOCAL_RANK", "0")

    class Note(PreemptionCheckpoint):
        def on_train_start(self, trainer, module):
            super().on_train_start(trainer, module)
            open(f"{sys.argv[1]}/pid_{rank}", "w").write(str(os.getpid()))

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=BigModelStrategy(pipeline_parallel_size=2), max_steps=-1, max_epochs=-1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=sys.argv[1], callbacks=[Note()],
    )
    trainer.fit(module, torch.utils.data.DataLoader(module.dataset(4096), batch_size=4), ckpt_path="last")
"""


def start(tmp_path: Path, *command: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *command, str(script), str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"pid_{rank}").exists() for rank in range(2)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.3)
    return process


@pytest.mark.parametrize("to_rank", [0, 1])
def test_lightnings_own_launcher(tmp_path: Path, to_rank: int) -> None:
    """The launcher ends rank 0 by SIGKILL when another exits with an error."""
    process = start(tmp_path)
    os.kill(int((tmp_path / f"pid_{to_rank}").read_text()), signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "SIGTERM asked this run to stop: saved to " in said
    assert "Traceback" not in said
    assert is_complete(tmp_path / "preempted.ckpt")


def test_torchrun(tmp_path: Path) -> None:
    """The launcher sends SIGTERM to all its ranks, and SIGKILL to those that do not end."""
    process = start(
        tmp_path,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
    )
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    assert "SIGTERM asked this run to stop: saved to " in said, said
    assert is_complete(tmp_path / "preempted.ckpt")
    assert not [name for name in entries(tmp_path) if name.startswith(".preempted")]


def fit_on_slurm(directory: str, send: Signals | None, ckpt_path: str | None) -> Any:
    rank = os.environ.pop("RANK")
    port = os.environ["MASTER_PORT"]
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"):
        os.environ.pop(name, None)
    os.environ.update(
        {
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank,
            "SLURM_NODEID": "0",
            "SLURM_NODELIST": "localhost",
            "MASTER_PORT": port,
            "PATH": f"{directory}/bin{os.pathsep}{os.environ['PATH']}",
        }
    )
    module = Classifier()
    run = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BigModelStrategy(**PIPELINE),
        plugins=[SLURMEnvironment(auto_requeue=True)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=f"{directory}/run",
        callbacks=[PreemptionCheckpoint(), *([send] if send else [])],
        num_sanity_val_steps=0,
    )
    try:
        run.fit(module, batches(), DataLoader(Sequences(10), batch_size=4, collate_fn=pad), ckpt_path=ckpt_path)
    except SystemExit as ending:
        return ending.code, str(ending), run.global_step
    return None, module.losses, run.global_step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_slurm_requeues_once(tmp_path: Path, ckpt_path: str | None) -> None:
    """Lightning's handler saves where each rank is, which hangs; without it nobody requeues the job."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IEXEC)
    # What a save that died has left: Lightning would read the number 4000000000000 out of it.
    (tmp_path / "run" / ".hpc_ckpt_4.ckpt.writing-000000000000").mkdir()
    send = Signals("SIGUSR1", 1, 1)
    found = run_ranks(fit_on_slurm, 2, str(tmp_path), send, ckpt_path, init_process_group=False)
    for code, said, step in found:
        assert (code, step) == (128 + signal.SIGUSR1, 2)
        assert f"saved to {tmp_path}/run/hpc_ckpt_1.ckpt;" in said
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    assert is_complete(tmp_path / "run" / "hpc_ckpt_1.ckpt")
    resumed = run_ranks(fit_on_slurm, 2, str(tmp_path), None, ckpt_path, init_process_group=False)
    # The module's own hook, which records losses, was due for the second step; then two steps.
    assert [(code, len(losses), step) for code, losses, step in resumed] == [(None, 1 + 2, 4)] * 2
    terminated = run_ranks(
        fit_on_slurm, 2, str(tmp_path), Signals("SIGTERM", 0, 2), ckpt_path, init_process_group=False
    )
    assert [found[0] for found in terminated] == [128 + signal.SIGTERM] * 2
    assert is_complete(tmp_path / "run" / "preempted.ckpt")


def fit_with_ddp(directory: str) -> Any:
    run = trainer("ddp", 2, default_root_dir=directory, callbacks=[PreemptionCheckpoint(), Signals("SIGUSR1", 1, 1)])
    module = TinyChain()
    try:
        run.fit(module, DataLoader(module.dataset(64), batch_size=4))
    except SystemExit as ending:
        return ending.code, run.global_step
    return None


@pytest.mark.filterwarnings("ignore")
def test_other_strategies(tmp_path: Path) -> None:
    """It must not silently do nothing under Lightning's own."""
    found = run_ranks(fit_with_ddp, 2, str(tmp_path))
    assert found[0] == found[1]
    assert found[0][0] == 128 + signal.SIGUSR1
    assert (tmp_path / "preempted.ckpt").is_file()


@pytest.mark.parametrize(
    "options",
    [{"signals": []}, {"signals": ["SIGKILL"]}, {"signals": ["sigterm"]}, {"filename": "a/b"}, {"filename": ""}],
)
def test_settings_that_cannot_work(options: dict[str, Any]) -> None:
    """A typo that shows when the machine is taken away."""
    with pytest.raises(ValueError, match=f"`{next(iter(options))}="):
        PreemptionCheckpoint(**options)
