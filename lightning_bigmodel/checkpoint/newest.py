"""Which of several checkpoints to go on from, and the removal of old ones."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path

from lightning_bigmodel.checkpoint import _replace
from lightning_bigmodel.checkpoint._place import RemotePlace, is_remote, local_path
from lightning_bigmodel.checkpoint.index import MARK_FILE, is_sharded_checkpoint, read_index
from lightning_bigmodel.checkpoint.remote import interrupted_remote

__all__ = ["find_checkpoint", "interrupted_names", "link_checkpoint", "newest_complete", "remove_checkpoint"]


def newest_complete(paths: Iterable[str | os.PathLike[str]]) -> Path | str | None:
    """The checkpoint whose writing was completed last, by the clock of its completion mark.

    Incomplete ones are passed over with a warning that names them. A single file counts as complete if it can be
    opened as one. Runs no pickled code.

    Args:
        paths: Directories, links to them, single files and URLs; what does not exist is passed over.

    Returns:
        The newest, a URL as it was given; None if none is complete.
    """
    newest: tuple[int, str] | None = None
    for given in sorted({str(path) for path in paths}):
        if is_remote(given):
            newest = max(newest or (0, ""), _completed_remote(given) or (0, ""))
            continue
        path = _replace.find(local_path(given))
        reason = _incompleteness(path)
        if reason is not None:
            warnings.warn(f"`{given}` is passed over: {reason}", stacklevel=2)
        elif path.exists():
            marker = path / MARK_FILE if path.is_dir() else path
            newest = max(newest or (0, ""), (marker.stat().st_mtime_ns, given))
    if newest is None or not newest[1]:
        return None
    return newest[1] if is_remote(newest[1]) else Path(newest[1])


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Local ``path``, or where its content is if a run died in the moment in which it was replaced."""
    return _replace.find(local_path(path))


def interrupted_names(directory: str | os.PathLike[str]) -> list[Path] | list[str]:
    """Checkpoints of a directory that lost their name when a run died while they were replaced; all can be loaded."""
    if is_remote(directory):
        return interrupted_remote(os.fspath(directory))
    return [local_path(directory) / name for name in _replace.exchanged_names(local_path(directory))]


def remove_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Remove a sharded checkpoint with all it holds, or a link to one; in a remote place one of one file too.

    Returns:
        Whether it was one; other files and directories are left alone.
    """
    if is_remote(path):
        return RemotePlace(os.fspath(path)).discard()
    return _replace.discard(local_path(path))


def link_checkpoint(target: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
    """Let ``link`` lead to ``target`` from one moment to the next; a crash leaves the old or the new one.

    Raises:
        FileExistsError: ``link`` is a directory that is no checkpoint.
    """
    _replace.put_link(Path(target), Path(link))


def _completed_remote(url: str) -> tuple[int, str] | None:
    """When it was completed, and its URL; None if there is none, with a warning if it is incomplete."""
    place = RemotePlace(url)
    found = place.find()
    reason = None if place.fs.isfile(found) else place.wrong(found)
    if reason is None:
        return round(place.modified(found) * 1e9), url
    if place.files(found):
        warnings.warn(f"`{url}` is passed over: {reason}", stacklevel=3)
    return None


def _incompleteness(path: Path) -> str | None:
    """What is wrong with it; None if it is complete, or is not there."""
    if path.is_symlink() and not path.exists():
        return f"it is a link to `{os.readlink(path)}`, which is not there."
    if path.is_dir() and not is_sharded_checkpoint(path):
        return "it is a directory without checkpoint files."
    if path.is_dir():
        try:
            read_index(path)
        except ValueError as error:
            return str(error)
    elif path.exists() and not zipfile.is_zipfile(path):
        return "it is no file that `torch.save` has completed."
    return None
