"""Micro-batches that find their own size under a limit of memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.pipeline.memory_limit import MemoryLimit, is_out_of_memory
from lightning_bigmodel.pipeline.microbatch_size import MicrobatchSizer
from lightning_bigmodel.testing import RanksFailedError
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)
_WIDTH, _NUM_BLOCKS = 16, 4


class Keeps(LightningModule):
    """Blocks that keep what they compute; counters, a buffer, a metric and random numbers that a step changes."""

    def __init__(self, greedy_from: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()
        self.num_parts: list[int] = []
        self.total = torch.zeros(1)  # written in place, as are those of a block
        self.blocks[0].calls, self.blocks[0].total = 0, torch.zeros(1)  # type: ignore[assignment]
        self.greedy_from = greedy_from

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Regression."""
        hidden = batch[0]
        for block in self.blocks:
            hidden = hidden + block(hidden)
            if batch_idx >= self.greedy_from >= 0:  # what no estimate on the first batch foresees
                hidden = hidden + torch.tanh(torch.tanh(hidden * 2.0) * 2.0) * 0.01
        self.seen.add_(len(batch[0]))
        self.total[0] += len(batch[0])
        self.blocks[0].calls += len(batch[0])
        self.blocks[0].total[0] += len(batch[0])  # type: ignore[index,operator]
        loss = nn.functional.mse_loss(self.head(hidden.mean(1)), batch[1])
        self.mean(loss.detach(), weight=len(batch[0]))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        """How the strategy split the batch."""
        strategy = self.trainer.strategy
        if isinstance(strategy, BigModelStrategy):
            self.num_parts.append(strategy.engine.num_parts)

    def configure_optimizers(self) -> Any:
        """With momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Lengths:
    """Sample i has the length of its batch."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        self.lengths, self.batch_size = lengths, batch_size

    def __len__(self) -> int:
        return len(self.lengths) * self.batch_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = self.lengths[index // self.batch_size]
        return torch.randn(length, _WIDTH, generator=generator), torch.randn(1, generator=generator)


def _kept_bytes(length: int) -> int:
    """What one sample of this length keeps for backward: each block's input, output, and their sum."""
    return 4 * length * _WIDTH * (2 * _NUM_BLOCKS)


def fit(strategy: Any, devices: int, batch_size: int, lengths: list[int], **options: Any) -> dict[str, Any]:
    """One epoch; whole batches are of 16 samples of one length."""
    greedy_from, folder, path = (options.pop(name, None) for name in ("greedy_from", "folder", "path"))
    module = Keeps(-1 if greedy_from is None else greedy_from)
    run = trainer(strategy, devices, max_epochs=1 if path is None else 2, **options)
    run.fit(module, DataLoader(Lengths(lengths, 16), batch_size=batch_size), ckpt_path=path)
    if folder is not None:
        run.save_checkpoint(f"{folder}/saved")
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    block: Any = module.blocks[0]
    return {
        "weights": weights(module),
        "num_parts": module.num_parts,
        "metrics": metrics,
        "seen": float(module.seen),
        "counted": [float(module.total), float(block.calls), float(block.total)],
    }


def _fit(settings: dict[str, Any], devices: int, batch_size: int, lengths: list[int], options: Any) -> dict[str, Any]:
    strategy = BigModelStrategy(**{"num_microbatches": "auto", **settings})
    return fit(strategy, devices, batch_size, lengths, **options)


# Parameters, gradients and momentum of the whole model, with the two that an optimizer is taken to need at first.
_RESIDENT = 4 * 4 * (_NUM_BLOCKS * _WIDTH * (_WIDTH + 1) + _WIDTH + 1)
# Ranks, data ranks, settings, least parts, and the samples that fit beside what is kept anyway (a schedule that splits
# backwards keeps nearly all of them to the end).
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], int, float]] = {
    "one": (1, 1, {}, 1, 9),
    "replicas": (2, 2, {}, 1, 5),
    "zero3": (2, 2, {"zero_stage": 3}, 1, 5),
    "pipe": (2, 1, {"pipeline_parallel_size": 2}, 4, 6),
    "zero_bubble": (2, 1, {"pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble"}, 8, 30),
    "pipe_zero3": (4, 2, {"pipeline_parallel_size": 2, "zero_stage": 3}, 4, 3),
    "tensor": (2, 1, {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*.0": "colwise_gather"}}, 1, 9),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_runs_as_one_process_within_the_limit(name: str) -> None:
    """A batch that is lost, or counted twice, where memory runs out; a hang of the ranks that have enough."""
    devices, data_size, settings, least, fitting = LAYOUTS[name]
    lengths = [64, 64, 64, 16, 64]
    expected = fit("auto", 1, 16, lengths, greedy_from=1)
    limit = int(_RESIDENT + fitting * _kept_bytes(64))
    given = {**settings, "memory_limit_bytes": limit}
    for found in run_ranks(_fit, devices, given, devices, 16 // data_size, lengths, {"greedy_from": 1}):
        assert_same_weights(found["weights"], expected["weights"])
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
        assert found["seen"] == expected["seen"] / (data_size if name != "one" else 1)
        if devices == 1:
            assert found["counted"] == [80.0] * 3
        first, greedy, _, short, _ = found["num_parts"]
        assert least <= first <= greedy
        assert greedy > least or fitting > 16  # more is kept than the first batch showed
        assert short <= greedy  # short samples need no small parts


def test_the_size_shrinks_and_grows_back() -> None:
    """Small micro-batches for the rest of the run because of one long batch."""
    (found,) = run_ranks(_fit, 1, {"memory_limit_bytes": _RESIDENT + 5 * _kept_bytes(64)}, 1, 16, [64, 8, 64, 8], {})
    first, second, third, fourth = found["num_parts"]
    assert first == third >= 4
    assert second == fourth == 1


def test_the_size_is_found_again_after_a_restart(tmp_path: Path) -> None:
    """The search begins anew with every run."""
    settings = {"memory_limit_bytes": _RESIDENT + 9 * _kept_bytes(64)}
    options = {"greedy_from": 1, "folder": str(tmp_path)}
    (before,) = run_ranks(_fit, 1, settings, 1, 16, [64] * 6, options)
    (after,) = run_ranks(_fit, 1, settings, 1, 16, [64] * 6, {"greedy_from": 1, "path": f"{tmp_path}/saved"})
    assert after["num_parts"][0] == before["num_parts"][-1]
    assert before["num_parts"][0] != before["num_parts"][-1]


@pytest.mark.parametrize("devices", [1, 2])
def test_one_sample_that_does_not_fit_is_named(devices: int) -> None:
    """An endless search."""
    with pytest.raises(RanksFailedError, match="ran out of memory within `memory_limit_bytes=.*one sample") as caught:
        run_ranks(_fit, devices, {"memory_limit_bytes": _RESIDENT + 10}, devices, 16, [64], {})
    assert len(caught.value.failures) == devices


def test_a_cpu_needs_a_limit() -> None:
    """A program that the system ends."""
    with pytest.raises(RanksFailedError, match="memory_limit_bytes=") as caught:
        run_ranks(_fit, 2, {}, 2, 8, [64], {})
    assert len(caught.value.failures) == 2


def test_sizes_are_searched_between_what_fits_and_what_does_not() -> None:
    """A size far below the largest that fits, or one that is tried again and again."""
    sizer, fits, tried = MicrobatchSizer(), 37, []
    batch = torch.zeros(100, 4)
    for _ in range(12):
        num_parts = sizer.num_parts(batch)
        while -(-100 // num_parts) > fits:
            sizer.failed(batch, num_parts)
            num_parts = max(num_parts + 1, sizer.num_parts(batch))
        sizer.fitted(batch, num_parts)
        tried.append(-(-100 // num_parts))
    assert tried[-1] == 34  # of three parts; two of 50 do not fit
    assert tried[-3:] == [34] * 3
    sizer.failed(batch, 3)
    assert sizer.num_parts(batch) > 3


def test_a_measured_step_takes_the_place_of_the_estimate() -> None:
    """A size by what the trace believes, or one beyond what fits, tried because of it."""
    batch = torch.zeros(64, 4)
    for held, free, expected in ((2, 1000.0, 16), (2, 4000.0, 4), (2, 8000.0, 1), (16, 1000.0, 1), (16, 500.0, 32)):
        sizer = MicrobatchSizer()
        sizer.estimate(batch, 1e9, free)
        assert sizer.num_parts(batch) == 64
        sizer.fitted(batch, 64)
        # In 16 parts 1000 bytes are kept at most: 500 of each where two are held, so 8000 of a batch; or 1000 of it.
        sizer.measured(batch, 16, 1000, held, free)
        assert sizer.num_parts(batch) == expected
        sizer.fitted(batch, expected)
        for _ in range(3):  # nothing far beyond is tried
            assert expected * 0.7 < sizer.num_parts(batch) <= expected
            sizer.fitted(batch, sizer.num_parts(batch))
    sizer = MicrobatchSizer()
    sizer.failed(batch, 2)
    known = sizer.num_parts(batch)
    sizer.measured(batch, 16, 1, 1, 1000.0)  # memory has run out, whatever was measured
    assert sizer.num_parts(batch) == known > 2


def test_the_limit_counts_each_storage_while_it_is_kept() -> None:
    """Views counted twice, parameters counted at all, or what is given up counted for ever."""
    limit, layer = MemoryLimit(10_000), nn.Linear(10, 10)
    for _ in range(3):
        inputs = torch.ones(20, 10, requires_grad=True) * 1.0
        with limit.watching():
            output = layer(inputs).tanh()
            both = (output.view(10, 20) * output.view(10, 20)).sum()
        assert limit.saved_bytes == 2 * 20 * 10 * 4
        both.backward()
        del output, both, inputs
        assert limit.saved_bytes == 0
    assert limit.peak_bytes == 1600
    with limit.watching():
        abandoned = layer(torch.ones(20, 10, requires_grad=True) * 1.0).tanh()
    del abandoned
    assert limit.saved_bytes == 0
    layer.requires_grad_(False)  # a frozen base is there anyway, too
    with limit.watching():
        frozen = layer(torch.ones(20, 10, requires_grad=True) * 1.0)
        assert limit.saved_bytes == 0
    del frozen
    layer.requires_grad_(True)
    limit.resident_bytes = 9_000
    with limit.watching(), pytest.raises(torch.OutOfMemoryError, match="memory_limit_bytes=10000"):
        layer(torch.ones(20, 10, requires_grad=True) * 1.0).tanh()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("the tokenizer is out of memory of words"), False),
    ],
)
def test_running_out_is_recognised(error: BaseException, expected: bool) -> None:
    """A user's error taken for memory, and the batch run again and again."""
    assert is_out_of_memory(error) is expected
