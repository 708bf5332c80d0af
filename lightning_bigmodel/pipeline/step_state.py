"""Keep the attributes a user's step writes on its module as one process would have them, on every rank of the pipeline.

A common pattern is `self.outputs.append(loss)` in a validation step and `torch.stack(self.outputs)` at the epoch's end.
Only the last stage gets as far as the `append`; and code before the first block runs once on every stage. So what the
last stage did to plain attributes is taken as the truth and sent to the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.pipeline.tree import map_tensors

__all__ = ["StepState"]

_PLAIN = (int, float, bool, str, type(None), complex)
_MAX_DEPTH = 3


def _copy(value: Any, depth: int = 0) -> Any:
    """A copy of the containers of `value`; what they hold is shared."""
    if depth < _MAX_DEPTH and type(value) is list:
        return [_copy(item, depth + 1) for item in value]
    if depth < _MAX_DEPTH and isinstance(value, dict):
        copied = value.copy()
        for key, item in value.items():
            copied[key] = _copy(item, depth + 1)
        return copied
    return value


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return isinstance(first, _PLAIN) and bool(first == second)


def _watched(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, list, dict, Tensor))


class StepState:
    """The plain attributes of a module (numbers, strings, tensors, lists and dicts of anything) before a step.

    Args:
        module: The user's module.
        ignored: Attribute names that belong to the host (nn.Module's and LightningModule's own).
        buffers: Names of the buffers that count too.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], buffers: Sequence[str] = ()) -> None:
        self._module = module
        self._ignored = ignored
        self._before = self._read()
        self._versions = {name: _version(value) for name, value in self._before.items() if isinstance(value, Tensor)}
        self._buffers = {name: (_buffer(module, name), _buffer(module, name).clone()) for name in buffers}
        self._buffer_versions = {name: _version(buffer) for name, (buffer, _) in self._buffers.items()}

    def _read(self) -> dict[str, Any]:
        return {
            name: _copy(value)
            for name, value in self._module.__dict__.items()
            if name not in self._ignored and _watched(value)
        }

    def _is_written(self, name: str) -> bool:
        """Whether a buffer has been written or replaced."""
        before, _ = self._buffers[name]
        return _buffer(self._module, name) is not before or _version(before) != self._buffer_versions[name]

    @torch.no_grad()
    def restore(self) -> None:
        """Take back what code did to the attributes and buffers since construction."""
        for name, (buffer, before) in self._buffers.items():
            if self._is_written(name):
                buffer.copy_(before)
                self._buffer_versions[name] = _version(buffer)
                _set_buffer(self._module, name, buffer)
        for name in set(self._read()) - set(self._before):
            del self._module.__dict__[name]
        for name, value in self._before.items():
            _assign(self._module.__dict__, name, value)

    def changes(self) -> dict[str, Any]:
        """What changed since construction: only additions where a list grew, else the new value; detached, on the CPU.

        Values that cannot be pickled stay where they are.
        """
        found: dict[str, Any] = {}
        for name, value in self._read().items():
            before = self._before.get(name, _MISSING)
            is_edited = before is value and name in self._versions and _version(value) != self._versions[name]
            if before is not _MISSING and _same(before, value) and not is_edited:
                continue
            grown = type(before) is list and type(value) is list and len(value) > len(before)
            if grown and all(map(_same, before, value)):
                change = ("appended", value[len(before) :])
            else:
                change = ("assigned", value)
            portable = map_tensors(lambda tensor: tensor.detach().cpu(), change)
            try:
                pickle.dumps(portable)
            except Exception:
                continue
            found[name] = portable
        for name in filter(self._is_written, self._buffers):
            found[name] = ("buffer", _buffer(self._module, name).detach().cpu())
        return found

    @torch.no_grad()
    def apply(self, changes: dict[str, Any]) -> None:
        """Restore the attributes and repeat another rank's changes."""
        self.restore()
        for name, (kind, value) in changes.items():
            if kind == "appended":
                self._module.__dict__[name].extend(value)
            elif kind == "buffer":
                current = _buffer(self._module, name)
                if (current.shape, current.dtype) == (value.shape, value.dtype):
                    current.copy_(value)
                else:
                    with torch.inference_mode(False):  # evaluation's own tensors would fail in training
                        _set_buffer(self._module, name, value.to(current.device, copy=True))
            else:
                _assign(self._module.__dict__, name, value)


def _buffer(module: nn.Module, name: str) -> Tensor:
    """A buffer by its full name."""
    return module.get_buffer(name)


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, own_name = name.rpartition(".")
    module.get_submodule(path)._buffers[own_name] = value


def _version(tensor: Tensor) -> int:
    """Counts what was written into a tensor."""
    return -1 if tensor.is_inference() else tensor._version


_MISSING: Any = object()


def _assign(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute, keeping the identity of a list or dict that others may hold."""
    current = attributes.get(name, _MISSING)
    if type(current) is list and type(value) is list:
        current[:] = value
    elif isinstance(current, dict) and isinstance(value, dict):
        current.clear()
        current.update(value)
    else:
        attributes[name] = value
