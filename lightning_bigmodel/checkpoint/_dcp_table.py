"""The table of tensors of ``torch.distributed.checkpoint``, which it pickles, read by a list of allowed classes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata

from lightning_bigmodel.checkpoint._pickle import UnreadableContentError

__all__ = ["read_table"]


def read_table(directory: Path) -> dcp_metadata.Metadata:
    """The table of tensors, read without running code of it.

    Raises:
        ValueError: If it is damaged, or names what such a table never needs.
    """
    path = directory / ".metadata"
    try:
        with path.open("rb") as file:
            table = _TableUnpickler(file, path).load()
        if not isinstance(table, dcp_metadata.Metadata):
            raise TypeError("it holds no table of tensors")
    except (UnreadableContentError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # damaged bytes lead to any of them
        raise UnreadableContentError(
            f"`{path}` is damaged ({error if str(error) else type(error).__name__}). Copy it again."
        ) from error
    return table


class _TableUnpickler(pickle.Unpickler):
    _ALLOWED = frozenset(
        (dcp_metadata.__name__, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ) | {
        (dcp_filesystem.__name__, "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    }

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise UnreadableContentError(
            f"`{self._path}`, the table of tensors, names `{module}.{name}`, which such a table never needs."
            " It was damaged or tampered with, or written by another torch: load with `weights_only=False` only if you"
            " trust it."
        )
