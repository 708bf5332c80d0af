"""Ends whatever waits in the process groups of this process, and tells the errors that come of it from others."""

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import ProcessGroup, ProcessGroupGloo, _world

__all__ = ["close_process_groups", "is_communication_error"]

# Text of the exceptions that a broken or closed connection gives; not all of them have a type of their own.
_COMMUNICATION_MARKS = (
    "gloo",
    "nccl",
    "pair closure",
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "process group",
    "monitoredbarrier",
)
# No message ever has these tags. Several, because a group with several network devices deals them out by tag.
_UNUSED_TAGS = range(0x7FFFFF0, 0x7FFFFF8)


def close_process_groups() -> None:
    """End every pending and later operation of all process groups of this process, from any thread.

    The groups stay registered, so `get_rank` and `destroy_process_group` go on working. Takes milliseconds with gloo.
    A message of gloo that is half transmitted is the one thing this does not end: its wait lasts until the timeout.
    """
    groups = _process_groups()
    for group in groups:
        for backend in _backends(group):
            if isinstance(backend, ProcessGroupGloo):
                _close_gloo(backend)
    nccl = [backend for group in groups for backend in _backends(group) if _is_nccl(backend)]
    if nccl:
        # One NCCL group around all of them: separate aborts of several communicators can wait for each other.
        nccl[0]._group_start()
        for backend in nccl:
            with contextlib.suppress(RuntimeError):
                backend.abort()
        nccl[0]._group_end()


def is_communication_error(exception: BaseException | None) -> bool:
    """Return whether an error of communication is the exception, or what it was raised from or during."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        seen.add(id(exception))
        text = str(exception).lower()
        if isinstance(exception, distributed.DistError) or (
            isinstance(exception, (RuntimeError, ValueError)) and any(mark in text for mark in _COMMUNICATION_MARKS)
        ):
            return True
        exception = exception.__cause__ or exception.__context__
    return False


def _close_gloo(backend: Any) -> None:
    # gloo has no abort: `abort`, `shutdown` and `destroy_process_group` leave a waiting thread as it is (torch 2.13).
    # But a receive that times out closes all connections of its group and fails everything that waits on one. So post
    # a receive that nobody will ever serve; to each peer, because posting fails at once where a connection is broken.
    for tag in _UNUSED_TAGS:
        for peer in range(backend.size()):
            if peer != backend.rank():
                with contextlib.suppress(RuntimeError):
                    backend.recv([torch.empty(1)], peer, tag).wait(timedelta(milliseconds=1))


def _process_groups() -> list[ProcessGroup]:
    # Private to torch. The newest first, as NCCL wants them ended.
    names = _world.pg_names
    return sorted(names, key=lambda group: names[group], reverse=True)


def _backends(group: ProcessGroup) -> list[Any]:
    # Private to torch. `wrapped_pg` undoes the wrapper of `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
    backends: list[Any] = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)
            # One backend may serve several kinds of device.
            if all(backend is not known for known in backends):
                backends.append(backend)
    return backends


def _is_nccl(backend: Any) -> bool:
    return distributed.is_nccl_available() and isinstance(backend, distributed.ProcessGroupNCCL)
