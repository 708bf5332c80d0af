"""Checkpoints of sharded runs: resumed elsewhere, consolidated, and begun from an ordinary file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.checkpoint import read_index
from lightning_bigmodel.cli import main
from lightning_bigmodel.testing import TinyTransformer, run_ranks
from tests.strategies.test_checkpoints import train
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import Classifier, loader, trainer, weights


def _train_and_save(devices: int, batch_size: int, directory: str, strategy: dict[str, Any]) -> dict[str, Any]:
    module = Classifier()
    keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    run = trainer(BigModelStrategy(**strategy), devices, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, loader(32, batch_size), loader(10, 4))
    return {"weights": weights(module)}


def _resume(devices: int, batch_size: int, strategy: dict[str, Any], path: str) -> dict[str, Any]:
    return train(BigModelStrategy(**strategy), devices, batch_size, 2, resume=path)


ELSEWHERE: list[tuple[int, int, dict[str, Any]]] = [
    (2, 4, {"zero_stage": 1}),
    (4, 2, {"zero_stage": 3, "data_replicate_size": 2}),
    (2, 8, {"pipeline_parallel_size": 2}),
    (4, 4, {"pipeline_parallel_size": 2, "zero_stage": 3}),
    (2, 4, {}),
]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("world_size", "data_size", "strategy"),
    [
        (4, 4, {"zero_stage": 3}),
        (2, 2, {"zero_stage": 2}),
        (4, 2, {"pipeline_parallel_size": 2, "zero_stage": 1}),
    ],
)
def test_resume_in_any_layout(world_size: int, data_size: int, strategy: dict[str, Any], tmp_path: Path) -> None:
    """Rows put back in the wrong place, moments lost, or a checkpoint that only its own layout can read."""
    saved = run_ranks(_train_and_save, world_size, world_size, 8 // data_size, str(tmp_path), strategy)
    path = str(tmp_path / "epoch=0.ckpt")
    for other_size, batch_size, other in ELSEWHERE if world_size == data_size == 4 else ELSEWHERE[-2:]:
        for result in run_ranks(_resume, other_size, other_size, batch_size, other, path):
            assert_same_weights(result["weights"], saved[0]["weights"])
    output = tmp_path / "out.ckpt"
    assert main(["convert", path, str(output)]) == 0
    assert_same_weights(train("auto", 1, 8, 2, resume=str(output))["weights"], saved[0]["weights"])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("strategy", [{"zero_stage": 1}, {"zero_stage": 3}])
def test_ordinary_file_resumes_sharded(strategy: dict[str, Any], tmp_path: Path) -> None:
    """A run begun on one device must go on sharded from its own checkpoint."""
    module = Classifier()
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = trainer("auto", 1, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, loader(32, 8), loader(10, 4))
    for result in run_ranks(_resume, 2, 2, 4, strategy, str(tmp_path / "epoch=0.ckpt")):
        assert_same_weights(result["weights"], weights(module))


class Consolidated(TinyTransformer):
    """A tied head, a frozen block, a persistent and a non-persistent buffer, and a layer that is never stepped."""

    def __init__(self) -> None:
        super().__init__(tied_head=True)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("dropped", torch.arange(3.0), persistent=False)
        self.unused = torch.nn.Linear(5, 3)
        self.unused.weight.requires_grad_(False)


def _consolidate(directory: str, strategy: dict[str, Any], devices: int) -> dict[str, Any]:
    module = Consolidated()
    run = trainer(BigModelStrategy(**strategy), devices, max_steps=2, max_epochs=None)
    during = _SavesDuring(f"{directory}/during.ckpt")
    run.callbacks.append(during)  # type: ignore[attr-defined]  # a list
    run.fit(module, torch.utils.data.DataLoader(module.dataset(16), batch_size=4))
    run.save_checkpoint(f"{directory}/after.ckpt")
    return weights(module)


class _SavesDuring(Callback):
    """Saves while parameters are in rows."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self._path)


@pytest.mark.parametrize(
    "strategy", [{"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "pipeline_parallel_size": 2}]
)
def test_consolidated_file_has_everything(strategy: dict[str, Any], tmp_path: Path) -> None:
    """Tied, frozen or never stepped weights left out, during the run and after it."""
    devices = 2 * strategy.get("pipeline_parallel_size", 1)
    found = run_ranks(_consolidate, devices, str(tmp_path), strategy, devices)
    for name in ("during", "after"):
        output = tmp_path / f"{name}.out"
        assert main(["convert", str(tmp_path / f"{name}.ckpt"), str(output)]) == 0
        module = Consolidated()
        plain = module.state_dict()
        state = torch.load(output, weights_only=False)["state_dict"]
        assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in plain.items()}
        module.load_state_dict(state, strict=True)
        for result in found:
            assert_same_weights(weights(module), result)


def test_no_rank_writes_what_it_does_not_hold(tmp_path: Path) -> None:
    """A whole copy at save time: each rank's file holds its rows only."""
    run_ranks(_train_and_save, 4, 4, 2, str(tmp_path), {"zero_stage": 3})
    index = read_index(tmp_path / "epoch=0.ckpt")
    total = sum(entry.num_bytes for entry in index.tensors.values())
    sizes = [size for name, size in index.files.items() if name.endswith(".distcp")]
    assert len(sizes) == 4
    overhead = 1500 * len(index.tensors)  # torch's archive format
    assert max(sizes) < total / 2 + overhead


class Pairs(LightningModule):
    """Pairs of layers that a tensor plan cuts, with an optimizer of the test's choice."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 8)) for _ in range(2)
        )
        self.head = torch.nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Classify by position."""
        hidden = batch[0]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        """One of torch's."""
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.02)


def _pairs(
    directory: str, devices: int, batch_size: int, strategy: Any, optimizer: str, resume: bool
) -> dict[str, Any]:
    module = Pairs(optimizer)
    keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    chosen = BigModelStrategy(**strategy) if isinstance(strategy, dict) else strategy
    options: dict[str, Any] = {} if resume else {"callbacks": [keep], "enable_checkpointing": True}
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    )
    run = trainer(chosen, devices, max_epochs=2, **options)
    path = f"{directory}/epoch=0.ckpt" if resume else None
    run.fit(module, torch.utils.data.DataLoader(data, batch_size=batch_size), ckpt_path=path)
    if not resume:
        run.save_checkpoint(f"{directory}/after.ckpt")
    return weights(module)


PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_plan": PLAN}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("devices", "data_size", "strategy", "optimizer"),
    [
        (2, 1, TENSOR, "AdamW"),
        (2, 1, TENSOR, "Adagrad"),
        (4, 2, {**TENSOR, "zero_stage": 3}, "AdamW"),
        (4, 4, {"zero_stage": 2}, "Adafactor"),
        (2, 2, {"zero_stage": 3}, "Adafactor"),
        (2, 1, TENSOR, "Adafactor"),
        (4, 2, {**TENSOR, "zero_stage": 3}, "Adafactor"),
        (2, 1, {"pipeline_parallel_size": 2}, "Adafactor"),
    ],
)
def test_slices_and_statistics_find_their_place(
    devices: int, data_size: int, strategy: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    """A slice saved as the whole, row statistics of one rank taken for those of all."""
    saved = run_ranks(_pairs, devices, str(tmp_path), devices, 8 // data_size, strategy, optimizer, False)[0]
    others: list[tuple[int, int, dict[str, Any]]] = [(2, 4, {"zero_stage": 1}), (2, 8, {"pipeline_parallel_size": 2})]
    others += [(4, 4, {**TENSOR, "zero_stage": 1})]
    for other_devices, batch_size, other in [*others, (devices, 8 // data_size, strategy)]:
        for result in run_ranks(
            _pairs, other_devices, str(tmp_path), other_devices, batch_size, other, optimizer, True
        ):
            assert_same_weights(result, saved)
    for name in ("epoch=0", "after"):
        assert main(["convert", str(tmp_path / f"{name}.ckpt"), str(tmp_path / f"{name}.out")]) == 0
    state = torch.load(tmp_path / "after.out", weights_only=False)
    module = Pairs(optimizer)
    module.load_state_dict(state["state_dict"], strict=True)
    assert_same_weights(weights(module), saved)
    plain = module.configure_optimizers()
    plain.load_state_dict(state["optimizer_states"][0])
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()  # states of the wrong shape would fail
    (tmp_path / "epoch=0.ckpt").rename(tmp_path / "sharded.ckpt")
    (tmp_path / "epoch=0.out").rename(tmp_path / "epoch=0.ckpt")
    assert_same_weights(_pairs(str(tmp_path), 1, 8, "auto", optimizer, True), saved)
    for result in run_ranks(_pairs, devices, str(tmp_path), devices, 8 // data_size, strategy, optimizer, True):
        assert_same_weights(result, saved)
