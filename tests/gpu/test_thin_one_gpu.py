"""What one GPU can show of thin states: kernels of 4 and 8 bits, adapters, paged moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_bigmodel import BigModelStrategy, EightBitOptimizer, LoRA, Quantize
from lightning_bigmodel.nn.quantized import quantize_layers
from lightning_bigmodel.testing import run_ranks
from tests.gpu.test_one_gpu import fit


@pytest.mark.parametrize("bits", [4, 8])
def test_values_are_those_of_the_cpu(bits: int) -> None:
    """A table that stays on the host, codes of another order."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 96))
    inputs = torch.randn(4, 128)
    quantize_layers(layer, ["0"], bits)
    expected = layer(inputs)
    gradient_of = inputs.cuda().requires_grad_()
    found = layer.cuda()(gradient_of)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
    found.sum().backward()
    assert gradient_of.grad is not None
    torch.testing.assert_close(
        gradient_of.grad[0].cpu(), layer[0].dequantized_weight().sum(0).cpu(), rtol=1e-3, atol=1e-3
    )


def test_products_of_8_bit_integers_are_those_of_the_cpu() -> None:
    """A kernel that reads rows of another order."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 96))
    Quantize(["0"], bits=8, trained=True).convert(layer)
    inputs, results = torch.randn(40, 128), []
    for device in ("cpu", "cuda"):
        layer.to(device)
        moved = inputs.to(device).requires_grad_()
        output = layer(moved)
        gradients = torch.autograd.grad(output.square().sum(), [moved, *layer.parameters()])
        results.append([found.detach().cpu() for found in (output, *gradients)])
    for found, expected in zip(*reversed(results), strict=True):
        # A value halfway between two codes may be rounded either way.
        assert (found - expected).norm() < 1e-2 * expected.norm()


def _fit(callbacks: list[Any], settings: dict[str, Any] | None) -> dict[str, Any]:
    return fit("auto" if settings is None else BigModelStrategy(**settings), callbacks=callbacks)


@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"zero_stage": 3, "num_microbatches": 2}])
def test_adapters_and_eight_bits_train_as_in_plain_lightning(settings: dict[str, Any]) -> None:
    """A state, a code or a matrix on another device than its parameter."""
    names = ["query", "key_value"]
    for callbacks in (
        [LoRA(names, rank=2, seed=1)],
        [LoRA(names, rank=2, seed=1), Quantize(names)],
        [Quantize(names, bits=8, trained=True)],
        [Quantize(names, bits=8), LoRA(names, rank=2, seed=1)],
        [EightBitOptimizer()],
        [EightBitOptimizer(paged=True)],
    ):
        (expected,) = run_ranks(_fit, 1, callbacks, None, init_process_group=False)
        (found,) = run_ranks(_fit, 1, callbacks, settings, init_process_group=False)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
