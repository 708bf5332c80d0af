"""Find out which weight of micro-batches gives a module the gradient of its whole batch."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.pipeline.microbatch import microbatch_weights, returned_weight, split_batch
from lightning_bigmodel.pipeline.scheduled_loss import without_backward
from lightning_bigmodel.pipeline.token_weight import TokenWeight

__all__ = ["WeightReport", "find_microbatch_weight"]

_NAMES = ("returned", "samples", "tokens", "equal", "sum")


@dataclass(frozen=True)
class WeightReport:
    """What `find_microbatch_weight` found.

    Attributes:
        weight: The `microbatch_weight` to use; None where none gives the gradient of the whole batch.
        errors: Weight -> largest difference from that gradient, relative to its largest element.
        reasons: Weight -> why it could not be tried.
    """

    weight: str | None
    errors: dict[str, float]
    reasons: dict[str, str] = field(default_factory=dict)


def find_microbatch_weight(
    module: Any, batch: Any, *, num_microbatches: int = 2, tolerance: float = 1e-4
) -> WeightReport:
    """Compare the gradient of a whole batch with sums over its micro-batches under every weight, in this process.

    Give a batch as uneven as real ones: with `labels` of different numbers of live tokens, and a number of samples that
    `num_microbatches` does not divide; else several weights agree, and the first of `"samples"`, `"tokens"`, `"equal"`,
    `"sum"` is named. A weight that the step returns itself goes before all (`"returned"`: leave the setting alone).
    Dropout modules are switched off. The module is copied, and trained nowhere.

    Args:
        module: A LightningModule, on the CPU.
        batch: One batch as its loader gives it.
        num_microbatches: Parts to split it into.
        tolerance: Largest error of a weight that counts as right.

    Returns:
        The weight and all errors. `weight=None`: the loss does not come apart (one over pairs of the batch, a root of a
        mean): use `num_microbatches=1`.

    Raises:
        ValueError: For fewer than two micro-batches, and for a batch that cannot tell: no label counts, or the gradient
            is zero or no number.

    Memory: a copy of the module, and its gradients twice.

    Example:
        >>> from lightning_bigmodel.testing import TinyChain, find_microbatch_weight
        >>> find_microbatch_weight(TinyChain(), (torch.randn(5, 8), torch.randn(5, 8))).weight
        'samples'
    """
    if type(num_microbatches) is not int or num_microbatches < 2:
        raise ValueError(f"`num_microbatches={num_microbatches!r}` must be a whole number of at least 2.")
    module = copy.deepcopy(module)
    configure = getattr(module, "configure_model", None)
    if callable(configure):
        configure()
    module.train()
    for inner in module.modules():
        if isinstance(inner, nn.modules.dropout._DropoutNd):
            inner.eval()
    module.log = module.log_dict = lambda *_, **__: None
    parts = split_batch(batch, num_microbatches)
    whole, _ = _gradients(module, batch)
    largest = _largest(whole)
    if not 0 < largest < math.inf:
        raise ValueError(
            f"The largest element of the gradient of this batch is {largest}, so that it cannot tell which weight is "
            "right. Give a batch with live labels, not equally many in each sample, on which the loss of the module and"
            " its gradient are finite and not zero."
        )
    found = [_gradients(module, part) for part in parts]
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name in _NAMES:
        try:
            weights = _weights(name, module, batch, parts, [given for _, given in found])
        except ValueError as error:
            reasons[name] = str(error)
            continue
        if weights is not None:
            total = 1.0 if name == "sum" else sum(weights) or 1.0
            errors[name] = _error(whole, [(part, w / total) for (part, _), w in zip(found, weights, strict=True)])
    right = [name for name, error in errors.items() if error <= tolerance]
    return WeightReport(right[0] if right else None, errors, reasons)


def _gradients(module: Any, batch: Any) -> tuple[dict[str, Tensor], float | None]:
    module.zero_grad()
    result = module.training_step(batch, 0)
    loss = result["loss"] if isinstance(result, dict) else result
    if loss is not None:
        (loss if bool(loss.isfinite()) else without_backward(loss)).backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return found, returned_weight(result)


def _weights(name: str, module: Any, batch: Any, parts: list[Any], given: list[float | None]) -> list[float] | None:
    if name == "returned":
        return None if any(weight is None for weight in given) else [weight or 0.0 for weight in given]
    if name != "tokens":
        return microbatch_weights(parts, name)
    weight = TokenWeight()
    weight.resolve(module, batch, lambda batch: module.training_step(batch, 0), torch.device("cpu"))
    return microbatch_weights(parts, weight)


def _largest(gradients: dict[str, Tensor]) -> float:
    """The largest element; not a number if any is not."""
    each = [gradient.abs().max().float() for gradient in gradients.values() if gradient.numel()]
    return float(torch.stack(each).max()) if each else 0.0


def _error(whole: dict[str, Tensor], parts: list[tuple[dict[str, Tensor], float]]) -> float:
    worst = 0.0
    for name, gradient in whole.items():
        total = torch.zeros_like(gradient)
        for part, weight in parts:
            if weight and name in part:
                total += part[name] * weight
        worst = max(worst, float((total - gradient).abs().max()))
    return worst / _largest(whole)
