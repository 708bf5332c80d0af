"""The fewest operators that, in fp32, bring a block under the tolerance: found by trying.

Matrix products and convolutions are never among them: a list holds for the whole model, and in fp32 these would take
along what 16 bits are used for. A block that needs them is proposed as a module.
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl

from lightning_bigmodel.callbacks._audit_report import Proposal
from lightning_bigmodel.callbacks._block_audit import BlockAudit, Ran
from lightning_bigmodel.precision.bigmodel import BigModelPrecision
from lightning_bigmodel.scaling.audit import OperatorKey, listed_name
from lightning_bigmodel.scaling.comparison import Comparison

__all__ = ["Proposer", "complete_proposal"]

_COSTLY = ("addmm", "baddbmm", "bmm", "convolution", "cudnn", "mm", "scaled_dot_product", "efficient_attention")
_MAX_OPS = 3  # of one block; more of them are the block
_MAX_CANDIDATES = 24
_MAX_TRIED_BLOCKS = 8  # a step; blocks of one kind mostly need the same operators, which are tried first


class Proposer:
    """Gathers operators and modules over steps.

    Args:
        tolerance: What an error must not exceed.
        takes_ops: Whether the precision has operators to choose from; else only modules are proposed.
        excluded: Operators that the user has given a type already.

    Attributes:
        ops: Operators to compute in fp32.
        modules: Blocks to compute in fp32 as a whole.
    """

    def __init__(self, tolerance: float, *, takes_ops: bool, excluded: Sequence[str] = ()) -> None:
        self._tolerance, self._takes_ops = tolerance, takes_ops
        self._excluded = frozenset(excluded)
        self.ops: list[str] = []
        self.modules: list[str] = []
        self._num_tried = 0

    def begin_step(self) -> None:
        """The number of blocks to try begins again."""
        self._num_tried = 0

    def consider(self, audit: BlockAudit, name: str, full: Ran, seen: dict[OperatorKey, Comparison]) -> None:
        """Find out what a block over the tolerance needs.

        Args:
            audit: With the block's call.
            name: The block.
            full: Its run in fp32.
            seen: What its operators lose by themselves.
        """
        if name in self.modules:
            return
        if self._takes_ops and self._num_tried >= _MAX_TRIED_BLOCKS:
            return
        self._num_tried += 1
        needed = self._needed(audit, name, full, seen) if self._takes_ops else None
        if needed is None:
            self.modules.append(name)
        else:
            self.ops += [op for op in needed if op not in self.ops]

    def _needed(self, audit: BlockAudit, name: str, full: Ran, seen: dict[OperatorKey, Comparison]) -> list[str] | None:
        """Operators beside those chosen already, or None where few do not suffice."""

        def suffices(ops: list[str]) -> bool:
            numbers = audit.retry(name, full, [*self.ops, *ops])
            return not numbers.exceeds(self._tolerance)

        if self.ops and suffices([]):
            return []
        needed = self._candidates(seen)
        if not needed or not suffices(needed):
            return None
        for op in needed[::-1]:  # the least suspicious first
            rest = [other for other in needed if other != op]
            if rest and suffices(rest):
                needed = rest
        return needed if len(needed) <= _MAX_OPS else None

    def _candidates(self, seen: dict[OperatorKey, Comparison]) -> list[str]:
        """Functions called in a block, the worst first."""
        by_function: dict[str, Comparison] = {}
        costly: set[str] = set()
        for key, numbers in seen.items():
            if key.phase == "forward" and listed_name(key.function):
                by_function[key.function] = by_function.get(key.function, Comparison()) + numbers
                if key.operator.lstrip("_").startswith(_COSTLY):
                    costly.add(key.function)
        names = [name for name in by_function if name not in {*self.ops, *self._excluded, *costly}]
        return sorted(names, key=lambda name: by_function[name].rank, reverse=True)[:_MAX_CANDIDATES]


def complete_proposal(trainer: pl.Trainer, ops: Sequence[str], modules: Sequence[str]) -> Proposal:
    """With what the run has already, as the lists replace those."""
    precision = trainer.precision_plugin
    if isinstance(precision, BigModelPrecision):
        ops = [*precision.full_precision_ops, *ops]
        modules = [*precision.full_precision_modules, *modules]
    found = Proposal(str(trainer.precision), tuple(dict.fromkeys(ops)), tuple(dict.fromkeys(modules)))
    BigModelPrecision(  # which says so if a name were none
        found.precision,  # type: ignore[arg-type]
        full_precision_ops=found.full_precision_ops,
        full_precision_modules=found.full_precision_modules,
    )
    return found
