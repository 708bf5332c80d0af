"""What a rank keeps all the time: parameters, gradients, optimizer states."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["resident_bytes"]


def resident_bytes(strategy: Any) -> int:
    """Bytes of this rank's parameters, of their gradients and of optimizer states, also of those still to be made.

    States that an optimizer makes at its first step are taken to be two of the size of what it steps, as Adam's are.

    Args:
        strategy: A `BigModelStrategy` whose model is set up.
    """
    stepped = [p for optimizer in strategy.optimizers for group in optimizer.param_groups for p in group["params"]]
    states = [
        value
        for optimizer in strategy.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    made = sum(value.numel() * value.element_size() for value in states)
    stepped_bytes = sum(p.numel() * p.element_size() for p in {id(p): p for p in stepped}.values())
    optimizer_bytes = made if states else 2 * stepped_bytes
    owned, sharded = strategy.engine.share.owned, strategy._sharded
    whole = [p for p in owned if sharded is None or not sharded.is_sharded(p)]
    total: int = sum(p.numel() * p.element_size() for p in whole) + optimizer_bytes
    trained: int = sum(p.numel() * p.element_size() for p in strategy.engine.trained_parameters())
    if sharded is None:
        return total + trained
    is_view = sharded.is_whole and sharded.shards.copies is None  # rows are parts of the parameters
    gradients = stepped_bytes if sharded.reduces_every_microbatch else trained
    total += sharded.whole_bytes() + (0 if is_view else stepped_bytes) + gradients
    return total
