"""One rank's batch to all ranks of a group: any nested structure, its tensors as raw bytes."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Message", "broadcast_message", "digest_batch", "pack_batch"]

# Measured with gloo on one machine, 2 to 4 ranks: a broadcast costs 0.3 to 0.9 ms whether it carries 8 bytes or 64 KiB,
# and twice that at 1 MiB; `broadcast_object_list`, two broadcasts and a pickle, twice as much as one. Hence one first
# frame of fixed size that holds a whole small batch, and broadcasts of their own for large tensors only.
_FRAME_BYTES = 64 * 1024
_INLINE_BYTES = 64 * 1024
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class _TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str
    pinned: bool
    inline: bool


@dataclass(kw_only=True)
class Message:
    """What the loading rank tells the others for each batch asked of it.

    Args:
        kind: `"batch"`, `"end"` (no more data), `"error"` (the loader raised) or `"rng"` (a random state).
        batch_index: Which batch of the epoch this is.
        padding: Whether the batch repeats an earlier one.
        body: The batch pickled with its tensors left out; the text of an error's traceback; a pickled random state.
        tensors: The tensors left out, on any device, in order of appearance.
    """

    kind: str
    batch_index: int
    padding: bool = False
    body: bytes = b""
    tensors: list[torch.Tensor]

    def batch(self) -> Any:
        """Rebuild the batch."""
        return _Unpickler(self.body, self.tensors).load()


def pack_batch(batch: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Separate a batch into its pickled structure and its tensors.

    Plain dense tensors at any depth are left out of the pickle, wherever they sit (dict, list, named tuple, dataclass,
    `BatchEncoding`, any object that pickles); the same tensor twice is taken once. Sparse and quantized tensors, those
    that require a gradient, and tensor subclasses stay in the pickle.

    Args:
        batch: Anything that can be pickled.

    Returns:
        The pickled structure, and the tensors in order of appearance.

    Raises:
        TypeError: If the batch holds something that cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(batch)
    except Exception as error:
        raise TypeError(
            f"A batch of type `{type(batch).__name__}` cannot be sent to the other ranks of its model, because part of "
            f"it cannot be pickled ({error}). Make that part picklable (a class at module level), leave it out in "
            'the `collate_fn`, or pass `batch_source="replicated"` so that every rank loads by itself.'
        ) from error
    return buffer.getvalue(), pickler.tensors


def broadcast_message(message: Message | None, group: dist.ProcessGroup) -> Message:
    """Send the first rank's message to all ranks of the group. Collective over the group.

    Communication: one broadcast of 64 KiB; one more if structure and tensors of up to 64 KiB do not fit in it; one for
    each larger tensor. Memory: a copy of the small tensors.

    Args:
        message: On the first rank of the group what to send, elsewhere None.
        group: Must carry CPU tensors.

    Returns:
        The message; on the first rank the very object given.
    """
    if message is not None:
        return _send(message, group)
    return _receive(group)


def digest_batch(batch: Any) -> str:
    """Hash a batch by value, the same in every process: types, numbers, strings, tensors and arrays, at any depth.

    Objects of unknown type count with their type's name only.

    Args:
        batch: Any batch.

    Returns:
        32 hexadecimal digits.
    """
    hasher = hashlib.blake2b(digest_size=16)
    _hash_into(hasher, batch)
    return hasher.hexdigest()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._index_by_id: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or obj.requires_grad or obj.layout != torch.strided or obj.is_quantized:
            return None
        if id(obj) not in self._index_by_id:
            self._index_by_id[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index_by_id[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _send(message: Message, group: dist.ProcessGroup) -> Message:
    contents = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in message.tensors]
    specs = [
        _TensorSpec(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            device_type=tensor.device.type,
            pinned=tensor.is_pinned(),
            inline=content.nbytes <= _INLINE_BYTES,
        )
        for tensor, content in zip(message.tensors, contents, strict=True)
    ]
    header = pickle.dumps((message.kind, message.batch_index, message.padding, message.body, specs))
    parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
    parts += [_as_bytes(content) for content, spec in zip(contents, specs, strict=True) if spec.inline]
    payload = torch.cat(parts)
    lengths = torch.tensor([payload.numel(), len(header)]).view(torch.uint8)
    room = _FRAME_BYTES - lengths.numel()
    frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
    frame[: lengths.numel()] = lengths
    frame[lengths.numel() :][: payload.numel()] = payload[:room]
    dist.broadcast(frame, group=group, group_src=0)
    if payload.numel() > room:
        dist.broadcast(payload[room:].clone(), group=group, group_src=0)
    for content, spec in zip(contents, specs, strict=True):
        if not spec.inline:
            dist.broadcast(_as_bytes(content), group=group, group_src=0)
    return message


def _receive(group: dist.ProcessGroup) -> Message:
    frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
    dist.broadcast(frame, group=group, group_src=0)
    lengths = frame[: 2 * _LENGTH_BYTES]
    num_payload, num_header = lengths.clone().view(torch.int64).tolist()
    payload = frame[lengths.numel() :][:num_payload]
    if num_payload > payload.numel():
        rest = torch.empty(num_payload - payload.numel(), dtype=torch.uint8)
        dist.broadcast(rest, group=group, group_src=0)
        payload = torch.cat([payload, rest])
    kind, batch_index, padding, body, specs = pickle.loads(payload[:num_header].numpy().tobytes())
    inlined = payload[num_header:]
    tensors = []
    for spec in specs:
        # Pinned memory needs an accelerator, and the loading rank may have one where this rank has none.
        content = torch.empty(spec.shape, dtype=spec.dtype, pin_memory=spec.pinned and torch.accelerator.is_available())
        flat = _as_bytes(content)
        if spec.inline:
            flat.copy_(inlined[: flat.numel()])
            inlined = inlined[flat.numel() :]
        else:
            dist.broadcast(flat, group=group, group_src=0)
        tensors.append(content if spec.device_type == "cpu" else content.to(spec.device_type))
    return Message(kind=kind, batch_index=batch_index, padding=padding, body=body, tensors=tensors)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor of any dtype as flat bytes: gloo knows few dtypes, bytes it always knows."""
    return tensor.reshape(-1).view(torch.uint8)


def _hash_into(hasher: Any, value: Any) -> None:
    hasher.update(f"<{type(value).__qualname__}>".encode())
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(_as_bytes(dense.cpu().resolve_conj().resolve_neg().contiguous()).numpy().tobytes())
    elif isinstance(value, bytes):
        hasher.update(value)
    elif isinstance(value, str | int | float | complex | None):
        hasher.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _hash_into(hasher, key)
            _hash_into(hasher, item)
    elif isinstance(value, set | frozenset):
        # The order of a set of strings differs by process.
        hasher.update("".join(sorted(digest_batch(item) for item in value)).encode())
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _hash_into(hasher, getattr(value, field.name))
    elif hasattr(value, "tobytes"):  # numpy arrays and scalars
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(value.tobytes())
    elif isinstance(value, list | tuple) or (isinstance(value, Iterable) and hasattr(value, "__len__")):
        for item in value:
            _hash_into(hasher, item)
    hasher.update(b">")
