"""The sharded directory of Lightning's own ``ModelParallelStrategy`` (FSDP2, tensor parallelism), read as one of ours.

It holds ``.metadata`` and ``__<rank>_<i>.distcp`` of torch.distributed.checkpoint, and ``meta.pt``, the rest of the
Lightning checkpoint (2.4 to 2.6). Its keys are ours, ``state_dict.<name>`` and ``optimizer_<i>.state.<name>.<key>``;
group options are entries of their own, and there is no completion mark.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # private in torch 2.11 to 2.14
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_bigmodel.checkpoint import _dcp_read
from lightning_bigmodel.checkpoint._dcp_table import read_table
from lightning_bigmodel.checkpoint._pickle import damaged, read_pickled
from lightning_bigmodel.checkpoint.index import (
    DCP_METADATA_FILE,
    METADATA_FILE,
    MODEL_PREFIX,
    CheckpointIndex,
    TensorEntry,
    is_foreign,
)

__all__ = ["ForeignIndex", "is_foreign", "read_foreign_index", "read_parts"]

REST_FILE = "meta.pt"
_OPTIMIZER_KEY = re.compile(r"optimizer_(\d+)\.")
_GROUP_KEY = re.compile(r"optimizer_(\d+)\.param_groups\.")


@dataclass(frozen=True, kw_only=True)
class ForeignIndex(CheckpointIndex):
    """What Lightning's directory holds, from torch's table of it.

    Args:
        group_paths: Key of each option of an optimizer's groups -> where in ``param_groups`` it belongs.
    """

    group_paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def read_foreign_index(directory: Path) -> ForeignIndex:
    """Names, shapes and dtypes of Lightning's directory, and the least size of each file. Runs no pickled code.

    Raises:
        ValueError: If its table is damaged, or is none of ``ModelParallelStrategy``.
    """
    table = read_table(directory)
    entries = table.state_dict_metadata
    if not any(key.startswith(MODEL_PREFIX) for key in entries):
        raise ValueError(
            f"`{directory}` has no `{MODEL_PREFIX}...` entries, so Lightning's `ModelParallelStrategy` did not write it"
            " (`FSDPStrategy` has others). Make one file of it with `lightning consolidate` and give that."
        )
    paths = dict(table.planner_data or {})
    if nested := sorted(key for key, path in paths.items() if path[0] == "state_dict" and len(path) != 2):
        raise ValueError(
            f"`{directory}` has an extra state that is spread over several entries, such as `{nested[0]}`, which this"
            " version does not put together. Save it as one file with `save_distributed_checkpoint=False`."
        )
    groups = {key: tuple(paths.get(key, ())) for key in entries if _GROUP_KEY.match(key)}
    kept = {key: entry for key, entry in entries.items() if key not in groups}
    files: dict[str, int] = {DCP_METADATA_FILE: 0, REST_FILE: 0}
    for place in (table.storage_data or {}).values():
        files[place.relative_path] = max(files.get(place.relative_path, 0), place.offset + place.length)
    numbers = [int(found[1]) for key in entries if (found := _OPTIMIZER_KEY.match(key))]
    return ForeignIndex(
        format_version=0,
        torch_version="unknown",
        num_ranks=len({name.split("_")[2] for name in files if name.startswith("__")}),
        layout={},
        global_step=None,
        epoch=None,
        num_optimizers=max(numbers) + 1 if numbers else None,
        tensors={
            key: TensorEntry(shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch."))
            for key, entry in kept.items()
            if isinstance(entry, TensorStorageMetadata)
        },
        objects=tuple(key for key, entry in kept.items() if not isinstance(entry, TensorStorageMetadata)),
        files=files,
        group_paths=groups,
    )


def read_parts(directory: Path, index: CheckpointIndex, *, weights_only: bool) -> dict[str, Any]:
    """What a directory has beside its tensors, whoever wrote it.

    Returns:
        ``metadata`` (the rest of a Lightning checkpoint), ``param_groups`` of each optimizer and ``module_versions``.
    """
    if not isinstance(index, ForeignIndex):
        found: dict[str, Any] = read_pickled(directory / METADATA_FILE, weights_only=weights_only)
        if lacking := {"metadata", "param_groups", "module_versions"} - set(found):
            raise damaged(str(directory / METADATA_FILE), KeyError(f"it lacks {sorted(lacking)}"))
        return found
    table = read_table(directory).state_dict_metadata
    values: dict[str, Any] = {}
    for key in index.group_paths:
        entry = table[key]
        values[key] = None
        if isinstance(entry, TensorStorageMetadata):  # a learning rate may be one
            values[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    if values:
        _dcp_read.Reading(directory, values, weights_only=weights_only, is_ours=False).run()
    nested = unflatten_state_dict(values, index.group_paths)
    numbers = range(index.num_optimizers or 0)
    return {
        "metadata": read_pickled(directory / REST_FILE, weights_only=weights_only),
        "param_groups": [list(nested.get(f"optimizer_{number}", {}).get("param_groups", ())) for number in numbers],
        "module_versions": None,
    }
