"""What `torch.compile` made of a function or a module: private API of torch (2.11 - 2.14), as in `_host`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = [
    "compiled_call",
    "compiled_function",
    "compiler_of",
    "never_compiled",
    "set_compiled_call",
    "uncompiled",
]

_CALL = "_compiled_call_impl"


def compiled_function(module: nn.Module, *names: str) -> Callable[..., Any] | None:
    """The first of a module's functions of such names that is compiled by itself."""
    for name in names:
        function = getattr(module, name, None)
        if _is_compiled(function):
            return function
    return None


def _is_compiled(function: Any) -> bool:
    # What is never compiled has the first as well.
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` has put in the place of the module's call."""
    found: Callable[..., Any] | None = module.__dict__.get(_CALL)
    return found


def set_compiled_call(module: nn.Module, function: Callable[..., Any] | None) -> None:
    """Let a module's call be `function`; None: what it is uncompiled."""
    module.__dict__[_CALL] = function


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a compiled function was made of."""
    inner: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return inner


def compiler_of(function: Callable[..., Any]) -> tuple[str, Callable[..., Any]] | None:
    """How a function was compiled: the backend's name, and what compiles others in the same way.

    Args:
        function: What `torch.compile` returned for a function.

    Returns:
        None where this version of torch does not tell. The name is that of a registered backend, or a description.
    """
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    held = {} if code is None else dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=False))
    compiler = held.get("self")
    inner = getattr(compiler, "callback", None)
    if not callable(compiler) or inner is None:
        return None
    while hasattr(inner, "_torchdynamo_orig_backend"):
        inner = inner._torchdynamo_orig_backend
    name = getattr(inner, "compiler_name", None)
    if not isinstance(name, str):
        return None
    return (name if _is_registered(name, inner) else f"{name}, which is a function of your own"), compiler


def _is_registered(name: str, wrapper: Any) -> bool:
    """Whether a backend is the one that torch knows by its name, and no function that is called the same."""
    if not hasattr(wrapper, "compiler_fn"):  # Inductor's own
        return True
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    return name in list_backends(exclude_tags=()) and lookup_backend(name) is wrapper.compiler_fn


def never_compiled(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function`, around which compiled code ends; itself where nothing can have been compiled yet."""
    if "torch._dynamo" not in sys.modules:
        return function
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=reason)
    return disabled
