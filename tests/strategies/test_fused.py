"""One setting for the implementation of torch's optimizers, with clipping and a loss scale."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.sharding.fused import choose_fused
from lightning_bigmodel.testing import TinyChain
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.trainer_modules import trainer, weights

# Two roundings of the last bit of bf16; the others step fp32 weights.
PRECISIONS = {"32-true": 1e-5, "16-mixed": 1e-5, "bf16-mixed": 1e-5, "bf16-true": 2**-7}
run_ranks = functools.partial(run_ranks_for, timeout_seconds=80.0)


def _fit(precision: str, fused: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module = TinyChain()
    strategy = BigModelStrategy(zero_stage=2, fused=fused)
    fitted = trainer(strategy, 2, precision=precision, gradient_clip_val=0.1)
    fitted.fit(module, DataLoader(module.dataset(32), batch_size=4))
    group = fitted.optimizers[0].param_groups[0]
    return {"weights": weights(module), "fused": group["fused"], "steps": fitted.global_step}


def _fit_each() -> dict[str, Any]:
    return {f"{p} {fused}": _fit(p, fused) for p in PRECISIONS for fused in ("auto", False)}


def test_the_numbers_of_the_other_implementation() -> None:
    """Gradients that are clipped before they are unscaled, or unscaled twice; clipping refused for fused kernels."""
    for results in run_ranks(_fit_each, 2):
        for precision, tolerance in PRECISIONS.items():
            one, other = results[f"{precision} auto"], results[f"{precision} False"]
            assert (one["fused"], other["fused"]) == (True, None)
            assert one["steps"] == other["steps"] == 4
            for name, value in one["weights"].items():
                np.testing.assert_allclose(other["weights"][name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def test_what_is_chosen() -> None:
    """A choice of the user's that is overruled, or kernels asked for that there are not."""
    weight = nn.Parameter(torch.ones(2))
    cpu = torch.device("cpu")
    asked = torch.optim.AdamW([weight], foreach=True)
    choose_fused(asked, "auto", cpu)
    assert (asked.param_groups[0]["fused"], asked.param_groups[0]["foreach"]) == (None, True)
    choose_fused(asked, True, cpu)
    assert (asked.param_groups[0]["fused"], asked.param_groups[0]["foreach"]) == (True, False)
    other = torch.optim.RMSprop([weight])
    choose_fused(other, "auto", cpu)
    with pytest.raises(ValueError, match="`fused=True` cannot be followed by `RMSprop`: it has no fused kernels"):
        choose_fused(other, True, cpu)
    integers = torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False), weight], lr=0.1)
    choose_fused(integers, True, cpu)  # codes of frozen layers are not stepped
    assert integers.param_groups[0]["fused"] is True
    with pytest.raises(ValueError, match="no real floating-point"):
        choose_fused(torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.cfloat))], lr=0.1), True, cpu)
