"""Where a tensor that ``torch.save`` wrote lies in a file, so that it can be read to where it is wanted."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from lightning_bigmodel.checkpoint._pickle import damaged

__all__ = ["StoredTensor", "find_tensor", "read_bytes"]

_CHUNK_BYTES = 1 << 20  # of what is read and summed at a time: it stays in the processor's cache
_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A dense tensor in a file.

    Attributes:
        offset: First byte of its storage.
        num_bytes: Bytes of its storage.
        sum: CRC-32 of them; None where ``torch.save`` was told to write none.
        dtype: Of the tensor, as are the next three.
        shape: In elements.
        stride: In elements.
        storage_offset: In elements.
    """

    offset: int
    num_bytes: int
    sum: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int

    @property
    def is_plain(self) -> bool:
        """Whether the storage is the tensor's elements in order, and nothing else."""
        expected, following = [], 1
        for size in reversed(self.shape):
            expected.append(following)
            following *= size
        is_dense = all(
            size == 1 or stride == dense
            for size, stride, dense in zip(self.shape, self.stride, reversed(expected), strict=True)
        )
        return is_dense and self.storage_offset == 0 and self.num_bytes == following * self.dtype.itemsize

    def of_bytes(self, storage: Tensor) -> Tensor:
        """The tensor, given its storage as bytes that begin at a multiple of its element size."""
        return storage.view(self.dtype).as_strided(self.shape, self.stride, self.storage_offset)


def find_tensor(file: IO[bytes], offset: int, length: int) -> StoredTensor | None:
    """Look at what was saved in a part of a file, without reading the tensor.

    Returns:
        None for what is more, or other, than one dense tensor: ``torch.load`` knows what that is.
    """
    try:
        with zipfile.ZipFile(_Part(file, offset, length)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            order = archive.read(entries["byteorder"])
            if order.decode() != sys.byteorder:
                return None
            description = _Description(io.BytesIO(archive.read(entries["data.pkl"]))).load()
            if not isinstance(description, _Described):
                return None
            entry = entries[f"data/{description.key}"]
            if entry.compress_type != zipfile.ZIP_STORED:
                return None
            return StoredTensor(
                offset=offset + entry.header_offset + _header_bytes(file, offset + entry.header_offset),
                num_bytes=entry.file_size,
                sum=entry.CRC if torch.serialization.get_crc32_options() else None,
                dtype=description.dtype,
                shape=description.shape,
                stride=description.stride,
                storage_offset=description.storage_offset,
            )
    except Exception:  # of damaged bytes any; reading them with torch.load says what is wrong
        return None


def read_bytes(file: IO[bytes], stored: StoredTensor, into: memoryview | None, name: str, *, is_checked: bool) -> None:
    """Read a storage and compare its sum.

    Args:
        file: Where it lies.
        stored: What is read.
        into: Its bytes; None to compare the sum alone.
        name: The file's name, for the message.
        is_checked: The sum was compared before.

    Raises:
        ValueError: Bytes are missing, or the sum is another.
    """
    found = 0
    file.seek(stored.offset)
    for chunk in _chunks(stored.num_bytes, into):
        read = _read_into(file, chunk)
        if read != len(chunk):
            raise damaged(name, EOFError("it ends early"))
        if stored.sum is not None and not is_checked:
            found = zlib.crc32(chunk, found)
    if stored.sum is not None and not is_checked and found != stored.sum:
        raise damaged(name, ValueError("the sum of a tensor is not that of what was written"))


def _chunks(num_bytes: int, into: memoryview | None) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(num_bytes, _CHUNK_BYTES))) if into is None else into
    for start in range(0, num_bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, num_bytes - start)
        yield buffer[:size] if into is None else buffer[start : start + size]


def _read_into(file: Any, chunk: memoryview) -> int:
    done = 0
    while done < len(chunk) and (read := file.readinto(chunk[done:])):
        done += read
    return done


def _header_bytes(file: IO[bytes], at: int) -> int:
    """Length of the header before an entry; the table at an archive's end does not know its padding."""
    file.seek(at)
    header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes, padding_bytes = struct.unpack("<HH", header[26:])
    return _LOCAL_HEADER_BYTES + int(name_bytes) + int(padding_bytes)


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        read = int(self._file.readinto(view) or 0)
        self._at += read
        return read


@dataclass(frozen=True)
class _Described:
    key: str
    dtype: torch.dtype
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Description(pickle.Unpickler):
    """Unpickles the description of one tensor, and no class but the few that such a description has."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not of a dense tensor")

    def persistent_load(self, saved: Any) -> tuple[str, torch.dtype]:
        kind, dtype, key, _, _ = saved
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{kind} is no storage of a known type")
        return key, dtype


def _described(
    storage: tuple[str, torch.dtype], offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *rest: Any
) -> _Described:
    return _Described(*storage, offset, tuple(shape), tuple(stride))


_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
