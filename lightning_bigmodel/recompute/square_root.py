"""Segments of about sqrt(n) blocks, of which one input each is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_bigmodel.recompute.policy import Again, Chain, RecomputePolicy, Treatment

__all__ = ["SquareRoot"]


class SquareRoot(RecomputePolicy):
    """Keep one input for each segment of about sqrt(n) blocks, and compute a segment again when backward enters it.

    The rule of arXiv 1604.06174, section 4.1. It keeps less than `Full` where a block's activations are small beside
    its input, or with very many blocks; for a transformer, whose block keeps 10 to 40 times its input, `Full` needs
    less memory.

    Memory, for n blocks with inputs of B bytes and activations of A bytes, in segments of k = ceil(sqrt(n)):
    ceil(n / k) B + k A. Compute: one more forward of each block outside of the last segment, which is left as it is
    where its backward directly follows. Where a block's input is not what the block before it returned (code in
    between), that input is kept too.

    Args:
        segment: Blocks of a segment. Default: ceil(sqrt(n)).

    Raises:
        ValueError: For what is no whole number of at least 2; with `compile_blocks` under `zero_stage=3`.

    Example:
        >>> from lightning_bigmodel import Recompute, SquareRoot
        >>> callback = Recompute(policy=SquareRoot())
    """

    def __init__(self, segment: int | None = None) -> None:
        if segment is not None and (isinstance(segment, bool) or not isinstance(segment, int) or segment < 2):
            raise ValueError(f"`segment={segment!r}` must be a whole number of at least 2, or None for sqrt(n).")
        self.segment = segment

    def treatments(self, chain: Chain) -> Sequence[Treatment | None]:
        """Of each segment, its first input only."""
        if chain.is_compiled and chain.is_gathered:
            raise ValueError(
                "`SquareRoot` computes a segment's blocks again before the backward of each, where `zero_stage=3` has "
                "not gathered their parameters for compiled code (`compile_blocks`). Use `Full()`, `zero_stage=2`, or "
                "leave `compile_blocks` out."
            )
        count = len(chain.blocks)
        size = self.segment or math.isqrt(max(0, count - 1)) + 1
        last = (count - 1) // size if chain.ends_in_backward else count
        return [None if index // size == last else Again(is_linked=index % size > 0) for index in range(count)]
