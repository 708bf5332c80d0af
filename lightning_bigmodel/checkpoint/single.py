"""One ordinary Lightning file, written by all ranks together."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_bigmodel.checkpoint import _replace
from lightning_bigmodel.checkpoint._place import RemotePlace, is_remote, local_path
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.convert import convert_to_single_file
from lightning_bigmodel.checkpoint.local_copy import fetch_whole
from lightning_bigmodel.checkpoint.remote import refuse_folder, write_file
from lightning_bigmodel.checkpoint.store import is_sharded_checkpoint, save_sharded

__all__ = ["save_single"]


def save_single(
    path: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None, **content: Any
) -> None:
    """Write what the arguments of `save_sharded` say as one file; what was there is replaced when it is complete.

    The ranks write a directory beside it, which the first one makes a file of. What only a rank has (`rank_state`) is
    not in the file. Of a URL the first rank fetches the parts, and puts the file up.

    Memory: that of `save_sharded`, and on the first rank one tensor at a time; twice the size on the disk meanwhile.
    Time: that of `save_sharded`, and of reading and writing all of it once by one process.

    Raises:
        RuntimeError: On all ranks, if anything failed on any.

    Example:
        >>> save_single(
        ...     Path("last.ckpt"), model_state=state, optimizer_states=None, metadata={}, rank_state={}
        ... )  # doctest: +SKIP
    """
    ranks = Ranks(process_group)
    if is_remote(path):
        _save_remote(os.fspath(path), ranks, process_group, content)
        return
    path = local_path(path)
    parts, joined = path.with_name(f".{path.name}.parts"), path.with_name(f".{path.name}.joined")
    ranks.agree("Preparing the checkpoint", lambda: _refuse_folder(path), only_rank=0)
    save_sharded(parts, process_group=process_group, **content)

    def join() -> None:
        try:
            convert_to_single_file(parts, joined, overwrite=True)
            if (
                path.is_dir() and not path.is_symlink()
            ):  # a sharded one of an earlier run, now that the new one is there
                _replace.discard(path)
            joined.replace(path)
        finally:
            joined.unlink(missing_ok=True)
            _replace.remove(parts)

    ranks.agree("Writing one file", join, only_rank=0)


def _save_remote(url: str, ranks: Ranks, process_group: dist.ProcessGroup | None, content: dict[str, Any]) -> None:
    head, _, name = url.rstrip("/").rpartition("/")
    parts = f"{head}/.{name}.parts"
    ranks.agree(f"Preparing `{url}`", lambda: refuse_folder(RemotePlace(url)), only_rank=0)
    save_sharded(parts, process_group=process_group, **content)

    def make(folder: Path) -> Path:
        fetch_whole(parts, folder / "parts")
        convert_to_single_file(folder / "parts", folder / "joined.ckpt")
        return folder / "joined.ckpt"

    def join() -> None:
        try:
            write_file(url, make)
        finally:
            with contextlib.suppress(Exception):  # what stays is replaced by the next save
                RemotePlace(parts).discard()

    ranks.agree(f"Writing `{url}`", join, only_rank=0)


def _refuse_folder(path: Path) -> None:
    if path.is_dir() and not is_sharded_checkpoint(path):
        raise FileExistsError(
            f"`{path}` is a directory that is no checkpoint, and is not replaced. Give the name of a file to write."
        )
