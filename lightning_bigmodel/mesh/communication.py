"""What a rank sends while it trains: calls and bytes by mesh axis and kind of collective."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel import _host
from lightning_bigmodel.mesh.build import RankMesh

__all__ = ["CommunicationCounter", "Traffic", "axes_of", "sent_share"]


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one kind of collective over one axis.

    Attributes:
        calls: How often it was issued.
        payload_bytes: Size of the tensors handed to it: what is reduced, broadcast, sent or received, or contributed.
        sent_bytes: What a rank sends for that by ring algorithms, as a mean over the ranks of the group.
    """

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.calls + other.calls,
            self.payload_bytes + other.payload_bytes,
            self.sent_bytes + other.sent_bytes,
        )


def sent_share(kind: str, size: int) -> float:
    """Bytes that a rank of a ring of `size` sends for each byte of payload."""
    if kind in ("recv", "barrier"):
        return 0.0
    if kind == "send":
        return 1.0
    if kind == "all_gather":
        return size - 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (size - 1) / size


def axes_of(mesh: RankMesh) -> dict[str, frozenset[int]]:
    """Axis, or axes together ("data", "model", "all") -> this rank and those it talks to along it."""
    groups: dict[str, Any] = {
        axis: mesh.device_mesh.get_group(axis) for axis in ("tensor", "data_shard", "data_replicate", "pipe")
    }
    groups.update(data=mesh.data_group, model=mesh.model_group, all=None)
    members = {name: frozenset(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    return {name: ranks for name, ranks in members.items() if len(ranks) > 1}


class CommunicationCounter:
    """Counts what this rank issues through `torch.distributed`, from `start` to `stop`.

    The methods of `ProcessGroup` are wrapped meanwhile; nothing is added to other operations. Not seen are collectives
    that C++ issues by itself: those of DTensor and compiled code, and of DDP's reducer (see `add`). Groups of one rank
    send nothing and are not counted.

    Args:
        axes: Name -> global ranks of this rank's groups. A group counts for the smallest of them that has all its
            ranks, of equal ones the first.

    Example:
        >>> counter = CommunicationCounter({"data": frozenset(range(4))})
        >>> counter.take()
        {}
    """

    def __init__(self, axes: Mapping[str, frozenset[int]]) -> None:
        self._axes = sorted(axes.items(), key=lambda item: len(item[1]))
        # (group, kind) -> calls and bytes: what is done at each call is no more than this.
        self._seen_calls: dict[tuple[Any, str], list[int]] = {}
        self._added: dict[tuple[str, str], Traffic] = {}
        self._lock = threading.Lock()  # autograd and savers in the background have threads of their own
        self._is_paused = False

    def start(self) -> None:
        """Count from here."""
        _host.watch_process_groups(self._seen)

    def stop(self) -> None:
        """Count no more. Does nothing twice."""
        _host.unwatch_process_groups(self._seen)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """Count nothing until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Count again."""
        self._is_paused = False

    def take(self) -> dict[tuple[str, str], Traffic]:
        """(axis, kind) -> what was counted since the last call."""
        with self._lock:
            seen, self._seen_calls = self._seen_calls, {}
            taken, self._added = self._added, {}
        for (group, kind), (calls, num_bytes) in seen.items():
            if group.size() > 1:
                key = self._name(group), kind
                traffic = Traffic(calls, num_bytes, num_bytes * sent_share(kind, group.size()))
                taken[key] = taken.get(key, Traffic()) + traffic
        return taken

    def add(self, axis: str, kind: str, size: int, num_bytes: int, calls: int = 1) -> None:
        """Count what was not seen."""
        traffic = Traffic(calls, num_bytes, num_bytes * sent_share(kind, size))
        with self._lock:
            self._added[axis, kind] = self._added.get((axis, kind), Traffic()) + traffic

    def _seen(self, group: Any, kind: str, tensors: Any) -> None:
        if self._is_paused:
            return
        num_bytes = _num_bytes(tensors)
        with self._lock:
            counts = self._seen_calls.setdefault((group, kind), [0, 0])
            counts[0] += 1
            counts[1] += num_bytes

    def _name(self, group: Any) -> str:
        ranks = set(dist.get_process_group_ranks(group))
        return next((name for name, members in self._axes if ranks <= members), "other")


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, (list, tuple)):
        return sum(_num_bytes(tensor) for tensor in tensors)
    return 0
