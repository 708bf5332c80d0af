"""`microbatch_weight="equal"`: every batch of a window has one share, whatever its size and wherever it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import run_ranks
from tests.strategies.trainer_modules import trainer, weights

NUM_BATCHES = 4


class Squares(LightningModule):
    """A loss whose gradient depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data() -> Tensor:
    return torch.randn(8 * NUM_BATCHES, 3, generator=torch.Generator().manual_seed(5))


def _fit(devices: int, accumulate: int, settings: dict[str, Any]) -> dict[str, Any]:
    module = Squares()
    strategy = BigModelStrategy(microbatch_weight="equal", **settings)
    run = trainer(strategy, devices, accumulate_grad_batches=accumulate)
    run.fit(module, DataLoader(_data(), batch_size=8 // devices))
    return weights(module)


def _by_hand(accumulate: int) -> dict[str, Any]:
    module = Squares()
    optimizer = module.configure_optimizers()
    for window in _data().split(8 * accumulate):
        module.training_step(window, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@pytest.mark.parametrize(
    ("devices", "accumulate", "settings"),
    [
        (1, 2, {}),
        (1, 3, {"num_microbatches": 2}),
        (2, 2, {"num_microbatches": 2}),
        (2, 2, {"zero_stage": 2}),
        (2, 2, {"zero_stage": 2, "num_microbatches": 2}),
    ],
)
def test_a_window_is_the_mean_of_its_batches(devices: int, accumulate: int, settings: dict[str, Any]) -> None:
    """Divided once by the Trainer and once by the window; or, where rows are summed early, by neither."""
    expected = _by_hand(accumulate)
    for result in run_ranks(_fit, devices, devices, accumulate, settings, timeout_seconds=60):
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
