"""Saving while training goes on: values of the moment of the call, written by a thread of every rank."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_bigmodel.checkpoint._content import HostCopies, SaveContent, checked_content
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.store import write_content

__all__ = ["BackgroundSaver"]


class BackgroundSaver:
    """Saves as `save_sharded` does, in the background. All ranks make their calls in the same order.

    `save` copies this rank's values to host memory and returns; a thread writes them while training changes the
    originals. One save is in flight at most: the next waits for it. What fails is an error on all ranks, of the next
    `save` or of `finish`, and the checkpoint that was there before stays.

    Not for a process group that anything else uses: its collectives would mix with those of the thread.

    Memory: a copy on the host of all that this rank holds and saves, kept from one save to the next. Communication:
    that of `save_sharded` and one small all-gather more.

    Args:
        process_group: All ranks that take part, in a group of their own that carries CPU tensors (gloo).
        device: The CUDA device of this rank. Default: None, no CUDA.

    Example::

        saver = BackgroundSaver(dist.new_group(backend="gloo"))
        saver.save("checkpoints/last.ckpt", model_state=..., optimizer_states=..., metadata=..., rank_state={})
        ...                # training goes on
        saver.finish()     # complete, or an error
    """

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        self._ranks = Ranks(process_group)
        self._device = device
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        # Under the lock: the thread and its caller both look at them.
        self._is_writing = False
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    def save(self, directory: str | os.PathLike[str], **content: Any) -> None:
        """Begin to write one checkpoint; the arguments are those of `save_sharded`.

        Raises:
            ValueError, RuntimeError: On all ranks: the save before failed, or this one cannot be begun.
        """
        self.finish()
        ranks = self._ranks
        checked = checked_content(ranks, **content)
        copied: list[SaveContent] = []

        def copy() -> None:
            copied.append(self._copies.of(checked, with_metadata=ranks.rank == 0))

        ranks.agree("Copying what is to be saved", copy)
        self._is_writing = True
        # A daemon: where a run fails, a disk that does not answer must not keep the process.
        self._thread = threading.Thread(
            target=self._write, args=(os.fspath(directory), copied[0]), name="bigmodel-checkpoint-writer", daemon=True
        )
        self._thread.start()

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` when the save in flight is complete; at once if there is none, never if it failed.

        For what may only happen once the new checkpoint is there, such as the removal of an old one. The action runs
        on this rank alone and may not communicate; its error is a warning.
        """
        with self._lock:
            if self._is_writing:
                self._then.append(action)
                return
            if self._error is not None:
                return
        _run(action)

    def finish(self) -> None:
        """Wait for the save in flight.

        Raises:
            ValueError, RuntimeError: On all ranks: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self, seconds: float) -> None:
        """After an error elsewhere: give the save in flight some time to end, and forget it.

        Without its process group it cannot be completed, and what it has written is no checkpoint.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None
        self._error = None

    def _write(self, target: str, content: SaveContent) -> None:
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread would take memory on the first one
            self._copies.wait()
            write_content(target, content, self._ranks)
        except BaseException as error:  # it is raised in the thread that asks for the outcome
            with self._lock:
                self._error, self._is_writing = error, False
                self._then.clear()
            return
        while True:
            with self._lock:
                if not self._then:
                    self._is_writing = False
                    return
                action = self._then.pop(0)
            _run(action)


def _run(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        # The new checkpoint is complete, which is what matters.
        warnings.warn(f"After a checkpoint was written: {error}", stacklevel=2)
