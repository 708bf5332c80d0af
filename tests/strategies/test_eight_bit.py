"""8-bit optimizers of bitsandbytes under ZeRO: losses near those of one process, states that survive any layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.cli import main
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.trainer_modules import trainer

run_ranks = functools.partial(run_ranks_for, timeout_seconds=80.0)


class Regression(LightningModule):
    """A weight of 128 x 128 that gets 8-bit states, and groups with options of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Of all ranks."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        """Two groups."""
        from bitsandbytes.optim import AdamW8bit

        first, last = self.layers[0], self.layers[2]
        return AdamW8bit(
            [{"params": first.parameters(), "weight_decay": 0.1}, {"params": last.parameters(), "lr": 5e-3}], lr=2e-3
        )


def run(strategy: Any, devices: int, epochs: int, directory: str, resume: str | None) -> dict[str, Any]:
    """Train for some epochs of ten steps, saving each; from a checkpoint where one is given."""
    module = Regression()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(160, 128, generator=generator), torch.randn(160, 4, generator=generator))
    loader = DataLoader(data, batch_size=16 // devices)
    keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True} if resume is None else {}
    fitted = trainer(strategy, devices, max_epochs=epochs, **options)
    fitted.fit(module, loader, ckpt_path=None if resume is None else f"{directory}/{resume}")
    raw = fitted.optimizers[0]
    states = [
        {key: value.cpu().numpy() for key, value in raw.state[p].items() if isinstance(value, Tensor)}
        for group in raw.param_groups
        for p in group["params"]
        if p in raw.state
    ]
    return {"losses": module.losses, "states": states, "rates": [g["lr"] for g in raw.param_groups]}


def _run(devices: int, settings: dict[str, Any], *args: Any) -> dict[str, Any]:
    return run(BigModelStrategy(**settings), devices, *args)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_training_and_states_in_any_layout(tmp_path: Path) -> None:
    """Mixed plain and distributed tensors, blocks of one rank taken for another's, states in the wrong precision."""
    folder, plain = str(tmp_path), str(tmp_path / "plain")
    expected = run("auto", 1, 2, plain, None)
    saved = run_ranks(_run, 2, 2, {"zero_stage": 3}, 1, folder, None)
    for result in saved:
        assert result["losses"] == pytest.approx(expected["losses"][:10], rel=0.01)
        assert result["rates"] == expected["rates"]
        assert result["states"][0]["state1"].dtype == np.uint8
    for devices, settings in ((1, {}), (4, {"zero_stage": 2}), (2, {"zero_stage": 1})):
        for result in run_ranks(_run, devices, devices, settings, 2, folder, "epoch=0.ckpt"):
            assert result["losses"] == pytest.approx(expected["losses"][10:], rel=0.01)
            assert result["states"][0]["state1"].dtype == np.uint8
    # Nothing happens after loading: codes and scales are those that were saved.
    for before, after in zip(saved, run_ranks(_run, 2, 2, {"zero_stage": 3}, 1, folder, "epoch=0.ckpt"), strict=True):
        for one, other in zip(before["states"], after["states"], strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                rounding = 1e-6 if key.startswith("absmax") else 0.0
                np.testing.assert_allclose(other[key], value, rtol=rounding, atol=0.0, err_msg=key)
    assert main(["convert", f"{folder}/epoch=0.ckpt", f"{folder}/one.ckpt"]) == 0
    assert run("auto", 1, 2, folder, "one.ckpt")["losses"] == pytest.approx(expected["losses"][10:], rel=0.01)
    for result in run_ranks(_run, 2, 2, {"zero_stage": 3}, 2, folder, "one.ckpt"):
        assert result["losses"] == pytest.approx(expected["losses"][10:], rel=0.01)
    # And back to a directory, of the file and of what plain Lightning has saved: codes and scales stay.
    assert main(["convert", f"{folder}/one.ckpt", f"{folder}/back.ckpt"]) == 0
    assert main(["convert", f"{plain}/epoch=0.ckpt", f"{folder}/plain.ckpt"]) == 0
    again = run_ranks(_run, 2, 2, {"zero_stage": 3}, 1, folder, "back.ckpt")
    for before, after in zip(saved, again, strict=True):
        for one, other in zip(before["states"], after["states"], strict=True):
            np.testing.assert_array_equal(other["state1"], one["state1"])
    for name in ("back.ckpt", "plain.ckpt"):
        for result in run_ranks(_run, 2, 2, {"zero_stage": 1}, 2, folder, name):
            assert result["losses"] == pytest.approx(expected["losses"][10:], rel=0.01)
            assert result["states"][0]["state1"].dtype == np.uint8
