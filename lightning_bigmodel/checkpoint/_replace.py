"""Putting a finished directory or file in the place of an old one, so that a crash never leaves neither.

Beside a target ``last.ckpt`` the names are ``.last.ckpt.writing-<random>`` while it is written,
``.last.ckpt.replaced-<random>`` for the old one during the moment of the exchange, and ``.last.ckpt.removed-<random>``
for one that is being removed.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import warnings
from pathlib import Path

from lightning_bigmodel.checkpoint.index import flush_to_disk, is_complete, is_sharded_checkpoint

_WRITING = "writing"
_REPLACED = "replaced"
_REMOVED = "removed"
_SIBLING = re.compile(rf"\.(?P<name>.+)\.(?P<kind>{_WRITING}|{_REPLACED}|{_REMOVED})-[0-9a-f]{{12}}")


def begin_writing(target: Path) -> Path:
    """Create an empty directory beside ``target`` to write into. Half-written ones of a dead run are removed."""
    if target.name in ("", ".."):
        raise ValueError(
            f"`{target}` has no last part to be the checkpoint's name. Give a path such as `{target}/last.ckpt`."
        )
    if target.is_dir() and not target.is_symlink() and not is_sharded_checkpoint(target) and any(target.iterdir()):
        raise FileExistsError(
            f"`{target}` is a directory that is no checkpoint, and is not replaced by one. Choose another name, or"
            " remove it yourself."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _siblings(target, _WRITING):
        # A complete one may be all that is left, if the run died in the moment of the exchange.
        if target.exists() or not is_complete(leftover):
            remove(leftover)
    directory = _new_sibling(target, _WRITING)
    directory.mkdir()
    return directory


def finish_writing(written: Path, target: Path) -> None:
    """Give ``written`` the name ``target``; what had the name before is removed after the exchange."""
    flush_to_disk(written)
    if target.exists() or target.is_symlink():
        # A directory that is not empty cannot be replaced by one rename.
        aside = _new_sibling(target, _REPLACED)
        aside.mkdir()
        target.rename(aside / target.name)
        try:
            written.rename(target)
        except OSError:
            (aside / target.name).rename(target)
            remove(aside)
            raise
    else:
        written.rename(target)
    flush_to_disk(target.parent)
    for kind in (_WRITING, _REPLACED):
        for leftover in _siblings(target, kind):
            remove(leftover)


def put_link(target: Path, link: Path) -> None:
    """Let ``link`` lead to ``target``; what had the name before goes when the new link is there."""
    if os.path.abspath(target) == os.path.abspath(link):
        return
    written = _new_sibling(link, _WRITING)
    written.symlink_to(os.path.relpath(target, link.parent))
    if link.is_dir() and not link.is_symlink():
        if not is_sharded_checkpoint(link):
            written.unlink()
            raise FileExistsError(f"`{link}` is a directory that is no checkpoint, and is not replaced by a link.")
        finish_writing(written, link)
    else:
        written.replace(link)
        flush_to_disk(link.parent)


def discard(target: Path) -> bool:
    """Remove a checkpoint directory wholly, or a link; returns False, and does nothing, for what is neither.

    It loses its name first, so that one that is half removed when the run dies never passes for a checkpoint.
    """
    if target.is_symlink():
        target.unlink()
        return True
    if not is_sharded_checkpoint(target):
        return False
    aside = _new_sibling(target, _REMOVED)
    target.rename(aside)
    for path in [aside, *(path for path in target.parent.iterdir() if _kind(path) == _REMOVED)]:
        remove(path)
    return True


def exchanged_names(directory: Path) -> list[str]:
    """Names in ``directory`` that :func:`find` knows something for, though nothing has them."""
    if not directory.is_dir():
        return []
    found = {match["name"] for path in directory.iterdir() if (match := _SIBLING.fullmatch(path.name))}
    return sorted(name for name in found if not (directory / name).exists() and _left(directory / name))


def find(target: Path) -> Path:
    """``target``, or where its content is if a run died between the two renames of an exchange."""
    if target.exists():
        return target
    candidates = _left(target)
    if not candidates:
        return target
    warnings.warn(
        f"`{target}` is gone: a run died while it was replaced. Using `{candidates[0]}`, which the next save removes.",
        stacklevel=2,
    )
    return candidates[0]


def remove(directory: Path) -> None:
    """Remove a directory with all it holds, links themselves rather than what they point to, as far as possible."""
    if directory.is_symlink():
        directory.unlink()
        return
    # What cannot be removed is left: it does not pass for a checkpoint, and its error would hide the one that matters.
    shutil.rmtree(directory, ignore_errors=True)


def _left(target: Path) -> list[Path]:
    """What a run that died while it replaced ``target`` left in its place, the newest first."""
    # Nothing is lost between the two renames: the new one is complete, and the old one is aside.
    candidates = [path for path in _siblings(target, _WRITING) if is_complete(path)]
    return candidates + [path / target.name for path in _siblings(target, _REPLACED) if (path / target.name).exists()]


def _kind(path: Path) -> str | None:
    match = _SIBLING.fullmatch(path.name)
    return None if match is None else match["kind"]


def _prefix(target: Path, kind: str) -> str:
    # Hidden, so that no search for checkpoints by pattern finds them.
    return f".{target.name}.{kind}-"


def _new_sibling(target: Path, kind: str) -> Path:
    # Not tempfile.mkdtemp: its directories are readable by their owner alone, whatever the umask.
    return target.parent / f"{_prefix(target, kind)}{uuid.uuid4().hex[:12]}"


def _siblings(target: Path, kind: str) -> list[Path]:
    prefix = _prefix(target, kind)
    return (
        sorted(path for path in target.parent.iterdir() if path.name.startswith(prefix))
        if target.parent.is_dir()
        else []
    )
