"""Backward of one stage on one micro-batch: whole, or split into its input half and its weight half.

Zero-bubble schedules (arXiv 2401.10241) send the gradients of a stage's inputs on before computing those of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel import _host
from lightning_bigmodel.pipeline.gate import as_output

__all__ = ["SplitBackward", "full_backward"]


def _roots(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def full_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Accumulate parameter gradients and return the gradient of each input (None where there is none)."""
    tensors, seeds = _roots(outputs, gradients)
    if tensors:
        torch.autograd.backward(tensors, seeds)
    found = [tensor.grad if tensor.requires_grad else None for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    return found


class SplitBackward:
    """The two halves of one backward.

    Example:
        >>> half = SplitBackward([loss], [torch.ones(())], [received], list(module.parameters()))
        >>> gradients = half.inputs()   # to be sent on at once
        >>> half.weights()              # later
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._tensors, self._seeds = _roots(outputs, gradients)
        self._inputs = inputs
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._groups: list[dict[str, Any]] | None = None
        self._rest: list[nn.Parameter] = []

    def inputs(self) -> list[Tensor | None]:
        """Gradients of the inputs. Parameters get none yet."""
        wanted = [tensor for tensor in self._inputs if tensor.requires_grad]
        if not self._tensors or not wanted:
            return [None] * len(self._inputs)
        # torch detaches the outputs it is given, in place, to free the graph on the output side.
        copies = [as_output(tensor) for tensor in self._tensors]
        gradients, self._groups = _host.stage_backward_input(copies, self._seeds, list(self._inputs), iter(self._parameters))
        self._rest = self._not_covered(self._groups)
        if not self._rest:
            self._tensors = []
        for tensor in self._inputs:
            tensor.grad = None
        return list(gradients)

    def weights(self) -> None:
        """Accumulate the gradients of the parameters."""
        if self._groups is None:
            if self._tensors:
                torch.autograd.backward(self._tensors, self._seeds, inputs=self._parameters or None)
            return
        _host.stage_backward_weight(iter(self._parameters), self._groups, retain_graph=bool(self._rest))
        if self._rest:
            torch.autograd.backward(self._tensors, self._seeds, inputs=self._rest)

    def _not_covered(self, groups: list[dict[str, Any]]) -> list[nn.Parameter]:
        """Parameters the outputs depend on along paths that never meet an input's path: the split misses them."""
        covered = set().union(*(group["params"] for group in groups)) if groups else set()
        reachable, queue, seen = set(), [tensor.grad_fn for tensor in self._tensors], set()
        while queue:
            node = queue.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and node not in covered:
                reachable.add(id(variable))
            queue.extend(following for following, _ in node.next_functions)
        return [parameter for parameter in self._parameters if id(parameter) in reachable]
