"""Writing a sharded checkpoint directory, by all ranks of any layout or by one process.

The layout of the directory is described in :mod:`lightning_bigmodel.checkpoint.index`. Each tensor is written once,
the copies of data replicas being spread over them; each rank reads only what it asks for, so any layout and any number
of ranks can read what any other wrote.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.checkpoint import _dcp, _replace
from lightning_bigmodel.checkpoint._collector import collector_paused
from lightning_bigmodel.checkpoint._content import SaveContent, checked_content, write_own
from lightning_bigmodel.checkpoint._pickle import write_pickled
from lightning_bigmodel.checkpoint._place import is_remote, local_path
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.index import (
    DCP_METADATA_FILE,
    METADATA_FILE,
    flush_to_disk,
    is_complete,
    is_sharded_checkpoint,
    make_index,
    read_index,
    write_mark,
)
from lightning_bigmodel.checkpoint.regions import TensorRegions
from lightning_bigmodel.checkpoint.remote import write_remote
from lightning_bigmodel.checkpoint.state import OptimizerState

__all__ = [
    "is_complete",
    "is_sharded_checkpoint",
    "read_index",
    "save_sharded",
    "write_content",
]

_VISIBLE_WITHIN_SECONDS = 10.0


def save_sharded(
    directory: str | os.PathLike[str],
    *,
    model_state: Mapping[str, Any],
    optimizer_states: Sequence[OptimizerState] | None,
    metadata: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    extra_states: Mapping[str, Mapping[str, Tensor | TensorRegions]] | None = None,
    layout: Mapping[str, int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write one checkpoint together with all ranks; what was there before is replaced when the new one is complete.

    Written beside ``directory``, flushed to disk, marked complete and renamed by rank 0. If any rank fails, all raise
    and the previous checkpoint stays. Returns on every rank after the rename.

    Communication: the list of entries to the first rank and back, and three small all-gathers; no tensor is sent.
    Memory: one tensor at a time on the CPU beside those given.

    Args:
        directory: Where the checkpoint goes, on storage that all ranks see, such as ``"checkpoints/last.ckpt"``, or a
            URL of fsspec's such as ``"s3://bucket/last.ckpt"``.
        model_state: What this rank owns, from :func:`~lightning_bigmodel.checkpoint.state.model_state_by_name`.
        optimizer_states: This rank's part of each optimizer, in the same order on every rank, from
            :func:`~lightning_bigmodel.checkpoint.state.optimizer_state_by_name`. ``None``: only weights are saved.
        metadata: The rest of a Lightning checkpoint (``epoch``, ``global_step``, ``loops``, ...); rank 0's is saved.
        rank_state: What only this rank has (random generators, loader positions).
        extra_states: Further sets of tensors by name, such as averages of parameters, whole or in regions. The name of
            a set has letters, digits and ``_``. Default: ``None``, no set.
        layout: Mesh axis to its size, such as ``{"pipe": 2, "data_replicate": 2}``. Default: ``None``, not recorded.
        process_group: All ranks that take part. Default: ``None``, the default group, or this process alone.

    Raises:
        ValueError: If ``metadata`` has tensors that belong elsewhere, a set of ``extra_states`` has no proper name, or
            ranks give different numbers of optimizers.
        FileNotFoundError: If a rank does not see the directory that rank 0 made.
        RuntimeError: If anything else failed on any rank. Raised on all ranks, naming the one that failed.
    """
    ranks = Ranks(process_group)
    with collector_paused():
        content = checked_content(
            ranks,
            model_state=model_state,
            optimizer_states=optimizer_states,
            metadata=metadata,
            rank_state=rank_state,
            extra_states=extra_states,
            layout=layout,
        )
        write_content(directory, content, ranks)


def write_content(directory: str | os.PathLike[str], content: SaveContent, ranks: Ranks) -> None:
    """The writing of `save_sharded`, once all ranks have checked what they give."""
    if is_remote(directory):
        write_remote(os.fspath(directory), content, ranks)
        return
    target = local_path(directory)
    temporary = ranks.agree("Preparing the checkpoint", lambda: _replace.begin_writing(target), only_rank=0)[0]
    if temporary is None:
        raise AssertionError("rank 0 returned no directory")
    try:
        ranks.agree("Preparing the checkpoint", lambda: _wait_until_visible(temporary))
        table = _dcp.write_tensors(temporary, dict(content.values), ranks)
        sizes = ranks.agree(
            "Writing the rank's own files", lambda: write_own(temporary, ranks.rank, content.rank_state)
        )

        def finish() -> None:
            write_pickled(content.metadata, temporary / METADATA_FILE)
            flush_to_disk(temporary / DCP_METADATA_FILE)
            files = {name: num_bytes for own in sizes for name, num_bytes in (own or {}).items()}
            for name in (METADATA_FILE, DCP_METADATA_FILE):
                files[name] = (temporary / name).stat().st_size
            write_mark(
                temporary,
                make_index(table, files, content.progress, content.layout, ranks.num_ranks, content.num_optimizers),
            )
            _replace.finish_writing(temporary, target)

        ranks.agree("Completing the checkpoint", finish, only_rank=0)
    except BaseException:
        if ranks.rank == 0:
            _replace.remove(temporary)
        raise


def _wait_until_visible(directory: Path) -> None:
    """A network file system may show a new directory to other machines a moment late."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    while not directory.is_dir():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"Rank 0 made `{directory}`, which this rank does not see after {_VISIBLE_WITHIN_SECONDS:.0f} seconds."
                " Sharded checkpoints need storage that all machines share: set `dirpath` or `default_root_dir` to it."
            )
        time.sleep(0.05)
