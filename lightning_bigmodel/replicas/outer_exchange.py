"""Weighted means of what replicas changed, under way while training goes on; dense, or in 8 bits."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_bigmodel._host import all_gather_flat
from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, buckets_of

__all__ = ["QUANTIZED", "DenseMean", "MeanUnderWay", "QuantizedMean"]

# What a replica without batches weighs: not to be seen beside a batch, enough for a plain mean where all have none.
# A power of two, so that such a mean loses nothing. Thus no weights need to be known before tensors are sent.
_FAINT = 2.0**-60

# Elements that share a scale of 4 bytes.
_BLOCK = 256
_WEIGHT_BYTES = 8

# Name -> what is sent of an element, and the largest value it takes.
QUANTIZED: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "float8": (torch.float8_e4m3fn, 448.0)}


class MeanUnderWay(ABC):
    """The weighted mean over replicas of some tensors, from when it is started until it is used.

    `start`, `advance` once in a later step, and `result` are called at equal steps on all replicas; `state` at any
    time, without the others.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self.group, self.size = group, size
        self._works: list[dist.Work | None] = []
        self._shapes: list[tuple[int, ...]] = []

    @abstractmethod
    def start(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Send what this replica has, of alike shapes on all."""

    @abstractmethod
    def advance(self) -> None:
        """Send what follows from what has come."""

    @abstractmethod
    def result(self) -> list[Tensor]:
        """The means, equal to the bit on all replicas. Waits."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All there is to go on from. Waits for what is under way."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from such a state in place of `start`."""

    def _wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []


class DenseMean(MeanUnderWay):
    """The mean by all-reduce, in the type of the tensors.

    Communication: their bytes once, and one number. Memory: their bytes.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(group, size)
        self._bucket_bytes = bucket_bytes
        self._counts: list[int] = []  # tensors in each message
        self._messages: list[Tensor] = []
        self._total = torch.zeros(())

    @override
    def start(self, tensors: Sequence[Tensor], weight: float) -> None:
        weight = weight or _FAINT
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._total = torch.tensor(weight, dtype=torch.float64, device=tensors[0].device)
        buckets = list(buckets_of(tensors, self._bucket_bytes))
        self._counts = [len(bucket) for bucket in buckets]
        self._messages = [torch.cat([tensor.reshape(-1) for tensor in bucket]).mul_(weight) for bucket in buckets]
        self._works = [
            dist.all_reduce(message, group=self.group, async_op=True)
            for message in (self._total, *self._messages)
            if message.numel()
        ]

    @override
    def advance(self) -> None:
        pass

    @override
    def result(self) -> list[Tensor]:
        self._wait()
        shapes = iter(self._shapes)
        means: list[Tensor] = []
        for message, count in zip(self._messages, self._counts, strict=True):
            own = list(itertools.islice(shapes, count))
            pieces = (message / self._total.to(message.dtype)).split([math.prod(shape) for shape in own])
            means += [piece.view(shape) for piece, shape in zip(pieces, own, strict=True)]
        return means

    @override
    def state(self) -> dict[str, Any]:
        self._wait()
        return {
            "shapes": self._shapes,
            "counts": self._counts,
            "messages": self._messages,
            "total": self._total,
        }

    @override
    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._shapes, self._counts = state["shapes"], state["counts"]
        self._messages = [message.to(device, copy=True) for message in state["messages"]]
        self._total = state["total"].to(device, copy=True)


class QuantizedMean(MeanUnderWay):
    """The mean with a byte an element and a scale of 4 bytes for each 256: twice over the wire, rounded twice.

    Each replica sends a part of what it has to each other one, which makes the mean of that part and sends it to all.

    Communication: an all-to-all and an all-gather of a byte an element, 1/4 of an all-reduce in fp32. Memory: three
    bytes an element, and at the end the tensors.

    Args:
        group: The replicas.
        size: How many.
        kind: A key of `QUANTIZED`.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, kind: str) -> None:
        super().__init__(group, size)
        self._kind = kind
        self._dtype = torch.float32
        self._num_messages = 0
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    @override
    def start(self, tensors: Sequence[Tensor], weight: float) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._dtype = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
        flat = torch.cat([tensor.reshape(-1).to(self._dtype) for tensor in tensors])
        part = -(-flat.numel() // (self.size * _BLOCK)) * _BLOCK
        flat = torch.cat([flat, flat.new_zeros(self.size * part - flat.numel())])
        own = torch.full((1,), weight or _FAINT, dtype=torch.float64, device=flat.device).view(torch.uint8)
        self._sent = torch.cat([torch.cat([_pack(one, self._kind), own]) for one in flat.view(self.size, part)])
        self._received = torch.empty_like(self._sent)
        self._works = [dist.all_to_all_single(self._received, self._sent, group=self.group, async_op=True)]
        self._num_messages = 1

    @override
    def advance(self) -> None:
        if self._num_messages == 2:
            return
        self._wait()
        parts = self._received.view(self.size, -1)
        weights = torch.cat([part[-_WEIGHT_BYTES:] for part in parts]).view(torch.float64)[:, None]
        values = torch.stack([_unpack(part[:-_WEIGHT_BYTES], self._kind, self._dtype) for part in parts])
        mean = (values * weights.to(self._dtype)).sum(0) / weights.sum().to(self._dtype)
        self._sent = _pack(mean, self._kind)
        self._received = self._sent.new_empty(self.size * self._sent.numel())
        self._works = [all_gather_flat(self._received, self._sent, self.group)]
        self._num_messages = 2

    @override
    def result(self) -> list[Tensor]:
        self.advance()
        self._wait()
        sizes = [math.prod(shape) for shape in self._shapes]
        parts = self._received.view(self.size, -1)
        flat = torch.cat([_unpack(part, self._kind, self._dtype) for part in parts])[: sum(sizes)]
        return [piece.view(shape) for piece, shape in zip(flat.split(sizes), self._shapes, strict=True)]

    @override
    def state(self) -> dict[str, Any]:
        self._wait()
        return {
            "shapes": self._shapes,
            "dtype": self._dtype,
            "num_messages": self._num_messages,
            "received": self._received,
        }

    @override
    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._shapes, self._dtype, self._num_messages = state["shapes"], state["dtype"], state["num_messages"]
        self._received = state["received"].to(device, copy=True)


def _pack(values: Tensor, kind: str) -> Tensor:
    """Whole blocks -> a byte an element, then the scales. What is not finite makes its block not a number."""
    dtype, largest = QUANTIZED[kind]
    blocks = values.view(-1, _BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / largest).float()
    codes = torch.nan_to_num(blocks / scales.to(blocks.dtype)).clamp_(-largest, largest)  # 0/0 in blocks of zeros
    codes = codes.round_().to(dtype) if dtype == torch.int8 else codes.float().to(dtype)
    return torch.cat([codes.reshape(-1).view(torch.uint8), scales.reshape(-1).view(torch.uint8)])


def _unpack(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    num_blocks = packed.numel() // (_BLOCK + 4)
    codes = packed[: num_blocks * _BLOCK].view(QUANTIZED[kind][0]).view(num_blocks, _BLOCK)
    scales = packed[num_blocks * _BLOCK :].clone().view(torch.float32)
    return (codes.to(dtype) * scales.to(dtype)[:, None]).view(-1)
