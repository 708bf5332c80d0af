"""The weights of a checkpoint as files of safetensors: shapes first, then the values into the files' memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from lightning_bigmodel.checkpoint import _dcp_read, _replace
from lightning_bigmodel.checkpoint.convert import in_module_order, weight_keys
from lightning_bigmodel.checkpoint.foreign import ForeignIndex, read_parts
from lightning_bigmodel.checkpoint.index import SAME_TENSOR, TensorEntry, flush_to_disk, model_key, read_index
from lightning_bigmodel.checkpoint.mapped_content import Content, Progress, entry_of
from lightning_bigmodel.checkpoint.safetensors_files import WEIGHTS_FILE, Reserved, plan_files, write_index

__all__ = ["WeightsPlan", "put_in_place", "write_safetensors"]

_UNITS = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}}
_UNITS.update({f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", 1)})


class WeightsPlan:
    """What files of safetensors get.

    Attributes:
        entries: Name -> shape and dtype of each tensor that is written.
        notes: Name that is left out -> the name of the same tensor that is kept.
        left_out: Names of values that are no tensors.
    """

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        same_tensor: list[list[str]],
        left_out: list[str],
        fill: Callable[[dict[str, Tensor]], None],
    ) -> None:
        groups = [[name for name in names if name in entries] for names in same_tensor]
        self.notes = {name: names[0] for names in groups for name in names[1:]}
        self.entries = {name: entry for name, entry in entries.items() if name not in self.notes}
        self.left_out, self._fill = left_out, fill
        self._origins = {name: name for name in self.entries}

    @classmethod
    def of_directory(
        cls, path: Path, weights_from: str | None, weights_only: bool, progress: Progress | None
    ) -> WeightsPlan:
        """Of a sharded directory, or of a further set of it; read straight into the files."""
        index = read_index(path)
        if weights_from is not None and weights_from not in index.extra_names:
            raise ValueError(
                f"`{path}` has no tensors of `{weights_from}`; beside the weights it has {sorted(index.extra_names)}."
            )
        parts = read_parts(path, index, weights_only=weights_only)
        keys = weight_keys(index, weights_from)
        order = in_module_order(index.model_names, parts["module_versions"] or ())
        entries = {name: index.tensors[model_key(name)] for name in order if model_key(name) in index.tensors}

        def fill(targets: dict[str, Tensor]) -> None:
            read: set[str] = set()

            def report(key: str) -> None:
                read.add(key)
                if progress is not None:
                    progress(len(read), len(targets), key)

            _dcp_read.Reading(
                path,
                {keys[name]: target for name, target in targets.items()},
                weights_only=weights_only,
                on_read=report,
                is_ours=not isinstance(index, ForeignIndex),
                is_mapped=True,
            ).run()

        left_out = [name for name in order if name not in entries]
        return cls(entries, parts["metadata"].get(SAME_TENSOR, []), left_out, fill)

    @classmethod
    def of_content(cls, content: Content, progress: Progress | None) -> WeightsPlan:
        """Of what is mapped already."""
        tensors = {name: value for name, value in content.model_state.items() if isinstance(value, Tensor)}

        def fill(targets: dict[str, Tensor]) -> None:
            for number, (name, target) in enumerate(targets.items(), 1):
                target.copy_(tensors[name].detach())
                if progress is not None:
                    progress(number, len(targets), name)

        entries = {name: entry_of(value) for name, value in tensors.items()}
        return cls(entries, content.same_tensor, [n for n in content.model_state if n not in tensors], fill)

    def rename(self, change: Callable[[str], str]) -> None:
        """Give the tensors other names."""
        origins = {change(name): name for name in self.entries}
        if len(origins) != len(self.entries):
            raise ValueError("Two names become one without the prefix. Choose another `strip_prefix`.")
        self.entries = {name: self.entries[origin] for name, origin in origins.items()}
        self.notes = {change(name): change(kept) for name, kept in self.notes.items()}
        self._origins = origins

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Put the values into memory by name."""
        self._fill({self._origins[name]: target for name, target in targets.items()})


def write_safetensors(plan: WeightsPlan, new: Path, output: Path, max_shard_size: str | int | None) -> None:
    """Write a file, or a folder, beside ``output`` as ``new`` and put it in its place."""
    is_folder = output.suffix != ".safetensors"
    most = _bytes(max_shard_size if max_shard_size is not None else "5GB") if is_folder or max_shard_size else None
    layout = plan_files(plan.entries, most)
    if not is_folder and len(layout) > 1:
        raise ValueError(
            f"`{output}` would have more than `max_shard_size` ({max_shard_size}). Give a folder as the target, with"
            " `to` safetensors, or leave the limit out."
        )
    new.mkdir()
    targets: dict[str, Tensor] = {}
    files = []
    for name, part in layout.items():
        notes = {other: kept for other, kept in plan.notes.items() if kept in part}
        files.append(Reserved(new / name, part, notes))
        targets.update(files[-1].tensors())
    plan.fill({name: targets[name] for name in plan.entries})
    for file in files:
        file.flush()
    if len(layout) > 1:
        write_index(new, layout)
    put_in_place(new if is_folder else new / WEIGHTS_FILE, output)


def _bytes(size: str | int) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"`max_shard_size` is {size!r}: give a size such as '5GB', '200MB' or a number of bytes.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def put_in_place(written: Path, output: Path) -> None:
    """Give what is complete its name."""
    if output.is_dir():
        _replace.finish_writing(written, output)
    else:
        written.replace(output)
        flush_to_disk(output.absolute().parent)
