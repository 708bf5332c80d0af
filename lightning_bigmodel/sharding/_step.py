"""Changes what `step` of one optimizer object does; its class, options, hooks and schedulers stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["behaves_as", "leave_out_empty", "replace_step"]


def behaves_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Whether an optimizer is of a class, or of a subclass that changes nothing but the constructor."""
    mro = type(optimizer).__mro__
    if kind not in mro:
        return False
    return all(name.startswith("__") for subclass in mro[: mro.index(kind)] for name in vars(subclass))


def replace_step(optimizer: Optimizer, update: Callable[[Optimizer], None]) -> None:
    """Makes `step` call the closure, if it is given one, and then `update`, in place of what its class does.

    Step hooks run as before. A scheduler may have been attached already, or come later.

    Raises:
        ValueError: If somebody else has replaced the `step` of this very object.
    """
    there = vars(optimizer).get("step")
    if there is not None and not hasattr(there, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"`step` of this `{type(optimizer).__name__}` object has been replaced, and what replaced it would be lost "
            "where each rank holds a part of the parameters only. Override `step` in a subclass, or train without "
            "`zero_stage` and `tensor_parallel_size`."
        )

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for to warn of a wrong order
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            update(self)
        return loss

    hooked = Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler that comes later wraps no more
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]


def leave_out_empty(optimizer: Optimizer) -> None:
    """Hides parameters without elements from `step`, for implementations that fail on them."""
    before = optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        lists = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, parameters in lists:
                group["params"] = [parameter for parameter in parameters if parameter.numel()]
            return before(*args, **kwargs)
        finally:
            for group, parameters in lists:
                group["params"] = parameters

    # Also takes over the mark of a scheduler that has wrapped `before`.
    update_wrapper(step, before)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
