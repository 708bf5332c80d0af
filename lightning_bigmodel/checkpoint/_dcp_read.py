"""What ``torch.distributed.checkpoint`` wrote, read to where it is wanted.

Its planner says which part of which saved piece goes where. Its own reader goes through memory of its own, twice, and
looks at no sums; here bytes go from the file into the tensor, and are summed while they are in the processor's cache.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from lightning_bigmodel.checkpoint._dcp_table import read_table
from lightning_bigmodel.checkpoint._mapping import bytes_at, map_to_read
from lightning_bigmodel.checkpoint._pickle import UnreadableContentError, check_sums, damaged, read_pickled
from lightning_bigmodel.checkpoint._stored import StoredTensor, find_tensor, read_bytes
from lightning_bigmodel.checkpoint.regions import TensorRegions

__all__ = ["Progress", "Reading"]

Progress = Callable[[str], None]


class Reading:
    """Values to be read of a checkpoint, in place and without communication. Reads its table and plans.

    Tensors are copied into the given ones, one at a time; other values replace what ``targets`` has.

    Args:
        directory: A complete checkpoint.
        targets: Key to a tensor of the saved shape, to the regions of one, or to ``None`` for a value that is no
            tensor.
        weights_only: Refuse pickles that are more than tensors and plain containers.
        on_read: Called with the key after each value.
        is_ours: Whether `write_tensors` wrote it, which wraps what is no tensor.
        is_mapped: Copy what cannot be read in place out of files mapped into memory, without memory of its own. Not
            for network file systems that many ranks read at once.
        fetch: Called with the names of the files that are about to be read, to get them there.

    Raises:
        ValueError: The table is damaged, or is not of what is asked for.
    """

    def __init__(
        self,
        directory: Path,
        targets: dict[str, Any],
        *,
        weights_only: bool,
        on_read: Progress | None = None,
        is_ours: bool = True,
        is_mapped: bool = False,
        fetch: Callable[[Collection[str]], None] | None = None,
    ) -> None:
        self._directory, self._targets, self._is_ours = directory, targets, is_ours
        self._objects = [key for key, value in targets.items() if not isinstance(value, (Tensor, TensorRegions))]
        self._remaining = set(targets)
        self._on_read = on_read
        self._planner = _ReadPlanner(weights_only, self._report)
        self._reader = _Reader(directory, weights_only=weights_only, is_mapped=is_mapped)
        with _naming_the_table(directory):
            table = self._reader.read_metadata()
            self._planner.set_up_planner(targets, table, is_coordinator=True)
            self._reader.set_up_storage_reader(table, is_coordinator=True)
            self._plan = self._planner.create_local_plan()
            self._reader.sort(self._plan)
        if fetch is not None:
            fetch({self._reader.place(item).relative_path for item in self._plan.items})

    def check(self, keys: Collection[str]) -> None:
        """Compare the sums of what is going to be read of some keys. `run` does so for the others.

        Raises:
            ValueError: A file is damaged.
        """
        wanted = set(keys)
        for name, items in self._reader.by_file(self._plan):
            chosen = [item for item in items if item.dest_index.fqn in wanted]
            if chosen:
                with self._reader.opened(name) as file:
                    for item in chosen:
                        self._reader.check(file, item)

    def run(self) -> None:
        """Read.

        Raises:
            ValueError: A file is damaged, or has what ``weights_only`` refuses.
        """
        with _naming_the_table(self._directory):
            self._reader.read_data(self._plan, self._planner)
        for key in self._objects if self._is_ours else ():
            self._targets[key] = self._targets[key][0]
        for key in sorted(self._remaining):  # tensors without elements are not read at all
            self._report(key)

    def _report(self, key: str) -> None:
        # Once a key, though one that several ranks wrote has several parts.
        if self._on_read is not None and key in self._remaining:
            self._remaining.remove(key)
            self._on_read(key)


@contextmanager
def _naming_the_table(directory: Path) -> Iterator[None]:
    """A table whose bytes are damaged leads to errors of any kind."""
    try:
        yield
    except (UnreadableContentError, OSError, MemoryError):
        raise
    except Exception as error:
        raise UnreadableContentError(
            f"`{directory}` is damaged: its table of tensors `.metadata` is not of what is asked for"
            f" ({type(error).__name__}: {error}). Copy it again."
        ) from error


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
        # Not torch's, which looks for tensors without memory, and puts None in place of what it does not know.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: dcp_metadata.MetadataIndex) -> Tensor:
        regions = self.state_dict.get(index.fqn)
        return regions.part(index) if isinstance(regions, TensorRegions) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        self.state_dict[fqn] = read_pickled(value, weights_only=self._weights_only, name=fqn)
        self._report(fqn)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._report(read_item.dest_index.fqn)


class _Reader(FileSystemReader):
    """Reads the table of tensors, which torch pickles, by a list of the classes such a table is made of."""

    def __init__(self, directory: Path, *, weights_only: bool, is_mapped: bool) -> None:
        super().__init__(directory)
        self._is_mapped = is_mapped
        self._weights_only = weights_only
        self._checked: set[Any] = set()
        self._found: dict[Any, StoredTensor | None] = {}
        self._buffer = bytearray()

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        if self._weights_only:
            return read_table(Path(self.path))
        found: dcp_metadata.Metadata = super().read_metadata(*args, **kwargs)
        return found

    def place(self, item: ReadItem) -> Any:
        """Which bytes of which file."""
        return self.storage_data[item.storage_index]

    def sort(self, plan: LoadPlan) -> None:
        """In the order in which what is read lies in files."""
        plan.items.sort(key=lambda item: (self.place(item).relative_path, self.place(item).offset))

    def by_file(self, plan: LoadPlan) -> list[tuple[str, list[ReadItem]]]:
        """File name to the items in it."""
        found: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            found.setdefault(self.place(item).relative_path, []).append(item)
        return list(found.items())

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """A file, without a buffer: what is read lies in pieces that are larger."""
        with (Path(self.path) / name).open("rb", buffering=0) as file:
            yield file

    def check(self, file: IO[bytes], item: ReadItem) -> None:
        """Compare the sums of what an item reads."""
        stored = self._find(file, item)
        if stored is not None:
            read_bytes(file, stored, None, self._name(item), is_checked=False)
            self._checked.add(item.storage_index)
            return
        try:
            torch.load(self._content(file, item), map_location="cpu", weights_only=self._weights_only)
        except (UnreadableContentError, OSError, MemoryError):
            raise
        except Exception as error:  # damaged bytes lead to any of them
            raise damaged(self._name(item), error) from error

    def read_data(self, plan: LoadPlan, planner: Any) -> torch.futures.Future[None]:
        for name, items in self.by_file(plan):
            rest = []
            with self.opened(name) as file:
                mapped = map_to_read(Path(self.path) / name) if self._is_mapped else None
                for item in items:
                    stored = self._find(file, item)
                    if stored is None:
                        rest.append(item)
                        continue
                    target = planner.resolve_tensor(item).detach()
                    self._read_tensor(file, mapped, item, stored, target)
                    planner.commit_tensor(item, target)
            if rest:
                self._read_rest(name, dataclasses.replace(plan, items=rest), planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _find(self, file: IO[bytes], item: ReadItem) -> StoredTensor | None:
        place = self.place(item)
        if item.type == LoadItemType.BYTE_IO or place.transform_descriptors:
            return None
        at = (place.relative_path, place.offset)
        if at not in self._found:
            self._found[at] = find_tensor(file, place.offset, place.length)
        return self._found[at]

    def _read_tensor(
        self, file: IO[bytes], mapped: mmap.mmap | None, item: ReadItem, stored: StoredTensor, target: Tensor
    ) -> None:
        name, is_checked = self._name(item), item.storage_index in self._checked
        is_all = stored.shape == tuple(item.lengths) == tuple(target.shape) and not any(item.storage_offsets)
        if is_all and stored.is_plain and _is_bytes_of(target, stored.dtype):
            read_bytes(file, stored, _bytes_of(target), name, is_checked=is_checked)
            return
        aligned = stored.offset % stored.dtype.itemsize == 0
        if mapped is not None and aligned:
            read_bytes(file, stored, None, name, is_checked=is_checked)
            raw = bytes_at(mapped, stored.offset, stored.num_bytes)
        else:
            if len(self._buffer) < stored.num_bytes:
                self._buffer = bytearray(stored.num_bytes)
            read_bytes(file, stored, memoryview(self._buffer), name, is_checked=is_checked)
            raw = torch.frombuffer(self._buffer, dtype=torch.uint8, count=stored.num_bytes)
        try:
            source = stored.of_bytes(raw)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, start, size)
        except (RuntimeError, ValueError, IndexError) as error:
            raise damaged(name, error) from error
        if source.shape != target.shape:
            raise damaged(name, ValueError(f"it has {list(source.shape)} where {list(target.shape)} was expected"))
        target.copy_(source)

    def _read_rest(self, name: str, plan: LoadPlan, planner: Any) -> None:
        """What is no dense tensor of a common type, in torch's way."""
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

    def _content(self, file: IO[bytes], item: ReadItem) -> Any:
        place = self.place(item)
        content = self._slice_file(file, place)
        plain = self.transforms.transform_load_stream(item, place.transform_descriptors or (), content)
        return io.BytesIO(plain.read(-1))

    def _name(self, item: ReadItem) -> str:
        return str(Path(self.path) / self.place(item).relative_path)


def _is_bytes_of(target: Tensor, dtype: torch.dtype) -> bool:
    is_plain = type(target) is Tensor and target.is_cpu and target.layout == torch.strided and target.is_contiguous()
    return is_plain and target.dtype == dtype and not target.is_neg()


def _bytes_of(target: Tensor) -> memoryview:
    content: Any = target.view(-1).view(torch.uint8).numpy()
    return memoryview(content)
