"""Saved under any layout, loaded under any other: every value, moment, count and group option to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.checkpoint import load_sharded
from lightning_bigmodel.testing import run_ranks
from tests.strategies.scaled_modules import WIDTH, Pair

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PIPE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "replicas": (2, {}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2": (3, {"zero_stage": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor_parallel_size": 2, "tensor_plan": PLAN}),
    "pipe2": (2, PIPE),
    "pipe4": (4, {"pipeline_parallel_size": 4, "num_microbatches": 4}),
    "interleaved": (2, {**PIPE, "num_microbatches": 4, "schedule": "Interleaved1F1B"}),
    "all": (8, {**PIPE, "zero_stage": 3, "tensor_parallel_size": 2, "tensor_plan": PLAN}),
}


class Mixed(LightningModule):
    """Blocks, a weight used twice, a buffer, rows that no number of ranks divides, two groups."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.narrow = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(()))
        self.seed = seed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Regression."""
        (x,) = batch
        self.count.add_(1.0 if batch_idx >= 0 else 0.0)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean() + self.narrow(x).square().mean()

    def configure_optimizers(self) -> Any:
        """Groups that differ by the seed, so that options must come from the checkpoint."""
        rate = 0.01 * self.seed
        return torch.optim.AdamW(
            [{"params": self.blocks.parameters(), "weight_decay": 0.1 * self.seed}, {"params": self._others()}], lr=rate
        )

    def _others(self) -> list[nn.Parameter]:
        inside = {id(parameter) for parameter in self.blocks.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in inside]


def _trainer(layout: str, **options: Any) -> Trainer:
    devices, settings = LAYOUTS[layout]
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=BigModelStrategy(**settings),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(2))), batch_size=8)


def _save(layout: str, path: str) -> None:
    trainer = _trainer(layout, max_steps=2)
    trainer.fit(Mixed(1), _data())
    trainer.save_checkpoint(path)


def _pass_on(layout: str, sources: list[str], directory: str) -> None:
    """Load each and save it again, without a step."""
    for source in sources:
        trainer = _trainer(layout, max_steps=2)
        trainer.fit(Mixed(2), _data(), ckpt_path=f"{directory}/{source}.ckpt")
        trainer.save_checkpoint(f"{directory}/{source}-{layout}.ckpt")


def _assert_same(first: Any, second: Any, where: str) -> None:
    assert type(first) is type(second), where
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype, where
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            _assert_same(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), where
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            _assert_same(one, other, f"{where}[{index}]")
    else:
        assert first == second, where


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each layout."""
    directory = tmp_path_factory.mktemp("pairs")
    for layout, (devices, _) in LAYOUTS.items():
        run_ranks(_save, devices, layout, f"{directory}/{layout}.ckpt", timeout_seconds=80.0)
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_passes_through_every_layout(layout: str, saved: Path) -> None:
    """Rows put together in another order, moments of another parameter, options that are those of the new run."""
    run_ranks(_pass_on, LAYOUTS[layout][0], layout, list(LAYOUTS), str(saved), timeout_seconds=120.0)
    for source in LAYOUTS:
        before, after = load_sharded(saved / f"{source}.ckpt"), load_sharded(saved / f"{source}-{layout}.ckpt")
        _assert_same(dict(before.model_state), dict(after.model_state), f"{source}: weights")
        assert len(before.optimizer_states[0]["state"]) > 10
        for name, entries in before.optimizer_states[0]["state"].items():
            _assert_same(entries, after.optimizer_states[0]["state"][name], f"{source}: state of {name}")
        for one, other in zip(
            before.optimizer_states[0]["param_groups"], after.optimizer_states[0]["param_groups"], strict=True
        ):
            assert set(one["params"]) == set(other["params"])
            assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
        assert before.metadata["global_step"] == after.metadata["global_step"] == 2
