"""Running out of memory: what it looks like, and a limit to run into where the device has none of its own."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_bigmodel import _host

__all__ = ["MemoryLimit", "is_out_of_memory"]

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

    def _keep(self, tensor: Tensor) -> _Saved:
        # Detached: a result that its own node keeps would keep the node, and a graph that gets no backward for ever.
        saved = _Saved(tensor.detach() if tensor.grad_fn is not None else tensor)
        if not _host.is_of_parameter(tensor):
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
            self._counts[key] += 1
            if self._counts[key] == 1:
                self.saved_bytes += size
            weakref.finalize(saved, self._release, key, size)
            self.peak_bytes = max(self.peak_bytes, self.saved_bytes)
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
