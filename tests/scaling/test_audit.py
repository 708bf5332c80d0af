"""Operators against fp32: what is counted, what is blamed, and that nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_bigmodel.scaling.audit import OperatorAudit, OperatorKey, listed_name
from lightning_bigmodel.scaling.comparison import Comparison, PairSums
from lightning_bigmodel.scaling.op_lists import OpPrecision


def compared(value: Tensor, reference: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> Comparison:
    """One pair."""
    sums = PairSums(dtype)
    sums.add(value, reference, scale)
    return sums.read()


def by_function(audit: OperatorAudit) -> dict[str, Comparison]:
    """Rows by the function that was called."""
    found: dict[str, Comparison] = {}
    for key, numbers in audit.read().items():
        found[key.function] = found.get(key.function, Comparison()) + numbers
    return found


def test_counts() -> None:
    """Infinities of the reference taken for overflows; zeros of the reference for underflows."""
    reference = torch.tensor([1.0, 1e-9, 0.0, 1e5, math.inf, math.nan, 3e-5, -2.0])
    numbers = compared(reference.half(), reference)
    assert numbers.num_values == 8
    assert numbers.num_overflows == 1
    assert (numbers.num_compared, numbers.num_underflows) == (5, 2)  # 1e-9 is 0, 3e-5 has lost bits
    assert numbers.underflow == 0.4
    assert numbers.largest == 2.0
    assert numbers.headroom_bits == pytest.approx(math.log2(65504 / 2))
    assert numbers.exceeds(1.0)
    assert compared(torch.tensor([1.5]), torch.tensor([2.0])).error == 0.25
    assert compared(torch.zeros(2), torch.zeros(2)).error == 0.0
    assert compared(torch.ones(2), torch.zeros(2)).error == math.inf
    assert compared(torch.empty(0), torch.empty(0)).error == 0.0


def test_the_loss_scale_is_taken_out() -> None:
    """A scale that hides that gradients would vanish without it."""
    gradient = torch.tensor([1e-3, 1e-2])
    numbers = compared(gradient.half(), gradient, scale=1024.0)
    assert (numbers.underflow, numbers.underflow_unscaled) == (0.0, 1.0)
    assert (numbers + numbers).underflow_unscaled == 1.0


def test_the_operator_that_overflows_is_blamed() -> None:
    """The one before, which gave a number; the one after, which was given none."""
    audit = OperatorAudit(torch.float16)
    x = torch.full((2, 4), 300.0, dtype=torch.float16)
    with audit.watching("a", "forward"):
        (x.square() + 1).sqrt()
    found = by_function(audit)
    assert {name: numbers.num_overflows for name, numbers in found.items()} == {"square": 8, "add": 0, "sqrt": 0}
    assert audit.read() == {}


def test_a_cast_is_the_fault_of_what_it_is_for() -> None:
    """Rounding and overflow of operands that nobody answers for."""
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1e-6)
    audit = OperatorAudit(torch.float16)
    with audit.watching("", "forward"), torch.autocast("cpu", torch.float16):
        layer(torch.full((1, 4), 1e5))
        layer(torch.ones(1, 4))
    numbers = by_function(audit)["linear"]
    assert numbers.num_calls == 2
    assert numbers.num_overflows == 4
    assert numbers.error > 0.01  # 1e-6 has few bits in fp16


def test_functions_are_found_within_functions() -> None:
    """`multi_head_attention_forward` blamed for its softmax; names that no list takes."""
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8, requires_grad=True)
    audit = OperatorAudit(torch.bfloat16)
    with audit.watching("", "forward"), torch.autocast("cpu", torch.bfloat16):
        output = attention(x, x, x)[0]
        nn.functional.softmax(output, -1)
        _ = output @ output.mT
    with audit.watching("", "backward"):
        output.float().sum().backward()
    rows = audit.read()
    functions = {key.function for key in rows if key.phase == "forward"}
    assert {"bmm", "linear", "matmul", "softmax"} <= functions
    assert "multi_head_attention_forward" not in functions
    OpPrecision(full_precision_ops=sorted(functions - {""}))
    assert {key.function for key in rows if key.phase == "backward"} == {""}


def test_results_and_random_numbers_stay() -> None:
    """Dropout that draws twice; an audit that changes what it watches."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def once(audit: OperatorAudit | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(4)
        layers.zero_grad()
        with torch.autocast("cpu", torch.float16):
            if audit is None:
                output = layers(x)
            else:
                with audit.watching("", "forward"):
                    output = layers(x)
        output.float().square().sum().backward()
        return output.detach(), torch.cat([p.grad.flatten() for p in layers.parameters()])

    for plain, watched in zip(once(None), once(OperatorAudit(torch.float16)), strict=True):
        assert torch.equal(plain, watched)


def test_names() -> None:
    """A proposal that the list refuses."""
    assert [listed_name(name) for name in ("__matmul__", "softmax", "add_", "nothing_such", "")] == [
        "matmul",
        "softmax",
        "",
        "",
        "",
    ]
    assert OperatorKey("a", "forward", "mm", "linear") == OperatorKey("a", "forward", "mm", "linear")
