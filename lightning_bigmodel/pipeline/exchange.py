"""Gather small Python objects that hold small tensors, such as logged values, over a group."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel import _host

__all__ = ["gather_objects", "start_gather"]

_FIRST_BYTES = 1024
_SIZE_BYTES = 8


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of the group gave, by rank, on every rank; a copy of this rank's own value too.

    Communication: one gather of 1 KiB a rank, and where a pickled value is larger, one more of the size of the largest.
    Groups that do not communicate on the host send sizes first.

    Example:
        >>> gather_objects({"loss": torch.tensor(1.5)}, None)  # on each of two ranks
        [{'loss': tensor(1.5000)}, {'loss': tensor(1.5000)}]
    """
    return start_gather(value, group)()


def start_gather(value: Any, group: dist.ProcessGroup | None) -> Callable[[], list[Any]]:
    """Like `gather_objects`, in two steps: values of now are on their way while a rank does other things.

    Returns:
        What waits for the others' values and returns them; every rank must call it at the same place among the
        collectives of the group.
    """
    num_ranks, data = dist.get_world_size(group), _dumps(value)
    if _host.device_for_numbers(group, torch.device("meta")).type == "meta":

        def gather() -> list[Any]:
            gathered: list[Any] = [None] * num_ranks
            dist.all_gather_object(gathered, data, group=group)
            return [pickle.loads(each) for each in gathered]

        return gather
    # Step by step this is what ranks wait for each other in, so the size comes with the value.
    first = len(data).to_bytes(_SIZE_BYTES, "little") + data[: _FIRST_BYTES - _SIZE_BYTES]
    wait = _start(first, _FIRST_BYTES, group)

    def finish() -> list[Any]:
        firsts = wait()
        sizes = [int.from_bytes(first[:_SIZE_BYTES], "little") for first in firsts]
        parts = [first[_SIZE_BYTES:] for first in firsts]
        rest = max(sizes) - (_FIRST_BYTES - _SIZE_BYTES)
        if rest > 0:
            others = _start(data[_FIRST_BYTES - _SIZE_BYTES :], rest, group)()
            parts = [first + other for first, other in zip(parts, others, strict=True)]
        return [pickle.loads(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    return finish


def _start(data: bytes, size: int, group: dist.ProcessGroup | None) -> Callable[[], list[bytes]]:
    """Gathers what each rank gives, filled up to `size` bytes."""
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    everything = torch.empty(dist.get_world_size(group) * size, dtype=torch.uint8)
    work = _host.all_gather_flat(everything, own, group)

    def wait() -> list[bytes]:
        work.wait()
        return [part.numpy().tobytes() for part in everything.split(size)]

    return wait


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes plain CPU tensors as bytes; each would else be a `torch.save` archive: 0.1 ms and 300 bytes a number."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = (
            type(value) is Tensor
            and value.layout is torch.strided
            and value.device.type == "cpu"
            and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
            and not value.__dict__
        )
        if not is_plain:
            return NotImplemented
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (flat.numpy().tobytes(), value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)  # a bytearray, so that it may be written to
