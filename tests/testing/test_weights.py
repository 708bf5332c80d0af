"""The check that tells users which weight of micro-batches is theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bigmodel.testing import TinyChain, find_microbatch_weight
from tests.strategies.test_weights import LIVE, Computed, Tagger, Texts


class Loss(TinyChain):
    """Regression with a loss of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Over samples, or not."""
        errors = (self.blocks(batch[0]) - batch[1]).square().mean(1)
        return {"mean": errors.mean, "sum": errors.sum, "root": lambda: errors.mean().sqrt()}[self.kind]()


@pytest.mark.parametrize(("kind", "weight"), [("mean", "samples"), ("sum", "sum"), ("root", None)])
def test_losses_over_samples(kind: str, weight: str | None) -> None:
    """A weight that happens to fit one batch."""
    torch.manual_seed(0)
    report = find_microbatch_weight(Loss(kind), (torch.randn(5, 8), torch.randn(5, 8)))
    assert report.weight == weight
    assert {"samples", "equal", "sum"} <= report.errors.keys()
    assert "tokens" in report.reasons


def _batch(live: list[int]) -> dict[str, Tensor]:
    data = Texts(live)
    return {key: torch.stack([data[index][key] for index in range(len(live))]) for key in ("tokens", "labels")}


@pytest.mark.parametrize(
    ("make", "weight"),
    [
        (lambda: Tagger(), "tokens"),
        (lambda: Tagger(causal=True), "tokens"),
        (lambda: Tagger(returns=True), "returned"),
    ],
)
def test_means_over_tokens(make: Any, weight: str) -> None:
    """Samples where tokens are right, with a part that has no tokens at all."""
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    report = find_microbatch_weight(module, _batch([3, 8, 0, 0]))
    assert report.weight == weight
    assert report.errors["samples"] > 0.01
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_labels_that_are_not_found_are_told() -> None:
    """A weight that silently was not tried."""
    report = find_microbatch_weight(Computed(), _batch(LIVE[:4]))
    assert "TokenWeight" in report.reasons["tokens"]


def test_dropout_is_off() -> None:
    """Gradients that differ by their masks."""
    module = Loss("mean")
    module.blocks[1].add_module("drop", nn.Dropout(0.5))
    torch.manual_seed(0)
    assert find_microbatch_weight(module, (torch.randn(5, 8), torch.randn(5, 8))).weight == "samples"


@pytest.mark.parametrize("returns", [False, True])
def test_a_batch_without_any_live_label_cannot_tell(returns: bool) -> None:
    """Every weight fits a gradient that is zero, and the first is named."""
    with pytest.raises(ValueError, match="cannot tell.*Give a batch with live labels"):
        find_microbatch_weight(Tagger(returns=returns), _batch([0, 0, 0, 0]))


@pytest.mark.parametrize("error", [0.0, float("inf")])
def test_a_loss_without_a_gradient_cannot_tell(error: float) -> None:
    """A weight named for a loss that has come to its end, or that is no number."""
    module, inputs = Loss("mean"), torch.randn(5, 8)
    with pytest.raises(ValueError, match="gradient of this batch is 0.0, .*cannot tell"):
        find_microbatch_weight(module, (inputs, module.blocks(inputs).detach() + error))


class Root(Loss):
    """A gradient that is no number, of a loss that is one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The root of zero."""
        return super().training_step(batch, batch_idx) + (0.0 * self.blocks[0].linear.weight).sum().sqrt()


def test_a_gradient_that_is_no_number_cannot_tell() -> None:
    """A loss taken for one that does not come apart."""
    with pytest.raises(ValueError, match="gradient of this batch is nan, .*cannot tell"):
        find_microbatch_weight(Root("mean"), (torch.randn(5, 8), torch.randn(5, 8)))
