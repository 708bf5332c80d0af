"""Files of safetensors, read and written tensor by tensor through memory that is mapped to them.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes, the length of the header; the header, JSON
of name -> dtype, shape and place of the data; the data. The library writes only what is whole in memory, so this is our
own, and needs no library. Beside one file there are several with an index, as transformers writes and reads them.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_bigmodel.checkpoint._mapping import bytes_at, map_to_read, take_room
from lightning_bigmodel.checkpoint.index import TensorEntry, flush_to_disk

__all__ = [
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "Layout",
    "files_of",
    "map_file",
    "plan_files",
    "read_header",
    "Reserved",
    "shared_names",
    "write_index",
]

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000  # as the library has it
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
}
_CODES = {name: code for code, name in _NAMES.items()}

Layout = dict[str, dict[str, TensorEntry]]
"""File name -> what it holds."""


def read_header(path: Path) -> tuple[dict[str, tuple[TensorEntry, int]], dict[str, str]]:
    """Name -> shape and dtype, and where in the file the data begin; and the file's own notes.

    Raises:
        ValueError: If the file is damaged or none of safetensors; names it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", start)[0] if len(start := file.read(8)) == 8 else -1
        if not 0 < length <= min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(
                f"`{path}` is damaged, or no file of safetensors: its first 8 bytes tell no header's length."
            )
        try:
            content = json.loads(file.read(length))
            notes = dict(content.pop("__metadata__", None) or {})
            found, most = {}, 0
            for name, entry in content.items():
                begin, end = entry["data_offsets"]
                known = TensorEntry(shape=tuple(entry["shape"]), dtype=_NAMES[entry["dtype"]])
                if not 0 <= begin <= end or end - begin != known.num_bytes:
                    raise ValueError(f"`{name}` has {end - begin} bytes where {known.num_bytes} are needed")
                found[name] = (known, 8 + length + begin)
                most = max(most, end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"`{path}` is damaged, or no file of safetensors: {error!r} in its header.") from error
    if size < 8 + length + most:
        raise ValueError(f"`{path}` has {size} bytes instead of {8 + length + most}: copy it again.")
    return found, notes


def map_file(path: Path) -> dict[str, Tensor]:
    """Name -> tensor in the file, mapped into memory to be read only."""
    entries, _ = read_header(path)
    return _views(map_to_read(path), entries)


def files_of(path: Path) -> list[Path]:
    """The files of a path: itself, or those of a folder with `model.safetensors`, or with an index.

    Raises:
        ValueError: If the index is damaged, or names files that are missing.
    """
    if not path.is_dir() and path.suffix != ".json":
        return [path]
    index = path / INDEX_FILE if path.is_dir() else path
    if not index.is_file():
        return [path / WEIGHTS_FILE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        # A name from elsewhere may not lead out of the folder.
        files = [index.parent / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`{index}` is damaged: {error!r}.") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"`{path}` is incomplete: `{'`, `'.join(missing)}` missing. Copy the whole folder again.")
    return files


def shared_names(notes: Mapping[str, str], names: Mapping[str, Any]) -> dict[str, str]:
    """Names that a file lacks, being of the same tensor as another, as `save_model` of the library notes them."""
    return {name: kept for name, kept in notes.items() if kept in names and name not in names}


def plan_files(entries: Mapping[str, TensorEntry], most_bytes: int | None) -> Layout:
    """Which file of a folder holds which tensors, each at most ``most_bytes`` (a larger tensor has one to itself)."""
    parts: list[dict[str, TensorEntry]] = [{}]
    for name, entry in entries.items():
        used = sum(other.num_bytes for other in parts[-1].values())
        if parts[-1] and most_bytes is not None and used + entry.num_bytes > most_bytes:
            parts.append({})
        parts[-1][name] = entry
    if len(parts) == 1:
        return {WEIGHTS_FILE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def write_index(folder: Path, layout: Layout) -> None:
    """The index of a folder of several files."""
    entries = [entry for part in layout.values() for entry in part.values()]
    content = {
        "metadata": {
            "total_parameters": sum(entry.num_elements for entry in entries),
            "total_size": sum(entry.num_bytes for entry in entries),
        },
        "weight_map": {name: file for file, part in layout.items() for name in part},
    }
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    flush_to_disk(folder / INDEX_FILE)


class Reserved:
    """A new file with its header and room for its tensors, which are memory mapped to it.

    Args:
        path: The file to make.
        entries: What it holds.
        notes: Text by name for the header.

    Raises:
        OSError: If there is no room on the disk. It is taken at once: a full disk would kill the process later.
        ValueError: For a dtype that the format does not have.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry], notes: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **notes}}
        # The widest first, so that each lies on a multiple of its width; so the library does it.
        order = sorted(entries, key=lambda name: (-entries[name].torch_dtype.itemsize, name))
        place = 0
        places = {}
        for name in order:
            entry = entries[name]
            if entry.dtype not in _CODES:
                raise ValueError(f"`{name}` is {entry.dtype}, which safetensors has no code for: convert it before.")
            end = place + entry.num_bytes
            header[name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [place, end]}
            places[name], place = (entry, place), end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._path, start = path, 8 + len(text)
        with path.open("w+b") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.flush()
            take_room(file.fileno(), start + place)
            self._map = mmap.mmap(file.fileno(), start + place)
        self._entries = {name: (entry, start + at) for name, (entry, at) in places.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor whose memory is the file."""
        return _views(self._map, self._entries)

    def flush(self) -> None:
        """Wait until what was put into the tensors is on the disk."""
        self._map.flush()
        flush_to_disk(self._path)


def _views(mapped: mmap.mmap, entries: Mapping[str, tuple[TensorEntry, int]]) -> dict[str, Tensor]:
    found = {}
    for name, (entry, begin) in entries.items():
        if entry.num_elements == 0:
            found[name] = entry.allocate()
            continue
        # By bytes: files of others may begin anywhere, and a view needs a multiple of its width.
        raw = bytes_at(mapped, begin, entry.num_bytes)
        if begin % entry.torch_dtype.itemsize:
            raw = raw.clone()
        found[name] = raw.view(entry.torch_dtype).view(entry.shape)
    return found
