"""Small objects with tensors, gathered over a group."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bigmodel.pipeline.exchange import _dumps, gather_objects
from lightning_bigmodel.testing import CollectiveCounter, run_ranks

_TENSORS = {
    "number": torch.tensor(1.5),
    "flag": torch.tensor(True),
    "integer": torch.tensor(2**40),
    "unsigned": torch.tensor([3], dtype=torch.uint16),
    "half": torch.arange(6.0).reshape(2, 3).bfloat16(),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "expanded": torch.ones(1).expand(4),
    "empty": torch.empty(0, 3),
    "complex": torch.tensor([1 + 2j]),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "not a number": torch.tensor([float("nan"), float("-inf")]),
    "sparse": torch.eye(2).to_sparse(),
    "trained": torch.ones(2, requires_grad=True),
    "parameter": nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("name", _TENSORS)
def test_every_kind_of_tensor_arrives_as_it_was(name):
    """A tensor that loses its type, shape or values would be logged, or given to the user's hooks, wrongly."""
    tensor = _TENSORS[name]
    found = pickle.loads(_dumps({"here": [tensor]}))["here"][0]
    assert type(found) is type(tensor)
    assert found.requires_grad == tensor.requires_grad
    torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True)


def test_what_arrives_may_be_written_to():
    """Users edit what a step returned in place; a view of read-only memory would crash."""
    found = pickle.loads(_dumps(torch.zeros(2)))
    found.add_(1)
    assert found.tolist() == [1.0, 1.0]


def gathered() -> tuple[list[Any], dict[str, tuple[int, int]]]:
    """One exchange on this rank and what it cost."""
    rank = torch.distributed.get_rank()
    with CollectiveCounter() as counter:
        found = gather_objects({"rank": rank, "losses": [torch.tensor(float(rank + i)) for i in range(8)]}, None)
    return found, counter.as_dict()


def test_every_rank_gets_every_ranks_value_in_few_bytes():
    """A tensor sent as a `torch.save` archive takes 300 bytes and 0.1 ms a number, in every step."""
    for found, counts in run_ranks(gathered, 2):
        assert [part["rank"] for part in found] == [0, 1]
        assert [[float(loss) for loss in part["losses"]] for part in found] == [
            [float(rank + i) for i in range(8)] for rank in range(2)
        ]
        assert counts == {"all_gather": (1, 1024)}


def _gather_large() -> tuple[list[Any], dict[str, tuple[int, int]]]:
    with CollectiveCounter() as counter:
        found = gather_objects("x" * (3000 * torch.distributed.get_rank()), None)
    return found, counter.as_dict()


def test_large_values_follow_in_one_more_message():
    """A value cut off where it does not fit, or sent by only those ranks whose own is large."""
    for found, counts in run_ranks(_gather_large, 2):
        assert found == ["", "x" * 3000]
        assert counts["all_gather"][0] == 2
        assert 3000 < counts["all_gather"][1] < 3100
