"""Losses times a scale, gradients divided by it, and steps that all ranks skip together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.precision.bigmodel import BigModelPrecision
from lightning_bigmodel.scaling.found_inf import any_rank, has_nonfinite
from lightning_bigmodel.strategies.base import StrategyBase

__all__ = ["LossScaling"]


class LossScaling(StrategyBase):
    """The strategy's side of a loss scale: the schedule multiplies by it, a complete window is divided by it.

    Communication a step: one number over all ranks, those without any row of a parameter too.
    """

    _overflowed = False
    _skips_step = False
    _unscaled_early = False  # in this window, before replicas exchanged gradients
    _is_unscaled = False  # whether gradients that are kept (manual optimization) are in their own units

    def _begin_loss_scaling(self) -> None:
        precision = self._scaling()
        self._overflowed = self._skips_step = self._is_unscaled = self._unscaled_early = False
        if isinstance(self.precision_plugin, BigModelPrecision):
            self.engine.backward_context = self.precision_plugin.backward_context
        if precision is not None:
            self.engine.loss_scale = lambda: precision.scale
            precision.overflow_of = self._overflow_of

    def _scaling(self) -> BigModelPrecision | None:
        precision = self.precision_plugin
        return precision if isinstance(precision, BigModelPrecision) and precision.loss_scale is not None else None

    def _reduce_dtype(self) -> torch.dtype | None:
        precision = self.precision_plugin
        return precision.reduce_dtype if isinstance(precision, BigModelPrecision) else None

    def _gradients(self) -> list[tuple[str, Tensor]]:
        """What this rank has of complete gradients, with the names of their parameters."""
        share, places = self.engine.share, self.engine.places
        assert share is not None
        if self._sharded is not None:
            self._sharded.shards.land()  # the host divides next
        held = [(share.names[id(p)], places.holder(p).grad) for p in self.engine.trained_parameters()]
        return [(name, gradient) for name, gradient in held if gradient is not None]

    def _unscale(self) -> bool:
        """Bring a complete window to its own units; whether it has overflowed on any rank. Collective."""
        precision = self._scaling()
        if precision is None:
            return False
        if self._unscaled_early:
            self._unscaled_early = False
            return self._overflowed
        if self._is_manual:  # where each optimizer asks for its own
            self._multiply(1.0 / precision.scale)
            self._is_unscaled = True
            return False
        self._overflowed = precision.unscale(self._gradients())
        return self._overflowed

    def _unscale_early(self) -> bool:
        """The same before replicas exchange gradients, for what must never see one that has overflowed. Collective."""
        precision = self._scaling()
        assert precision is not None
        self._unscaled_early = True
        self._overflowed = precision.unscale(self._gradients())
        return self._overflowed

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        gradients = [gradient for _, gradient in self._gradients()]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _overflow_of(self, optimizer: Any) -> bool:
        """Whether the gradients an optimizer is about to step by have overflowed on any rank. Collective."""
        if not self._is_manual:
            found, self._overflowed = self._overflowed, False
        else:
            precision = self._scaling()
            assert precision is not None
            held = [p for group in optimizer.param_groups for p in group["params"]]
            named = [(self._name_of(p), p.grad) for p in held if p.grad is not None]
            found = any_rank(has_nonfinite([gradient for _, gradient in named]))
            if found:
                precision.note_overflow(named)
        self._skips_step = found
        return found

    def _name_of(self, held: nn.Parameter) -> str:
        assert self.engine.share is not None
        parameter = held if self._sharded is None else self._sharded.parameter_of(held)
        return self.engine.share.names.get(id(parameter), "a parameter")
