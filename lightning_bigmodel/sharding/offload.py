"""ZeRO with its row shards outside of the device: in host memory, and optimizer state on a disk.

ZeRO-Offload (https://arxiv.org/abs/2101.06840) keeps the fp32 rows, their gradients and the optimizer step on the host,
so that the device has what computing needs; ZeRO-Infinity (https://arxiv.org/abs/2104.07857) puts the optimizer's state
on a disk and reads it piece by piece while it steps. In place of their own CPU Adam the user's optimizer steps here, in
the threads torch uses on the host; there is no step that is delayed by one iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Arriving", "HostCopies", "OffloadPolicy"]

_CHUNK_BYTES = 64 * 1024 * 1024
_KINDS = ("cpu", "disk")


@dataclass(frozen=True)
class OffloadPolicy:
    """Where ZeRO keeps what the device does not compute with. Not for a run that fits the device: it adds copies.

    * `"cpu"`: rows of parameters, their gradients and the optimizer's state and step on the host (ZeRO-Offload, arXiv
      2101.06840).
    * `"disk"`: so too, with the optimizer's state in files (ZeRO-Infinity, arXiv 2104.07857); for optimizers that treat
      each element by itself.

    Bytes a rank, for P parameters in fp32 and Adam on N ranks: 16 P / N on the host for `"cpu"`; for `"disk"` 8 P / N
    on the disk and 8 P / N plus about four chunks on the host. The device keeps whole parameters (4 P; stage 3: those
    of the blocks at work) and, in stage 1, whole gradients. Copies a step: rows to the device once (stage 3: with each
    gather), gradients to the host with each reduction; with `"disk"` the state is read and written once. Pinned host
    memory (on CUDA) comes in powers of two, so that up to twice the rows' bytes are taken. Where the device is the CPU,
    `"cpu"` saves nothing, and in stages 1 and 2 keeps the rows a second time.

    Args:
        kind: `"cpu"` or `"disk"`.
        path: Folder of the files, for `"disk"`: on a fast disk of each machine. It stays; what is made in it is
            removed at the end.
        chunk_bytes: Optimizer state that is read, stepped and written together, for `"disk"`; more where there would be
            over 256 files. Default: 64 MiB.

    Raises:
        ValueError: For an unknown kind, `"disk"` without a path, or what cannot take effect with `"cpu"`.

    Example:
        >>> OffloadPolicy("disk", path="/scratch/run").kind
        'disk'
        >>> OffloadPolicy("disk")
        Traceback (most recent call last):
        ValueError: `offload="disk"` needs a folder for its files. Give one: \
`offload=OffloadPolicy("disk", path="/local/disk/run")`.
    """

    kind: Literal["cpu", "disk"]
    path: str | Path | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f'`kind={self.kind!r}` is not known. Use "cpu", or "disk" with a `path`.')
        if self.kind == "disk" and (self.path is None or not str(self.path)):
            raise ValueError(
                '`offload="disk"` needs a folder for its files. Give one: '
                '`offload=OffloadPolicy("disk", path="/local/disk/run")`.'
            )
        if self.path is not None and not isinstance(self.path, (str, Path)):
            raise ValueError(f"`path={self.path!r}` must be the name of a folder.")
        for name, value in (("path", self.path), ("chunk_bytes", self.chunk_bytes)):
            if self.kind == "cpu" and value is not None:
                raise ValueError(
                    f'`{name}={value!r}` is for `OffloadPolicy("disk")`; with "cpu" nothing is written to a disk. '
                    'Leave it out, or use "disk".'
                )
        size = self.chunk_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"`chunk_bytes={size!r}` must be a whole number of at least 1.")

    @property
    def bytes_a_chunk(self) -> int:
        """`chunk_bytes` with its default."""
        return self.chunk_bytes or _CHUNK_BYTES

    @classmethod
    def of(cls, value: Any) -> OffloadPolicy | None:
        """What a setting means: a policy, its kind, or None.

        Raises:
            ValueError: For anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str) and value in _KINDS:
            return cls(value)  # type: ignore[arg-type]  # one of the two
        raise ValueError(f'`offload={value!r}` is not known. Use None, "cpu" or `OffloadPolicy("disk", path=...)`.')


class Arriving:
    """A copy on its way to the host.

    Args:
        tensor: Its target.
        event: Recorded after it; None where there is nothing to wait for.
    """

    def __init__(self, tensor: Tensor, event: torch.cuda.Event | None = None) -> None:
        self._tensor, self._event = tensor, event

    def wait(self) -> Tensor:
        """The copy, complete: the host may read it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensor


class HostCopies:
    """Host memory of row shards, and every copy between it and the device that computes.

    On CUDA host memory is pinned and copies run beside the host, in the stream that is current when they are asked for.
    Where the device is the CPU itself, nothing is copied.

    Args:
        device: Where the module computes.

    Example:
        >>> copies = HostCopies(torch.device("cpu"))
        >>> copies.to_host(torch.ones(2)).wait()
        tensor([1., 1.])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_pinned = device.type == "cuda"
        self._sent: dict[int, torch.cuda.Event] = {}  # by stream, the last copy to the device

    def zeros(self, shape: torch.Size | int, dtype: torch.dtype) -> Tensor:
        """New host memory."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._is_pinned)

    def to_host(self, tensor: Tensor) -> Arriving:
        """Start to copy a tensor of the device."""
        if tensor.device.type == "cpu":
            return Arriving(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_pinned)
        copy.copy_(tensor, non_blocking=self._is_pinned)
        return Arriving(copy, torch.cuda.current_stream(self.device).record_event() if self._is_pinned else None)

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Start to copy a tensor of the host, in another type if so asked; the host must not change it before `wait`.

        What the device does with the result comes after the copy by itself.
        """
        if dtype not in (None, tensor.dtype):  # on the host: the smaller type crosses
            tensor = torch.empty(tensor.shape, dtype=dtype, pin_memory=self._is_pinned).copy_(tensor)
        moved = tensor.to(self.device, non_blocking=self._is_pinned)
        if self._is_pinned:
            stream = torch.cuda.current_stream(self.device)
            self._sent[stream.cuda_stream] = stream.record_event()
        return moved

    def wait(self) -> None:
        """After this the host may change what it has sent."""
        for event in self._sent.values():
            event.synchronize()
        self._sent.clear()
