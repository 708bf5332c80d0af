"""Reading a sharded checkpoint directory, by all ranks of any layout or by one process.

Each rank reads only what it asks for, so any layout and any number of ranks can read what any other wrote.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.checkpoint import _dcp_read, _replace
from lightning_bigmodel.checkpoint._collector import collector_paused
from lightning_bigmodel.checkpoint._entries import read_target
from lightning_bigmodel.checkpoint._names import list_with_nearest, why_left_out
from lightning_bigmodel.checkpoint._pickle import read_pickled
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint._versions import set_module_versions
from lightning_bigmodel.checkpoint.foreign import read_parts
from lightning_bigmodel.checkpoint.index import (
    LEFT_OUT,
    CheckpointIndex,
    extra_key,
    is_foreign,
    model_key,
    rank_file,
    read_index,
)
from lightning_bigmodel.checkpoint.numbered import is_numbered, named_groups, with_names
from lightning_bigmodel.checkpoint.optimizer_rows import Rows, is_of_other_shard, unmarked_state
from lightning_bigmodel.checkpoint.regions import RegionLayout, TensorRegions
from lightning_bigmodel.checkpoint.state import OptimizerState

__all__ = ["LiveTensors", "LoadedCheckpoint", "load_sharded", "read_rank_state"]


class LoadedCheckpoint(NamedTuple):
    """What :func:`load_sharded` read for one rank; tensors are on the CPU, or those it was given."""

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


class LiveTensors(NamedTuple):
    """Memory in use that :func:`load_sharded` may overwrite."""

    model: Mapping[str, Tensor]
    """State-dict name to what this rank holds of it."""
    optimizers: Sequence[Mapping[str, Mapping[str, Tensor]]]
    """One per optimizer: parameter name to state key to what this rank holds of it."""


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
    into: LiveTensors | None = None,
    weights_only: bool = True,
    fetch: Callable[[Collection[str]], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Read what this rank asks for, whatever layout wrote it. All ranks of the group call it together.

    Reads directories of Lightning's ``ModelParallelStrategy`` too. Runs no code from the checkpoint: whatever is more
    than tensors, plain containers and classes that only hold values (paths, ``Namespace``, OmegaConf's, numpy's) is
    refused by name. ``weights_only=False`` allows it; pickled data can run code then, so trust the directory.

    Communication: three small all-gathers; tensors are read by each rank from the directory, none is sent.
    Memory: the tensors asked for that are not in ``into``, and one more at a time, on the CPU.

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
        into: Tensors to be overwritten, where their shape and type are those saved: once all ranks have compared the
            sums of all that is going to be read into them. Default: ``None``, everything is read into new memory.
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
    finish: list[Callable[[], LoadedCheckpoint]] = []

    def check() -> None:
        index = read_index(found, check_files=False)
        own_rank = ranks.rank if _same_layout(index, layout, ranks.num_ranks) else None
        finish.append(
            _open(
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
                into or LiveTensors({}, []),
                weights_only,
                fetch,
            )
        )

    loaded: list[LoadedCheckpoint] = []
    with collector_paused():
        ranks.agree("Reading the checkpoint", check)
        ranks.agree("Reading the checkpoint", lambda: loaded.append(finish[0]()))
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


def _same_layout(index: CheckpointIndex, layout: Mapping[str, int] | None, num_ranks: int) -> bool:
    return index.num_ranks == num_ranks and (layout is None or index.layout == dict(layout))


def _open(
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
    into: LiveTensors,
    weights_only: bool,
    fetch: Callable[[Collection[str]], None] | None,
) -> Callable[[], LoadedCheckpoint]:
    """Find out what is to be read, and that what goes into memory in use is not damaged; the function given reads."""
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
    live = {model_key(name): tensor for name, tensor in into.model.items()}
    for by_name, given in zip(optimizer_keys, into.optimizers, strict=False):
        for name, keys in by_name.items():
            live.update({at: given[name][key] for key, at in keys.items() if key in given.get(name, ())})
    targets = {
        at: read_target(index, at, key, regions.get(name), rows.get(name), live.get(at))
        for at, (name, key) in sorted(wanted.items())
    }
    reading = _dcp_read.Reading(
        directory, targets, weights_only=weights_only, is_ours=not is_foreign(directory), fetch=fetch
    )
    reading.check([at for at, tensor in live.items() if _local(targets.get(at)) is tensor])

    def finish() -> LoadedCheckpoint:
        reading.run()
        values = {key: _local(value) for key, value in targets.items()}
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
        rank_state = (
            None if own_rank is None else read_pickled(directory / rank_file(own_rank), weights_only=weights_only)
        )
        extra_states = {
            set_name: {name: values[extra_key(set_name, name)] for name in chosen} for set_name, chosen in extra.items()
        }
        return LoadedCheckpoint(model_state, optimizer_states, pickled["metadata"], rank_state, extra_states)

    return finish


def _local(target: Any) -> Any:
    return target.local if isinstance(target, TensorRegions) else target


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
