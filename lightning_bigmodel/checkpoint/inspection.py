"""What a checkpoint of any kind holds and whether it is whole, without running code from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_bigmodel.checkpoint import _replace
from lightning_bigmodel.checkpoint._dcp_table import read_table
from lightning_bigmodel.checkpoint._harmless import needed_classes, refused_classes
from lightning_bigmodel.checkpoint._pickle import read_pickled
from lightning_bigmodel.checkpoint._place import RemotePlace, is_remote, local_path
from lightning_bigmodel.checkpoint.foreign import REST_FILE, ForeignIndex, read_parts
from lightning_bigmodel.checkpoint.formats import kind_of
from lightning_bigmodel.checkpoint.index import (
    METADATA_FILE,
    TensorEntry,
    is_sharded_checkpoint,
    rank_file,
    read_index,
    wrong_files,
)
from lightning_bigmodel.checkpoint.local_copy import local_copy
from lightning_bigmodel.checkpoint.mapped_content import entry_of
from lightning_bigmodel.checkpoint.remote_formats import fetched
from lightning_bigmodel.checkpoint.safetensors_files import files_of, read_header, shared_names

__all__ = ["inspect_checkpoint", "saved_hyper_parameters"]


def inspect_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """What there is at a path, as plain values. Reads no tensor, and runs no code from the checkpoint.

    Memory: names and shapes; a Lightning file also what it holds beside tensors.

    Args:
        path: A sharded directory (ours or of Lightning's ``ModelParallelStrategy``), a Lightning file, safetensors. A
            URL of fsspec's too: of a sharded directory all but the tensors is fetched for the time, else the files.
        weights_only: ``False`` also reads a Lightning file whose pickled part may run code. Default: ``True``.

    Returns:
        ``kind`` (``"sharded"``, ``"lightning-sharded"``, ``"ckpt"`` or ``"safetensors"``), ``global_step``, ``epoch``,
        ``layout`` and ``num_ranks`` (None where the kind does not say), ``num_optimizers``, ``file_bytes``,
        ``tensor_bytes``, ``problems`` (what is missing, truncated or damaged; empty for a complete one),
        ``needs_code`` (file to the classes it asks for that may run code), ``tensors`` (key to ``shape`` and
        ``dtype``) and ``same_tensor`` (name to the name it shares a tensor with).

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: For a folder that holds no checkpoint.

    Example::

        found = inspect_checkpoint("checkpoints/last.ckpt")
        print(found["global_step"], found["problems"])
    """
    if is_remote(path):
        url = os.fspath(path)
        with fetched(url, with_tensors=False) as local:
            there = inspect_checkpoint(local, weights_only=weights_only)
        problems = [problem.replace(str(local), url) for problem in there["problems"]]
        return {**there, "path": url, "problems": problems}
    found, kind = _replace.find(local_path(path)), kind_of(local_path(path))
    report: dict[str, Any] = {
        "path": str(path),
        "kind": kind,
        "global_step": None,
        "epoch": None,
        "layout": None,
        "num_ranks": None,
        "num_optimizers": None,
        "file_bytes": sum(file.stat().st_size for file in ([found] if found.is_file() else _files_in(found))),
        "tensor_bytes": 0,
        "problems": [],
        "needs_code": {},
        "tensors": {},
        "same_tensor": {},
    }
    look = {"sharded": _look_at_directory, "ckpt": _look_at_file, "safetensors": _look_at_safetensors}[kind]
    try:
        look(found, report, weights_only)
    except (ValueError, OSError) as error:
        report["problems"].append(str(error))
    report["tensor_bytes"] = sum(
        TensorEntry(shape=tuple(entry["shape"]), dtype=entry["dtype"]).num_bytes for entry in report["tensors"].values()
    )
    return report


def _files_in(folder: Path) -> Iterable[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


def _look_at_directory(path: Path, report: dict[str, Any], weights_only: bool) -> None:
    index = read_index(path, check_files=False)
    is_foreign = isinstance(index, ForeignIndex)
    if is_foreign:
        report["kind"] = "lightning-sharded"
    report["problems"] = wrong_files(path, index.files, at_least=is_foreign)
    report["num_ranks"], report["num_optimizers"] = index.num_ranks, index.num_optimizers
    report["global_step"], report["epoch"] = index.global_step, index.epoch
    report["layout"] = None if is_foreign else dict(index.layout)
    report["tensors"] = _plain(index.tensors)
    pickled = [REST_FILE] if is_foreign else [METADATA_FILE, *map(rank_file, range(index.num_ranks))]
    for name in pickled:
        if (path / name).is_file():
            _note_code(path / name, name, report)
    if not is_foreign and not report["problems"]:
        read_table(path)  # the mark knows its size only
    if is_foreign and (not report["needs_code"] or not weights_only) and (path / REST_FILE).is_file():
        rest = read_pickled(path / REST_FILE, weights_only=weights_only)
        report["global_step"], report["epoch"] = rest.get("global_step"), rest.get("epoch")


def _look_at_file(path: Path, report: dict[str, Any], weights_only: bool) -> None:
    _note_code(path, path.name, report)
    if report["needs_code"] and weights_only:
        return
    content = read_pickled(path, weights_only=weights_only, mapped=True)
    if not isinstance(content, Mapping):
        report["problems"].append(f"`{path.name}` holds a {type(content).__name__}, no checkpoint")
        return
    for key in ("global_step", "epoch"):
        value = content.get(key)
        report[key] = value if isinstance(value, int) else None
    optimizers = content.get("optimizer_states")
    report["num_optimizers"] = len(optimizers) if isinstance(optimizers, list) else None
    state = content.get("state_dict", content)
    places: dict[Any, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            first = places.setdefault(place, str(name)) if value.numel() else name
            if first != name:
                report["same_tensor"][name] = first
    tensors = {f"state_dict.{name}": value for name, value in state.items()}
    for number, saved in enumerate(optimizers or ()):
        for place, entries in saved["state"].items():
            tensors.update({f"optimizer_{number}.state.{place}.{key}": value for key, value in entries.items()})
    report["tensors"] = _plain({k: entry_of(value) for k, value in tensors.items() if isinstance(value, Tensor)})


def _look_at_safetensors(path: Path, report: dict[str, Any], weights_only: bool) -> None:
    for file in files_of(path):
        try:
            entries, notes = read_header(file)
        except (ValueError, OSError) as error:
            report["problems"].append(str(error))
            continue
        report["tensors"].update(_plain({name: entry for name, (entry, _) in entries.items()}))
        report["same_tensor"].update(shared_names(notes, entries))


def _note_code(path: Path, name: str, report: dict[str, Any]) -> None:
    if refused := refused_classes(needed_classes(path)):
        report["needs_code"][name] = refused


def _plain(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {key: {"shape": list(entry.shape), "dtype": entry.dtype} for key, entry in entries.items()}


def saved_hyper_parameters(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What `save_hyperparameters` of the module has put into a sharded checkpoint, local or remote.

    Runs no code from the checkpoint, and reads no tensor.

    Returns:
        Name to value; empty if there are none. None if there is no sharded checkpoint at the path.

    Raises:
        ValueError: It is incomplete, or has what may run code.
    """
    if is_remote(path):
        url = os.fspath(path)
        if RemotePlace(url).is_file():
            return None
        with local_copy(url) as copy:
            return saved_hyper_parameters(copy.path)
    found = _replace.find(local_path(path))
    if not is_sharded_checkpoint(found):
        return None
    metadata = read_parts(found, read_index(found, check_files=False), weights_only=True)["metadata"]
    return dict(metadata.get("hyper_parameters") or {})
