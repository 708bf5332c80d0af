"""A block beside a block: the same forward on other values, of which the block itself takes no notice."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["as_full", "make_twin"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_MARKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def make_twin(block: nn.Module, values: Mapping[int, Tensor], convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module of the same classes, whose parameters are leaves of their own.

    What its forward writes, into buffers, attributes or what it logs, stays with the twin. Hooks are left out but for
    those of torch, which make weights (`weight_norm`): those of users would see a step that is none.

    Args:
        block: The module.
        values: id of a parameter or buffer -> what to take in its place.
        convert: Applied to every tensor taken.

    Memory: buffers and plain tensor attributes once more; parameters only where `convert` copies.
    """
    made: dict[int, Any] = {}
    for module in block.modules():
        made[id(module)] = type(module).__new__(type(module))
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in made:
                value = convert(values.get(id(parameter), parameter).detach())
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in made:
                made[id(buffer)] = convert(values.get(id(buffer), buffer).detach().clone())
    for module in block.modules():
        _fill(made[id(module)], module, made, convert)
    twin: nn.Module = made[id(block)]
    return twin


def _fill(twin: nn.Module, module: nn.Module, made: Mapping[int, Any], convert: Callable[[Tensor], Tensor]) -> None:
    state = {name: _copied(value, made, convert) for name, value in module.__dict__.items()}
    for name in _HOOKS:
        hooks = module.__dict__.get(name, {})
        kept = {key: hook for key, hook in hooks.items() if "backward" not in name and _is_of_torch(hook)}
        state[name] = type(hooks)(kept)
    for name in _MARKS:
        state[name] = type(module.__dict__.get(name, {}))(module.__dict__.get(name, {}))
    own_forward = module.__dict__.get("forward")
    if isinstance(own_forward, MethodType) and own_forward.__self__ is module:
        state["forward"] = MethodType(own_forward.__func__, twin)
    if hasattr(module, "log_dict"):  # of a LightningModule
        state["log"] = _log_nothing
    twin.__dict__.update(state)


def _copied(value: Any, made: Mapping[int, Any], convert: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """Modules, parameters and buffers are those of the twin, containers are its own."""
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Tensor):
        return convert(value.detach().clone())
    if depth < 3 and isinstance(value, dict):
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = _copied(each, made, convert, depth + 1)
        return copied
    if depth < 3 and type(value) in (list, set, tuple):
        return type(value)(_copied(each, made, convert, depth + 1) for each in value)
    return value


def _is_of_torch(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).split(".")[0] == "torch"


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def as_full(tensor: Tensor) -> Tensor:
    """16 bits as fp32; everything else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
