"""Putting a finished directory or file in the place of an old one, so that a crash never leaves neither.

Beside a target ``last.ckpt`` the names are ``.last.ckpt.writing-<random>`` while it is written and
``.last.ckpt.replaced-<random>`` for the old one during the moment of the exchange.
"""

from __future__ import annotations

import shutil
import uuid
import warnings
from pathlib import Path

from lightning_bigmodel.checkpoint.index import flush_to_disk, is_complete

_WRITING = "writing"
_REPLACED = "replaced"


def begin_writing(target: Path) -> Path:
    """Create an empty directory beside ``target`` to write into. Half-written ones of a dead run are removed."""
    if target.name in ("", ".."):
        raise ValueError(
            f"`{target}` has no last part to be the checkpoint's name. Give a path such as `{target}/last.ckpt`."
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


def find(target: Path) -> Path:
    """``target``, or where its content is if a run died between the two renames of an exchange."""
    if target.exists():
        return target
    # Nothing is lost between the two renames: the new one is complete, and the old one is aside.
    candidates = [path for path in _siblings(target, _WRITING) if is_complete(path)]
    candidates += [path / target.name for path in _siblings(target, _REPLACED) if (path / target.name).exists()]
    if not candidates:
        return target
    warnings.warn(
        f"`{target}` is gone: a run died while it was replaced. Using `{candidates[0]}`, which the next save removes.",
        stacklevel=2,
    )
    return candidates[0]


def remove(directory: Path) -> None:
    """Remove a directory with all it holds, links themselves rather than what they point to, as far as possible."""
    # What cannot be removed is left: it does not pass for a checkpoint, and its error would hide the one that matters.
    shutil.rmtree(directory, ignore_errors=True)


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
