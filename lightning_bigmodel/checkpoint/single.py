"""One ordinary Lightning file, written by all ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_bigmodel.checkpoint import _replace
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.convert import convert_to_single_file
from lightning_bigmodel.checkpoint.store import save_sharded

__all__ = ["save_single"]


def save_single(path: Path, *, process_group: dist.ProcessGroup | None = None, **content: Any) -> None:
    """Write what the arguments of `save_sharded` say as one file; what was there is replaced when it is complete.

    The ranks write a directory beside it, which the first one makes a file of. What only a rank has (`rank_state`) is
    not in the file.

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
    parts = path.with_name(f".{path.name}.parts")
    save_sharded(parts, process_group=process_group, **content)

    def join() -> None:
        try:
            if path.is_dir():  # a sharded one of an earlier run
                _replace.remove(path)
            convert_to_single_file(parts, path, overwrite=True)
        finally:
            _replace.remove(parts)

    ranks.agree("Writing one file", join, only_rank=0)
