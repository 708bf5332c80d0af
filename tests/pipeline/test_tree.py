"""Containers users pass around are walked and rebuilt with their own types."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.modeling_outputs import BaseModelOutput

from lightning_bigmodel.pipeline.tree import detached, leaves, map_leaves, map_tensors, structure, tensor_leaves

ONE = torch.ones(2, 3)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    tensor: Any
    note: str = "kept"


VALUES: dict[str, Callable[[], Any]] = {
    "list": lambda: [ONE, 1, None],
    "tuple": lambda: (ONE, "text"),
    "dict": lambda: {"a": ONE, "b": [ONE, {"c": 2.5}]},
    "ordered": lambda: OrderedDict(b=ONE, a=ONE * 2),
    "default": lambda: defaultdict(list, a=ONE),
    "named tuple": lambda: Pair(ONE, [ONE]),
    "frozen dataclass": lambda: Frozen(ONE),
    "model output": lambda: BaseModelOutput(last_hidden_state=ONE, hidden_states=(ONE, ONE)),
    "packed": lambda: pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_mapping_keeps_the_type_and_the_other_leaves(name: str) -> None:
    """A dict where a model output was, or a dataclass passed on whole and never sent."""
    value = VALUES[name]()
    mapped = map_tensors(lambda tensor: tensor * 2, value)
    assert type(mapped) is type(value)
    assert all(torch.equal(new, old * 2) for new, old in zip(tensor_leaves(mapped), tensor_leaves(value), strict=True))
    others = [[leaf for leaf in leaves(v) if not isinstance(leaf, torch.Tensor)] for v in (mapped, value)]
    assert others[0] == others[1]
    assert len(tensor_leaves(value)) >= 1


@pytest.mark.parametrize("name", VALUES)
def test_any_leaf_can_take_a_tensors_place(name: str) -> None:
    """Descriptions of tensors travel in the containers, also in those whose constructor checks what it is given."""
    described = map_leaves(lambda leaf: "tensor" if isinstance(leaf, torch.Tensor) else leaf, VALUES[name]())
    assert "tensor" in list(leaves(described))
    assert tensor_leaves(described) == []


def test_packed_sequences_come_back_whole() -> None:
    """One rebuilt without its constructor must still unpack."""
    packed = pack_sequence([torch.arange(3.0), torch.arange(1.0)])
    rebuilt = map_tensors(torch.clone, packed)
    assert isinstance(rebuilt, PackedSequence)
    assert torch.equal(torch.nn.utils.rnn.pad_packed_sequence(rebuilt)[0][:, 0], torch.arange(3.0))


def test_structure_tells_forms_apart_and_sizes_out() -> None:
    """Two batches that run differently under one key, or alike under two, which traces anew at every step."""
    form, sizes = structure({"x": torch.zeros(2, 5), "flag": True, "length": 5, "rate": 0.1, "mask": None})
    assert sizes == (2, 5, 5)
    same, other = structure({"x": torch.zeros(3, 7), "flag": True, "length": 7, "rate": 0.9, "mask": None})
    assert same == form
    assert other == (3, 7, 7)
    for changed in (
        {"x": torch.zeros(2, 5, dtype=torch.int64), "flag": True, "length": 5, "rate": 0.1, "mask": None},
        {"x": torch.zeros(2, 5, 1), "flag": True, "length": 5, "rate": 0.1, "mask": None},
        {"x": torch.zeros(2, 5), "flag": False, "length": 5, "rate": 0.1, "mask": None},
        {"x": torch.zeros(2, 5), "flag": True, "length": 5, "rate": 0.1, "mask": torch.zeros(1)},
        {"y": torch.zeros(2, 5), "flag": True, "length": 5, "rate": 0.1, "mask": None},
    ):
        assert structure(changed)[0] != form
    assert hash(form) == hash(same)


def test_detached_values_hold_no_graph() -> None:
    """A kept output that keeps its stage's whole graph alive."""
    tensor = torch.ones(1, requires_grad=True) * 2
    assert detached({"a": [tensor]})["a"][0].grad_fn is None
