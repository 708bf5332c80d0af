"""Clipping with fused optimizers and in every precision that needs no loss scale, sharded or not."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

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


class Equal(LightningModule):
    """Equal linear blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """A chain."""
        for block in self.blocks:
            batch = block(batch)
        return batch.float().square().mean()

    def configure_optimizers(self) -> Any:
        """Two moments."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Bytes(Callback):
    """Bytes a parameter, after the backward of the last batch of a window that is not over yet."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Of distinct storages."""
        optimizer = trainer.optimizers[0]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = [*pl_module.parameters()]
        states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
        gradients = [p.grad for p in [*held, *parameters] if p.grad is not None]
        count = sum(p.numel() for p in parameters)
        with torch._C.DisableTorchFunctionSubclass():
            for name, tensors in (
                ("parameters", [*held, *parameters]),
                ("gradients", gradients),
                ("optimizer", states),
            ):
                storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
                self.found[name] = sum(storages.values()) / count


def _bytes(stage: int, precision: Any, devices: int) -> dict[str, float]:
    look = Bytes()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "limit_train_batches": 4, "max_epochs": 1}
    run = trainer(BigModelStrategy(zero_stage=stage), devices, precision=precision, callbacks=[look], **options)  # type: ignore[arg-type]
    look.on_train_batch_end = functools.partial(_only, 2, look.on_train_batch_end)  # type: ignore[method-assign]
    run.fit(Equal(), DataLoader(torch.ones(32, 64), batch_size=2))
    return look.found


def _only(index: int, hook: Any, *args: Any) -> None:
    if args[-1] == index:
        hook(*args)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_mixed_precision_keeps_two_two_and_twelve_bytes(stage: int, devices: int) -> None:
    """Whole parameters or gradients in fp32 beside those in bf16; the third batch begins a window that goes on."""
    n = devices
    expected = {
        1: {"parameters": 2 + 4 / n, "gradients": 2.0, "optimizer": 8 / n},
        2: {"parameters": 2 + 4 / n, "gradients": 4 / n, "optimizer": 8 / n},
        3: {"parameters": 4 / n, "gradients": 4 / n, "optimizer": 8 / n},
    }[stage]
    for found in run_ranks(_bytes, devices, stage, "bf16-mixed", devices):
        assert found == pytest.approx(expected, rel=0.01)
