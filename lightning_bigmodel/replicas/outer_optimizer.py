"""The optimizer of the weights that replicas have in common: made from a class path or a callable, and tried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

__all__ = ["MakeOptimizer", "outer_optimizer_maker"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

_DEFAULTS = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def outer_optimizer_maker(given: Any, options: Any) -> MakeOptimizer:
    """What makes the outer optimizer of a list of parameters.

    Args:
        given: A class path, or a callable of parameters and options; None for SGD as in DiLoCo (lr 0.7, Nesterov
            momentum 0.9).
        options: Keyword arguments for it, or None.

    Raises:
        ValueError: If it can't be found, made or stepped, or keeps state that has no parameter.
    """
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(key, str) for key in options)):
        raise ValueError(f"`outer_options={options!r}` must be a dict of keyword arguments for the outer optimizer.")
    factory: Callable[..., Any] = SGD if given is None else _found(given)
    keywords = {**(_DEFAULTS if given is None else {}), **(options or {})}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer: Optimizer = factory(parameters, **keywords)
        return optimizer

    shown = f"`outer_optimizer={given!r}` with `outer_options={options!r}`"
    _try_out(make, shown)
    return make


def _found(given: Any) -> Callable[..., Any]:
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            given_class: Any = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"`outer_optimizer={given!r}` cannot be imported ({error}). Use a full path, such as 'torch.optim.SGD'."
            ) from error
        return _found(given_class)
    if not callable(given):
        raise ValueError(
            f"`outer_optimizer={given!r}` must be a class path, such as 'torch.optim.SGD', or a callable that makes an "
            "optimizer of parameters."
        )
    function: Callable[..., Any] = given
    return function


def _try_out(make: MakeOptimizer, shown: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = make([parameter])
        before = _options(optimizer)
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"{shown} cannot be made or stepped ({type(error).__name__}: {error}). It must be an optimizer that steps "
            "by gradients alone, with options that it takes."
        ) from error
    if _options(optimizer) != before:
        raise ValueError(
            f"{shown} keeps state beside that of its parameters, which would be lost in checkpoints. Use another one, "
            "such as 'torch.optim.SGD'."
        )


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
