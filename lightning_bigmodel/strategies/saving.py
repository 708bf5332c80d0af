"""When checkpoints are written, and what happens to old ones: at once or in the background, in the same order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_bigmodel import _host_checkpoints
from lightning_bigmodel.checkpoint import (
    BackgroundSaver,
    is_remote,
    link_checkpoint,
    local_path,
    remove_checkpoint,
    save_sharded,
    save_single,
)
from lightning_bigmodel.strategies.base import StrategyBase

__all__ = ["SavingHooks"]

# How long a save in flight may take to end once a run has failed: it cannot be completed then.
_ABANDON_SECONDS = 10.0


class SavingHooks(StrategyBase):
    """`async_checkpoint`: who writes, who waits, and what waits for a checkpoint to be complete."""

    _saves_in_background = False
    _checkpoint_format = "sharded"
    _checkpoint_parameters = "all"
    _saver: BackgroundSaver | None = None
    # As all ranks know it alike, from the call on: what the disk of rank 0 will show when the save is complete.
    _path_in_flight: str | None = None
    _paths_to_remove: frozenset[str] = frozenset()
    _linked_paths: tuple[str, ...] = ()  # to be removed once no link leads there

    def finish_saving(self) -> None:
        """Wait until a checkpoint that is being written in the background is complete. Call it on all ranks together.

        Does nothing where none is in flight. The strategy calls it at the next save, before a checkpoint is loaded and
        at the end of training.

        Raises:
            RuntimeError, ValueError: On all ranks: the writing failed.
        """
        if self._saver is not None:
            with self._phase("saving a checkpoint"):
                self._path_in_flight, self._paths_to_remove = None, frozenset()
                self._saver.finish()

    def _begin_saving(self) -> None:
        """At the start of each run. Collective over the world."""
        trainer = self._trainer()
        _host_checkpoints.share_resume_path(trainer, self.broadcast)
        _host_checkpoints.follow_saves(trainer, self._is_taken, self._link)
        if self._saves_in_background:
            # Of its own: the thread's collectives would mix with those of training.
            group = dist.new_group(backend="gloo", timeout=self._timeout)  # type: ignore[attr-defined]
            self._saver = BackgroundSaver(group, self.root_device)

    def _end_saving(self) -> BaseException | None:
        """At the end of each run: wait for what is in flight. Returns its error."""
        saver, self._saver = self._saver, None
        _host_checkpoints.unfollow_saves(self._trainer())
        self._path_in_flight, self._paths_to_remove = None, frozenset()
        if self._failed:
            if saver is not None:
                saver.abandon(_ABANDON_SECONDS)
            return None
        if saver is None:
            self._remove_linked()
            return None
        try:
            with self._phase("saving a checkpoint"):
                saver.finish()
        except Exception as error:  # raised by the caller once the run is taken down
            self._failed = True
            return error
        self._remove_linked()
        return None

    def _save(self, path: str, **content: Any) -> None:
        """Write a checkpoint, or begin to; the arguments are those of `save_sharded`. Collective."""
        if self._checkpoint_format == "single":
            save_single(path, **content)
            return
        if self._saver is None:
            save_sharded(path, **content)
            return
        self.finish_saving()
        self._saver.save(path, **content)
        self._path_in_flight = location(path)
        if _host_checkpoints.is_requeue_path(Path(path)):
            self.finish_saving()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint once what replaces it is complete; anything that is none stays."""
        path = os.fspath(filepath)
        if self._path_in_flight is not None:
            self._paths_to_remove |= {location(path)}
        if self.is_global_zero:
            self._once_complete(lambda: self._remove_unlinked(path))

    def _remove_unlinked(self, path: str) -> None:
        # ModelCheckpoint removes what `last.ckpt` leads to before it links the new one: a run killed between the two
        # would have no last checkpoint.
        if _has_link(path):
            self._linked_paths += (path,)
        else:
            self._remove(path)

    def _remove_linked(self) -> None:
        paths, self._linked_paths = self._linked_paths, ()
        for path in paths:
            self._remove(path)

    def _remove(self, path: str) -> None:
        if is_remote(path):
            self._remove_remote(path)
            return
        if remove_checkpoint(path):
            return
        if local_path(path).is_dir():
            rank_zero_warn(f"`{path}` was to be removed, but is a directory that is no checkpoint. It stays.")
        else:
            self.checkpoint_io.remove_checkpoint(path)

    def _remove_remote(self, url: str) -> None:
        try:
            if not remove_checkpoint(url):
                rank_zero_warn(f"`{url}` was to be removed, but is no checkpoint. It stays.")
        except Exception as error:  # of whatever serves the store; the new checkpoint is complete, which matters more
            rank_zero_warn(f"`{url}` was to be removed, and may still be there ({type(error).__name__}: {error}).")

    def _link(self, path: str, link: str) -> None:
        if self.is_global_zero:
            self._once_complete(lambda: self._link_and_remove(path, link))
        self.barrier("link to a checkpoint")

    def _link_and_remove(self, path: str, link: str) -> None:
        link_checkpoint(path, link)
        paths, self._linked_paths = self._linked_paths, ()
        for linked in paths:
            self._remove_unlinked(linked)

    def _once_complete(self, action: Any) -> None:
        if self._saver is None:
            action()
        else:
            self._saver.then(action)

    def _is_taken(self, path: str) -> bool | None:
        """Whether a name is, or will be, that of a checkpoint, while the disk does not show it; None: look there."""
        if location(path) == self._path_in_flight:
            return True
        return False if location(path) in self._paths_to_remove else None

    @override
    def on_train_end(self) -> None:
        self.finish_saving()


def _has_link(path: str) -> bool:
    place = Path(location(path)) if not is_remote(path) else None
    if place is None or not place.parent.is_dir():
        return False
    return any(entry.is_symlink() and entry.resolve() == place.resolve() for entry in place.parent.iterdir())


def location(path: str | os.PathLike[str]) -> str:
    """One text for one place: a URL, or the absolute path."""
    return os.fspath(path) if is_remote(path) else str(local_path(path).absolute())
