"""Keep the attributes a user's step writes on its module as one process would have them, on every rank of the pipeline.

A common pattern is `self.outputs.append(loss)` in a validation step and `torch.stack(self.outputs)` at the epoch's end.
Only the last stage gets as far as the `append`; and code before the first block runs once on every stage. So what the
last stage did to plain attributes is taken as the truth and sent to the others.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.pipeline.containers import CONTAINERS, Contents, refill
from lightning_bigmodel.pipeline.tree import children, rebuild

__all__ = ["StepState"]

_PLAIN = (int, float, bool, str, type(None), complex)
_WATCHED = (*_PLAIN, *CONTAINERS, Tensor)
_MAX_DEPTH = 100  # far below where Python itself gives up


def _portable(value: Any, known: dict[int, Any], depth: int = 0) -> Any:
    """A copy for another process: tensors detached and on the CPU; what holds itself, or is held twice, does so again.

    Raises:
        ValueError: For what is nested too deeply.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if id(value) in known:
        return known[id(value)]
    if depth > _MAX_DEPTH:
        raise ValueError(f"Values nested more than {_MAX_DEPTH} deep are not sent.")
    if not isinstance(value, CONTAINERS) or dataclasses.is_dataclass(value):
        pairs = children(value)
        return value if pairs is None else rebuild(value, [_portable(each, known, depth + 1) for _, each in pairs])
    copied: Any = copy.copy(value)
    known[id(value)] = copied
    if isinstance(value, dict):
        for key, item in value.items():
            copied[key] = _portable(item, known, depth + 1)
    else:
        refill(copied, [_portable(item, known, depth + 1) for item in value])
    return copied


class StepState:
    """The plain attributes of a module before a step: numbers, strings, tensors, and lists, dicts and sets of anything.

    Lists, dicts and sets within each other are looked into, at any depth; what else they hold (tuples, objects) counts
    as changed when it is replaced. What cannot be pickled or is nested more than 100 deep is restored, but not sent.

    Args:
        module: The user's module.
        ignored: Attribute names that belong to the host (nn.Module's and LightningModule's own).
        buffers: Names of the buffers that count too.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], buffers: Sequence[str] = ()) -> None:
        self._module = module
        self._ignored = ignored
        self._before = self._read()
        self._contents = Contents(self._before.values())
        self._versions = {name: _version(value) for name, value in self._before.items() if isinstance(value, Tensor)}
        self._buffers = {name: (_buffer(module, name), _buffer(module, name).clone()) for name in buffers}
        self._buffer_versions = {name: _version(buffer) for name, (buffer, _) in self._buffers.items()}

    def _read(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._module.__dict__.items()
            if name not in self._ignored and isinstance(value, _WATCHED)
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
        self._module.__dict__.update(self._before)
        self._contents.restore()

    def _same(self, pairs: Iterable[tuple[Any, Any]]) -> bool:
        """Whether the second value of each pair is now what the first one was before."""
        todo, seen = list(pairs), set()
        while todo:
            first, second = todo.pop()
            if type(first) is not type(second):
                return False
            if not isinstance(first, CONTAINERS):
                if first is not second and not (isinstance(first, _PLAIN) and bool(first == second)):
                    return False
                continue
            if (id(first), id(second)) in seen:  # they hold themselves
                continue
            seen.add((id(first), id(second)))
            before = self._contents.of(first)
            if len(before) != len(second):
                return False
            if isinstance(before, set):
                if before != second:
                    return False
            elif isinstance(before, list):
                todo += [pair for pair in zip(before, second, strict=True) if _may_differ(*pair)]
            elif before.keys() == second.keys():
                todo += [pair for pair in ((value, second[key]) for key, value in before.items()) if _may_differ(*pair)]
            else:
                return False
        return True

    def _change(self, first: Any, second: Any) -> tuple[str, Any]:
        if type(first) is type(second) and isinstance(first, (list, set)):
            before = self._contents.of(first)
            if isinstance(before, set) and before < second:
                return "added", second - before
            if isinstance(before, list) and len(before) < len(second) and self._same(zip(before, second, strict=False)):
                return "appended", second[len(before) :]
        return "assigned", second

    def changes(self) -> dict[str, Any]:
        """What changed since construction: only additions where a list or set grew, else the new value.

        Detached, on the CPU. Values that cannot be pickled, or are nested too deeply, stay where they are.
        """
        found: dict[str, Any] = {}
        for name, value in self._read().items():
            before = self._before.get(name, _MISSING)
            is_edited = before is value and name in self._versions and _version(value) != self._versions[name]
            if before is not _MISSING and not is_edited and self._same([(before, value)]):
                continue
            try:
                portable = _portable(self._change(before, value), {})
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
            elif kind == "added":
                self._module.__dict__[name].update(value)
            elif kind == "buffer":
                current = _buffer(self._module, name)
                if (current.shape, current.dtype) == (value.shape, value.dtype):
                    current.copy_(value)
                else:
                    with torch.inference_mode(False):  # evaluation's own tensors would fail in training
                        _set_buffer(self._module, name, value.to(current.device, copy=True))
            else:
                _assign(self._module.__dict__, name, value)


def _may_differ(first: Any, second: Any) -> bool:
    return first is not second or isinstance(first, CONTAINERS)


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
    """Set an attribute, keeping the identity of a list, dict or set that others may hold."""
    current = attributes.get(name, _MISSING)
    if type(current) is type(value) and isinstance(value, CONTAINERS):
        refill(current, value)
    else:
        attributes[name] = value
