"""Pickled files of a checkpoint: flushed when written, guarded when read."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_bigmodel.checkpoint._harmless import harmless_classes, needed_classes, refused_classes
from lightning_bigmodel.checkpoint._names import list_names
from lightning_bigmodel.checkpoint.index import flush_to_disk


class UnreadableContentError(ValueError):
    """A file of a checkpoint is damaged, or has what is refused; the message names it and says what to do."""


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
        if not mapped:
            check_sums(source, str(name or source))
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


def check_sums(source: Path | io.BytesIO, name: str) -> None:
    """Compare what ``torch.save`` wrote with the sums it wrote along, which ``torch.load`` does not look at.

    Raises:
        UnreadableContentError: They differ.
    """
    if not torch.serialization.get_crc32_options():
        return  # nor are they right where this was turned off
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                if (wrong := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"the sum of `{wrong}` is not that of what was written")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, struct.error, EOFError) as error:
        raise damaged(name, error) from error
    finally:
        if isinstance(source, io.BytesIO):
            source.seek(0)


def damaged(name: str, error: BaseException) -> UnreadableContentError:
    """The error that says which file is damaged, and by what that was seen."""
    return UnreadableContentError(f"`{name}` is damaged, or no checkpoint ({_reason(error)}). Copy it again.")


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _read(source: Path | io.BytesIO, load: Callable[[], Any], name: str) -> Any:
    try:
        needed = needed_classes(source)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:  # of torch's reading of pickles
        raise damaged(name, error) from error
    if refused := refused_classes(needed):
        raise UnreadableContentError(_refusal(name, f"it asks for {list_names(refused)}"))
    try:
        with harmless_classes(needed) as with_kinds:
            return with_kinds(load())
    except (UnreadableContentError, ImportError, MemoryError):
        raise
    except Exception as error:  # damaged bytes lead to any of them
        if isinstance(error, OSError) and error.filename is not None:
            raise  # it is not there, or may not be read
        text = str(error)
        if "eights only load failed" not in text or "persistent" in _reason(error):
            raise damaged(name, error) from error
        if "nsupported operand" in text:  # which `torch.save` does not write
            raise damaged(name, error) from error
        raise UnreadableContentError(_refusal(name, _reason(error))) from error


def _refusal(name: str, reason: str) -> str:
    return (
        f"`{name}` holds more than tensors and plain containers, which `weights_only=True` refuses ({reason}): loading"
        " it could run code. Use `weights_only=False` if you trust the checkpoint."
    )
