"""Clipping with fused optimizers and in every precision that needs no loss scale, sharded or not."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.trainer_modules import Classifier, loader, trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)


class Fused(Classifier):
    """Adam in one kernel, or in a loop."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.clipped: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Gradients as they are before clipping."""
        super().on_before_optimizer_step(optimizer)
        gradients = [p.grad.float().norm() for p in self.parameters() if p.grad is not None]
        self.clipped.append(float(torch.stack(gradients).norm()))

    def configure_optimizers(self) -> Any:
        """Fused where asked for."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused or None, foreach=None)


def _fit(settings: dict[str, Any], precision: Any, fused: bool, devices: int = 2) -> dict[str, Any]:
    module = Fused(fused)
    run = trainer(BigModelStrategy(**settings), devices, precision=precision, gradient_clip_val=0.05)
    run.fit(module, loader(32, 8 // devices), loader(8, 4))
    dtypes = {str(p.dtype) for p in module.parameters()}
    return {"weights": weights(module), "norms": module.clipped, "dtypes": dtypes}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fused_optimizers_clip_in_every_precision(precision: Any) -> None:
    """A refusal that is meant for loss scalers; norms of rounded or partial gradients; weights in another type."""
    expected = run_ranks(_fit, 1, {}, precision, False, 1)[0]
    tolerance = {"32-true": 1e-5, "bf16-mixed": 1e-2, "bf16-true": 3e-2}[precision]
    for settings in ({}, {"zero_stage": 1}, {"zero_stage": 3}):
        for result in run_ranks(_fit, 2, settings, precision, True):
            assert result["dtypes"] == expected["dtypes"]
            assert result["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
            for name, value in expected["weights"].items():
                np.testing.assert_allclose(result["weights"][name], value, atol=tolerance, rtol=tolerance, err_msg=name)
