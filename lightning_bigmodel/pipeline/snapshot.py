"""What a step may change on its module, kept so that the step can be run again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_bigmodel.mesh.rng import capture_rng, restore_rng
from lightning_bigmodel.pipeline.step_state import StepState
from lightning_bigmodel.pipeline.trace import is_metric

__all__ = ["StepSnapshot"]

_METRIC_COUNTERS = ("_update_count", "_update_called", "_computed", "_forward_cache")


class StepSnapshot:
    """Random states, buffers, plain attributes and torchmetrics states before a step. Memory: those of the buffers.

    Args:
        root: The user's module.
        state: Its plain attributes; see `StepState`.
    """

    def __init__(self, root: nn.Module, state: StepState) -> None:
        self._state, self._rng = state, capture_rng()
        self._buffers = [(buffer, buffer.clone()) for buffer in root.buffers() if not buffer.is_meta]
        self._metrics = [(metric, _metric_state(metric)) for metric in _metrics(root)]

    @torch.no_grad()
    def restore(self) -> None:
        """As before the step."""
        self._state.restore()
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for metric, values in self._metrics:
            metric.__dict__.update(copy.deepcopy(values))
        restore_rng(self._rng)


def _metrics(root: nn.Module) -> Sequence[Any]:
    return [module for module in root.modules() if is_metric(module) and not hasattr(module, "items")]


def _metric_state(metric: Any) -> dict[str, Any]:
    names = [*metric.metric_state, *(name for name in _METRIC_COUNTERS if name in metric.__dict__)]
    return copy.deepcopy({name: metric.__dict__[name] for name in names if name in metric.__dict__})
