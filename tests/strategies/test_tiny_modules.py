"""The tiny modules under every kind of layout: equal to one process, or refused on every rank before any batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import (
    TinyBatchNorm,
    TinyCalledTwice,
    TinyChain,
    TinyEncoderDecoder,
    TinyLeak,
    TinyManualOptimization,
    TinyNoChain,
    TinySkips,
    TinyTransformer,
    assert_parallel_equivalent,
    run_ranks,
)

PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}


@pytest.mark.parametrize("kind", [TinyChain, TinyTransformer, TinySkips, TinyEncoderDecoder])
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ({**PIPELINE}, 2),
        ({**PIPELINE, "pipeline_parallel_size": 4}, 4),
        ({**PIPELINE}, 4),
        ({**PIPELINE, "schedule": "ZBVZeroBubble"}, 2),
        ({}, 2),
        ({"num_microbatches": 4}, 1),
    ],
    ids=["pipe 2", "pipe 4", "pipe 2 x data 2", "V", "data 2", "micro-batches only"],
)
def test_layouts_equal_one_process(kind: Any, strategy: dict[str, Any], world_size: int) -> None:
    """A layout whose gradients, metrics or weights are not those of one process."""
    module = kind()
    batch = module.example_batch(8, seed=0)
    report = assert_parallel_equivalent(
        module, batch, BigModelStrategy(**strategy), world_size=world_size, gradient_clip_val=0.1
    )
    assert report.world_size == world_size
    assert report.num_metrics > 0


def test_a_cut_of_ones_own() -> None:
    """Names that are taken for a choice of blocks only, and the cut put elsewhere: here it would be even."""
    module = TinyChain(num_blocks=4)
    names = run_ranks(_modules_of_ranks, 2, ["blocks.0", "blocks.3"])
    assert names[0] == names[1] == [["blocks.0", "blocks.1", "blocks.2"], ["blocks.3"]]
    strategy = BigModelStrategy(**PIPELINE, blocks=["blocks.0", "blocks.3"])
    assert_parallel_equivalent(module, module.example_batch(8, seed=0), strategy)


def test_whole_batch_statistics_with_one_micro_batch() -> None:
    """Batch normalisation is exact where the batch stays whole: gradients, and running statistics on every rank."""
    expected = _buffers("auto", 1)
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "GPipe"}
    module = TinyBatchNorm()
    assert_parallel_equivalent(module, module.example_batch(8, seed=0), BigModelStrategy(**strategy))
    for found in run_ranks(_buffers_of_rank, 2, strategy):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-6), name


def _trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip


def _buffers(strategy: Any, devices: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    module = TinyBatchNorm()
    _trainer(strategy, devices).fit(module, DataLoader(module.dataset(16), batch_size=8))
    return {name: buffer.double().reshape(-1).tolist() for name, buffer in module.named_buffers()}


def _buffers_of_rank(strategy: dict[str, Any]) -> dict[str, list[float]]:
    return _buffers(BigModelStrategy(**strategy), 2)


class _Describes(Callback):
    """Asks what each rank owns while the run lasts."""

    found: list[Any]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = [entry["modules"] for entry in trainer.strategy.describe_ranks()]


def _modules_of_ranks(blocks: list[str]) -> list[Any]:
    module, describes = TinyChain(num_blocks=4), _Describes()
    trainer = _trainer(BigModelStrategy(**PIPELINE, blocks=blocks), 2, callbacks=[describes])
    trainer.fit(module, DataLoader(module.dataset(8), batch_size=8))
    return describes.found


# -- refused -----------------------------------------------------------------------------------------------------------


class _Lbfgs(TinyChain):
    """An optimizer that calls the step several times."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class _NeverCalled(TinyChain):
    """Has a child that no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(8, 8)


class _Counts(Callback):
    """Counts the training batches that began."""

    num_batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.num_batches += 1


def _refusal(kind: Any, settings: dict[str, Any]) -> tuple[str, str, int]:
    """Type, message and number of batches begun, on this rank."""
    counts, module = _Counts(), kind()
    try:
        strategy = BigModelStrategy(**{**PIPELINE, **settings})
        trainer = _trainer(strategy, torch.distributed.get_world_size(), callbacks=[counts])
        trainer.fit(module, DataLoader(module.dataset(8), batch_size=8))
    except Exception as error:
        return type(error).__name__, str(error), counts.num_batches
    return "", "it ran", counts.num_batches


@pytest.mark.parametrize(
    ("kind", "settings", "parts"),
    [
        (TinyNoChain, {}, ["found no chain of blocks", "layer (Linear)", 'blocks=["model.layers.*"]']),
        (TinyCalledTwice, {}, ["`blocks.1` (TanhBlock) is called 2 times in one step"]),
        (TinyLeak, {}, ["A value made inside `blocks.0`", "the code after the last block", "Return it from the block"]),
        (TinyBatchNorm, {}, ["`blocks.0.norm` (BatchNorm1d)", "`num_microbatches=4`", "GroupNorm"]),
        (TinyManualOptimization, {}, ["manual optimization", "automatic_optimization=True"]),
        (_Lbfgs, {}, ["LBFGS", "AdamW"]),
        (TinyChain, {"schedule": "ZBVZeroBubble", "blocks": ["blocks.[012]"]}, ["needs 4 pipeline stages", "3 blocks"]),
        (TinyChain, {"blocks": ["block.*"]}, ["'block.*'", "Nearest names: 'blocks"]),
        (TinyChain, {"blocks": ["blocks.*", "blocks.0.*"]}, ["name one level only"]),
        (_NeverCalled, {"blocks": ["blocks.*", "spare"]}, ["'spare'", "is called in a step"]),
        (TinyChain, {"pipeline_parallel_size": 3, "num_microbatches": 3}, ["2 ranks", "`pipeline_parallel_size=3`"]),
        (TinyChain, {"pipeline_parallel_size": "all", "num_microbatches": 1}, ["`schedule='1F1B'`", "at least 2"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_refused_on_every_rank_before_any_batch(kind: Any, settings: dict[str, Any], parts: list[str]) -> None:
    """An error on one rank only is a hang on the others; one in the middle of a run costs the run."""
    found = run_ranks(_refusal, 2, kind, settings)
    assert len(found) == 2
    for name, message, num_batches in found:
        assert name in ("ValueError", "PartitionError")
        assert num_batches == 0
        for part in parts:
            assert part in message


@pytest.mark.parametrize(
    ("settings", "error", "parts"),
    [
        ({"schedule": "1f1b"}, ValueError, ["`schedule='1f1b'`", "Did you mean '1F1B'?"]),
        ({"schedule": "DualPipeV"}, ValueError, ["`num_microbatches=2`", "Set `num_microbatches=4`"]),
        ({"schedule": "Interleaved1F1B", "num_microbatches": 5}, ValueError, ["`num_microbatches=5`", "Set `num_"]),
        ({"pipeline_parallel_size": 2.0}, ValueError, ["`pipeline_parallel_size=2.0`"]),
        ({"pipeline_parallel_size": True}, ValueError, ["`pipeline_parallel_size=True`"]),
        ({"pipeline_parallel_size": "everything"}, ValueError, ["`pipeline_parallel_size='everything'`"]),
        ({"num_microbatches": 0}, ValueError, ["`num_microbatches=0`", "at least 1"]),
        ({"num_microbatches": "4"}, ValueError, ["`num_microbatches='4'`"]),
        ({"blocks": 3}, TypeError, ["`blocks=3`"]),
        ({"blocks": [1, 2]}, TypeError, ["`blocks=[1, 2]`"]),
        ({"blocks": []}, ValueError, ["`blocks=[]`"]),
        ({"microbatch_weight": "sample"}, ValueError, ["`microbatch_weight='sample'`", "'samples'"]),
        ({"batch_source": "broadcasted"}, ValueError, ["`batch_source='broadcasted'`", "'broadcast'"]),
        ({"pipeline_parallel_size": 1, "schedule": "GPipe"}, ValueError, ["`pipeline_parallel_size=1`"]),
    ],
)
def test_settings_are_refused_where_they_are_given(settings: dict[str, Any], error: Any, parts: list[str]) -> None:
    """A typo found out when the cluster has started, or not at all."""
    with pytest.raises(error) as caught:
        BigModelStrategy(**{"pipeline_parallel_size": 2, "num_microbatches": 2, **settings})
    for part in parts:
        assert part in str(caught.value)


def test_the_comparison_sees_a_difference() -> None:
    """An oracle that always agrees: two micro-batches of unequal size, weighed alike, must differ from one process."""
    module = TinyChain()
    strategy = BigModelStrategy(pipeline_parallel_size=2, num_microbatches=2, microbatch_weight=_wrong)
    with pytest.raises(AssertionError, match="differs by up to") as caught:
        assert_parallel_equivalent(module, module.example_batch(7, seed=0), strategy)
    assert "metric `train_loss`" in str(caught.value)


def _wrong(microbatch: Any) -> float:
    return math.sqrt(len(microbatch[0]))
