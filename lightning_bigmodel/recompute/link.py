"""The link between a device and its host: copies that run beside what the device computes, and when they are over.

This is the seam behind which streams and events are. What is above it may run on any link; one that is told of every
read and every release can prove that none comes too early.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

__all__ = ["Copy", "CudaLink", "DirectLink", "Link", "link_of", "measured_bandwidth"]

_PROBE_BYTES = 64 * 1024 * 1024


class Copy(ABC):
    """A copy that was started."""

    @abstractmethod
    def wait(self) -> None:
        """What the device is told to do from now on comes after the copy. The host goes on."""

    @abstractmethod
    def finish(self) -> None:
        """The host waits for the copy."""


class Link(ABC):
    """Starts copies. Buffers are bytes: tensors of uint8 with one dimension."""

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> Tensor:
        """New memory of the host. Its owner keeps it until copies from and to it are over."""

    @abstractmethod
    def device_buffer(self, num_bytes: int) -> Tensor:
        """New memory of the device."""

    @abstractmethod
    def start_out(self, source: Tensor, target: Tensor) -> Copy:
        """Copy device to host, after what the device was told to do before."""

    @abstractmethod
    def start_in(self, source: Tensor, target: Tensor) -> Copy:
        """Copy host to device, after what the device was told to do before: `target` may be memory in use till then."""

    def release(self, buffer: Tensor) -> None:  # noqa: B027  # links with an allocator of torch need nothing
        """Its owner gives a buffer up: no copy from or to it may be under way, but for `wait`."""


class _Event(Copy):
    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


class CudaLink(Link):
    """Pinned memory, and a stream for each direction.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Pinned: torch's allocator hands it out again only after the copies that were recorded with it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Of the stream that computes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def start_out(self, source: Tensor, target: Tensor) -> Copy:
        """Beside what is computed."""
        return self._start(self._out, source, target)

    def start_in(self, source: Tensor, target: Tensor) -> Copy:
        """Beside what is computed."""
        return self._start(self._in, source, target)

    def _start(self, stream: Any, source: Tensor, target: Tensor) -> Copy:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return _Event(stream.record_event(), self._device)


class _Done(Copy):
    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass


class DirectLink(Link):
    """For devices without streams: a copy is over when it is started.

    Args:
        device: Any.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """On the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def start_out(self, source: Tensor, target: Tensor) -> Copy:
        """At once."""
        target.copy_(source)
        return _Done()

    def start_in(self, source: Tensor, target: Tensor) -> Copy:
        """At once."""
        target.copy_(source)
        return _Done()


def link_of(device: torch.device) -> Link:
    """The link of a device."""
    return CudaLink(device) if device.type == "cuda" else DirectLink(device)


def measured_bandwidth(link: Link, device: torch.device, num_bytes: int = _PROBE_BYTES) -> float:
    """Bytes a second of the slower direction of a link, by one copy each way after one to warm up."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    host = link.host_buffer(num_bytes)
    slowest = float("inf")
    for start, one, other in ((link.start_out, source, host), (link.start_in, host, source)):
        start(one, other).finish()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        start(one, other).finish()
        slowest = min(slowest, num_bytes / max(time.perf_counter() - began, 1e-9))
    return slowest
