"""Optimizer state on a disk, stepped piece by piece (ZeRO-Infinity, https://arxiv.org/abs/2104.07857, section 5.2).

The user's optimizer steps one chunk of its parameters at a time, each chunk's state in a file:

    for each chunk:    wait until at most two chunks are being written
                       ask for the next chunk's file
                       step the chunk's parameters        # the state is read as it is used
                       write its file in the background   # and give its memory up
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_bigmodel.sharding._disk_probe import StateLayout, raw_step, state_layouts, stepping
from lightning_bigmodel.sharding._step import replace_step
from lightning_bigmodel.sharding.disk import MappedFile, StateFolder, give_back_free_memory
from lightning_bigmodel.sharding.offload import OffloadPolicy

__all__ = ["DiskStates"]

_MAX_WRITING = 2
_MAX_FILES = 256
_Found = TypeVar("_Found")


@dataclass
class _Chunk:
    """Parameters that are stepped together; `entries` are what of their state is in the file."""

    parameters: list[Tensor] = field(default_factory=list)
    entries: list[tuple[Tensor, str, torch.dtype]] = field(default_factory=list)
    file: MappedFile | None = None

    def tensors(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(parameter.shape, dtype) for parameter, _, dtype in self.entries]


class DiskStates:
    """Keeps the state tensors of optimizers in files, of the shape of their parameters; numbers stay in memory.

    Args:
        optimizers: Without hooks lost or options changed; their `step` now goes chunk by chunk.
        held: Ids of the parameters (row shards) this rank steps. State of others, of those that are frozen now, and
            state that comes after the optimizer's third step stay in memory.
        policy: Where, and how much at a time.
        rank: This rank, for the name of its folder.
        group: All ranks of the run, which agree whether there is space enough.

    Raises:
        ValueError: For an optimizer that cannot be stepped piece by piece, or a folder that is not ours.
        OSError: Where the disk has too little space; on every rank alike.

    Memory: four chunks at most, whatever the size of the state; just after a checkpoint was loaded, all of the state
    for a moment. What the kernel keeps of the files beyond that, it gives up when memory is short. Disk a step: the
    state is read once and written once.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        held: Collection[int],
        policy: OffloadPolicy,
        *,
        rank: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        assert policy.path is not None, "checked by the policy"
        self._group, self._path = group, str(policy.path)
        self._folder: StateFolder | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._writing: list[Future[None]] = []
        self._chunks: dict[int, list[_Chunk]] = {}
        self._hooks: list[Any] = []
        try:
            layouts = self._agreed(lambda: [state_layouts(optimizer, held) for optimizer in optimizers])
            self._folder = self._agreed(lambda: StateFolder(self._path, rank))
            for optimizer, layout in zip(optimizers, layouts, strict=True):
                self._chunks[id(optimizer)] = _chunks(optimizer, layout, held, policy.bytes_a_chunk)
            chunks = [chunk for each in self._chunks.values() for chunk in each if chunk.entries]
            self.num_bytes = sum(MappedFile.size_of(chunk.tensors()) for chunk in chunks)
            self._check_space()
            self._agreed(lambda: self._make_files(chunks))
        except BaseException:
            self.close()
            raise
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="optimizer-states")
        for optimizer in optimizers:
            replace_step(optimizer, self._step)
            self._adopt_all(optimizer)
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self._adopt_all))

    def close(self) -> None:
        """Remove the files. The state stays readable, and optimizers steppable; its memory is not bounded any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown(wait=True, cancel_futures=True)
        self._writing.clear()
        if self._folder is not None:
            self._folder.close()

    # -- before training -----------------------------------------------------------------------------------------------

    def _agreed(self, work: Callable[[], _Found]) -> _Found:
        """What `work` returns; if it fails on one rank, all fail. Collective."""
        found: Any = None
        error: ValueError | OSError | None = None
        try:
            found = work()
        except (ValueError, OSError) as caught:
            error = caught
        errors = self._from_all(None if error is None else (type(error).__name__, _text(error)))
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                kind = ValueError if other[0] == "ValueError" else OSError
                raise kind(f"On rank {rank}: {other[1]}")
        result: _Found = found
        return result

    def _from_all(self, value: Any) -> list[Any]:
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _check_space(self) -> None:
        """Refuse too small a disk before anything is written, on every rank alike. Collective."""
        assert self._folder is not None
        disk = (socket.gethostname(), os.stat(self._folder.path).st_dev)
        answers = self._from_all((disk, self.num_bytes, shutil.disk_usage(self._folder.path).free))
        for each in dict.fromkeys(answer[0] for answer in answers):
            ranks = [rank for rank, answer in enumerate(answers) if answer[0] == each]
            needed = sum(answers[rank][1] for rank in ranks)
            free = min(answers[rank][2] for rank in ranks)
            if needed > free:
                raise OSError(
                    errno.ENOSPC,
                    f"The optimizer state of ranks {ranks} needs {needed} bytes ({needed / 2**30:.2f} GiB) under "
                    f"`{self._path}` on {each[0]}, whose disk has {free} bytes ({free / 2**30:.2f} GiB) free. Give "
                    '`OffloadPolicy("disk", path=...)` a larger disk, train on more ranks, or use `offload="cpu"`',
                )

    def _make_files(self, chunks: Sequence[_Chunk]) -> None:
        assert self._folder is not None
        for number, chunk in enumerate(chunks):
            try:
                chunk.file = MappedFile(self._folder.file(number), chunk.tensors())
            except OSError as error:  # noqa: PERF203  # says which
                raise OSError(
                    error.errno,
                    f"No space for the optimizer state could be taken under `{self._folder.path}` ({self.num_bytes} "
                    f"bytes in {len(chunks)} files; file {number} failed: {error.strerror}). Nothing was trained; "
                    "checkpoints are as they were. Free space there, or give `OffloadPolicy` another `path`",
                ) from error

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self, optimizer: Optimizer) -> None:
        chunks, step = self._chunks[id(optimizer)], raw_step(optimizer)
        with stepping(optimizer, [chunk.parameters for chunk in chunks]) as select:
            for index, chunk in enumerate(chunks):
                self._write(None, _MAX_WRITING)
                following = chunks[index + 1].file if index + 1 < len(chunks) else None
                if following is not None:
                    following.read_ahead()
                select(index)
                step(optimizer)
                self._adopt(optimizer, chunk)
                self._write(chunk.file, _MAX_WRITING + 1)

    def _write(self, file: MappedFile | None, most: int) -> None:
        """Begin to write a file, once fewer than `most` are being written."""
        if self._writer is None:
            return
        while len(self._writing) >= most:
            self._writing.pop(0).result()
        if file is not None:
            self._writing.append(self._writer.submit(file.write_behind))

    def _adopt(self, optimizer: Optimizer, chunk: _Chunk) -> None:
        """Move state that the optimizer has made or replaced into the file."""
        if chunk.file is None:
            return
        has_moved = False
        for (parameter, key, dtype), place in zip(chunk.entries, chunk.file.tensors, strict=True):
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            value = state.get(key)
            if value is not place and isinstance(value, Tensor) and (value.shape, value.dtype) == (place.shape, dtype):
                place.copy_(value)
                state[key], has_moved = place, True
        if has_moved:
            value = None
            give_back_free_memory()

    def _adopt_all(self, optimizer: Optimizer) -> None:
        for chunk in self._chunks[id(optimizer)]:
            if chunk.file is not None and any(parameter in optimizer.state for parameter in chunk.parameters):
                with torch.no_grad():
                    self._adopt(optimizer, chunk)
                self._write(chunk.file, _MAX_WRITING)


def _chunks(optimizer: Optimizer, layout: StateLayout, held: Collection[int], chunk_bytes: int) -> list[_Chunk]:
    """Parameters in the optimizer's order; first those without state in files."""
    entries: dict[int, list[tuple[Tensor, str, torch.dtype]]] = {}
    parameters: dict[int, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kept = layout.get((number, parameter.dim(), parameter.dtype))
            if kept and id(parameter) in held and parameter.requires_grad and parameter.numel():
                parameters[id(parameter)] = parameter
                entries[id(parameter)] = [(parameter, key, dtype) for key, dtype in kept.items()]
    sizes = {key: sum(prod(p.shape) * dtype.itemsize for p, _, dtype in each) for key, each in entries.items()}
    chunk_bytes = max(chunk_bytes, -(-sum(sizes.values()) // _MAX_FILES))
    chunks = [_Chunk()]
    num_bytes = 0
    for key, parameter in parameters.items():
        if len(chunks) == 1 or num_bytes + sizes[key] > chunk_bytes:
            chunks.append(_Chunk())
            num_bytes = 0
        chunks[-1].parameters.append(parameter)
        chunks[-1].entries += entries[key]
        num_bytes += sizes[key]
    return chunks


def _text(error: Exception) -> str:
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)
