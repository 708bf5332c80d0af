"""Data ranks whose loaders the user shards, and that run out of batches at different times."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import RanksFailedError
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import Classifier, Sequences, pad, trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)
_ROWS = 2  # samples a batch of one data rank
# Batches of each data rank, by the index of the first sample.
_STARTS = ([0, 2, 4], [6, 8, 10, 12, 14])


class Stream(IterableDataset[list[dict[str, Any]]]):
    """Batches of samples, without a length."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        data = Sequences(16)
        for batch in self.batches:
            yield pad([data[index] for index in batch])


def _own(start: int) -> list[int]:
    return list(range(start, start + _ROWS))


def pooled(uneven_inputs: str) -> list[list[int]]:
    """The batches of all ranks together."""
    first, second = _STARTS
    if uneven_inputs == "stop":
        second = second[: len(first)]
    return [
        [index for starts in (first, second) if at < len(starts) for index in _own(starts[at])]
        for at in range(len(second))
    ]


class Streams(Classifier):
    """Each data rank has its own stream."""

    def __init__(self, uneven_inputs: str) -> None:
        super().__init__()
        self.uneven_inputs = uneven_inputs

    def _loader(self) -> Any:
        assert self.trainer.strategy is not None
        mesh = getattr(self.trainer.strategy, "mesh", None)
        if mesh is None or mesh.data_size == 1:
            return DataLoader(Stream(pooled(self.uneven_inputs)), batch_size=None)
        return DataLoader(Stream([_own(start) for start in _STARTS[mesh.data_rank]]), batch_size=None)

    def train_dataloader(self) -> Any:
        """Of unknown length."""
        return self._loader()

    def val_dataloader(self) -> Any:
        """Of unknown length too, and never cut short."""
        return self._loader()

    def configure_optimizers(self) -> Any:
        """Without a schedule, which would need a validation."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(strategy: Any, devices: int, uneven_inputs: str, validates: bool) -> dict[str, Any]:
    """Two epochs in windows of two batches."""
    module = Streams(uneven_inputs)
    options: dict[str, Any] = {"val_check_interval": 2} if validates else {"limit_val_batches": 0}
    run = trainer(strategy, devices, accumulate_grad_batches=2, max_epochs=2, **options)
    run.fit(module)
    names = ("train_loss", "accuracy", "num_samples", "val_loss", "val_accuracy")
    metrics = {key: float(value) for key, value in run.callback_metrics.items() if key.removesuffix("_epoch") in names}
    return {"weights": weights(module), "metrics": metrics, "global_step": run.global_step}


def _train(settings: dict[str, Any], devices: int, uneven_inputs: str, validates: bool) -> dict[str, Any]:
    return train(BigModelStrategy(**settings, uneven_inputs=uneven_inputs), devices, uneven_inputs, validates)


PIPE = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.mark.parametrize(
    ("name", "devices", "settings"),
    [
        ("replicas", 2, {}),
        ("zero2", 2, {"zero_stage": 2}),
        ("zero3", 2, {"zero_stage": 3}),
        ("microbatches", 2, {"num_microbatches": 2}),
        ("pipe", 4, PIPE),
        ("pipe_zero3", 4, {**PIPE, "zero_stage": 3}),
        ("tensor", 4, {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*.mix": "colwise_gather"}}),
    ],
)
@pytest.mark.parametrize("uneven_inputs", ["join", "stop"])
def test_no_batch_is_lost_or_counted_twice(name: str, devices: int, settings: Any, uneven_inputs: str) -> None:
    """A hang of the rank that has more, or a repeated batch in gradients, metrics or step counts."""
    validates = name in ("replicas", "zero3")
    (expected,) = run_ranks(_train, 1, {}, 1, uneven_inputs, validates)
    assert expected["global_step"] == 2 * (3 if uneven_inputs == "join" else 2)
    for result in run_ranks(_train, devices, settings, devices, uneven_inputs, validates):
        assert result["global_step"] == expected["global_step"]
        assert_same_weights(result["weights"], expected["weights"])
        if uneven_inputs == "join":  # evaluation has all batches in either case
            assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


class FirstIsEmpty(Streams):
    """The first data rank has no batch at all."""

    def _loader(self) -> Any:
        mesh = getattr(self.trainer.strategy, "mesh", None)
        starts = [0, 2, 4, 6]
        if mesh is not None and mesh.data_size > 1 and mesh.data_rank == 0:
            starts = []
        return DataLoader(Stream([_own(start) for start in starts]), batch_size=None)


def _train_on_rest(settings: dict[str, Any], devices: int) -> dict[str, Any]:
    module = FirstIsEmpty("join")
    trainer(BigModelStrategy(**settings), devices, limit_val_batches=0).fit(module)
    return weights(module)


@pytest.mark.parametrize(("devices", "settings"), [(2, {"zero_stage": 3}), (4, PIPE)])
def test_a_rank_without_any_batch(devices: int, settings: dict[str, Any]) -> None:
    """A model cut on the first batch of a rank that has none."""
    (expected,) = run_ranks(_train_on_rest, 1, {}, 1)
    for found in run_ranks(_train_on_rest, devices, settings, devices):
        assert_same_weights(found, expected)


def test_unknown_choice() -> None:
    """A choice that is silently ignored."""
    with pytest.raises(ValueError, match="`uneven_inputs='wait'` is not known"):
        BigModelStrategy(uneven_inputs="wait")  # type: ignore[arg-type]  # what is tested


def _few_samples(kind: str) -> None:
    module = Classifier()
    run = trainer(BigModelStrategy(), 2, max_epochs=1)
    few = DataLoader(Sequences(1), collate_fn=pad, batch_size=2)
    if kind == "fit":
        run.fit(module, DataLoader(Sequences(4), collate_fn=pad, batch_size=2), few)
    else:
        getattr(run, kind)(module, few)


@pytest.mark.parametrize("kind", ["fit", "validate", "test", "predict"])
def test_fewer_samples_than_data_ranks_are_named_on_all(kind: str) -> None:
    """An error of the host's own on one rank, which names no remedy."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_few_samples, 2, kind)
    assert len(caught.value.failures) == 2
    for text in caught.value.failures.values():
        assert text.splitlines()[-1].startswith("ValueError: ")
        assert "has 1 sample for 2 data ranks" in text
