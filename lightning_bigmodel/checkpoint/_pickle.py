"""Pickled files of a checkpoint: flushed when written, guarded when read."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_bigmodel.checkpoint._harmless import harmless_classes, needed_classes, refused_classes
from lightning_bigmodel.checkpoint._names import list_names
from lightning_bigmodel.checkpoint.index import flush_to_disk


def pickled(value: Any) -> bytes:
    """What ``torch.save`` would write."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_pickled(value: Any, path: Path) -> None:
    """``torch.save``, or what :func:`pickled` gave, on the disk when it returns."""
    if isinstance(value, bytes):
        path.write_bytes(value)
    else:
        torch.save(value, path)
    flush_to_disk(path)


def read_pickled(
    source: Path | io.BytesIO, *, weights_only: bool, name: str | None = None, mapped: bool = False
) -> Any:
    """``torch.load`` onto the CPU: a tensor saved by GPU 3 must not ask for a GPU 3 where it is read.

    Args:
        source: A file or its content.
        weights_only: Refuse everything but tensors, plain containers and classes that only hold values.
        name: What the message calls ``source``. Default: ``None``, its path.
        mapped: Leave tensors in the file, mapped into memory.

    Raises:
        ValueError: If ``weights_only`` refuses the content, or it is damaged.
    """
    # Files of torch before 1.6 cannot be mapped.
    mapped = mapped and isinstance(source, Path) and zipfile.is_zipfile(source)

    def load() -> Any:
        return torch.load(source, map_location="cpu", weights_only=weights_only, mmap=mapped or None)

    return _read(source, load, str(name or source)) if weights_only else load()


def read_guarded(path: Path, load: Callable[..., Any], *, weights_only: bool) -> Any:
    """Read a file of ``torch.save`` by another's ``load(path, weights_only=...)``, as `read_pickled` would.

    Raises:
        ValueError: If ``weights_only`` refuses the content, or it is damaged.
    """
    if not weights_only or not path.is_file():
        return load(path, weights_only=weights_only)
    return _read(path, lambda: load(path, weights_only=True), str(path))


def _read(source: Path | io.BytesIO, load: Callable[[], Any], name: str) -> Any:
    needed = needed_classes(source)
    if refused := refused_classes(needed):
        raise ValueError(_refusal(name, f"it asks for {list_names(refused)}"))
    try:
        with harmless_classes(needed) as with_kinds:
            return with_kinds(load())
    except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # it is not there, or may not be read
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "eights only load failed" in str(error) and "persistent" not in reason:
            raise ValueError(_refusal(name, reason)) from error
        raise ValueError(f"`{name}` is damaged, or no checkpoint ({reason}). Copy it again.") from error


def _refusal(name: str, reason: str) -> str:
    return (
        f"`{name}` holds more than tensors and plain containers, which `weights_only=True` refuses ({reason}): loading"
        " it could run code. Use `weights_only=False` if you trust the checkpoint."
    )
