"""Row shards in plain torch: the numbers, bytes and messages of each ZeRO stage."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.sharding.zero_models import Model, Sharded, batch, counted, loss_of, reference

TOLERANCE = 1e-5
run_ranks = functools.partial(run_ranks_for, timeout_seconds=40.0)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every parameter, by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def _train(stage: int, uses_extra: list[bool], options: dict[str, Any], per_rank: int = 1) -> dict[str, Any]:
    run = Sharded(stage, **options)
    rank, size = dist.get_rank(), dist.get_world_size()
    before = {name: id(parameter) for name, parameter in run.model.named_parameters()}
    for step in range(3):
        run.optimizer.zero_grad()
        for part in range(rank * per_rank, (rank + 1) * per_rank):
            run.microbatch(step, part, per_rank * size, uses_extra[part])
        run.finish_step()
    run.shards.restore()
    assert before == {name: id(parameter) for name, parameter in run.model.named_parameters()}
    assert all(type(parameter) is nn.Parameter for parameter in run.model.parameters())
    return {name: value.detach().numpy().copy() for name, value in run.model.named_parameters()}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"keep_gathered": True}),
        (2, {"every_microbatch": False}),
        (3, {"every_microbatch": False}),
        (1, {"frozen": "up"}),
        (2, {"frozen": "up"}),
        (3, {"frozen": "up"}),
        (3, {"frozen": "blocks"}),
    ],
)
def test_training_equals_one_process(stage: int, options: dict[str, Any], num_ranks: int) -> None:
    """Rows that do not divide, tied and raw parameters, frozen and trained ones in one block, two micro-batches."""
    extra = [False, True] * num_ranks
    results = run_ranks(_train, num_ranks, stage, extra, options, 2)
    for result in results:
        assert_same(result, reference(2 * num_ranks, extra, frozen=options.get("frozen", "")))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("extra", [[True, False], [False, True], [False, False]])
def test_ranks_may_take_different_branches(stage: int, extra: list[bool]) -> None:
    """A gather or reduction one rank waits for; a mean over the ranks that took part; moments of what none used."""
    for result in run_ranks(_train, 2, stage, extra, {}):
        assert_same(result, reference(2, extra))


class Equal(nn.Module):
    """Blocks of one size, and nothing else."""

    def __init__(self, width: int = 32, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(num_blocks)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The chain."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def _bytes(stage: int, mixed: bool) -> tuple[dict[str, int], int]:
    """What a rank keeps after a micro-batch in the second step."""
    dtype = torch.bfloat16 if mixed else None
    run = Sharded(stage, model=Equal(), compute_dtype=dtype)
    for index in range(2):
        run.optimizer.zero_grad()
        inputs = torch.ones(2, 32, dtype=dtype)
        if run.passes:
            with run.passes.forward(0):
                loss = run.model(inputs).float().sum()
        else:
            loss = run.model(inputs).float().sum()
        run.backward(loss, 0)
        if index == 0:
            run.finish_step()
    return run.state_bytes(), sum(p.numel() for p in run.model.parameters())


# stage -> bytes a parameter of parameters, gradients, optimizer state on n ranks
FORMULAS = {
    False: {
        1: lambda n: (4, 4, 8 / n),
        2: lambda n: (4, 4 / n, 8 / n),
        3: lambda n: (4 / n, 4 / n, 8 / n),
    },
    # bf16 for computing (2), its gradients (2, or 4 where they are kept as rows), fp32 rows and moments (12).
    True: {
        1: lambda n: (2 + 4 / n, 2, 8 / n),
        2: lambda n: (2 + 4 / n, 4 / n, 8 / n),
        3: lambda n: (4 / n, 4 / n, 8 / n),
    },
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_bytes_follow_the_formulas(num_ranks: int, mixed: bool) -> None:
    """A second copy of the rows beside whole parameters; gradients or parameters that stay whole."""
    for stage in (1, 2, 3)[: 3 if num_ranks > 1 else 2]:  # one rank alone has nothing to gather
        expected = FORMULAS[mixed][stage](num_ranks)
        for found, count in run_ranks(_bytes, num_ranks, stage, mixed):
            for kind, bytes_each in zip(("parameters", "gradients", "optimizer"), expected, strict=True):
                assert found[kind] == pytest.approx(bytes_each * count, rel=0.01), (stage, kind)


def _messages(stage: int, options: dict[str, Any]) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Collectives of the third step with four micro-batches, parameter bytes, and units."""
    run = Sharded(stage, model=Equal(), **options)
    rank, found = dist.get_rank(), {}
    for _ in range(3):
        run.optimizer.zero_grad()

        def step() -> None:
            for part in range(4):
                inputs = torch.full((2, 32), float(rank + part))
                if run.passes:
                    with run.passes.forward(part):
                        loss = run.model(inputs).sum()
                else:
                    loss = run.model(inputs).sum()
                run.backward(loss, part)
            if not run.every:
                run.reducer.flush()
            run.optimizer.step()
            run.shards.publish()

        found = counted(step)
    return found, sum(p.numel() * 4 for p in run.model.parameters()), 4


@pytest.mark.parametrize(
    ("stage", "options", "reduce_scatters", "gathers"),
    [
        (1, {}, 1, 1),
        (2, {}, 4, 1),
        (2, {"every_microbatch": False}, 1, 1),
        (3, {}, 4, 8),
        (3, {"every_microbatch": False}, 1, 8),
        (3, {"keep_gathered": True}, 4, 1),
        (3, {"keep_gathered": True, "every_microbatch": False}, 1, 1),
    ],
)
def test_each_stage_sends_what_it_must(stage: int, options: dict[str, Any], reduce_scatters: int, gathers: int) -> None:
    """A stage that communicates more often than its definition says; times are of all parameters, in bytes."""
    (found, num_bytes, num_units), other = run_ranks(_messages, 2, stage, options)
    assert other[0] == found
    units = num_units if stage == 3 else 1
    settled = {"all_reduce": (4, 4 * 2 * units)} if stage == 3 else {}  # a forward: a byte or two a unit
    assert found == {
        **settled,
        "all_gather": (gathers * units, gathers * num_bytes // 2),
        "reduce_scatter": (reduce_scatters * units, reduce_scatters * num_bytes),
    }


def _frozen_messages(stage: int) -> dict[str, tuple[int, int]]:
    run = Sharded(stage, model=Equal(), frozen="0.weight")
    for _ in range(2):
        run.optimizer.zero_grad()

        def step() -> None:
            if run.passes:
                with run.passes.forward(0):
                    loss = run.model(torch.ones(2, 32)).sum()
            else:
                loss = run.model(torch.ones(2, 32)).sum()
            run.backward(loss, 0)
            if not run.every:
                run.reducer.flush()

        found = counted(step)
        assert all(p.grad is None for p in run.model.parameters())
        frozen = [
            s for p, s in zip(run.model.parameters(), run.shards.shards.values(), strict=True) if not p.requires_grad
        ]
        assert len(frozen) == 4
        assert all(shard.grad is None for shard in frozen)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_send_no_gradient(stage: int) -> None:
    """Gradient memory or traffic for what is not trained."""
    trained = 4 * (32 * 32 + 2 * 32) * 4
    for found in run_ranks(_frozen_messages, 2, stage):
        assert found["reduce_scatter"][1] == trained


def _memory() -> list[int]:
    """Bytes of whole parameters at each point of a stage 3 step, and after a failed one."""
    run = Sharded(3, model=Equal())
    assert run.passes is not None
    live: list[int] = []
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(w.untyped_storage().nbytes() for w in run.shards.wholes.values()))

    def note() -> None:
        live.append(sum(w.untyped_storage().nbytes() for w in run.shards.wholes.values()))

    def fail() -> None:
        assert run.passes is not None
        with torch.no_grad(), run.passes.forward(0):
            run.model.blocks[0](torch.ones(2, 32))
            raise ValueError("boom")

    for module in run.model.modules():
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    note()
    for _ in range(3):
        with run.passes.forward(0):
            loss = run.model(torch.ones(2, 32, requires_grad=True)).sum()
        note()
        run.backward(loss, 0)
        note()
        run.finish_step()
        with torch.no_grad(), run.passes.forward(0):
            run.model(torch.ones(2, 32))
        note()
        with pytest.raises(ValueError, match="boom"):
            fail()
        note()
    block = 2 * (32 * 32 + 32) * 4
    assert max(seen) <= 2 * block, (max(seen), block)  # the block at work and the next one
    return live


def test_whole_parameters_are_given_up() -> None:
    """Memory that grows between training, evaluation and a failed step."""
    for live in run_ranks(_memory, 2):
        assert live == [0] * len(live)


def _outside() -> list[str]:
    """What reading a sharded parameter outside of a step says."""
    run = Sharded(3)
    said = []
    uses: list[Any] = [
        lambda: run.model.scale + 1,
        lambda: run.model(batch(0, 0)),
        lambda: run.model.state_dict(),
        lambda: run.model.double(),
        lambda: run.model.scale.data,
        lambda: torch._foreach_norm([run.model.scale]),
    ]
    for use in uses:
        with pytest.raises(RuntimeError) as caught:
            use()
        said.append(str(caught.value))
    with run.shards.gathered():
        assert float(run.model.scale.sum()) == 6.0
        with torch.no_grad():
            run.model.scale.mul_(2.0)
    assert run.model.scale.shape == (6,)
    with run.shards.gathered(write=False):
        assert float(run.model.scale.sum()) == 12.0
        with torch.no_grad():
            run.model.scale.mul_(2.0)
    with run.shards.gathered():
        assert float(run.model.scale.sum()) == 12.0
    return said


def test_reading_outside_of_a_step_says_what_to_do() -> None:
    """A crash, zeros or rubbish where memory was given up."""
    for said in run_ranks(_outside, 2):
        assert len(said) == 6
        assert all("whole_parameters()" in text for text in said)


def _penalty(stage: int) -> dict[str, Any]:
    """Weight decay by hand: every parameter is read outside of its module, within the step."""
    run = Sharded(stage)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        run.optimizer.zero_grad()
        with run.passes.forward(0) if run.passes else torch.enable_grad():
            loss = loss_of(run.model, batch(step, rank), size, True)
            loss = loss + sum(p.square().sum() for p in run.model.parameters()) / size
        run.backward(loss, 0)
        run.finish_step()
    run.shards.restore()
    return {name: value.detach().numpy().copy() for name, value in run.model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_read_in_the_step_are_fetched(stage: int) -> None:
    """A penalty on all weights in the training step, which calls no module."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, batch(step, part), 2, True).backward()
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]  # a tensor
        optimizer.step()
    expected = {name: value.detach().numpy() for name, value in model.named_parameters()}
    for result in run_ranks(_penalty, 2, stage):
        assert_same(result, expected)
