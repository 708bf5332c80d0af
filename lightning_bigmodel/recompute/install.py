"""Puts treatments around the forwards of blocks, and takes them away again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_bigmodel.recompute.policy import Block, Chain, Treatment

__all__ = ["TreatedBlocks", "is_treated"]

_MARK = "_bigmodel_recomputes"


class TreatedBlocks:
    """Blocks whose forward is treated, from here to `close`.

    A block's `forward` is overridden in its `__dict__`: hooks that gather parameters or exchange activations stay
    outside and do not run again, no module is replaced, and names in the state dict stay. Without gradients (in an
    evaluation) the forward is what it was.

    Args:
        chain: The blocks.
        treatments: For each block what is done; None leaves it as it is.
    """

    def __init__(self, chain: Chain, treatments: Sequence[Treatment | None]) -> None:
        self.chain = chain
        self._forwards = [_Forward(chain, block) for block in chain.blocks]
        self.treat(treatments)

    def treat(self, treatments: Sequence[Treatment | None]) -> None:
        """Change what is done, between steps."""
        self._give_up()
        for forward, treatment in zip(self._forwards, treatments, strict=True):
            forward.treatment = treatment

    def close(self) -> None:
        """Give the blocks their own `forward` back."""
        self._give_up()
        for forward in self._forwards:
            forward.remove()
        self._forwards = []

    def _give_up(self) -> None:
        for forward in self._forwards:
            if forward.treatment is not None:
                forward.treatment.close()


class _Forward:
    """The forward of one block."""

    def __init__(self, chain: Chain, block: Block) -> None:
        self.chain, self.block = chain, block
        self.treatment: Treatment | None = None
        self._before = block.module.__dict__.get("forward")
        self._installed = MethodType(_treated(self, self._before, type(block.module).forward), block.module)
        block.module.__dict__["forward"] = self._installed

    def remove(self) -> None:
        module = self.block.module
        self.treatment = None
        if module.__dict__.get("forward") is not self._installed:
            return  # another wrapper has come around this one, and goes on calling it
        if self._before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._before


def is_treated(module: nn.Module) -> bool:
    """Whether a module's forward is one of these."""
    return hasattr(module.__dict__.get("forward"), _MARK)


def _treated(holder: _Forward, before: Callable[..., Any] | None, native: Callable[..., Any]) -> Callable[..., Any]:
    # By this name a pickled module finds the forward of its class again.
    @functools.wraps(native)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_own = self is holder.block.module  # a copy of the module is an ordinary one
        # Its class may have changed since: gates and `fully_shard` put one of theirs in front.
        function = before if before is not None and is_own else functools.partial(type(self).forward, self)
        treatment = holder.treatment
        if treatment is None or not is_own or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return treatment.call(holder.chain, holder.block, function, args, kwargs)

    setattr(forward, _MARK, True)
    return forward
