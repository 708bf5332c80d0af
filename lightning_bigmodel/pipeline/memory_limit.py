"""Running out of memory: what it looks like, and a limit to run into where the device has none of its own."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_bigmodel import _host

__all__ = ["MemoryLimit", "is_out_of_memory", "measured_bytes"]

_WORDS = ("CUDA out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


class _Saved:
    """A tensor that autograd keeps."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class MemoryLimit:
    """Raises `torch.OutOfMemoryError` when what autograd keeps, with what is there anyway, goes beyond a limit.

    For devices that do not end a program by themselves, such as the CPU. Counted are the storages of all tensors that
    autograd keeps for backward and that are still alive, each once; parameters are no part of them. Not counted: what
    operators need while they run.

    Args:
        num_bytes: The limit.

    Example:
        >>> limit = MemoryLimit(1000); limit.resident_bytes = 500
        >>> layer = torch.nn.Linear(10, 10)
        >>> with limit.watching():
        ...     layer(torch.ones(100, 10))
        Traceback (most recent call last):
        torch.OutOfMemoryError: ...
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.resident_bytes = 0  # parameters, gradients, optimizer states
        self.saved_bytes = 0
        self.peak_bytes = 0
        self._counts: Counter[int] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count within; what is kept within counts until it is given up."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda saved: saved.tensor):
            yield

    def hold(self, holder: object, tensor: Tensor) -> None:
        """Count a storage while `holder` lives; those of parameters are there anyway."""
        if _host.is_of_parameter(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        self._counts[key] += 1
        if self._counts[key] == 1:
            self.saved_bytes += size
        weakref.finalize(holder, self._release, key, size)
        self.peak_bytes = max(self.peak_bytes, self.saved_bytes)

    def _keep(self, tensor: Tensor) -> _Saved:
        # Detached: a result that its own node keeps would keep the node, and a graph that gets no backward for ever.
        saved = _Saved(tensor.detach() if tensor.grad_fn is not None else tensor)
        self.hold(saved, tensor)
        if self.resident_bytes + self.saved_bytes > self.num_bytes:
            raise torch.OutOfMemoryError(
                f"{self.saved_bytes} bytes kept for backward beside {self.resident_bytes} of parameters, gradients "
                f"and optimizer states exceed `memory_limit_bytes={self.num_bytes}`."
            )
        return saved

    def _release(self, key: int, size: int) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self.saved_bytes -= size


@contextmanager
def measured_bytes(
    stages: Sequence[Any],
    limit: MemoryLimit | None,
    noting_hidden: Callable[[Callable[[object, Tensor], None]], AbstractContextManager[Any]],
) -> Iterator[MemoryLimit]:
    """Within, what stages keep for backward is counted: `peak_bytes` of what this gives.

    Args:
        stages: Of this rank.
        limit: Theirs, if any.
        noting_hidden: Makes a context in which its argument is told of tensors that hooks around a block do not see,
            each with what holds it: those that are computed again, or that are moved and on the device.
    """
    counter = MemoryLimit(sys.maxsize) if limit is None else limit
    counter.peak_bytes = counter.saved_bytes
    for stage in stages:
        stage.limit, stage.most_in_flight = counter, 0
    try:
        with noting_hidden(counter.hold):
            yield counter
    finally:
        for stage in stages:
            stage.limit = limit
