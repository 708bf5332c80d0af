"""Tells others of saved tensors that hooks around a block do not see: computed again, or moved and on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["Note", "note_moved", "note_second_run", "noting_hidden", "noting_second_runs"]

# Given a holder and a tensor, which is kept while the holder lives.
Note = Callable[[object, Tensor], None]

_of_second_runs: list[Note] = []
_of_moved: list[Note] = []


@contextmanager
def noting_second_runs(note: Note) -> Iterator[None]:
    """Within, `note` is told of each tensor that is computed again."""
    _of_second_runs.append(note)
    try:
        yield
    finally:
        _of_second_runs.remove(note)


@contextmanager
def noting_hidden(note: Note) -> Iterator[None]:
    """Within, `note` is told of each tensor that is computed again, or is on the device to be moved or used."""
    _of_moved.append(note)
    try:
        with noting_second_runs(note):
            yield
    finally:
        _of_moved.remove(note)


def note_second_run(holder: object, tensor: Tensor) -> None:
    """A second run made `tensor`."""
    for note in _of_second_runs:
        note(holder, tensor)


def note_moved(holder: object, tensor: Tensor) -> None:
    """`tensor` is on the device until it leaves, or after it came back."""
    for note in _of_moved:
        note(holder, tensor)
