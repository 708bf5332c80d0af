"""Batches of every form, split and put together again."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch

from lightning_bigmodel.pipeline.microbatch import batch_size, join_outputs, microbatch_weights, split_batch

Pair = collections.namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass
class Record:
    """A batch class of a user's own."""

    tokens: torch.Tensor
    names: list[str]
    scale: float


def rows(num_samples: int, width: int = 3) -> torch.Tensor:
    """Distinct values."""
    return torch.arange(num_samples * width, dtype=torch.float32).view(num_samples, width)


@pytest.mark.parametrize(
    "batch",
    [
        rows(7),
        (rows(7), torch.arange(7)),
        Pair(rows(7), torch.arange(7)),
        {"x": rows(7), "mask": torch.ones(3, 3), "length": 9, "none": None, "texts": list("abcdefg")},
        [rows(7), {"deep": (torch.arange(7),)}],
        Record(rows(7), list("abcdefg"), 0.5),
    ],
    ids=["tensor", "tuple", "namedtuple", "dict", "nested", "dataclass"],
)
def test_parts_keep_the_form_and_cover_every_sample_once(batch: Any) -> None:
    """A part of another type, a sample lost, a shared mask cut."""
    parts = split_batch(batch, 4)
    assert [batch_size(part) for part in parts] == [2, 2, 2, 1]
    assert all(type(part) is type(batch) for part in parts)
    if isinstance(batch, dict):
        assert all(part["mask"].shape == (3, 3) for part in parts)
        assert all((part["length"], part["none"]) == (9, None) for part in parts)
        assert sum((part["texts"] for part in parts), []) == batch["texts"]
    if isinstance(batch, Record):
        assert sum((part.names for part in parts), []) == batch.names
    joined = join_outputs(parts, [2, 2, 2, 1], [2.0, 2.0, 2.0, 1.0])
    first, whole = (b[0] if isinstance(b, (tuple, list)) else b for b in (joined, batch))
    if isinstance(whole, torch.Tensor):
        assert torch.equal(first, whole)


def test_parts_share_the_batchs_memory() -> None:
    """A copy of every batch."""
    batch = rows(8)
    assert all(
        part.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr() for part in split_batch(batch, 4)
    )


def test_fewer_samples_than_parts_give_fewer_parts() -> None:
    """An empty part, whose mean would be NaN."""
    assert [len(part) for part in split_batch(rows(3), 8)] == [1, 1, 1]
    assert len(split_batch({"nothing": 1}, 4)) == 1


def test_weights_are_those_asked_for() -> None:
    """Samples counted as if parts were equal."""
    parts = split_batch(rows(7), 4)
    assert microbatch_weights(parts, "samples") == [2.0, 2.0, 2.0, 1.0]
    assert microbatch_weights(parts, "equal") == [0.25] * 4
    assert microbatch_weights(parts, "sum") == [1.0] * 4
    assert microbatch_weights(parts, lambda part: part[0, 0]) == [0.0, 6.0, 12.0, 18.0]
    with pytest.raises(ValueError, match="finite"):
        microbatch_weights(parts, lambda part: -1.0)


def test_numbers_are_averaged_and_parts_without_output_left_out() -> None:
    """None from one part takes the whole batch's output away, or counts as zero."""
    outputs = [{"loss": torch.tensor(1.0), "rows": rows(2)}, None, {"loss": torch.tensor(4.0), "rows": rows(1)}]
    joined = join_outputs(outputs, [2, 2, 1], [2.0, 2.0, 1.0])
    assert joined["loss"].item() == pytest.approx(2.0)
    assert joined["rows"].shape == (3, 3)
    assert join_outputs([None, None], [1, 1], [1.0, 1.0]) is None
    assert join_outputs([1.0, 4.0], [2, 1], [2.0, 1.0]) == pytest.approx(2.0)
