"""Writing and reading a sharded checkpoint directory, by all ranks of any layout or by one process.

The layout of the directory is described in :mod:`lightning_bigmodel.checkpoint.index`. Each tensor is written once,
the copies of data replicas being spread over them; each rank reads only what it asks for, so any layout and any number
of ranks can read what any other wrote.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.checkpoint import _dcp, _replace
from lightning_bigmodel.checkpoint._content import SaveContent, checked_content, write_own
from lightning_bigmodel.checkpoint._entries import read_target
from lightning_bigmodel.checkpoint._names import list_with_nearest, why_left_out
from lightning_bigmodel.checkpoint._pickle import read_pickled, write_pickled
from lightning_bigmodel.checkpoint._place import is_remote, local_path
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint._versions import set_module_versions
from lightning_bigmodel.checkpoint.foreign import read_parts
from lightning_bigmodel.checkpoint.index import (
    DCP_METADATA_FILE,
    LEFT_OUT,
    METADATA_FILE,
    CheckpointIndex,
    extra_key,
    flush_to_disk,
    is_complete,
    is_foreign,
    is_sharded_checkpoint,
    make_index,
    model_key,
    rank_file,
    read_index,
    write_mark,
)
from lightning_bigmodel.checkpoint.numbered import is_numbered, named_groups, with_names
from lightning_bigmodel.checkpoint.optimizer_rows import Rows, is_of_other_shard, unmarked_state
from lightning_bigmodel.checkpoint.regions import RegionLayout, TensorRegions
from lightning_bigmodel.checkpoint.remote import write_remote
from lightning_bigmodel.checkpoint.state import OptimizerState

__all__ = [
    "LoadedCheckpoint",
    "is_complete",
    "is_sharded_checkpoint",
    "load_sharded",
    "read_index",
    "read_rank_state",
    "save_sharded",
    "write_content",
]

_VISIBLE_WITHIN_SECONDS = 10.0


class LoadedCheckpoint(NamedTuple):
    """What :func:`load_sharded` read for one rank; tensors are on the CPU."""

    model_state: dict[str, Any]
    """State-dict name to tensor or extra state."""
    optimizer_states: list[OptimizerState]
    """One per optimizer: all groups, and state of the names asked for."""
    metadata: dict[str, Any]
    """Everything else of a Lightning checkpoint."""
    rank_state: dict[str, Any] | None
    """What this rank saved of its own; ``None`` if the layout is another one."""
    extra_states: dict[str, dict[str, Any]]
    """Name of each further set that was asked for and saved, to its tensors by name."""


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


def load_sharded(
    directory: str | os.PathLike[str],
    *,
    model_names: Collection[str] | None = None,
    optimizer_names: Collection[str] | None = None,
    extra_names: Mapping[str, Collection[str]] | None = None,
    layout: Mapping[str, int] | None = None,
    regions: Mapping[str, RegionLayout] | None = None,
    rows: Mapping[str, Rows] | None = None,
    optimizer_order: Sequence[Sequence[Sequence[str]]] | None = None,
    same_tensor: Sequence[Collection[str]] = (),
    weights_only: bool = True,
    fetch: Callable[[Collection[str]], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Read what this rank asks for, whatever layout wrote it. All ranks of the group call it together.

    Reads directories of Lightning's ``ModelParallelStrategy`` too. Runs no code from the checkpoint: whatever is more
    than tensors, plain containers and classes that only hold values (paths, ``Namespace``, OmegaConf's, numpy's) is
    refused by name. ``weights_only=False`` allows it; pickled data can run code then, so trust the directory.

    Communication: two small all-gathers; tensors are read by each rank from the directory, none is sent.
    Memory: the tensors asked for, and one more at a time, on the CPU.

    Args:
        directory: A complete sharded checkpoint.
        model_names: State-dict names to read. Default: ``None``, all.
        optimizer_names: Parameters whose optimizer state is read; one that has none saved gets none. ``()`` reads the
            groups alone. Default: ``None``, all.
        extra_names: Further set to the names to read of it; what was not saved is left out. ``{}`` reads none.
            Default: ``None``, all of every set.
        layout: This run's layout, to decide whether ``rank_state`` fits. Default: ``None``, only their number counts.
        regions: Parameter name to what this rank holds of it; such a parameter, and optimizer state of its shape, is
            read as the local tensor, and so is its name in a further set. Default: ``None``, whole tensors.
        rows: Parameter name to the rows this rank's optimizers step, for state that has other shapes than the
            parameter. Default: ``None``, none.
        optimizer_order: For each optimizer here, the names in each of its groups. A directory made of a Lightning file
            has optimizer states by that order alone. Default: ``None``, such states keep their place as name.
        same_tensor: Sets of names of one tensor (tied parameters): one of them is enough. Default: ``()``.
        weights_only: See above. Default: ``True``.
        fetch: Called with the names of the files of tensors before they are read, to get them there; see
            :func:`~lightning_bigmodel.checkpoint.local_copy`. Default: ``None``, they are there.
        process_group: All ranks that take part. Default: ``None``, the default group, or this process alone.

    Raises:
        FileNotFoundError: If there is nothing at ``directory``.
        ValueError: If it is no sharded checkpoint, is incomplete, lacks names asked for, or has what ``weights_only``
            refuses.
        RuntimeError: If reading failed on any rank. Like the others raised on all ranks.
    """
    ranks = Ranks(process_group)

    def locate() -> Path:
        found = _replace.find(Path(directory))
        read_index(found, check_files=fetch is None)
        return found

    # Rank 0 looks whether all files are there: every rank asking after every file would be ranks squared. Local copies
    # of a remote one have been looked at, and their folders differ between machines.
    looking = 0 if fetch is None else ranks.rank
    found = ranks.agree("Opening the checkpoint", locate, only_rank=0 if fetch is None else None)[looking]
    if found is None:
        raise AssertionError("rank 0 returned no directory")
    loaded: list[LoadedCheckpoint] = []

    def read() -> None:
        index = read_index(found, check_files=False)
        own_rank = ranks.rank if _same_layout(index, layout, ranks.num_ranks) else None
        loaded.append(
            _read(
                found,
                index,
                model_names,
                optimizer_names,
                extra_names,
                own_rank,
                regions or {},
                rows or {},
                optimizer_order,
                same_tensor,
                weights_only,
                fetch,
            )
        )

    ranks.agree("Reading the checkpoint", read)
    return loaded[0]


def read_rank_state(directory: str | os.PathLike[str], rank: int, *, weights_only: bool = True) -> dict[str, Any]:
    """What one of the ranks that wrote the checkpoint saved of its own, for re-distribution over another layout.

    Raises:
        ValueError: If no such rank wrote it, or it has what ``weights_only`` refuses.
    """
    found = _replace.find(Path(directory))
    index = read_index(found, check_files=False)
    if is_foreign(found):
        raise ValueError(
            f"`{directory}` is of Lightning's `ModelParallelStrategy`, whose ranks save nothing of their own."
        )
    if not 0 <= rank < index.num_ranks:
        raise ValueError(f"`rank` is {rank}, but `{directory}` was written by {index.num_ranks} ranks.")
    state: dict[str, Any] = read_pickled(found / rank_file(rank), weights_only=weights_only)
    return state


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


def _same_layout(index: CheckpointIndex, layout: Mapping[str, int] | None, num_ranks: int) -> bool:
    return index.num_ranks == num_ranks and (layout is None or index.layout == dict(layout))


def _read(
    directory: Path,
    index: CheckpointIndex,
    model_names: Collection[str] | None,
    optimizer_names: Collection[str] | None,
    extra_names: Mapping[str, Collection[str]] | None,
    own_rank: int | None,
    regions: Mapping[str, RegionLayout],
    rows: Mapping[str, Rows],
    optimizer_order: Sequence[Sequence[Sequence[str]]] | None,
    same_tensor: Sequence[Collection[str]],
    weights_only: bool,
    fetch: Callable[[Collection[str]], None] | None,
) -> LoadedCheckpoint:
    available = index.model_names
    names = list(available) if model_names is None else list(model_names)
    there = set(available)
    spared = {name for group in same_tensor if not there.isdisjoint(group) for name in group} - there
    names = [name for name in names if name not in spared]
    pickled = read_parts(directory, index, weights_only=weights_only)
    all_groups, all_keys = _optimizer_parts(index, pickled["param_groups"], optimizer_order)
    if (missing := set(names) - set(available)) and (left := missing & set(pickled["metadata"].get(LEFT_OUT, ()))):
        raise ValueError(why_left_out(f"`{directory}`", left))
    if missing:
        raise ValueError(f"`{directory}` lacks {list_with_nearest(missing, available)}.")
    wanted: dict[str, tuple[str, str | None]] = {model_key(name): (name, None) for name in names}
    owners = None if optimizer_names is None else set(optimizer_names)
    optimizer_keys = [
        {
            name: {key: at for key, at in keys.items() if not is_of_other_shard(key, rows.get(name))}
            for name, keys in by_name.items()
            if owners is None or name in owners
        }
        for by_name in all_keys
    ]
    for by_name in optimizer_keys:
        for name, keys in by_name.items():
            wanted.update({at: (name, key) for key, at in keys.items()})
    extra = {
        set_name: [name for name in saved if extra_names is None or name in extra_names[set_name]]
        for set_name, saved in index.extra_names.items()
        if extra_names is None or set_name in extra_names
    }
    wanted.update((extra_key(set_name, name), (name, None)) for set_name, chosen in extra.items() for name in chosen)
    targets = {
        at: read_target(index, at, key, regions.get(name), rows.get(name)) for at, (name, key) in sorted(wanted.items())
    }
    _dcp.read_values(directory, targets, weights_only=weights_only, is_ours=not is_foreign(directory), fetch=fetch)
    values = {key: value.local if isinstance(value, TensorRegions) else value for key, value in targets.items()}
    model_state: OrderedDict[str, Any] = OrderedDict((name, values[model_key(name)]) for name in names)
    set_module_versions(model_state, pickled["module_versions"])
    optimizer_states: list[OptimizerState] = [
        {
            "state": {
                name: unmarked_state({key: values[at] for key, at in keys.items()}, rows.get(name), name)
                for name, keys in by_name.items()
            },
            "param_groups": groups,
        }
        for by_name, groups in zip(optimizer_keys, all_groups, strict=True)
    ]
    rank_state = None if own_rank is None else read_pickled(directory / rank_file(own_rank), weights_only=weights_only)
    extra_states = {
        set_name: {name: values[extra_key(set_name, name)] for name in chosen} for set_name, chosen in extra.items()
    }
    return LoadedCheckpoint(model_state, optimizer_states, pickled["metadata"], rank_state, extra_states)


def _optimizer_parts(
    index: CheckpointIndex, saved: Sequence[list[dict[str, Any]]], order: Sequence[Sequence[Sequence[str]]] | None
) -> tuple[list[list[dict[str, Any]]], list[dict[str, dict[str, str]]]]:
    """Groups, and keys by name, of each optimizer; by the names of ``order`` where the checkpoint has none."""
    all_groups, all_keys = [], []
    for number, groups in enumerate(saved):
        keys = index.optimizer_keys(number)
        if order is not None and number < len(order) and is_numbered(groups):
            groups, keys = named_groups(groups, order[number], number), with_names(keys, order[number])
        all_groups.append(groups)
        all_keys.append(keys)
    return all_groups, all_keys
