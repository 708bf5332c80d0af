"""A device and a host on one CPU that are told apart, to see what crosses between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_bigmodel import _host
from lightning_bigmodel.sharding.offload import Arriving, HostCopies


class Late(Arriving):
    """Has nothing but NaN until somebody waits for it."""

    def __init__(self, source: Tensor) -> None:
        super().__init__(torch.full_like(source, math.nan))
        self._source = source.clone()

    def wait(self) -> Tensor:
        return super().wait().copy_(self._source)


class Boundary(HostCopies):
    """A device and a host that are told apart: it counts what crosses, and no side works with the other's memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.of_host: list[Tensor] = []
        self.moved: list[Tensor] = []
        self.sent: list[tuple[Tensor, Tensor]] = []
        self.reset()

    def reset(self) -> None:
        self.num_bytes = {"to_host": 0, "to_device": 0}

    def is_on_host(self, tensor: Tensor) -> bool:
        return any(tensor.untyped_storage()._cdata == each.untyped_storage()._cdata for each in self.of_host)

    def was_moved(self, tensor: Tensor) -> bool:
        return any(tensor is each for each in self.moved)

    def zeros(self, shape: torch.Size | int, dtype: torch.dtype) -> Tensor:
        self.of_host.append(super().zeros(shape, dtype))
        return self.of_host[-1]

    def to_host(self, tensor: Tensor) -> Arriving:
        assert not self.is_on_host(tensor)
        self.num_bytes["to_host"] += tensor.numel() * tensor.element_size()
        arriving = Late(tensor)
        self.of_host.append(arriving._tensor)
        return arriving

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        assert self.is_on_host(tensor)
        self.sent.append((tensor, tensor.clone()))
        moved = tensor.to(dtype or tensor.dtype).clone()
        self.moved.append(moved)
        self.num_bytes["to_device"] += moved.numel() * moved.element_size()
        return moved

    def wait(self) -> None:
        for sent, before in self.sent:
            assert torch.equal(sent, before), "changed while the device was reading it"
        self.sent.clear()


@contextmanager
def groups_refuse_the_host(copies: Boundary) -> Iterator[None]:
    """Groups that know the device only."""
    gather, scatter = _host.all_gather_flat, _host.reduce_scatter_flat

    def gather_rows(output: Tensor, own: Tensor, group: Any) -> Any:
        assert own.dtype == torch.uint8 or copies.was_moved(own)  # bytes are of the host: what a step logs
        return gather(output, own, group)

    def scatter_gradients(output: Tensor, everything: Tensor, group: Any) -> Any:
        assert not copies.is_on_host(everything)
        return scatter(output, everything, group)

    _host.all_gather_flat, _host.reduce_scatter_flat = gather_rows, scatter_gradients
    try:
        yield
    finally:
        _host.all_gather_flat, _host.reduce_scatter_flat = gather, scatter
