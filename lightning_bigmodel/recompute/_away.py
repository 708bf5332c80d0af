"""What stands for a saved tensor that has left the device: its bytes, wherever they are, and how it looks on them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lightning_bigmodel.recompute.link import Copy
from lightning_bigmodel.recompute.spill import SpillFile

__all__ = ["AwayTensor", "MovedStorage", "Resident", "SavedGroup", "changed_message", "span_of"]


class Owner(Protocol):
    """Gives up what a storage takes."""

    def forget(self, storage: MovedStorage) -> None:
        """Nothing refers to it any more."""


class MovedStorage:
    """A range of a storage's bytes: on the device, on the host, in a file, or on its way."""

    def __init__(self, owner: Owner, tensor: Tensor, start: int, stop: int) -> None:
        self.owner, self.start, self.num_bytes = owner, start, stop - start
        self.version = tensor._version
        self.alias: Tensor | None = tensor.detach()  # while it is on the device; it shares the version
        self.host: Tensor | None = None
        self.file: SpillFile | None = None
        self.out: Copy | None = None
        self.fetched: Tensor | None = None
        self.arriving: Copy | None = None
        self.resident: object = None  # lives while the bytes are on the device

    def device_bytes(self) -> Tensor:
        """As it was saved; while it has not left."""
        assert self.alias is not None
        bytes_of = torch.empty(0, dtype=torch.uint8, device=self.alias.device)
        return bytes_of.set_(self.alias.untyped_storage(), self.start, (self.num_bytes,), (1,))

    def check(self, name: str) -> None:
        """Refuse what has changed since it was saved."""
        if self.alias is not None and self.alias._version != self.version:
            raise RuntimeError(changed_message(name, self.alias, self.version))

    def __del__(self) -> None:
        self.owner.forget(self)


class Resident:
    """Stands for bytes on the device."""

    __slots__ = ("__weakref__",)


class SavedGroup:
    """What one call of one block saved."""

    def __init__(self, name: str, index: int, previous: SavedGroup | None) -> None:
        self.name, self.index = name, index
        self._previous = None if previous is None else weakref.ref(previous)
        self._storages: dict[int, weakref.ref[MovedStorage]] = {}
        self.new: list[weakref.ref[MovedStorage]] = []  # that no call before had saved

    def new_storages(self) -> Iterator[MovedStorage]:
        """Those that this call was the first to save, once."""
        references, self.new = self.new, []
        for reference in references:
            storage = reference()
            if storage is not None:
                yield storage

    def add(self, storage: MovedStorage) -> None:
        """A tensor of it was saved here."""
        self._storages[id(storage)] = weakref.ref(storage)

    def storages(self) -> Iterator[MovedStorage]:
        """Those that backward still needs."""
        for reference in self._storages.values():
            storage = reference()
            if storage is not None:
                yield storage

    def before(self, count: int) -> Iterator[SavedGroup]:
        """Groups of the blocks before this one, nearest first."""
        group: SavedGroup | None = self
        for _ in range(count):
            group = None if group is None or group._previous is None else group._previous()
            if group is None:
                return
            yield group


class AwayTensor:
    """What autograd holds in the place of a saved tensor."""

    __slots__ = ("dtype", "group", "offset", "shape", "source", "storage", "stride", "version")

    def __init__(self, group: SavedGroup, storage: MovedStorage, tensor: Tensor) -> None:
        self.group, self.storage, self.dtype = group, storage, tensor.dtype
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset() * tensor.element_size() - storage.start
        self.source, self.version = weakref.ref(tensor), tensor._version

    def view_of(self, held: Tensor) -> Tensor:
        """The tensor, on the bytes of its storage."""
        view = torch.empty(0, dtype=self.dtype, device=held.device)
        offset = (self.offset + held.storage_offset()) // self.dtype.itemsize
        return view.set_(held.untyped_storage(), offset, self.shape, self.stride)


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first that `tensor` uses to the last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    extent = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + size * (1 + extent)


def changed_message(name: str, tensor: Tensor, version: int) -> str:
    return (
        f"A tensor of shape {tuple(tensor.shape)} that `{name}` needs for backward has been modified by an inplace "
        f"operation: it is at version {tensor._version}, and was saved at version {version}."
    )
