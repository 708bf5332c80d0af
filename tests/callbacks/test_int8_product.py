"""Trained layers that multiply 8-bit integers: bitsandbytes' arithmetic, and one process's numbers in every layout."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torch.utils.flop_counter import FlopCounterMode

from lightning_bigmodel import BigModelStrategy, LoRA, Quantize
from lightning_bigmodel.nn.int8_product import multiply_in_int8
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.callbacks import lora_runs
from tests.callbacks.test_lora import assert_same
from tests.strategies.trainer_modules import trainer

run_ranks = functools.partial(run_ranks_for, timeout_seconds=80.0)


def _layer(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Linear(48, 20).half().to(dtype)
    model = nn.Sequential(copy.deepcopy(plain))
    multiply_in_int8(model, ["0"])
    return plain, model


def _codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    import bitsandbytes.functional

    codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(matrix.half().contiguous())
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    """Codes of columns where those of rows belong, a scale of another kind, a gradient by other values."""
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    plain, model = _layer(dtype)
    inputs = torch.randn(6, 7, 48).half().to(dtype).requires_grad_()
    gradient = torch.randn(6, 7, 20).half().to(dtype)
    of_inputs, of_weight, of_bias = torch.autograd.grad(model(inputs), [inputs, *model.parameters()], gradient)
    state = MatmulLtState()
    # The only way that its autograd function takes on the CPU: with a weight that is not trained.
    theirs = MatMul8bitLt.apply(inputs, plain.weight.detach(), None, None, state) + plain.bias
    eps = 2 * torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps
    torch.testing.assert_close(model(inputs), theirs, rtol=eps, atol=eps)
    torch.testing.assert_close(of_inputs, torch.autograd.grad(theirs, inputs, gradient)[0], rtol=eps, atol=eps)
    torch.testing.assert_close(of_bias, gradient.sum((0, 1)), rtol=2 * eps, atol=2 * eps)
    # The gradient of the weight by the paper: columns over tokens, of both.
    (first, of_rows), (second, of_columns) = _codes(gradient.flatten(0, 1).T), _codes(inputs.detach().flatten(0, 1).T)
    expected = first.double() @ second.double().T * of_rows[:, None] * of_columns / 127**2
    torch.testing.assert_close(of_weight.double(), expected, rtol=eps, atol=8 * eps)
    whole = gradient.double().flatten(0, 1).T @ inputs.detach().double().flatten(0, 1)
    assert (of_weight - whole).norm() < 0.02 * whole.norm()
    assert [p.dtype for p in model.parameters()] == [dtype, dtype]


def test_nothing_is_kept_from_call_to_call() -> None:
    """Codes of the weight before a step, where gradients are there already; a gradient below what fp16 holds."""
    _, model = _layer()
    inputs = torch.randn(5, 48)
    model(inputs).sum().backward()
    with torch.no_grad():
        model[0].weight.mul_(-2.0)
    whole = F.linear(inputs, *(p.detach() for p in model.parameters()))
    torch.testing.assert_close(model(inputs).detach(), whole, rtol=0, atol=0.03 * float(whole.abs().max()))
    (small,) = torch.autograd.grad(model(inputs), model[0].weight, torch.full((5, 20), 1e-12))
    (large,) = torch.autograd.grad(model(inputs), model[0].weight, torch.ones(5, 20))
    torch.testing.assert_close(small * 1e12, large, rtol=1e-5, atol=1e-5)
    for value in (float("nan"), float("inf")):
        broken = inputs.clone()
        broken[1, 3] = value
        assert model(broken).isfinite().all(dim=1).tolist() == [True, False, True, True, True]
    none = torch.zeros(0, 48, requires_grad=True)
    model.zero_grad()
    model(none).sum().backward()
    assert not model[0].weight.grad.any()
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(inputs).dtype == torch.bfloat16
        model(inputs).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    with FlopCounterMode(display=False) as counter:
        model(inputs).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 5 * 48 * 20)  # inputs have no gradient
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(inputs), model(inputs), rtol=0, atol=0)
    assert list(again.state_dict()) == ["0.weight", "0.bias"]
    state = nn.Linear(48, 20)
    state.load_state_dict(model[0].state_dict())


def test_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that leave 32 bits: 127 * 127 a token."""
    from lightning_bigmodel.nn import int8_product

    assert 127 * 127 * int8_product._MOST_SUMMED < 2**31
    _, model = _layer()
    inputs = torch.randn(50, 48)
    (expected,) = torch.autograd.grad(model(inputs).square().sum(), model[0].weight)
    monkeypatch.setattr(int8_product, "_MOST_SUMMED", 12)
    (found,) = torch.autograd.grad(model(inputs).square().sum(), model[0].weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


class Mixed(lora_runs.Tuned):
    """With a layer that is frozen, a transformers layer, and one that gets int8 codes of gradients alone."""

    def build(self) -> None:
        """Make the layers."""
        from transformers.pytorch_utils import Conv1D

        super().build()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.blocks[1].down = Conv1D(lora_runs.WIDTH, 2 * lora_runs.WIDTH)
        self.blocks[2].up.requires_grad_(False)


NUM_SAMPLES, BATCH = 24, 8


def _fit(
    devices: int,
    settings: dict[str, Any],
    targets: list[str],
    copies: int,
    *,
    bits: bool = True,
    precision: Any = "32-true",
    save: str | None = None,
    resume: str | None = None,
) -> dict[str, Any]:
    """Train by batches of eight, in two halves that are the same ones everywhere: odd samples and even ones."""
    module = Mixed()
    callbacks: list[Any] = [Quantize(targets, bits=8, trained=True)] if bits else []
    data = lora_runs.batches(NUM_SAMPLES, BATCH).dataset
    if copies == 1:  # data ranks take every second sample; micro-batches are halves of a batch
        order = [at + half + 2 * k for at in range(0, NUM_SAMPLES, BATCH) for half in (0, 1) for k in range(BATCH // 2)]
        data = Subset(data, order)
    fitted = trainer(
        BigModelStrategy(**settings), devices, max_epochs=2 if resume else 1, callbacks=callbacks, precision=precision
    )
    fitted.fit(module, DataLoader(data, batch_size=BATCH // copies), ckpt_path=resume)
    if save:
        fitted.save_checkpoint(save)
    return {name: p.detach().float().numpy().copy() for name, p in module.named_parameters()}


PLAN = {"up": "colwise", "down": "rowwise"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipe": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor": (
        2,
        {"tensor_parallel_size": 2, "tensor_plan": {"up": "colwise", "down": "rowwise"}, "num_microbatches": 2},
    ),
    "replicas": (2, {}),
}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_layouts(tmp_path: Any) -> None:
    """A weight that is quantised before it is whole, or once for several steps; a file of other names."""
    saved = str(tmp_path / "one.ckpt")
    halves = {"num_microbatches": 2}
    for names, targets in ((("pipe", "zero3"), ["up", "down", "enter"]), (("tensor",), ["up"])):
        (expected,) = run_ranks(_fit, 1, 1, halves, targets, 1, save=saved)
        assert list(expected) == [name for name, _ in Mixed().named_parameters()]
        for name in names:
            devices, settings = LAYOUTS[name]
            copies = 1 if name in ("pipe", "tensor") else 2
            for found in run_ranks(_fit, devices, devices, settings, targets, copies):
                assert_same(found, expected)
    # A cut of the inputs has a scale for each part.
    devices, settings = LAYOUTS["tensor"]
    (whole,) = run_ranks(_fit, 1, 1, halves, ["up", "down"], 1)
    for found in run_ranks(_fit, devices, devices, settings, ["up", "down"], 1):
        for weight, expected_weight in whole.items():
            assert np.linalg.norm(found[weight] - expected_weight) < 0.05 * np.linalg.norm(expected_weight), weight
    # Files are those of a run without the callback.
    (plain,) = run_ranks(_fit, 1, 1, halves, ["up"], 1, bits=False, resume=saved)
    assert plain.keys() == whole.keys()


def test_with_adapters_and_what_is_refused() -> None:
    """A base that trains under adapters; a setting without effect; a frozen layer in codes taken for a trained one."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    Quantize(["0"], bits=8, trained=True).convert(module)
    adapters = LoRA(["0"], rank=2)
    for layer in adapters.inject(module).values():
        nn.init.normal_(layer.lora_B)
    inputs = torch.randn(3, 8)
    before = module(inputs)
    before.sum().backward()
    assert [name for name, p in module.named_parameters() if p.grad is not None] == ["0.lora_A", "0.lora_B"]
    adapters.merge(module)
    torch.testing.assert_close(module(inputs), before, rtol=0.05, atol=0.2)
    Quantize(["1"], bits=8).convert(module)
    with pytest.raises(ValueError, match="'1' has 8 bits and is frozen already"):
        Quantize(["1"], bits=8, trained=True).convert(module)
    with pytest.raises(ValueError, match="'0' is a `Int8ProductLinear`, which computes in a way of its own"):
        Quantize(["0"], bits=8).convert(module)
    assert list(Quantize(["0"], bits=8, trained=True).convert(module)) == ["0"]
    with pytest.raises(ValueError, match="trained=True.*bits=4"):
        Quantize(["0"], trained=True)
    with pytest.raises(ValueError, match="'2', which matches no module"):
        Quantize(["2"], bits=8, trained=True).convert(module)
