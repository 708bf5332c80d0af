"""Writing with ``torch.distributed.checkpoint``, with what is awkward in it kept in this file.

Its errors derive from ``BaseException``, it warns whenever it is used without a process group, and it pickles
whatever a rank raised in order to send it, which itself fails (and leaves the other ranks waiting) for some errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.index import flush_to_disk
from lightning_bigmodel.checkpoint.regions import TensorRegions

Progress = Callable[[str], None]

_COPY_AHEAD_BYTES = 10_000_000  # torch's default


def write_tensors(directory: Path, state: dict[str, Any], ranks: Ranks) -> dcp_metadata.Metadata:
    """Write every rank's entries of ``state`` to the disk; one that several ranks hold is written by one of them.

    Communication: torch gathers the list of entries to the first rank and scatters what each writes.

    Args:
        directory: An empty directory that every rank sees.
        state: Flat keys to tensors or to anything that ``torch.save`` takes. Equal keys hold equal values.
        ranks: All ranks that call this together.

    Raises:
        RuntimeError: On every rank, if writing failed on any; names the rank.
    """
    # A tuple hides values that have `state_dict()`: torch would call it and save the outcome in their place.
    wrapped = {
        key: value if isinstance(value, (torch.Tensor, TensorRegions)) else (value,) for key, value in state.items()
    }
    try:
        # Not with a process group: there is no warning then, and another thread must not touch the filters.
        with nullcontext() if ranks.is_distributed else _without_process_group_warning():
            metadata = save(
                wrapped,
                storage_writer=_Writer(directory, sync_files=False, per_thread_copy_ahead=_copy_ahead_bytes(state)),
                planner=_WritePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=ranks.group,
                no_dist=not ranks.is_distributed,
            )
    except CheckpointException as failure:
        if not ranks.is_distributed:
            raise _only_failure(failure) from None
        ranks.raise_failures("Writing tensors", {rank: _said(error) for rank, (error, _) in failure.failures.items()})
    if not isinstance(metadata, dcp_metadata.Metadata):
        raise AssertionError(f"torch.distributed.checkpoint.save returned {type(metadata).__name__}")
    return metadata


def _copy_ahead_bytes(state: dict[str, Any]) -> int:
    """How far tensors are copied from a GPU ahead of the writing; 0, which needs no stream, where none is on one."""
    tensors = (value.local if isinstance(value, TensorRegions) else value for value in state.values())
    on_device = any(isinstance(tensor, torch.Tensor) and not tensor.is_cpu for tensor in tensors)
    return _COPY_AHEAD_BYTES if on_device else 0


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning
        )
        yield


def _only_failure(failure: CheckpointException) -> BaseException:
    """The original error of the one process that takes part."""
    error, _ = next(iter(failure.failures.values()))
    return error.__cause__ if isinstance(error, _Sendable) and error.__cause__ is not None else error


def _said(error: BaseException) -> tuple[str, str]:
    """Type name and message; those of the original for an error that was made sendable."""
    if isinstance(error, _Sendable):
        return error.kind, error.message
    return type(error).__name__, str(error)


class _Sendable(Exception):
    """An error as two strings, so that sending it to the other ranks cannot fail."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        try:
            written = super().write_data(plan, planner)
            # At once, while other ranks are still writing. By ourselves: torch 2.13 and older do not flush Python's
            # buffer before their fsync.
            for name in {result.storage_data.relative_path for result in written.value()}:
                flush_to_disk(Path(self.path) / name)
            return written
        except Exception as error:
            raise _Sendable(type(error).__name__, str(error)) from error


def _in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor whose storage holds nothing else; without that torch copies it to save it.

    Rows of a shard are a view of a larger piece of memory.
    """
    if tensor.untyped_storage().size() == tensor.nbytes or not (tensor.is_cpu and tensor.is_contiguous()):
        return tensor
    if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return tensor
    raw = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return raw.view(tensor.dtype).view(tensor.shape)


class _WritePlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return _in_own_storage(data) if isinstance(data, torch.Tensor) else data

    def lookup_object(self, index: dcp_metadata.MetadataIndex) -> Any:
        regions = self.state_dict.get(index.fqn)
        return regions.part(index) if isinstance(regions, TensorRegions) else super().lookup_object(index)

    def create_local_plan(self) -> SavePlan:
        try:
            return super().create_local_plan()
        except Exception as error:
            raise _Sendable(type(error).__name__, str(error)) from error
