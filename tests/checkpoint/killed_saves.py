"""Ranks that save over and over, and are killed at an operation on the file system that a test has chosen."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_bigmodel.checkpoint import BackgroundSaver, load_sharded, save_sharded

# What an interpreter tells its audit hooks of; each is a moment to die at, just before it happens.
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree", "os.listdir"}


def values(step: int, rank: int) -> dict[str, Any]:
    """What a rank owns at a step; one tensor is everybody's."""
    return {f"own_{rank}": torch.full((300,), float(step)), "shared": torch.full((5,), float(step))}


def step_of(path: Path) -> int:
    """The step a checkpoint is of; all that it holds must be of that step."""
    loaded = load_sharded(path)
    step = loaded.metadata["global_step"]
    assert sorted(loaded.model_state) == ["own_0", "own_1", "shared"]
    for value in loaded.model_state.values():
        assert (value == step).all()
    for entries in loaded.optimizer_states[0]["state"].values():
        assert (entries["exp_avg"] == -step).all()
    return int(step)


class Killer:
    """Counts what this rank does to files below a directory, and kills it, or all ranks, at one of these.

    `at` is the number of that operation, or a time in seconds as a float.
    """

    def __init__(self, directory: Path, at: float | None, victims: list[int]) -> None:
        self.directory, self.at, self.victims, self.num_events = str(directory), at, victims, 0
        self.is_on = True
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        self.pids = pids
        if isinstance(at, float):
            threading.Timer(at, self._kill).start()
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in _EVENTS or not any(self.directory in str(a) for a in arguments[:2]):
            return
        self.num_events += 1
        if isinstance(self.at, int) and self.num_events == self.at:
            self._kill()

    def _kill(self) -> None:
        for rank in self.victims:
            os.kill(self.pids[rank], signal.SIGKILL)


def save_steps(
    directory: Path, first: int, num_steps: int, is_async: bool, at: float | None, victims: list[int], own: int
) -> int:
    """Save some steps under one name; `own` is the rank that counts. Returns how many events there were."""
    rank = dist.get_rank()
    saver = BackgroundSaver(dist.new_group(backend="gloo")) if is_async else None
    save = save_sharded if saver is None else saver.save
    killer = Killer(directory, at if rank == own else None, victims)
    weights = values(first, rank)
    moments = {name: {"exp_avg": -value} for name, value in weights.items()}
    for step in range(first, first + num_steps):
        for name, value in values(step, rank).items():  # in place, as an optimizer does
            weights[name].copy_(value)
            moments[name]["exp_avg"].copy_(-value)
        save(
            directory / "last.ckpt",
            model_state=weights,
            optimizer_states=[{"state": moments, "param_groups": [{"params": sorted(weights)}]}],
            metadata={"global_step": step},
            rank_state={"step": step},
        )
        if rank == 0:
            # In a background save's case this is the step whose save has begun.
            (directory / "asked.tmp").write_text(json.dumps(step))
            (directory / "asked.tmp").replace(directory / "asked.json")
    if saver is not None:
        saver.finish()
    killer.is_on = False
    return killer.num_events
