"""The calls of ``torch.distributed.checkpoint``, with what is awkward in them kept in this file.

Its errors derive from ``BaseException``, it warns whenever it is used without a process group, and it pickles
whatever a rank raised in order to send it, which itself fails (and leaves the other ranks waiting) for some errors.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_bigmodel.checkpoint._mapping import bytes_at, map_to_read
from lightning_bigmodel.checkpoint._pickle import UnreadableContentError, check_sums, damaged, read_pickled
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.regions import TensorRegions

Progress = Callable[[str], None]

_COPY_AHEAD_BYTES = 10_000_000  # torch's default


def write_tensors(directory: Path, state: dict[str, Any], ranks: Ranks) -> dcp_metadata.Metadata:
    """Write every rank's entries of ``state``; one that several ranks hold is written by one of them.

    Communication: torch gathers the list of entries to the first rank and scatters what each writes.

    Args:
        directory: An empty directory that every rank sees.
        state: Flat keys to tensors or to anything that ``torch.save`` takes. Equal keys hold equal values.
        ranks: All ranks that call this together.

    Raises:
        RuntimeError: On every rank, if writing failed on any; names the rank.
    """
    # A tuple hides values that have `state_dict()`: torch would call it and save the outcome in their place.
    wrapped = {
        key: value if isinstance(value, (torch.Tensor, TensorRegions)) else (value,) for key, value in state.items()
    }
    try:
        # Not with a process group: there is no warning then, and another thread must not touch the filters.
        with nullcontext() if ranks.is_distributed else _without_process_group_warning():
            metadata = save(
                wrapped,
                # Our own flush follows: torch 2.13 and older do not flush Python's buffer before its fsync.
                storage_writer=_Writer(directory, sync_files=False, per_thread_copy_ahead=_copy_ahead_bytes(state)),
                planner=_WritePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=ranks.group,
                no_dist=not ranks.is_distributed,
            )
    except CheckpointException as failure:
        if not ranks.is_distributed:
            raise _only_failure(failure) from None
        ranks.raise_failures("Writing tensors", {rank: _said(error) for rank, (error, _) in failure.failures.items()})
    if not isinstance(metadata, dcp_metadata.Metadata):
        raise AssertionError(f"torch.distributed.checkpoint.save returned {type(metadata).__name__}")
    return metadata


def _copy_ahead_bytes(state: dict[str, Any]) -> int:
    """How far tensors are copied from a GPU ahead of the writing; 0, which needs no stream, where none is on one."""
    tensors = (value.local if isinstance(value, TensorRegions) else value for value in state.values())
    on_device = any(isinstance(tensor, torch.Tensor) and not tensor.is_cpu for tensor in tensors)
    return _COPY_AHEAD_BYTES if on_device else 0


def read_values(
    directory: Path,
    targets: dict[str, Any],
    *,
    weights_only: bool,
    on_read: Progress | None = None,
    is_ours: bool = True,
    is_mapped: bool = False,
    fetch: Callable[[Collection[str]], None] | None = None,
) -> None:
    """Read the keys of ``targets`` in place, without communication.

    Tensors are copied into the given ones, one at a time; other values replace what ``targets`` has.

    Args:
        directory: A complete checkpoint.
        targets: Key to a tensor of the saved shape, to the regions of one, or to ``None`` for a value that is no
            tensor.
        weights_only: Refuse pickles that are more than tensors and plain containers.
        on_read: Called with the key after each value.
        is_ours: Whether `write_tensors` wrote it, which wraps what is no tensor.
        is_mapped: Copy out of files mapped into memory, without memory of its own for what is read. Not for network
            file systems that many ranks read at once.
        fetch: Called with the names of the files that are about to be read, to get them there.
    """
    objects = [key for key, value in targets.items() if not isinstance(value, (torch.Tensor, TensorRegions))]
    remaining = set(targets)

    def report(key: str) -> None:
        # Once a key, though one that several ranks wrote has several parts.
        if on_read is not None and key in remaining:
            remaining.remove(key)
            on_read(key)

    reader = _Reader(directory, weights_only=weights_only, is_mapped=is_mapped, fetch=fetch)
    try:
        with _without_process_group_warning():
            load(
                targets,
                storage_reader=reader,
                planner=_ReadPlanner(weights_only, report),
                no_dist=True,
            )
    except CheckpointException as failure:
        error = _only_failure(failure)
        if isinstance(error, (UnreadableContentError, OSError)) or not isinstance(error, Exception):
            raise error from None
        raise _unfit_table(directory, error) from error
    except (KeyError, AttributeError, TypeError) as error:  # while torch looks at the table
        raise _unfit_table(directory, error) from error
    for key in objects if is_ours else ():
        targets[key] = targets[key][0]
    for key in sorted(remaining):  # tensors without elements are not read at all
        report(key)


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


def _unfit_table(directory: Path, error: BaseException) -> UnreadableContentError:
    return UnreadableContentError(
        f"`{directory}` is damaged: its table of tensors `.metadata` is not of what is asked for"
        f" ({type(error).__name__}: {error}). Copy it again."
    )


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning
        )
        yield


def _only_failure(failure: CheckpointException) -> BaseException:
    """The original error of the one process that takes part."""
    error, _ = next(iter(failure.failures.values()))
    return error.__cause__ if isinstance(error, _Sendable) and error.__cause__ is not None else error


def _said(error: BaseException) -> tuple[str, str]:
    """Type name and message; those of the original for an error that was made sendable."""
    if isinstance(error, _Sendable):
        return error.kind, error.message
    return type(error).__name__, str(error)


class _Sendable(Exception):
    """An error as two strings, so that sending it to the other ranks cannot fail."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _Sendable(type(error).__name__, str(error)) from error


def _in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor whose storage holds nothing else; without that torch copies it to save it.

    Rows of a shard are a view of a larger piece of memory.
    """
    if tensor.untyped_storage().size() == tensor.nbytes or not (tensor.is_cpu and tensor.is_contiguous()):
        return tensor
    if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return tensor
    raw = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return raw.view(tensor.dtype).view(tensor.shape)


class _WritePlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return _in_own_storage(data) if isinstance(data, torch.Tensor) else data

    def lookup_object(self, index: dcp_metadata.MetadataIndex) -> Any:
        regions = self.state_dict.get(index.fqn)
        return regions.part(index) if isinstance(regions, TensorRegions) else super().lookup_object(index)

    def create_local_plan(self) -> SavePlan:
        try:
            return super().create_local_plan()
        except Exception as error:
            raise _Sendable(type(error).__name__, str(error)) from error


class _ReadPlanner(DefaultLoadPlanner):
    def __init__(self, weights_only: bool, report: Progress) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only
        self._report = report

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: dcp_metadata.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # torch 2.11 to 2.14 puts None in place of values whose type it does not know.
        regions = {key: value for key, value in state_dict.items() if isinstance(value, TensorRegions)}
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict.update(regions)

    def lookup_tensor(self, index: dcp_metadata.MetadataIndex) -> torch.Tensor:
        regions = self.state_dict.get(index.fqn)
        return regions.part(index) if isinstance(regions, TensorRegions) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        self.state_dict[fqn] = read_pickled(value, weights_only=self._weights_only, name=fqn)
        self._report(fqn)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._report(read_item.dest_index.fqn)


class _Reader(FileSystemReader):
    """Reads the table of tensors, which torch pickles, by a list of the classes such a table is made of."""

    def __init__(
        self,
        directory: Path,
        *,
        weights_only: bool,
        is_mapped: bool,
        fetch: Callable[[Collection[str]], None] | None,
    ) -> None:
        super().__init__(directory)
        self._fetch = fetch
        self._is_mapped = is_mapped
        # At once: an error inside `load` would be logged and replaced by one that says less.
        self._table = read_table(directory) if weights_only else None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        if self._table is not None:
            return self._table
        found: dcp_metadata.Metadata = super().read_metadata(*args, **kwargs)
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        if self._fetch is not None:
            self._fetch({self.storage_data[item.storage_index].relative_path for item in plan.items})
        rest = []
        files: dict[str, mmap.mmap] = {}
        for item in plan.items if self._is_mapped else ():
            place = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO or place.transform_descriptors:
                rest.append(item)
                continue
            if place.relative_path not in files:
                files.clear()  # items of one file come together
                files[place.relative_path] = map_to_read(Path(self.path) / place.relative_path)
            target = planner.resolve_tensor(item).detach()
            if _copy_mapped(files[place.relative_path], place.offset, place.length, item, target):
                planner.commit_tensor(item, target)
            else:
                rest.append(item)
        left: dict[str, list[ReadItem]] = {}
        for item in rest if self._is_mapped else plan.items:
            left.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in left.items():
            self._read_file(name, dataclasses.replace(plan, items=items), planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, plan: LoadPlan, planner: LoadPlanner) -> None:
        try:
            super().read_data(plan, planner)
        except (UnreadableContentError, OSError, MemoryError):
            raise
        except Exception as error:  # damaged bytes lead to any of them
            raise damaged(str(Path(self.path) / name), error) from error

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        # Private; torch 2.11 - 2.14. Where it is not called, sums are not looked at.
        content = io.BytesIO(super()._slice_file(file, sinfo).read())
        check_sums(content, str(getattr(file, "name", Path(self.path) / sinfo.relative_path)))
        return content


def _copy_mapped(mapped: mmap.mmap, offset: int, length: int, item: ReadItem, target: torch.Tensor) -> bool:
    """Copy a tensor that ``torch.save`` wrote at a place of a file; False where torch does not say where it lies."""
    part: Any = _Part(mapped, offset, length)
    described = torch.load(part, map_location="meta", weights_only=True)
    storage = described.untyped_storage()
    at = getattr(storage, "_checkpoint_offset", None)  # private; checked with 2.13, what has none is read whole
    if at is None or described.numel() == 0:
        return False
    raw = bytes_at(mapped, offset + at, storage.nbytes())
    if (offset + at) % described.element_size():  # tensors follow each other in the file as they come
        is_plain = described.is_contiguous() and described.nbytes == storage.nbytes() == target.nbytes
        if is_plain and target.is_contiguous() and target.dtype == described.dtype:
            target.view(-1).view(torch.uint8).copy_(raw)
            return True
        raw = raw.clone()
    source = raw.view(described.dtype).as_strided(described.size(), described.stride(), described.storage_offset())
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dim, start, size)
    target.copy_(source)
    return True


class _Part(io.RawIOBase):
    """A part of what is mapped, as a file."""

    def __init__(self, mapped: mmap.mmap, offset: int, length: int) -> None:
        self._mapped, self._offset, self._length, self._at = mapped, offset, length, 0

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
        start = self._offset + self._at
        found = self._mapped[start : min(start + len(buffer), self._offset + self._length)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


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
