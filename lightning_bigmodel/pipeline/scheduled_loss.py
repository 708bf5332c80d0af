"""A whole pipeline step as one autograd node.

The host runs the user's step, then `zero_grad`, then `backward`. A pipeline does its backward inside the step, so the
gradients would be erased. Here the schedule's gradients are set aside when it ends and enter `parameter.grad` only when
the host calls `backward` on the returned loss; whatever scales that loss scales them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["run_as_one_node", "scaled_backward", "without_backward"]


class ScheduledLoss(torch.autograd.Function):
    """Returns the loss of a finished schedule; its backward hands the set-aside gradients to the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        loss: Tensor,
        gradients: list[tuple[nn.Parameter, Tensor]],
        scale: Callable[[Tensor], Tensor | float],
    ) -> Tensor:
        """Keep the gradients for backward; `anchor` is what makes autograd call it."""
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """Multiply by the incoming gradient and accumulate."""
        factor = ctx.scale(outer[0])
        for parameter, gradient in ctx.gradients:
            if not (isinstance(factor, float) and factor == 1.0):
                # Gradients may be kept on the host.
                gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        ctx.gradients = []
        return torch.zeros_like(outer[0]), None, None, None


def run_as_one_node(
    schedule: Callable[[], Tensor | None],
    parameters: Sequence[nn.Parameter],
    scale: Callable[[Tensor], Tensor | float],
    orphaned: Callable[[list[tuple[nn.Parameter, Tensor]]], None] | None = None,
) -> Tensor | None:
    """Run a schedule that does its own backward and return its loss as a tensor to call `backward` on.

    Args:
        schedule: Runs forwards and backwards and returns the loss, or None if no micro-batch had one.
        parameters: Those whose gradients the schedule accumulates.
        scale: Incoming gradient of the loss -> factor for the gradients.
        orphaned: Given the gradients where there is no loss to bring them in by; by default they are dropped.

    Memory: while gradients are accumulated over several batches, a second set of this rank's gradients during the step.
    """
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = schedule()
        gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
    if loss is None:
        if orphaned is not None:
            orphaned(gradients)
        return None
    anchor = torch.zeros((), device=loss.device, dtype=loss.dtype, requires_grad=True)
    result: Tensor = ScheduledLoss.apply(anchor, loss, gradients, scale)  # type: ignore[no-untyped-call]
    return result


class _ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Callable[[Tensor], Tensor | float]) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        factor = ctx.scale(outer[0])
        return (factor if isinstance(factor, Tensor) else torch.full_like(outer[0], factor)), None


def scaled_backward(loss: Tensor, scale: Callable[[Tensor], Tensor | float]) -> Tensor:
    """The same loss; what arrives at it in backward is replaced by `scale` of it."""
    result: Tensor = _ScaledBackward.apply(loss, scale)  # type: ignore[no-untyped-call]
    return result


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None


def without_backward(loss: Tensor) -> Tensor:
    """The same loss; its backward makes no gradients, not even zeros."""
    result: Tensor = _WithoutBackward.apply(loss)  # type: ignore[no-untyped-call]
    return result
