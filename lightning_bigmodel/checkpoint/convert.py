"""A sharded checkpoint directory as one ordinary Lightning file, and a description of what it holds."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_bigmodel.checkpoint import _dcp_read, _replace
from lightning_bigmodel.checkpoint._mapping import take_room
from lightning_bigmodel.checkpoint._pickle import write_pickled
from lightning_bigmodel.checkpoint._versions import set_module_versions
from lightning_bigmodel.checkpoint.eight_bit import quantized_entries
from lightning_bigmodel.checkpoint.foreign import ForeignIndex, read_parts
from lightning_bigmodel.checkpoint.index import (
    SAME_TENSOR,
    CheckpointIndex,
    TensorEntry,
    extra_key,
    flush_to_disk,
    model_key,
    read_index,
)
from lightning_bigmodel.checkpoint.optimizer_rows import unmarked_state

__all__ = ["convert_to_single_file", "describe"]


def convert_to_single_file(
    directory: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    weights_only: bool = True,
    weights_from: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Write one ordinary Lightning checkpoint, for ``load_from_checkpoint`` and ``Trainer.fit(ckpt_path=...)``.

    A further set of tensors that a callback has saved, such as the averages ``"ema"``, becomes
    ``checkpoint["ema_state_dict"]``, by full name.

    Runs in one process without communication. Tensors go through files mapped into memory beside the output, so a
    machine with less memory than the checkpoint has can convert it: it needs twice the checkpoint's size
    on the disk while it runs. The output appears under its name when it is complete.

    Args:
        directory: A complete sharded checkpoint.
        output_path: The file to write, such as ``"last-single.ckpt"``.
        overwrite: Replace a file that exists. Default: ``False``.
        weights_only: Refuse a checkpoint whose pickled parts hold more than tensors, plain containers and classes that
            only hold values; loading others can run code. Default: ``True``.
        weights_from: A further set, such as ``"ema"``, whose values take the place of the weights of their name in
            ``state_dict``, in the type of the weights. The file is for inference then: it has neither optimizer states
            nor further sets. Default: ``None``, the weights themselves.
        progress: Called as ``progress(num_read, num_values, key)`` after each value. Default: ``None``.

    Raises:
        FileNotFoundError: If there is nothing at ``directory``, or no directory to write the output in.
        FileExistsError: If the output exists and ``overwrite`` is not set, or is a directory.
        ValueError: If ``directory`` is no sharded checkpoint, is incomplete, lacks the set ``weights_from``, or has
            what ``weights_only`` refuses.

    Example::

        convert_to_single_file("checkpoints/last.ckpt", "single.ckpt")
        MyModule.load_from_checkpoint("single.ckpt")
    """
    source, output = _replace.find(Path(directory)), Path(output_path)
    index = read_index(source)
    if weights_from is not None and weights_from not in index.extra_names:
        raise ValueError(
            f"`{directory}` has no tensors of `{weights_from}`; beside the weights it has {sorted(index.extra_names)}."
            " Convert a checkpoint that was saved with the callback that keeps them, or take the weights."
        )
    if output.is_dir():
        raise FileExistsError(f"`output_path` is `{output}`, a directory. Give the path of a file to write.")
    if output.exists() and not overwrite:
        raise FileExistsError(f"`{output}` exists. Give another `output_path`, or set `overwrite`.")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"There is no directory `{output.parent}` to write `{output.name}` in: make it first.")
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.writing-", dir=output.parent))
    try:
        keys = index.keys if weights_from is None else weight_keys(index, weights_from).values()
        values = read_mapped(source, index, keys, scratch, weights_only, progress)
        pickled = read_parts(source, index, weights_only=weights_only)
        write_pickled(_lightning_checkpoint(index, values, pickled, weights_from), scratch / "checkpoint")
        (scratch / "checkpoint").replace(output)
        flush_to_disk(output.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def describe(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What a sharded checkpoint holds, as plain values. Reads the completion mark alone and runs no pickled code.

    Returns:
        ``global_step``, ``epoch``, ``layout``, ``num_ranks``, ``num_optimizers``, ``format_version``,
        ``torch_version``; ``model``, ``optimizers`` (one per optimizer) and ``extra`` (name of each further set) with
        ``num_tensors``, ``num_elements``, ``num_bytes`` and ``dtypes`` (name to number of elements); ``file_bytes``,
        the size of all files; ``tensors``, key to ``{"shape", "dtype"}``.

    Raises:
        FileNotFoundError: If there is nothing at ``directory``.
        ValueError: If it is no sharded checkpoint, or is incomplete.
    """
    index = read_index(directory)
    model = [index.tensors[model_key(name)] for name in index.model_names if model_key(name) in index.tensors]
    optimizers = [
        [
            index.tensors[key]
            for keys in index.optimizer_keys(number).values()
            for key in keys.values()
            if key in index.tensors
        ]
        for number in range(index.num_optimizers or 0)
    ]
    return {
        "global_step": index.global_step,
        "epoch": index.epoch,
        "layout": dict(index.layout),
        "num_ranks": index.num_ranks,
        "num_optimizers": index.num_optimizers,
        "format_version": index.format_version,
        "torch_version": index.torch_version,
        "model": _sums(model),
        "optimizers": [_sums(entries) for entries in optimizers],
        "extra": {
            set_name: _sums([index.tensors[key] for key in extra_keys(index, set_name).values()])
            for set_name in index.extra_names
        },
        "file_bytes": sum(index.files.values()),
        "tensors": {key: {"shape": list(entry.shape), "dtype": entry.dtype} for key, entry in index.tensors.items()},
    }


def _sums(entries: Sequence[TensorEntry]) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for entry in entries:
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.num_elements
    return {
        "num_tensors": len(entries),
        "num_elements": sum(dtypes.values()),
        "num_bytes": sum(entry.num_bytes for entry in entries),
        "dtypes": dtypes,
    }


def read_mapped(
    source: Path,
    index: CheckpointIndex,
    keys: Collection[str],
    scratch: Path,
    weights_only: bool,
    progress: Callable[[int, int, str], None] | None,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        key: allocate_mapped(index.tensors[key], scratch / f"{number}.bin") if key in index.tensors else None
        for number, key in enumerate(keys)
    }
    num_read = 0

    def count(key: str) -> None:
        nonlocal num_read
        num_read += 1
        if progress is not None:
            progress(num_read, len(values), key)

    _dcp_read.Reading(
        source,
        values,
        weights_only=weights_only,
        on_read=count,
        is_ours=not isinstance(index, ForeignIndex),
        is_mapped=True,
    ).run()
    return values


def allocate_mapped(entry: TensorEntry, path: Path) -> torch.Tensor:
    """A tensor whose memory is a file, so that the system can write it out instead of keeping it."""
    if entry.num_bytes == 0:
        return entry.allocate()
    with path.open("wb") as file:
        take_room(file.fileno(), entry.num_bytes)
    return torch.from_file(str(path), shared=True, size=entry.num_elements, dtype=entry.torch_dtype).view(entry.shape)


def extra_keys(index: CheckpointIndex, set_name: str) -> dict[str, str]:
    """Name in a further set -> key."""
    return {name: extra_key(set_name, name) for name in index.extra_names[set_name]}


def weight_keys(index: CheckpointIndex, weights_from: str | None) -> dict[str, str]:
    """State-dict name -> key of what is to be its value."""
    found = {name: model_key(name) for name in index.model_names}
    if weights_from is not None:
        found.update((name, key) for name, key in extra_keys(index, weights_from).items() if name in found)
    return found


def _lightning_checkpoint(
    index: CheckpointIndex, values: Mapping[str, Any], pickled: Mapping[str, Any], weights_from: str | None
) -> dict[str, Any]:
    checkpoint = dict(pickled["metadata"])
    same_tensor = checkpoint.pop(SAME_TENSOR, ())
    versions = pickled["module_versions"]

    def ordered(keys: Mapping[str, str]) -> OrderedDict[str, Any]:
        return OrderedDict((name, values[keys[name]]) for name in in_module_order(keys, versions or ()))

    state_dict = ordered(weight_keys(index, weights_from))
    for name, value in state_dict.items():
        entry = index.tensors.get(model_key(name))
        state_dict[name] = value if entry is None else value.to(entry.torch_dtype)
    # As the module has it: the file then holds a tied tensor once.
    for names in same_tensor:
        present = [name for name in names if name in state_dict]
        state_dict.update((name, state_dict[present[0]]) for name in present[1:])
    set_module_versions(state_dict, versions)
    checkpoint["state_dict"] = state_dict
    if weights_from is not None:
        return checkpoint
    for set_name in index.extra_names:
        checkpoint[f"{set_name}_state_dict"] = ordered(extra_keys(index, set_name))
    if index.num_optimizers is not None:
        checkpoint["optimizer_states"] = [
            _torch_optimizer_state(index.optimizer_keys(number), values, groups)
            for number, groups in enumerate(pickled["param_groups"])
        ]
    return checkpoint


def in_module_order(names: Iterable[str], module_paths: Iterable[str]) -> list[str]:
    """Names in the order of the modules they belong to; ranks wrote them in another."""
    place = {path: number for number, path in enumerate(module_paths)}
    return sorted(names, key=lambda name: (place.get(name.rpartition(".")[0], len(place)), name))


def _torch_optimizer_state(
    keys: Mapping[str, Mapping[str, str]], values: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """``optimizer.state_dict()`` as torch has it: parameters are numbered in the order of the groups."""
    state: dict[int, dict[str, Any]] = {}
    param_groups = []
    position = 0
    for group in groups:
        positions = list(range(position, position + len(group["params"])))
        position += len(positions)
        for at, name in zip(positions, group["params"], strict=True):
            if name in keys:
                state[at] = quantized_entries(
                    unmarked_state({key: values[stored] for key, stored in keys[name].items()}, None, name)
                )
        # `params` last, as torch has it.
        param_groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": positions})
    return {"state": state, "param_groups": param_groups}
