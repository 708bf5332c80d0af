"""Average what optimizers keep of parameters, where replicas agree on that too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["average_optimizer_state"]


@torch.no_grad()
def average_optimizer_state(
    states: Mapping[str, Mapping[str, Any]],
    group: dist.ProcessGroup | None,
    average: Callable[[Sequence[Tensor]], None],
) -> None:
    """Average moments over replicas, in place.

    Averaged are floating tensors with dimensions that all ranks have (a replica that has not used a parameter yet has
    none of it); step counts stay each rank's own.

    Args:
        states: Name of a parameter -> its state, with equal names in equal order on all ranks.
        group: All replicas.
        average: Averages a list of tensors in place (see `ParameterSync.average_alike`).

    Communication: the names once, which are small, and all bytes of these tensors once.
    """
    own = {
        f"{name} {key}": value
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim
    }
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, list(own), group=group)
    common = set(own).intersection(*everyone)
    # In one order, whatever order a rank has made them in.
    average([own[name] for name in sorted(common)])
