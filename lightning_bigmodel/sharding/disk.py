"""Files that back tensors, and the folder of one rank that holds them."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["MappedFile", "StateFolder", "give_back_free_memory"]

_MARKER = ".lightning_bigmodel_offload"
_PREFIX, _SUFFIX = "states_", ".bin"
_ALIGNMENT = 64


class StateFolder:
    """The folder of one rank, locked while in use; what a crashed run has left in it is removed first.

    It holds a marker file. Nothing is ever deleted in a folder without one, nor a file of another name than ours.

    Args:
        path: The folder of all ranks; made if it is not there, and left in place.
        rank: Whose.

    Raises:
        OSError: If the folder cannot be made or written.
        ValueError: If something else is in it, or another run uses it.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self.path = Path(path) / f"rank_{rank}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno,
                f"The folder `{self.path}` for the optimizer state cannot be made: {error.strerror}. Give "
                "`OffloadPolicy` a `path` that is a folder this user may write, on every machine",
            ) from error
        marker = self.path / _MARKER
        if not marker.exists() and (others := sorted(file.name for file in self.path.iterdir())):
            raise ValueError(
                f"`{self.path}` has files of somebody else ({', '.join(others[:3])}{', ...' if others[3:] else ''}), "
                "and they stay. Give `OffloadPolicy` another `path`."
            )
        self._lock: int | None = os.open(marker, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise ValueError(
                f"`{self.path}` is in use by another run. Give `OffloadPolicy` another `path`, or end that run."
            ) from None
        self._remove_files()

    def _remove_files(self) -> None:
        for file in self.path.glob(f"{_PREFIX}*{_SUFFIX}"):
            file.unlink(missing_ok=True)

    def file(self, number: int) -> Path:
        """The name of a file."""
        return self.path / f"{_PREFIX}{number}{_SUFFIX}"

    def close(self) -> None:
        """Remove the files, and the folder if nothing else is in it. Tensors in the files live on until dropped."""
        if self._lock is None:
            return
        self._remove_files()
        (self.path / _MARKER).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None
        if not any(self.path.iterdir()):
            self.path.rmdir()


class MappedFile:
    """A file of tensors. Its space is taken at once, so that a full disk is an error here and no signal later.

    Args:
        path: The file; must not exist.
        tensors: Shape and type of each.

    Raises:
        OSError: If there is no space for it; nothing is left behind then.
    """

    def __init__(self, path: Path, tensors: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        offsets, size = [], 0
        for shape, dtype in tensors:
            offsets.append(size)
            size += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.path, self.num_bytes = path, size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _allocate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        # `frombuffer` gives each tensor a storage of its own: saving one does not save the file.
        self.tensors: list[Tensor] = [
            torch.frombuffer(self._map, dtype=dtype, count=prod(shape), offset=offset).view(shape)
            for (shape, dtype), offset in zip(tensors, offsets, strict=True)
        ]

    @staticmethod
    def size_of(tensors: Sequence[tuple[torch.Size, torch.dtype]]) -> int:
        """Bytes of a file with such tensors."""
        return sum(-(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in tensors)

    def read_ahead(self) -> None:
        """Ask for the file's pages; returns at once."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def write_behind(self) -> None:
        """Write what has changed and give the memory up; the values stay. Safe beside readers and writers.

        Raises:
            OSError: If the disk fails.
        """
        # Out of this process's memory first; the kernel notes what has changed, and writes it. `mmap.flush` would hold
        # Python's lock while the disk works.
        self._map.madvise(mmap.MADV_DONTNEED)
        if self.path.exists():  # else removed: there is nobody to write for
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                getattr(os, "fdatasync", os.fsync)(descriptor)
            finally:
                os.close(descriptor)


def give_back_free_memory() -> None:
    """Return what was freed to the system: glibc keeps it where small allocations lie in between."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    piece = bytes(1024 * 1024)
    for start in range(0, size, len(piece)):
        os.write(descriptor, piece[: size - start])
    os.lseek(descriptor, 0, os.SEEK_SET)
