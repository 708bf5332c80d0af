"""Compile a model block by block: small graphs, compiled once for all blocks of a kind, under any layout."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["CompiledBlocks", "check_compile_setting"]


def check_compile_setting(compile_blocks: Any) -> None:
    """Refuse what is neither a switch nor options of `torch.compile`.

    Raises:
        ValueError: With what to write.
    """
    if not isinstance(compile_blocks, (bool, Mapping)) or (isinstance(compile_blocks, Mapping) and not compile_blocks):
        raise ValueError(
            f"`compile_blocks={compile_blocks!r}` must be True, False, or options of `torch.compile` such as "
            "{'mode': 'max-autotune'}."
        )
    if isinstance(compile_blocks, Mapping):
        known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
        unknown = [name for name in compile_blocks if name not in known]
        if unknown:
            raise ValueError(
                f"`compile_blocks` has {unknown[0]!r}, which `torch.compile` does not know. Use {', '.join(known)}."
            )


class CompiledBlocks:
    """Blocks whose `forward` is compiled, until `restore`.

    Only `forward` is compiled, not the module: hooks that gather parameters or exchange activations stay outside, and
    names in checkpoints stay as they are.

    Args:
        blocks: The modules.
        options: Passed on to `torch.compile`.

    Raises:
        ValueError: Where there are no blocks.
    """

    def __init__(self, blocks: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
        self._blocks = list(blocks)
        if not self._blocks:
            raise ValueError(
                "`compile_blocks` found no blocks: the model has no repeated modules. Name them in `blocks=[...]`, or "
                "set `compile_blocks=False` and call `module.compile()` in `configure_model`."
            )
        self._before = [block.__dict__.get("forward") for block in self._blocks]
        for block in self._blocks:
            block.__dict__["forward"] = torch.compile(block.forward, **options)

    def restore(self) -> None:
        """Give the blocks their own `forward` back."""
        for block, before in zip(self._blocks, self._before, strict=True):
            block.__dict__.pop("forward", None)
            if before is not None:
                block.__dict__["forward"] = before
        self._blocks.clear()
        self._before.clear()
