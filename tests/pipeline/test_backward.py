"""The split backward against the whole one, on graphs that broke simpler splits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_bigmodel.pipeline.backward import SplitBackward, full_backward

Case = Callable[[list[nn.Parameter], list[Tensor]], list[Tensor]]


def chain(weights: list[nn.Parameter], inputs: list[Tensor]) -> list[Tensor]:
    """Each weight at one place."""
    hidden = inputs[0]
    for weight in weights:
        hidden = torch.tanh(hidden @ weight)
    return [hidden]


def same_weight_twice(weights: list[nn.Parameter], inputs: list[Tensor]) -> list[Tensor]:
    """One weight at two places of one path."""
    return [torch.tanh(torch.tanh(inputs[0] @ weights[0]) @ weights[0])]


def shared_bias(weights: list[nn.Parameter], inputs: list[Tensor]) -> list[Tensor]:
    """A value made of weights alone, used by every layer, as a relative position bias is."""
    bias = torch.tanh(weights[0] @ weights[1])
    hidden = inputs[0]
    for weight in weights[1:]:
        hidden = torch.softmax(hidden @ weight + bias[0], dim=-1)
    return [hidden]


def output_without_input(weights: list[nn.Parameter], inputs: list[Tensor]) -> list[Tensor]:
    """One output that depends on no input at all."""
    return [inputs[0] @ weights[0], torch.tanh(weights[1] @ weights[2])]


def second_input(weights: list[nn.Parameter], inputs: list[Tensor]) -> list[Tensor]:
    """Two inputs that meet late, one of them split in two."""
    left, right = (inputs[1] @ weights[0]).chunk(2, dim=-1)
    hidden = torch.tanh(inputs[0] @ weights[1])
    return [hidden * torch.cat([right, left], dim=-1) @ weights[2], hidden]


def loss(weights: list[nn.Parameter], inputs: list[Tensor]) -> list[Tensor]:
    """A scalar with a penalty on a weight beside it."""
    return [chain(weights, inputs)[0].square().mean() + 0.1 * weights[1].square().sum()]


CASES: list[Case] = [chain, same_weight_twice, shared_bias, output_without_input, second_input, loss]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_both_halves_together_equal_the_whole(case: Case) -> None:
    """A weight counted twice, or not at all."""

    def build() -> tuple[list[nn.Parameter], list[Tensor], list[Tensor], list[Tensor]]:
        torch.manual_seed(1)
        weights = [nn.Parameter(torch.randn(4, 4) / 2) for _ in range(3)]
        inputs = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
        outputs = case(weights, inputs)
        return weights, inputs, outputs, [torch.randn_like(output) for output in outputs]

    weights, inputs, outputs, seeds = build()
    expected_inputs = full_backward(outputs, list(seeds), inputs)
    expected = [weight.grad for weight in weights]

    weights, inputs, outputs, seeds = build()
    halves = SplitBackward(outputs, list(seeds), inputs, weights)
    found_inputs = halves.inputs()
    assert all(weight.grad is None for weight in weights)
    halves.weights()
    for found, wanted in zip(found_inputs, expected_inputs, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted)
    for weight, wanted in zip(weights, expected, strict=True):
        assert (weight.grad is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(weight.grad, wanted)


def test_without_inputs_the_second_half_is_everything() -> None:
    """The first stage has nothing to send back."""
    weight = nn.Parameter(torch.ones(2))
    halves = SplitBackward([(weight * 3).sum()], [torch.ones(())], [torch.ones(2)], [weight])
    assert halves.inputs() == [None]
    halves.weights()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
