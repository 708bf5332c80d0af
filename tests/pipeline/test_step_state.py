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


def _nested(depth: int) -> tuple[list[Any], list[Any]]:
    """A list in a list in a list, and the innermost one."""
    outer: list[Any] = []
    inner = outer
    for _ in range(depth - 1):
        inner.append([])
        inner = inner[0]
    return outer, inner


@pytest.mark.parametrize("depth", [5, 50, 99])
def test_lists_are_looked_into_at_any_depth(depth: int) -> None:
    """What a step appends to a list inside of others, seen on the last stage only."""
    first, second = Module(), Module()
    (first.best, inner), (second.best, elsewhere) = _nested(depth), _nested(depth)
    before, other = StepState(first, ()), StepState(second, ())
    inner.append({"loss": torch.ones(1, requires_grad=True) * 2})
    elsewhere.append("what code before the blocks did here")
    other.apply(before.changes())
    found = second.best
    for _ in range(depth - 1):
        (found,) = found
    assert [float(each["loss"]) for each in found] == [2.0]
    assert not found[0]["loss"].requires_grad
    before.restore()
    assert inner == []


def test_what_is_too_deep_is_restored_and_not_sent() -> None:
    """The end of the run by Python's limit on recursion, for a value that no other rank asks for."""
    module = Module()
    module.best, inner = _nested(5000)
    before = StepState(module, ())
    inner.append(1)
    module.count = 5
    assert before.changes() == {"count": ("assigned", 5)}
    before.restore()
    assert inner == []
    while module.best:  # one by one: Python would free them by recursion
        module.best = module.best[0]


def test_sets_are_kept() -> None:
    """Samples counted once over an epoch, in a set that only the last stage fills."""
    first, second = Module(), Module()
    for module in (first, second):
        module.seen = {1, 2}
        module.table["sets"] = [{"a"}]
        module.shrinks = {1, 2}
    before, elsewhere = StepState(first, ()), StepState(second, ())
    held, inner = second.seen, first.table["sets"][0]
    first.seen.add(3)
    inner.add("b")
    first.shrinks.remove(2)
    second.seen.add(9)
    changes = before.changes()
    assert changes["seen"] == ("added", {3})  # not the whole of it at every step
    elsewhere.apply(changes)
    assert second.seen is held
    assert (second.seen, second.table["sets"], second.shrinks) == ({1, 2, 3}, [{"a", "b"}], {1})
    before.restore()
    assert (first.seen, first.shrinks) == ({1, 2}, {1, 2})
    assert first.table["sets"][0] is inner
    assert inner == {"a"}
    assert before.changes() == {}


def test_tensors_in_sets_leave_their_graph() -> None:
    """A tensor with a graph, which does not pickle."""
    module = Module()
    module.seen = set()
    before = StepState(module, ())
    module.seen.add(torch.ones(1, requires_grad=True) * 2)
    kind, (sent,) = before.changes()["seen"]
    assert (kind, sent.requires_grad, float(sent)) == ("added", False, 2.0)


def test_containers_that_hold_themselves() -> None:
    """Walks without an end."""
    first, second = Module(), Module()
    for module in (first, second):
        module.table["self"] = module.table
        module.losses.append(module.losses)
    before, elsewhere = StepState(first, ()), StepState(second, ())
    assert before.changes() == {}
    first.table["nested"]["b"].append(2)
    first.losses.append(3)
    elsewhere.apply(before.changes())
    assert second.table["nested"]["b"] == second.table["self"]["nested"]["b"] == [1, 2]
    assert (len(second.losses), second.losses[2]) == (3, 3)
    before.restore()
    assert first.table["self"] is first.table
    assert len(first.losses) == 2
