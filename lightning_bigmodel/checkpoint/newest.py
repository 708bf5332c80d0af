"""Which of several checkpoints to go on from, and the removal of old ones."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path

from lightning_bigmodel.checkpoint import _replace
from lightning_bigmodel.checkpoint.index import MARK_FILE, is_sharded_checkpoint, read_index

__all__ = ["find_checkpoint", "interrupted_names", "link_checkpoint", "newest_complete", "remove_checkpoint"]


def newest_complete(paths: Iterable[str | os.PathLike[str]]) -> Path | None:
    """The checkpoint whose writing was completed last, by the clock of its completion mark.

    Incomplete ones are passed over with a warning that names them. A single file counts as complete if it can be
    opened as one. Runs no pickled code.

    Args:
        paths: Directories, links to them and single files; what does not exist is passed over.

    Returns:
        The newest; None if none is complete.
    """
    newest: tuple[int, str] | None = None
    for given in sorted({str(path) for path in paths}):
        path = _replace.find(Path(given))
        reason = _incompleteness(path)
        if reason is not None:
            warnings.warn(f"`{given}` is passed over: {reason}", stacklevel=2)
        elif path.exists():
            marker = path / MARK_FILE if path.is_dir() else path
            newest = max(newest or (0, ""), (marker.stat().st_mtime_ns, given))
    return None if newest is None else Path(newest[1])


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """``path``, or where its content is if a run died in the moment in which it was replaced."""
    return _replace.find(Path(path))


def interrupted_names(directory: str | os.PathLike[str]) -> list[Path]:
    """Checkpoints of a directory that lost their name when a run died while they were replaced; all can be loaded."""
    return [Path(directory) / name for name in _replace.exchanged_names(Path(directory))]


def remove_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Remove a sharded checkpoint with all it holds, or a link to one.

    Returns:
        Whether it was one; other files and directories are left alone.
    """
    return _replace.discard(Path(path))


def link_checkpoint(target: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
    """Let ``link`` lead to ``target`` from one moment to the next; a crash leaves the old or the new one.

    Raises:
        FileExistsError: ``link`` is a directory that is no checkpoint.
    """
    _replace.put_link(Path(target), Path(link))


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
