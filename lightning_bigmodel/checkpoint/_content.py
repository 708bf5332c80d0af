"""What one rank gives for a checkpoint, as it is written: live values, or copies that training cannot change."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_bigmodel.checkpoint._entries import check_given, flat_state
from lightning_bigmodel.checkpoint._pickle import pickled, write_pickled
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint._versions import module_versions
from lightning_bigmodel.checkpoint.index import rank_file
from lightning_bigmodel.checkpoint.regions import TensorRegions
from lightning_bigmodel.checkpoint.state import OptimizerState

__all__ = ["HostCopies", "SaveContent", "checked_content", "write_own"]


@dataclass(frozen=True, kw_only=True)
class SaveContent:
    """What this rank writes, or would write.

    Args:
        values: Checkpoint key to tensor, regions of one, or what is no tensor.
        metadata: What rank 0 pickles: a mapping, or the bytes already.
        rank_state: What this rank pickles of its own: a mapping, or the bytes already.
        progress: Step and epoch, for the completion mark.
        layout: Mesh axis to its size.
        num_optimizers: How many; None if only weights are saved.
    """

    values: Mapping[str, Any]
    metadata: Mapping[str, Any] | bytes
    rank_state: Mapping[str, Any] | bytes
    progress: Mapping[str, Any]
    layout: Mapping[str, int]
    num_optimizers: int | None


def checked_content(
    ranks: Ranks,
    *,
    model_state: Mapping[str, Any],
    optimizer_states: Sequence[OptimizerState] | None,
    metadata: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    extra_states: Mapping[str, Mapping[str, Any]] | None = None,
    layout: Mapping[str, int] | None = None,
) -> SaveContent:
    """The arguments of `save_sharded` as one, checked together with all ranks. Nothing is copied.

    Raises:
        ValueError: On all ranks; see `save_sharded`.
    """
    extra = extra_states or {}
    checked = ranks.agree("Preparing the checkpoint", lambda: check_given(optimizer_states, metadata, extra))
    if len(set(checked)) != 1:
        raise ValueError(
            f"`optimizer_states` has different lengths on different ranks: {checked}. Give all optimizers."
        )
    return SaveContent(
        values=flat_state(model_state, optimizer_states or (), extra),
        metadata={
            "metadata": dict(metadata),
            "param_groups": [state["param_groups"] for state in optimizer_states or ()],
            "module_versions": module_versions(model_state),
        },
        rank_state=dict(rank_state),
        progress={key: metadata.get(key) for key in ("global_step", "epoch")},
        layout=layout or {},
        num_optimizers=checked[0],
    )


class HostCopies:
    """Copies of what is to be written, in host memory that is kept from one save to the next.

    Fresh memory costs as much as the copy itself, which is why it is kept: in bytes what this rank saves. Memory that
    CUDA copies into is pinned, and filled on a stream of its own: the host goes on at once, and kernels launched later
    wait on the device, for as long as the copy takes.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}

    def of(self, content: SaveContent, *, with_metadata: bool) -> SaveContent:
        """The same content with values of this moment. Call `wait` before they are read.

        Args:
            content: Live values.
            with_metadata: Whether this rank writes the metadata; others need no copy.
        """
        buffers: dict[str, Tensor] = {}
        seen: dict[Any, Tensor] = {}
        values: dict[str, Any] = {}
        for key, value in content.values.items():
            if isinstance(value, TensorRegions):
                values[key] = TensorRegions(self._copy(key, value.local, buffers, seen), value.layout)
            elif isinstance(value, Tensor):
                values[key] = self._copy(key, value, buffers, seen)
            else:
                values[key] = copy.deepcopy(value)
        self._buffers = buffers  # those of keys that are gone are freed
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        return replace(
            content,
            values=values,
            metadata=pickled(content.metadata) if with_metadata else b"",
            rank_state=pickled(content.rank_state),
        )

    def wait(self) -> None:
        """Return when all copies are there; on the CPU they are already."""
        for stream in self._streams.values():
            stream.synchronize()

    def _copy(self, key: str, tensor: Tensor, buffers: dict[str, Tensor], seen: dict[Any, Tensor]) -> Tensor:
        source = tensor.detach()
        # A tied parameter has several names and one memory.
        place = (source.device, source.data_ptr(), source.dtype, tuple(source.shape), source.stride())
        if source.numel() and place in seen:
            return seen[place]
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        if source.is_cuda:
            self._copy_from_cuda(buffer, source)
        else:
            buffer.copy_(source)
        buffers[key] = seen[place] = buffer
        return buffer

    def _copy_from_cuda(self, buffer: Tensor, source: Tensor) -> None:
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            buffer.copy_(source, non_blocking=True)
        source.record_stream(stream)


def write_own(directory: Path, rank: int, rank_state: Mapping[str, Any] | bytes) -> dict[str, int]:
    """Write the rank's state, beside its tensor files; returns the sizes of all its files in bytes."""
    write_pickled(rank_state, directory / rank_file(rank))
    own = [directory / rank_file(rank), *directory.glob(f"__{rank}_*.distcp")]
    return {path.name: path.stat().st_size for path in own}
