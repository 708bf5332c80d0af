"""The trace of a step: which values travel, which were edited, read, drawn or leaked, and nothing changed behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bigmodel.pipeline.blocks import find_units
from lightning_bigmodel.pipeline.partition import PartitionError, cut_points, parameter_owners
from lightning_bigmodel.pipeline.trace import StepTrace, TraceError, call_order, trace_step

WIDTH = 4
CPU = torch.device("cpu")


class Chain(nn.Module):
    """Four linear blocks, an embedding of its own and a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.calls: list[int] = []


def traced(step: Callable[[Chain, Tensor], Any], model: Chain | None = None, *, fake: bool = True) -> StepTrace:
    """Trace a step of a chain on a batch of two samples."""
    model = model or Chain()
    inputs = torch.arange(2.0 * WIDTH).reshape(2, WIDTH)
    order = call_order(model, lambda: step(model, inputs), CPU, fake=fake)
    tree = find_units(model, order, "auto", 2)
    candidates = {module: tree.names[module] for module in tree.candidates}
    return trace_step(model, lambda: step(model, inputs), candidates, tree.blocks, CPU, fake=fake)


def plain(model: Chain, hidden: Tensor) -> Tensor:
    """The easy step."""
    for block in model.blocks:
        hidden = block(hidden)
    return hidden.square().mean()


@pytest.mark.parametrize("fake", [True, False])
def test_a_chain_carries_one_value_over_each_cut(fake: bool) -> None:
    """A value too many costs bandwidth at every step; one too few is NaN."""
    trace = traced(plain, fake=fake)
    assert [call.name for call in trace.units] == [f"blocks.{index}" for index in range(4)]
    assert [trace.carried(cut) for cut in (1, 2, 3)] == [[(0, 0)], [(1, 0)], [(2, 0)]]
    assert all(call.flops == 2 * 2 * WIDTH * WIDTH for call in trace.units)
    assert trace.units[0].leaf_specs[0].num_bytes == 2 * WIDTH * 4
    assert len(trace.trained) == 8


def test_skips_travel_as_far_as_they_are_used() -> None:
    """A skip dropped at the first cut, or one that travels on after its last use."""

    def step(model: Chain, inputs: Tensor) -> Tensor:
        first = model.blocks[0](inputs)
        third = model.blocks[2](model.blocks[1](first))
        return model.blocks[3](third + first).mean()

    trace = traced(step)
    assert trace.carried(2) == [(0, 0), (1, 0)]
    assert trace.carried(3) == [(0, 0), (2, 0)]
    assert trace.carried(4) == [(3, 0)]


def test_values_written_through_views_are_followed() -> None:
    """Outputs gathered in a buffer slice by slice: the buffer is not the tensor that was written."""

    def step(model: Chain, hidden: Tensor) -> Tensor:
        gathered = torch.zeros(2, 4, WIDTH)
        for index, block in enumerate(model.blocks):
            hidden = block(hidden)
            gathered[:, index] = hidden
        return gathered.mean()

    trace = traced(step)
    assert trace.carried(3) == [(0, 0), (1, 0), (2, 0)]
    assert not trace.flow.edited_in_place


def test_edits_of_outputs_are_noticed_and_bring_their_operands_along() -> None:
    """An edit through a view: stand-ins need memory to be edited, and later stages the values that went in."""

    def step(model: Chain, inputs: Tensor) -> Tensor:
        first = model.blocks[0](inputs)
        second = model.blocks[1](inputs)
        second[:, 0] = first[:, 1]
        return model.blocks[3](model.blocks[2](second) + second).mean()

    trace = traced(step)
    assert {tag[1] for tag in trace.flow.edited_in_place} == {1}
    assert trace.carried(3) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    "read",
    [lambda value: float(value.sum()), lambda value: value.numpy().sum(), lambda value: sum(value.tolist()[0])],
    ids=["float", "numpy", "tolist"],
)
def test_values_read_into_python_reach_every_later_stage(read: Callable[[Tensor], Any]) -> None:
    """Later stages repeat the code, and would take another branch on a stand-in."""

    def step(model: Chain, inputs: Tensor) -> Tensor:
        first = model.blocks[0](inputs)
        factor = 2.0 if abs(read(first.detach())) >= 0 else 1.0
        hidden = first
        for block in list(model.blocks)[1:]:
            hidden = block(hidden)
        return factor * hidden.mean()

    assert (0, 0) in traced(step).carried(3)


def test_checks_pass_and_alarms_stay_silent() -> None:
    """Code that raises on bad values must not be taken to have them."""

    def step(model: Chain, hidden: Tensor) -> Tensor:
        for block in model.blocks:
            hidden = block(hidden)
            if hidden.isnan().any() or not (hidden == hidden).all():
                raise ValueError("bad values")
        return F.mse_loss(torch.distributions.Normal(hidden, hidden.exp()).mean, hidden)

    assert traced(step).end == 4


def test_random_numbers_between_units_are_noticed() -> None:
    """Each stage would draw other numbers; before the first unit all draw from one stream anyway."""

    def between(model: Chain, inputs: Tensor) -> Tensor:
        hidden = model.blocks[0](inputs)
        noise = torch.randn(2, WIDTH)
        return model.blocks[3](model.blocks[2](model.blocks[1](hidden + noise)) + noise).mean()

    assert traced(between).flow.draws_between_units
    assert not traced(lambda model, inputs: plain(model, inputs + torch.randn(2, WIDTH))).flow.draws_between_units


def refused(step: Callable[[Chain, Tensor], Any], model: Chain | None = None) -> str:
    """Why a cut into two stages is refused."""
    model = model or Chain()
    trace = traced(step, model)
    starts = cut_points(trace, 2)
    stages = [sum(start <= position for start in starts) - 1 for position in range(trace.end)]
    with pytest.raises(PartitionError) as caught:
        parameter_owners(model, trace, stages, 2)
    return str(caught.value)


class Keeps(nn.Linear):
    """Keeps a value from its inside."""

    kept: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        self.kept = super().forward(hidden)
        return self.kept.tanh()


def test_values_kept_from_inside_a_block_are_refused() -> None:
    """A router's loss: its gradient would be lost without a word."""

    def step(model: Chain, hidden: Tensor) -> Tensor:
        return plain(model, hidden) + model.blocks[0].kept.mean()

    model = Chain()
    model.blocks[0] = Keeps(WIDTH, WIDTH)
    assert "A value made inside `blocks.0` (pipeline stage 0)" in refused(step, model)


def test_random_masks_of_blocks_outputs_on_two_stages_are_refused() -> None:
    """Functional dropout between blocks whose result two stages use: their masks need not be equal."""

    def step(model: Chain, hidden: Tensor) -> Tensor:
        dropped = F.dropout(model.blocks[0](hidden), 0.5)
        return model.blocks[3](model.blocks[2](model.blocks[1](dropped)) + dropped).mean()

    assert "random operator" in refused(step)


def test_blocks_that_write_into_what_others_read_are_refused() -> None:
    """Other stages do not run the block, and would read what was there before."""

    class Writes(nn.Linear):
        def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
            memory[:, 0].add_(1.0)
            return super().forward(hidden) + memory

    class Writing(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Writes(WIDTH, WIDTH) for _ in range(4))

    model = Writing()

    def step(model: Chain, inputs: Tensor) -> Tensor:
        hidden = memory = inputs * 1.0
        for block in model.blocks:
            hidden = block(hidden, memory)
        return hidden.mean()

    trace = traced(step, model)
    with pytest.raises(PartitionError, match="written into an argument in place"):
        parameter_owners(model, trace, [0, 0, 1, 1], 2)


def test_reentrant_recomputation_is_refused() -> None:
    """Its graph exists in backward only: the stage would hand on a value without a gradient, and both sides wait."""

    def step(model: Chain, inputs: Tensor) -> Tensor:
        hidden = model.blocks[0](inputs)
        for block in list(model.blocks)[1:]:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=True)
        return hidden.mean()

    with pytest.raises(TraceError, match="use_reentrant=False"):
        traced(step)


def test_parameters_belong_where_they_are_used() -> None:
    """A loose parameter, one used outside of its block, and one that no code uses."""

    def step(model: Chain, hidden: Tensor) -> Tensor:
        hidden = hidden * model.scale
        for block in model.blocks:
            hidden = block(hidden)
        return F.linear(hidden, model.blocks[0].weight).mean()

    model = Chain()
    model.unused = nn.Parameter(torch.zeros(1))
    owners = parameter_owners(model, traced(step, model), [0, 0, 1, 1], 2).stages_of_parameter
    assert owners[id(model.scale)] == (0,)
    assert owners[id(model.blocks[0].weight)] == (0, 1)
    assert owners[id(model.blocks[3].weight)] == (1,)
    assert owners[id(model.unused)] == (0, 1)


@pytest.mark.parametrize("fake", [True, False])
def test_a_trace_leaves_no_trace(fake: bool) -> None:
    """A counter that begins at two, a list with entries of a run that never was, moved random numbers."""

    def step(model: Chain, hidden: Tensor) -> Tensor:
        model.calls.append(1)
        model.extra = len(model.calls)
        torch.rand(3)
        return plain(model, hidden)

    model = Chain()
    before = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
    attributes, state = set(model.__dict__), torch.get_rng_state()
    traced(step, model, fake=fake)
    assert model.calls == []
    assert set(model.__dict__) == attributes
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.named_parameters():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])
        assert value.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_sizes_can_be_replaced() -> None:
    """Other batch shapes are planned without a trace of their own."""
    trace = traced(plain)
    assert trace.sizes() == (2, WIDTH) * 4
    assert trace.with_sizes((5, WIDTH) * 4).units[3].leaf_specs[0].shape == (5, WIDTH)
