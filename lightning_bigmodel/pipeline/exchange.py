"""Gather small Python objects that hold small tensors, such as logged values, over a group."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_objects"]


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of the group gave, by rank, on every rank; a copy of this rank's own value too.

    Communication: the pickled value of every rank to every rank, and its size.

    Example:
        >>> gather_objects({"loss": torch.tensor(1.5)}, None)  # on each of two ranks
        [{'loss': tensor(1.5000)}, {'loss': tensor(1.5000)}]
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, _dumps(value), group=group)
    return [pickle.loads(data) for data in gathered]


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
