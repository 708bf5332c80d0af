"""Multiply learning rates for one optimizer step, past any learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["StepFactors"]


class StepFactors:
    """Learning rates times a factor until the optimizer's step ends.

    Schedulers, checkpoints and monitors see the rates as they were: those of a schedule in closed form would overwrite
    a lasting change, and those that multiply would keep it twice.

    Args:
        optimizer: Whose groups to change; its steps put the rates back.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> weight.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> factors = StepFactors(optimizer)
        >>> factors.apply([4.0])
        >>> optimizer.step()
        >>> weight.item(), optimizer.param_groups[0]["lr"]
        (-2.0, 0.5)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._changed: list[tuple[dict[str, Any], Any]] = []
        self._hook = optimizer.register_step_post_hook(lambda *_: self.undo())
        self._optimizer = optimizer

    def apply(self, factors: Sequence[float]) -> None:
        """Multiply, group by group."""
        self.undo()
        for group, factor in zip(self._optimizer.param_groups, factors, strict=True):
            self._changed.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor

    def undo(self) -> None:
        """Put the rates back."""
        for group, rate in self._changed:
            group["lr"] = rate
        self._changed.clear()

    def close(self) -> None:
        """Put the rates back, and leave the optimizer alone."""
        self.undo()
        self._hook.remove()
