"""Pickled files of a checkpoint: flushed when written, guarded when read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from lightning_bigmodel.checkpoint.index import flush_to_disk


def write_pickled(value: Any, path: Path) -> None:
    """``torch.save``, on the disk when it returns."""
    torch.save(value, path)
    flush_to_disk(path)


def read_pickled(source: Path | io.BytesIO, *, weights_only: bool, name: str | None = None) -> Any:
    """``torch.load`` onto the CPU: a tensor saved by GPU 3 must not ask for a GPU 3 where it is read.

    Args:
        source: A file or its content.
        weights_only: Refuse everything but tensors and plain containers.
        name: What the message calls ``source``. Default: ``None``, its path.

    Raises:
        ValueError: If ``weights_only`` refuses the content.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        if not weights_only:
            raise
        raise ValueError(
            f"`{name or source}` holds more than tensors and plain containers, which `weights_only=True` refuses"
            f" ({str(error).splitlines()[0]}). Use `weights_only=False` if you trust the checkpoint."
        ) from error
