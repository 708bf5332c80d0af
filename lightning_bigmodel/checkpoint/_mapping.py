"""Files mapped into memory, which the system can drop and read again."""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import torch


def map_to_read(path: Path) -> mmap.mmap:
    """A file to be read only, so that no memory has to be set aside for changes."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def bytes_at(mapped: mmap.mmap, offset: int, num_bytes: int) -> torch.Tensor:
    """Some bytes of a file as a tensor; of one that is mapped to be read, do not write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=offset)


def take_room(descriptor: int, num_bytes: int) -> None:
    """Give an open file its size and its place on the disk.

    Raises:
        OSError: If there is no room. Memory mapped to a file without a place kills the process on a full disk.
    """
    if num_bytes == 0:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:  # macOS
        os.ftruncate(descriptor, num_bytes)
