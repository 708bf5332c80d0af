"""Copies of a module for a trial: other parameters on the CPU, no hooks, and nothing that the module itself notices."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.sharding.plan_calls import Call, map_items, own_numbers

__all__ = ["copy_module", "why_not_copied"]

_PLAIN = (
    type(None),
    int,
    float,
    complex,
    str,
    bytes,
    type,
    Enum,
    PurePath,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
    Tensor,
    nn.Module,
)


def why_not_copied(module: nn.Module, call: Call) -> str:
    """Why a copy would not do what the module does, or a trial might reach into the module itself; or ""."""
    if any("forward" in vars(found) for found in module.modules()):
        return "a forward is replaced on the instance, which a copy would not follow"
    if not all(parameter.is_floating_point() for parameter in module.parameters()):
        return "parameters are not floating-point numbers"
    if call.method is None:
        return ""
    # A forward seldom changes what it does not return; a step may count, append or draw by any object there is.
    for name, found in module.named_modules():
        for attribute, value in vars(found).items():
            if not attribute.startswith("_") and not _is_metric(found) and not _is_harmless(value):
                return f"a trial might change `{name + '.' if name else ''}{attribute}` ({type(value).__name__})"
    return ""


def _is_metric(module: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _is_harmless(value: Any) -> bool:
    """Whether a copy has its own of what an attribute refers to, or nobody writes there."""
    if isinstance(value, (list, tuple, set, deque)):
        return type(value) in (list, tuple, set, deque, torch.Size) and all(map(_is_harmless, value))
    if isinstance(value, dict):
        return type(value) in (dict, OrderedDict) and all(map(_is_harmless, value.values()))
    if isinstance(value, partial):
        return all(map(_is_harmless, (value.func, value.args, value.keywords)))
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        # What a function holds on to, a copy of the module shares.
        return all(isinstance(each, (type(None), int, float, str, type, torch.dtype)) for each in cells)
    if isinstance(value, MethodType):
        return isinstance(value.__self__, nn.Module)
    is_constant = is_dataclass(value) and getattr(type(value), "__dataclass_params__").frozen  # noqa: B009  # untyped
    return is_constant or type(value).__name__.endswith("Config") or isinstance(value, _PLAIN)


def copy_module(root: nn.Module, make: Callable[[nn.Parameter], nn.Parameter], memo: dict[int, Any]) -> nn.Module:
    """A copy with other parameters and without hooks, on the CPU; what else it refers to is shared, or copied.

    Copied are tensors and containers, into which a forward may write, and methods of the module's parts.
    """
    modules = list(root.modules())
    for module in modules:
        memo[id(module)] = type(module).__new__(type(module))
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = make(parameter)
    for module in modules:
        state = vars(memo[id(module)])
        for name, value in vars(module).items():
            state[name] = OrderedDict() if name.startswith("_") and "_hooks" in name else _own(value, make, memo)
        if isinstance(state.get("_device"), torch.device):  # a LightningModule's
            state["_device"] = torch.device("cpu")
        if hasattr(module, "rounds_products"):  # parts that are rounded by themselves would seem a mistake
            state["rounds_products"] = False
        if _is_metric(module):
            for name in ("forward", "compute", "update"):
                state[name] = _nothing_measured
        for name in ("log", "log_dict", "print"):
            if hasattr(type(module), "log_dict") and hasattr(type(module), name):
                state[name] = _do_nothing
    twin: nn.Module = memo[id(root)]
    return twin


def _nothing_measured(*args: Any, **kwargs: Any) -> Tensor:
    """In place of metrics, whose methods are bound to the real ones."""
    return torch.zeros(())


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what would show."""


def _own(value: Any, make: Callable[[nn.Parameter], nn.Parameter], memo: dict[int, Any]) -> Any:
    """What a copy has in the place of an attribute's value."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Parameter):
        return memo.setdefault(id(value), make(value))
    if isinstance(value, Tensor):
        return own_numbers(value)
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, (set, deque)):
        return copy.copy(value)
    return map_items(value, lambda item: _own(item, make, memo), lambda item: item)
