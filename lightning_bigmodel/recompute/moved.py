"""Saved tensors that are moved to the host as they are made, and fetched back ahead of their use.

    forward of block i:    each storage that autograd saves is noted, and its views
    end of it:             these start on their way out, once; what block i - prefetch saved leaves the device, as soon
                           as its copies are over
    backward of block i:   fetch what blocks i - 1 to i - prefetch saved; give up what later blocks had fetched

So the device holds the saved tensors of at most `prefetch` + 1 blocks, however many there are.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_bigmodel import _host
from lightning_bigmodel.recompute._away import AwayTensor, MovedStorage, Resident, SavedGroup, changed_message, span_of
from lightning_bigmodel.recompute._storages import is_activation
from lightning_bigmodel.recompute.link import Copy, Link
from lightning_bigmodel.recompute.noting import note_moved
from lightning_bigmodel.recompute.spill import SpillFolder

__all__ = ["HostMemoryError", "MovedTensors"]


class HostMemoryError(RuntimeError):
    """The host, or the limit on what is taken of it, has no room for what is to be moved there."""


class MovedTensors:
    """Moves what autograd saves in chosen calls.

    Args:
        link: The link to the host.
        prefetch: Blocks whose saved tensors are fetched ahead, and stay on the device behind the one at work.
        min_bytes: Smaller tensors stay.
        max_host_bytes: Most that is taken of the host; None: as much as there is.
        max_in_flight_bytes: Most that is on its way out at a time: the host waits for older copies beyond it.
        spill_path: Folder for what goes beyond `max_host_bytes`.

    Attributes:
        host_bytes: Taken of the host.
        device_bytes: Saved tensors of these calls that are on the device.
        peak_device_bytes: The most that these were.
        spilled_bytes: Written to files so far.
        num_copies: Copies started: out, and in.
    """

    def __init__(
        self,
        link: Link,
        *,
        prefetch: int = 1,
        min_bytes: int = 0,
        max_host_bytes: int | None = None,
        max_in_flight_bytes: int | None = None,
        spill_path: Path | None = None,
    ) -> None:
        self._link, self._prefetch, self._min_bytes = link, prefetch, min_bytes
        self._max_host_bytes, self._max_in_flight_bytes = max_host_bytes, max_in_flight_bytes
        self._folder = None if spill_path is None else SpillFolder(spill_path, link.host_buffer)
        self.host_bytes = self.device_bytes = self.peak_device_bytes = self.spilled_bytes = 0
        self.num_copies = [0, 0]
        self._without_room, self._why = 0, ""
        self._known: dict[tuple[Any, ...], list[weakref.ref[MovedStorage]]] = {}
        self._recent: deque[SavedGroup] = deque()
        self._last: SavedGroup | None = None
        self._current: weakref.ref[SavedGroup] | None = None
        self._near: list[weakref.ref[SavedGroup]] = []
        self._in_flight: deque[tuple[Copy, int]] = deque()
        self._lock = threading.RLock()  # a thread writes files

    def close(self) -> None:
        """Give up what is kept beyond a step."""
        self._recent.clear()
        self._known.clear()
        self._last = None
        if self._folder is not None:
            self._folder.close()

    # -- forward -------------------------------------------------------------------------------------------------------

    @contextmanager
    def moving(self, name: str, index: int, lasting: Collection[Any] = ()) -> Iterator[None]:
        """Within, what autograd saves is moved.

        Args:
            name: The block's, for messages.
            index: Its place; a pass goes through blocks in rising order.
            lasting: See `lasting_storages`; these stay.
        """
        previous = self._last if self._last is not None and self._last.index < index else None
        if previous is None:
            self._forget_expired()
        group = self._last = SavedGroup(name, index, previous)

        def pack(tensor: Tensor) -> Any:
            return self._pack(group, tensor) if self._moves(tensor, lasting) else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        # Not as they are saved: autograd saves arguments before it runs an operator, which may write to them.
        for storage in group.new_storages():
            self._send(storage)
        self._recent.append(group)
        while len(self._recent) > self._prefetch:
            self._leave(self._recent.popleft())

    def _forget_expired(self) -> None:
        self._known = {
            key: kept
            for key, references in self._known.items()
            if (kept := [reference for reference in references if reference() is not None])
        }

    def _pack(self, group: SavedGroup, tensor: Tensor) -> Any:
        start, stop = span_of(tensor)
        whole = tensor.untyped_storage().nbytes()
        # A part that is no view (of `unsafe_chunk`, as in recurrent cells) has a version of its own: code may have
        # written to other parts since a copy, and nothing tells.
        is_alone = tensor._base is None and tensor.numel() * tensor.element_size() < whole
        look = (tensor.storage_offset(), tensor.shape, tensor.stride()) if is_alone else None
        known = self._known.setdefault((_host.storage_reference(tensor), tensor._version, look), [])
        for reference in known:
            storage = reference()
            if storage is not None and storage.start <= start and stop <= storage.start + storage.num_bytes:
                break
        else:
            if not is_alone and 2 * (stop - start) >= whole:  # other views of it are likely to be saved too
                start, stop = 0, whole
            storage = MovedStorage(self, tensor, start, stop)
            known.append(weakref.ref(storage))
            self._count_device(storage, tensor)
            group.new.append(weakref.ref(storage))
        assert storage is not None
        group.add(storage)
        return AwayTensor(group, storage, tensor)

    def _moves(self, tensor: Tensor, lasting: Collection[Any]) -> bool:
        return (
            is_activation(tensor, lasting)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not _host.is_fake(tensor)
            and tensor.numel() > 0
            and tensor.numel() * tensor.element_size() >= self._min_bytes
        )

    def _send(self, storage: MovedStorage) -> None:
        num_bytes, limit = storage.num_bytes, self._max_host_bytes
        if limit is not None and self.host_bytes + num_bytes > limit:
            self._spill(storage, limit)
            return
        host = self._host_buffer(num_bytes)
        if host is not None:
            storage.host = host
            storage.out = self._start_out(storage, host)

    def _host_buffer(self, num_bytes: int) -> Tensor | None:
        try:
            buffer = self._link.host_buffer(num_bytes)
        except (RuntimeError, MemoryError) as error:
            self._without_room, self._why = self._without_room + num_bytes, f" ({error})"
            return None
        with self._lock:
            self.host_bytes += num_bytes
        return buffer

    def _spill(self, storage: MovedStorage, limit: int) -> None:
        """To a file, through a buffer that is given up when it is written."""
        folder, num_bytes = self._folder, storage.num_bytes
        while folder is not None and folder.writing and self.host_bytes + num_bytes > limit:
            folder.wait_for_one()
        if folder is None:
            self._without_room += num_bytes
            return
        host = self._host_buffer(num_bytes)
        if host is None:
            return
        storage.out = self._start_out(storage, host)
        storage.file = folder.write(host, storage.out, lambda: self._give_up_host(num_bytes))
        self.spilled_bytes += num_bytes

    def _give_up_host(self, num_bytes: int) -> None:
        with self._lock:
            self.host_bytes -= num_bytes

    def _start_out(self, storage: MovedStorage, host: Tensor) -> Copy:
        copy = self._link.start_out(storage.device_bytes(), host)
        self.num_copies[0] += 1
        self._in_flight.append((copy, storage.num_bytes))
        limit = self._max_in_flight_bytes
        while limit is not None and sum(size for _, size in self._in_flight) > limit:
            self._in_flight.popleft()[0].finish()
        return copy

    def _leave(self, group: SavedGroup) -> None:
        """What a group saved leaves the device, as far as it is on the host and later groups do not use it."""
        used = {id(storage) for recent in self._recent for storage in recent.storages()}
        for storage in group.storages():
            if storage.alias is None or storage.out is None or id(storage) in used:
                continue
            storage.check(group.name)
            self._give_up_device(storage)

    def _give_up_device(self, storage: MovedStorage) -> None:
        if storage.alias is not None:
            if storage.out is not None:
                storage.out.wait()
                self._in_flight = deque(item for item in self._in_flight if item[0] is not storage.out)
            self._link.release(storage.device_bytes())
            storage.alias = storage.out = storage.resident = None
            self.device_bytes -= storage.num_bytes
        if storage.fetched is not None:
            if storage.arriving is not None:
                storage.arriving.wait()
            self._link.release(storage.fetched)
            storage.fetched = storage.arriving = storage.resident = None
            self.device_bytes -= storage.num_bytes

    def forget(self, storage: MovedStorage) -> None:
        """Nothing refers to it any more."""
        self._give_up_device(storage)
        if storage.host is not None:
            self._link.release(storage.host)
            self._give_up_host(storage.num_bytes)
        if storage.file is not None:
            storage.file.remove()

    def _count_device(self, storage: MovedStorage, tensor: Tensor) -> None:
        storage.resident = Resident()
        note_moved(storage.resident, tensor)
        self.device_bytes += storage.num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, AwayTensor):
            tensor: Tensor = packed
            return tensor
        group, storage = packed.group, packed.storage
        self._refuse_without_room(group)
        source = packed.source()
        if source is not None and source._version != packed.version:
            raise RuntimeError(changed_message(group.name, source, packed.version))
        self._enter(group)
        if storage.alias is not None:
            storage.check(group.name)
            return packed.view_of(storage.device_bytes())
        self._fetch(storage)
        if storage.arriving is not None:
            storage.arriving.wait()
            storage.arriving = None
        assert storage.fetched is not None
        return packed.view_of(storage.fetched)

    def _enter(self, group: SavedGroup) -> None:
        """Backward comes to a group: fetch what it and those after it need, give up what those behind it had."""
        if self._current is not None and self._current() is group:
            return
        self._current = weakref.ref(group)
        near = [group, *group.before(self._prefetch)]
        wanted = {id(storage) for each in near for storage in each.storages()}
        for reference in self._near:
            behind = reference()
            for storage in () if behind is None else behind.storages():
                if id(storage) not in wanted and storage.fetched is not None:
                    self._give_up_device(storage)
        self._near = [weakref.ref(each) for each in near]
        for each in near:
            for storage in each.storages():
                if storage.file is not None and storage.alias is None:
                    storage.file.start()
        for each in near:
            for storage in each.storages():
                if storage.file is None or each is group:
                    self._fetch(storage)

    def _fetch(self, storage: MovedStorage) -> None:
        """Start to bring a storage back, unless it is on the device."""
        if storage.alias is not None or storage.fetched is not None:
            return
        host = storage.host if storage.file is None else storage.file.take()
        assert host is not None
        storage.fetched = self._link.device_buffer(storage.num_bytes)
        storage.arriving = self._link.start_in(host, storage.fetched)
        self.num_copies[1] += 1
        self._count_device(storage, storage.fetched)

    def _refuse_without_room(self, group: SavedGroup) -> None:
        if not self._without_room:
            return
        least = self.host_bytes + self._without_room
        missing, self._without_room = self._without_room, 0
        what = (
            f"`max_host_bytes={self._max_host_bytes}` of the host leaves"
            if self._max_host_bytes is not None and not self._why
            else f"The host{self._why} leaves"
        )
        raise HostMemoryError(
            f"{what} no room for {missing} of the {least} bytes that are to be moved there before the backward of "
            f"`{group.name}`. The least that would do is {least} bytes. Set `max_host_bytes` to that if the host has "
            "it, give a `path` for the rest, raise `min_bytes`, or use more micro-batches."
        )
