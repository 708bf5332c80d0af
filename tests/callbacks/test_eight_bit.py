"""`EightBitOptimizer`: the user's optimizer with 8-bit moments, under every layout and between layouts."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy, EightBitOptimizer
from lightning_bigmodel.checkpoint import portable_entries, quantized_entries, requantization_error
from lightning_bigmodel.sharding.eight_bit import to_eight_bit
from lightning_bigmodel.strategies.checkpoints import _note_quantization
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.trainer_modules import trainer

run_ranks = functools.partial(run_ranks_for, timeout_seconds=80.0)
WIDTH = 128


class Regression(LightningModule):
    """An embedding, two layers of 128 x 128 in a pair, groups with options of their own and a schedule.

    Args:
        kind: Name of the optimizer.
    """

    def __init__(self, kind: str = "AdamW") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.small = nn.Linear(WIDTH, 4)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        hidden = self.down(torch.tanh(self.up(self.table(batch[0]))))
        loss = nn.functional.mse_loss(self.small(hidden), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Of all ranks."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        """Two groups, and a schedule that was made for the optimizer before it had 8 bits."""
        groups = [
            {"params": [*self.table.parameters(), *self.up.parameters()], "weight_decay": 0.1, "name": "first"},
            {"params": [*self.down.parameters(), *self.small.parameters()], "lr": 5e-3},
        ]
        if self.kind == "AdamW":
            optimizer: Any = torch.optim.AdamW(groups, lr=2e-3, fused=True)
        else:
            import bitsandbytes

            optimizer = getattr(bitsandbytes.optim, self.kind)(groups, lr=2e-4)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _run(
    devices: int, settings: dict[str, Any], kind: str, epochs: int, directory: str | None, resume: str | None
) -> dict[str, Any]:
    """Train for some epochs of ten steps, saving each; from a checkpoint where one is given."""
    module = Regression(kind)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(0, WIDTH, (160,), generator=generator), torch.randn(160, 4, generator=generator))
    copies = devices // settings.get("tensor_parallel_size", 1) // settings.get("pipeline_parallel_size", 1)
    # Above it are whole parameters, below it every part of them.
    callbacks: list[Any] = [EightBitOptimizer(min_8bit_size=10_000)]
    if directory and not resume:
        callbacks.append(ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1))
    strategy = BigModelStrategy(**settings)
    fitted = trainer(strategy, devices, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=not resume)
    fitted.fit(module, DataLoader(data, batch_size=16 // copies), ckpt_path=resume)
    raw = fitted.optimizers[0]
    names = strategy._parameter_names()
    return {
        "losses": module.losses,
        "class": type(raw).__name__,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in raw.param_groups],
        "states": {
            names[id(p)]: {k: v.cpu().numpy() for k, v in state.items() if isinstance(v, Tensor)}
            for p, state in raw.state.items()
        },
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (2, {}),
    "pipe": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "blocks": ["table", "down"]}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor_zero1": (
        4,
        {"tensor_parallel_size": 2, "tensor_plan": {"up": "colwise", "down": "rowwise"}, "zero_stage": 1},
    ),
}


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "AdEMAMix"])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_every_layout_and_between_them(kind: str, tmp_path: Path) -> None:
    """Precision by the size of a shard; embeddings in 8 bits; a schedule or group that is lost; moments that are."""
    expected = run_ranks(_run, 1, 1, {}, kind, 2, str(tmp_path / "one"), None)[0]
    assert expected["class"] == f"{kind}8bit"
    assert [group["lr"] for group in expected["groups"]] == pytest.approx(
        [rate * 0.5 for rate in ((2e-3, 5e-3) if kind == "AdamW" else (2e-4, 5e-3))]
    )
    assert [group["weight_decay"] for group in expected["groups"]][0] == 0.1
    assert expected["groups"][0]["name"] == "first"
    layouts = LAYOUTS if kind == "AdamW" else {"tensor_zero1": LAYOUTS["tensor_zero1"]}
    for name, (devices, settings) in layouts.items():
        results = run_ranks(_run, devices, devices, settings, kind, 1, str(tmp_path / name), None)
        for result in results:
            # Replicas and stages hold whole parameters, zero's rows begin at whole blocks; else by their error.
            exact = not name.startswith("tensor")
            assert result["losses"] == pytest.approx(expected["losses"][:10], rel=1e-4 if exact else 0.01), name
            for parameter, state in result["states"].items():
                is_large = parameter in ("up.weight", "down.weight")
                assert (state["state1"].dtype == np.uint8) == is_large, (name, parameter)
    pairs = [("tensor_zero1", "zero3"), ("zero3", "tensor_zero1"), ("zero3", "pipe")]
    for origin, name in pairs if kind == "AdamW" else pairs[:1]:
        devices, settings = LAYOUTS[name]
        saved = str(tmp_path / origin / "epoch=0.ckpt")
        for result in run_ranks(_run, devices, devices, settings, kind, 2, None, saved):
            assert result["losses"] == pytest.approx(expected["losses"][10:], rel=0.01), (origin, name)


@pytest.mark.parametrize("double", [False, True])
def test_what_quantising_again_costs(double: bool) -> None:
    """An error that is not bounded, or that is claimed where there is none."""
    import bitsandbytes

    weight = nn.Parameter(torch.randn(16, 96))
    make = bitsandbytes.optim.AdEMAMix8bit if double else bitsandbytes.optim.AdamW8bit
    optimizer = make([weight], min_8bit_size=0)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    entries = dict(optimizer.state[weight])
    portable = portable_entries(entries)
    assert all(value.shape == weight.shape for key, value in portable.items() if key.startswith("state"))
    again = quantized_entries(portable)
    for key, value in entries.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(again[key], value, rtol=1e-6, atol=0.0)
    worst, bound = requantization_error(portable, again)
    assert worst < 1e-6
    rows = {k: v[3:9] if k.startswith("state") else v for k, v in portable.items()}  # from the middle of a block on
    worst, bound = requantization_error(rows, quantized_entries(rows))
    assert 1e-6 < worst < bound < 0.02


def test_the_cost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Moments that are rounded once more without a word, or words about a rounding of fp32."""
    with caplog.at_level(logging.INFO):
        _note_quantization([(1e-8, 0.01)])
        assert "quantised" not in caplog.text
        _note_quantization([(1e-8, 0.01), (0.004, 0.01)])
    assert (
        "quantised again: they differ by up to 0.004 of the largest value in their block (at most 0.01)" in caplog.text
    )


def test_an_optimizer_that_pages_has_a_twin_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments that no longer leave the GPU where the user had them leave it."""
    import bitsandbytes

    for has_gpu, name in ((False, "AdamW8bit"), (True, "PagedAdamW8bit")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        optimizer = bitsandbytes.optim.PagedAdamW32bit([nn.Parameter(torch.ones(8, 8))])
        to_eight_bit(optimizer)
        assert type(optimizer).__name__ == name


def test_what_has_no_twin_is_refused() -> None:
    """Another optimizer than the user's, options that are dropped, a step that is."""
    weight = nn.Parameter(torch.ones(8, 8))
    other = torch.optim.AdamW([weight])
    other.step = lambda closure=None: None  # type: ignore[method-assign]
    stepped = torch.optim.AdamW([weight])
    weight.grad = torch.ones(8, 8)
    stepped.step()
    cases: list[tuple[Any, str]] = [
        (torch.optim.SGD([weight]), "`SGD` has no twin"),
        (torch.optim.Adafactor([weight]), "`Adafactor` has no twin"),
        (torch.optim.Adam([weight], amsgrad=True), "amsgrad=True"),
        (torch.optim.AdamW([weight], maximize=True), "maximize=True"),
        (other, "`step` of this `AdamW` object has been replaced"),
        (stepped, "has state already"),
    ]
    for optimizer, message in cases:
        kind = type(optimizer)
        with pytest.raises(ValueError, match=message):
            to_eight_bit(optimizer)
        assert type(optimizer) is kind
    with pytest.raises(ValueError, match="`paged=True` needs a GPU"):
        trainer("auto", 1, callbacks=EightBitOptimizer(paged=True)).fit(Regression(), DataLoader([0]))
