"""How a block is compiled, by the strategy or by the user, by itself or with what is around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_bigmodel import _host_compile
from lightning_bigmodel.recompute.compilation import Compilation

__all__ = ["compilation_of", "compiled_part_of"]


def compilation_of(
    name: str, block: nn.Module, root: pl.LightningModule, options: Mapping[str, Any] | None
) -> Compilation | None:
    """How one block is compiled.

    Args:
        name: Of the block.
        block: The block.
        root: The model.
        options: Of `compile_blocks`; None: the strategy compiles no blocks.

    Raises:
        ValueError: Where it cannot be told.
    """
    around = _around(block, root)
    if around is not None:
        return _taken_apart(*around, around=around[0])
    if options is not None and _host_compile.compiled_function(block, "forward") is not None:
        backend = options.get("backend", "inductor")
        shown = backend if isinstance(backend, str) else f"{getattr(backend, '__name__', backend)}, a function of yours"
        return Compilation(shown, functools.partial(torch.compile, **options))
    compiled = _compiled(block)
    return None if compiled is None else _taken_apart(name, compiled)


def compiled_part_of(block: nn.Module) -> str:
    """Name of a part of a block that is compiled by itself, or nothing."""
    parts: list[tuple[str, nn.Module]] = list(block.named_modules())[1:]
    return next((name for name, part in parts if _compiled(part) is not None), "")


def _compiled(module: nn.Module) -> Callable[..., Any] | None:
    return _host_compile.compiled_call(module) or _host_compile.compiled_function(module, "forward")


def _around(block: nn.Module, root: pl.LightningModule) -> tuple[str, Callable[..., Any]] | None:
    """Name and compiled function of what holds the block and is compiled."""
    step = _host_compile.compiled_function(root, "training_step")
    if step is not None:
        return type(root).__name__, step
    for name, part in root.named_modules():
        if part is not block and any(other is block for other in part.modules()):
            compiled = _compiled(part)
            if compiled is not None:
                return name or type(root).__name__, compiled
    return None


def _taken_apart(name: str, compiled: Callable[..., Any], around: str = "") -> Compilation:
    found = _host_compile.compiler_of(compiled)
    if found is None:
        raise ValueError(
            f"`{name}` is compiled in a way that `Recompute` cannot take apart. Compile it by `module.compile()`, or "
            "let `BigModelStrategy(compile_blocks=...)` compile blocks."
        )
    return Compilation(*found, around=around)
