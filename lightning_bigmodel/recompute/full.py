"""Full recomputation: of a block only its inputs are kept."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_bigmodel.recompute.policy import Again, Chain, RecomputePolicy, Treatment

__all__ = ["Full"]


class Full(RecomputePolicy):
    """Compute every block, or every k-th, again in backward.

    The simplest policy, and the one that keeps least (arXiv 1604.06174, with a segment a block). Do not use it where
    activations fit: each block it takes costs a second forward, a third more time where it takes all. The last block is
    left out where its backward directly follows its forward, as its activations would be given up only to be computed
    again at once.

    Memory, for n blocks with inputs of B bytes and activations of A bytes: n B + A with `every=1`. Compute: one more
    forward of each block taken. Communication: what a block's forward sends, once more (tensor parallelism; not ZeRO 3,
    whose parameters are there for the backward anyway).

    Args:
        every: Take the first block of each `every`.

    Raises:
        ValueError: For what is no whole number of at least 1.

    Example:
        >>> from lightning_bigmodel import Full, Recompute
        >>> callback = Recompute(policy=Full(every=2))
    """

    def __init__(self, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"`every={every!r}` must be a whole number of at least 1.")
        self.every = every

    def treatments(self, chain: Chain) -> Sequence[Treatment | None]:
        """Of every k-th block, its input only."""
        last = len(chain.blocks) - 1
        return [
            None if index % self.every or (index == last and chain.ends_in_backward) else Again()
            for index in range(len(chain.blocks))
        ]
