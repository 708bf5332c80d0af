"""Puts treatments around the forwards of blocks, and takes them away again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_bigmodel import _host_compile
from lightning_bigmodel.recompute.compilation import check_unwritten, marked_for_compiler, written_state
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
        self._noted: list[tuple[str, Any]] = []
        self.treat(treatments)

    def treat(self, treatments: Sequence[Treatment | None]) -> None:
        """Change what is done, between steps."""
        self._give_up()
        for forward, treatment in zip(self._forwards, treatments, strict=True):
            forward.treat(treatment)

    def note_state(self) -> None:
        """Before a step's forward: note what blocks that are compiled with what is around them must not write."""
        self._noted = [(each.block.name, written_state(each.block.module)) for each in self._forwards if each.is_traced]

    def check_state(self) -> None:
        """After it, and before weights move.

        Raises:
            RecomputeError: See `check_unwritten`.
        """
        for name, noted in self._noted:
            check_unwritten(name, noted)

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
    """The forward of one block.

    Treatments work around what is compiled, where that is this block alone. A block whose call was compiled, by
    `block.compile()`, has its forward compiled instead meanwhile, so that hooks stay outside here too. Treatments that
    look inside, and those of blocks that are compiled with what is around them, are left to the compiler.
    """

    def __init__(self, chain: Chain, block: Block) -> None:
        self.chain, self.block = chain, block
        self.treatment: Treatment | None = None
        module, compilation = block.module, block.compilation
        self._before = module.__dict__.get("forward")
        self.is_traced = compilation is not None and bool(compilation.around)
        self._compiled_call = None if self.is_traced else _host_compile.compiled_call(module)
        self._function: Callable[..., Any] | None = self._before
        if self._compiled_call is not None and compilation is not None:
            self._function = compilation.compile(module.forward)
            _host_compile.set_compiled_call(module, None)
        self._inside: Callable[..., Any] | None = None
        self._around = _host_compile.never_compiled(self._call_around, "recomputation is no code to compile")
        self.refuse = _host_compile.never_compiled(self._refuse, "Recompute works around each block")
        self._installed = MethodType(_treated(self, type(module).forward), module)
        module.__dict__["forward"] = self._installed

    def treat(self, treatment: Treatment | None) -> None:
        """Change what is done."""
        self.treatment, self._inside, compilation = treatment, None, self.block.compilation
        if treatment is None or compilation is None or not (self.is_traced or treatment.looks_inside):
            return
        kept = treatment.kept_operators()
        assert kept is not None, "was refused"
        inner = self.function(self.block.module)
        plain = _host_compile.uncompiled(inner)
        self._inside = marked_for_compiler(plain, kept, self._around, compilation.backend)
        if not self.is_traced:
            self._inside = compilation.compile(self._inside)

    @property
    def acts_inside(self) -> bool:
        """Whether the compiled block itself does what is to be done."""
        return self._inside is not None and not self.is_traced

    def function(self, module: nn.Module) -> Callable[..., Any]:
        """What is treated; of a copy of the block, what that one computes."""
        if self._function is not None and module is self.block.module:
            return self._function
        # Its class may have changed since: gates and `fully_shard` put one of theirs in front.
        return functools.partial(type(module).forward, module)

    def inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiler's part."""
        assert self._inside is not None
        if self.is_traced:
            return self._inside(*args, **kwargs)  # what it writes is looked at after the step's forward
        noted = written_state(self.block.module, (args, kwargs))
        output = self._inside(*args, **kwargs)
        check_unwritten(self.block.name, noted)
        return output

    def around(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ours."""
        return self._around(*args, **kwargs)

    def _call_around(self, *args: Any, **kwargs: Any) -> Any:
        assert self.treatment is not None
        inner = self.function(self.block.module)
        if self._inside is not None:
            inner = _host_compile.uncompiled(inner)
        return self.treatment.call(self.chain, self.block, inner, args, kwargs)

    def _refuse(self) -> None:
        raise ValueError(
            f"`{self.block.name}` is traced into code that is compiled around it, where `Recompute` would have no "
            "effect. Compile the module or the step that calls it before `fit`, by `module.compile()` or "
            "`torch.compile(module)`, or compile block by block (`block.compile()` for each, or `compile_blocks` of "
            "`BigModelStrategy`)."
        )

    def remove(self) -> None:
        """Give the block its own forward back."""
        module = self.block.module
        self.treatment = self._inside = None
        if module.__dict__.get("forward") is not self._installed:
            return  # another wrapper has come around this one, and goes on calling it
        if self._before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._before
        if self._compiled_call is not None:
            _host_compile.set_compiled_call(module, self._compiled_call)


def is_treated(module: nn.Module) -> bool:
    """Whether a module's forward is one of these."""
    return hasattr(module.__dict__.get("forward"), _MARK)


def _treated(holder: _Forward, native: Callable[..., Any]) -> Callable[..., Any]:
    # By this name a pickled module finds the forward of its class again.
    @functools.wraps(native)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_own = self is holder.block.module  # a copy of the module is an ordinary one
        if holder.treatment is None or not is_own or not torch.is_grad_enabled():
            return holder.function(self)(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if not holder.is_traced:
                holder.refuse()
            return holder.inside(args, kwargs)
        if holder.acts_inside:
            return holder.inside(args, kwargs)
        return holder.around(args, kwargs)

    setattr(forward, _MARK, True)
    return forward
