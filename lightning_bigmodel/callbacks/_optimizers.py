"""What `configure_optimizers` of a module returned, as far as callbacks look into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

__all__ = ["check_all_stepped", "optimizers_in"]


def optimizers_in(returned: Any) -> list[Optimizer]:
    """The optimizers in what `configure_optimizers` returned, in any of the forms that Lightning takes."""
    if isinstance(returned, Optimizer):
        return [returned]
    if isinstance(returned, Mapping):
        return optimizers_in(returned.get("optimizer"))
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return [optimizer for item in returned for optimizer in optimizers_in(item)]
    return []


def check_all_stepped(module: pl.LightningModule, returned: Any, callback: str) -> None:
    """Refuse optimizers that were made before parameters were, which they do not step.

    Raises:
        ValueError: With the name of such a parameter.
    """
    optimizers = optimizers_in(returned)
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if optimizers and left:
        raise ValueError(
            f"`{callback}` trains {left[0]!r} and {len(left) - 1} more, which no optimizer that "
            f"`{type(module).__name__}.configure_optimizers` returns has in its groups. Make the optimizer there, of "
            "`self.parameters()`, and not before."
        )
