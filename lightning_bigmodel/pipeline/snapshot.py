"""What a step may change on its module, kept so that the step can be run again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lightning_bigmodel.mesh.rng import capture_rng, restore_rng
from lightning_bigmodel.pipeline.trace import ModuleState, is_metric

__all__ = ["StepSnapshot"]


class StepSnapshot:
    """Random states, buffers, attributes and torchmetrics states before a step. Memory: copies of buffers and tensors.

    Args:
        root: The user's module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._state, self._rng = ModuleState(root), capture_rng()
        self._buffers = [(buffer, buffer.clone()) for buffer in root.buffers() if not buffer.is_meta]
        # Some keep what they compute in objects of their own.
        metrics: list[Any] = [module for module in root.modules() if is_metric(module) and not hasattr(module, "items")]
        self._metrics = [(metric, copy.deepcopy(metric.metric_state)) for metric in metrics]

    @torch.no_grad()
    def restore(self) -> None:
        """As before the step."""
        self._state.restore()
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for metric, state in self._metrics:
            values: dict[str, Any] = copy.deepcopy(state)
            metric.__dict__.update(values)
        restore_rng(self._rng)
