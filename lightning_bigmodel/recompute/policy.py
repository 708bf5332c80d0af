"""What a recompute policy is: it decides for each block what happens to the activations that backward needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_bigmodel.recompute.ambient import Keeper, OwnState
from lightning_bigmodel.recompute.compilation import Compilation
from lightning_bigmodel.recompute.frame import Contexts, Link, run_again_in_backward

__all__ = ["Again", "Block", "Chain", "RecomputePolicy", "Treatment"]


@dataclass
class Block:
    """One block of a model.

    Attributes:
        name: Its module name.
        module: The module.
        index: Its place among the blocks of this rank.
        compilation: How it is compiled, by itself or within what is around it; None: it is not.
        compiled_part: Name of a part of it that is compiled by itself.
        own: What its forward writes into it.
    """

    name: str
    module: nn.Module
    index: int
    compilation: Compilation | None = None
    compiled_part: str = ""
    own: OwnState = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.own = OwnState(self.module)


@dataclass
class Chain:
    """The blocks of this rank, in order.

    Attributes:
        blocks: The blocks.
        ends_in_backward: Whether the backward of the last block directly follows its forward.
        is_gathered: Whether parameters of a block are there around its own forward and backward only (ZeRO 3).
        keepers: See `Ambient`.
        link: Connects blocks of a segment.
    """

    blocks: Sequence[Block]
    ends_in_backward: bool = True
    is_gathered: bool = False
    keepers: Sequence[Keeper] = ()
    link: Link = field(default_factory=Link)

    @property
    def is_compiled(self) -> bool:
        """Whether operators of some block are within compiled code."""
        return any(block.compilation is not None or block.compiled_part for block in self.blocks)


class Treatment(ABC):
    """What is done with the activations of one block."""

    @property
    def looks_inside(self) -> bool:
        """Whether it chooses among the operators of a block, which cannot be done from around compiled code."""
        return False

    def kept_operators(self) -> Collection[Any] | None:
        """For a compiler that does the same within its code: operators whose results it is to keep; None: it cannot."""
        return None

    @abstractmethod
    def call(
        self, chain: Chain, block: Block, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the block's forward.

        Args:
            chain: All blocks.
            block: The block.
            function: Its forward.
            args: Of the call.
            kwargs: Of the call.
        """

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Give up what is held beyond a step."""


class Again(Treatment):
    """Compute the block again in backward.

    Args:
        contexts: See `run_again_in_backward`.
        is_linked: Whether the block's input is computed again too, from the blocks before it.
        keep: Operators whose results `contexts` keep.
    """

    def __init__(
        self,
        contexts: Contexts | None = None,
        *,
        is_linked: bool = False,
        keep: Collection[Any] = (),
    ) -> None:
        self._contexts, self._is_linked, self._keep = contexts, is_linked, keep

    @property
    def looks_inside(self) -> bool:
        """Where results of operators are kept."""
        return self._contexts is not None

    def kept_operators(self) -> Collection[Any] | None:
        """Those; not where an input comes from another block."""
        return None if self._is_linked or (self._contexts is not None and not self._keep) else self._keep

    def call(
        self, chain: Chain, block: Block, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the forward, keeping its inputs."""
        if not self._is_linked:
            chain.link.clear()
        return run_again_in_backward(
            block.name,
            block.own,
            function,
            args,
            kwargs,
            keepers=chain.keepers,
            link=chain.link,
            contexts=self._contexts,
        )


class RecomputePolicy(ABC):
    """Decides for each block. A policy of your own is one subclass, given as `Recompute(policy=...)`."""

    @abstractmethod
    def treatments(self, chain: Chain) -> Sequence[Treatment | None]:
        """For each block of `chain` what is done with its activations; None: autograd keeps them as always.

        Raises:
            ValueError: For settings that cannot take effect on this chain.
        """

    def around_batch(self) -> AbstractContextManager[None]:
        """What each training batch runs within."""
        return nullcontext()

    def revised(self, chain: Chain, gather: Callable[[Any], list[Any]]) -> Sequence[Treatment | None] | None:
        """Called after each training batch: what is done from now on, or None for what was done before.

        Args:
            chain: The blocks.
            gather: Gives what each rank gives it, to all of them. Collective.

        Raises:
            ValueError: On every rank alike, where measuring has shown that the settings cannot take effect.
        """
        return None
