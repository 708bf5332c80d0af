"""Holding up or failing the writing of tensors, where a test wants something to happen meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from lightning_bigmodel.checkpoint import _dcp


class Writer:
    """Stands in front of the writing of tensors on this rank."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.num_calls = 0
        self.fail_at: set[int] = set()
        self.fail_on_rank: int | None = None
        self.num_in_flight = self.most_in_flight = 0


@contextlib.contextmanager
def writer() -> Iterator[Writer]:
    """The writer of this rank; all writing in the block goes by it."""
    original, state = _dcp.write_tensors, Writer()

    def write_tensors(*args: Any) -> Any:
        state.num_calls += 1
        state.num_in_flight += 1
        state.most_in_flight = max(state.most_in_flight, state.num_in_flight)
        try:
            if not state.may_write.wait(60):
                raise TimeoutError("the test did not let the writer go on")
            if state.num_calls in state.fail_at and state.fail_on_rank == dist.get_rank():
                args[1]["unwritable"] = Unwritable()
            return original(*args)
        finally:
            state.num_in_flight -= 1

    _dcp.write_tensors = write_tensors
    try:
        yield state
    finally:
        state.may_write.set()
        _dcp.write_tensors = original


class Unwritable:
    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")
