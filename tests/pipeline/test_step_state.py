"""Attributes a step writes: noticed, undone on stages that only repeat code, and repeated on other ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bigmodel.pipeline.step_state import StepState


class Module(nn.Module):
    """Has attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.losses: list[Any] = [torch.zeros(1)]
        self.table: dict[str, Any] = {"a": 1, "nested": {"b": [1]}}
        self.best: Any = None
        self.trainer = "the host's"


def write(module: Module) -> None:
    """What a step does."""
    module.count += 1
    module.losses.append(torch.ones(1))
    module.table["nested"]["b"].append(2)
    module.best = torch.full((1,), 3.0, requires_grad=True) * 1
    module.new = "new"
    module.trainer = "other"


def test_changes_are_repeated_elsewhere() -> None:
    """Lists that only the last stage fills, counters, new attributes; what belongs to the host stays."""
    first, second = Module(), Module()
    before, elsewhere = StepState(first, {"trainer"}), StepState(second, {"trainer"})
    write(first)
    changes = before.changes()
    held = second.losses
    elsewhere.apply(changes)
    assert second.count == 1
    assert second.losses is held
    assert [float(loss) for loss in second.losses] == [0.0, 1.0]
    assert second.table == {"a": 1, "nested": {"b": [1, 2]}}
    assert second.best.grad_fn is None
    assert second.new == "new"
    assert second.trainer == "the host's"


def test_only_additions_to_a_list_travel() -> None:
    """A list that grows over an epoch would be sent whole at every step."""
    module = Module()
    module.losses = list(range(1000))
    before = StepState(module, ())
    module.losses.append(1000)
    assert before.changes() == {"losses": ("appended", [1000])}


def test_restoring_takes_everything_back() -> None:
    """A counter before the blocks, advanced once on every stage."""
    module = Module()
    before = StepState(module, {"trainer"})
    table, losses = module.table, module.losses
    write(module)
    before.restore()
    assert module.count == 0
    assert len(module.losses) == 1
    assert module.table == {"a": 1, "nested": {"b": [1]}}
    assert (module.table is table, module.losses is losses) == (True, True)
    assert module.best is None
    assert not hasattr(module, "new")
    assert before.changes() == {}


@pytest.mark.parametrize("value", [threading.Lock(), [threading.Lock()], {"lock": threading.Lock()}])
def test_what_cannot_be_sent_stays(value: Any) -> None:
    """One attribute that does not pickle must not fail the step, nor keep the others."""
    module = Module()
    before = StepState(module, ())
    module.best = value
    module.count = 5
    assert before.changes() == {"count": ("assigned", 5)}


def test_buffers_and_edits_in_place_count() -> None:
    """A running center, written on the last stage only: the first would go on with the old one."""
    first, second = Module(), Module()
    for module in (first, second):
        module.register_buffer("center", torch.zeros(2))
        module.inner = nn.BatchNorm1d(2)
        module.best = torch.zeros(2)
    names = ["center", "inner.running_mean"]
    before, elsewhere = StepState(first, (), names), StepState(second, (), names)
    held = first.center
    first.center.add_(1.0)
    first.best.add_(2.0)
    first.inner.running_mean = torch.full((2,), 3.0)
    changes = before.changes()
    assert {name: value.tolist() for name, (_, value) in changes.items()} == {
        "center": [1.0, 1.0],
        "inner.running_mean": [3.0, 3.0],
        "best": [2.0, 2.0],
    }
    second.center.sub_(5.0)  # what code before the blocks did here
    elsewhere.apply(changes)
    assert second.center.tolist() == [1.0, 1.0]
    assert second.inner.running_mean.tolist() == [3.0, 3.0]
    assert second.best.tolist() == [2.0, 2.0]
    before.restore()
    assert first.center is held
    assert first.center.tolist() == first.inner.running_mean.tolist() == [0.0, 0.0]
    assert set(before.changes()) <= {"best"}
