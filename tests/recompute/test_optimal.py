"""Bytes of each policy on a 24-block GPT, and the choice for each block: the best there is, within its budget."""

from __future__ import annotations

import copy
import io
import itertools
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_bigmodel.recompute.choose import BlockCost, BudgetError, Option, choose, options_of, peak_bytes
from lightning_bigmodel.recompute.full import Full
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.moved import MovedTensors
from lightning_bigmodel.recompute.offload import Moved
from lightning_bigmodel.recompute.optimal import Optimal, Plan
from lightning_bigmodel.recompute.plan_table import plan_table
from lightning_bigmodel.recompute.policy import Block, Chain, RecomputePolicy
from lightning_bigmodel.recompute.selective import Selective
from lightning_bigmodel.recompute.square_root import SquareRoot
from lightning_bigmodel.testing import SavedBytes, TinyTransformer

NUM_BLOCKS, WIDTH, POSITIONS, SAMPLES = 24, 16, 24, 2
BOUNDARY = SAMPLES * POSITIONS * WIDTH * 4


def gpt(policy: RecomputePolicy | None, num_steps: int = 3) -> tuple[SavedBytes, list[Tensor]]:
    """What the last step kept at most within the blocks of a GPT, and its gradients."""
    torch.manual_seed(0)
    blocks = TinyTransformer(WIDTH, NUM_BLOCKS, num_positions=POSITIONS, dropout=0.1).blocks
    chain = Chain([Block(f"blocks.{index}", block, index) for index, block in enumerate(blocks)])
    treated = TreatedBlocks(chain, [None] * NUM_BLOCKS if policy is None else policy.treatments(chain))
    for step in range(num_steps):
        torch.manual_seed(step)
        hidden = torch.randn(SAMPLES, POSITIONS, WIDTH, requires_grad=True) * 1
        for parameter in blocks.parameters():
            parameter.grad = None
        with SavedBytes() as saved:
            for block in blocks:
                hidden = block(hidden)
            hidden.sum().backward()
        assert saved.bytes == 0
        revised = None if policy is None else policy.revised(chain, lambda own: [copy.deepcopy(own)])
        if revised is not None:
            treated.treat(revised)
    treated.close()
    return saved, [parameter.grad for parameter in blocks.parameters()]


@pytest.fixture(scope="module")
def plain() -> tuple[SavedBytes, list[Tensor]]:
    """Nothing is computed again."""
    torch.set_num_threads(1)
    return gpt(None)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit by bit."""
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_peak_bytes_of_the_simple_policies(plain: Any) -> None:
    """Activations that a policy only seems to give up."""
    whole, gradients = plain
    block = whole.peak_bytes / NUM_BLOCKS
    full, found = gpt(Full())
    assert_equal(found, gradients)
    assert full.peak_bytes <= (NUM_BLOCKS - 1) * BOUNDARY + block
    every_second, found = gpt(Full(every=2))
    assert_equal(found, gradients)
    assert every_second.peak_bytes <= NUM_BLOCKS / 2 * (BOUNDARY + block) + block
    square_root, found = gpt(SquareRoot())
    assert_equal(found, gradients)
    assert square_root.peak_bytes <= 5 * BOUNDARY + 5 * block
    selective, found = gpt(Selective())
    assert_equal(found, gradients)
    assert full.peak_bytes < selective.peak_bytes < 0.75 * whole.peak_bytes


def test_the_plan_holds_its_budget_and_uses_it(plain: Any) -> None:
    """A plan by numbers that are not those of the run; a budget of which half is left over."""
    whole, gradients = plain
    least = gpt(Full())[0].peak_bytes
    block = whole.peak_bytes / NUM_BLOCKS
    # A small budget may be left over by less than a block, which is more than a twentieth of it.
    for share, left in ((0.1, block / 2), (0.4, None), (0.6, None), (0.9, None)):
        budget = int(least + share * (whole.peak_bytes - least))
        policy = Optimal(budget)
        saved, found = gpt(policy)
        assert_equal(found, gradients)
        assert policy.plan is not None
        assert saved.peak_bytes <= policy.plan.peak_bytes * 1.001 <= budget * 1.001
        assert saved.peak_bytes > budget - (0.05 * budget if left is None else left)
    policy = Optimal(2 * whole.peak_bytes)
    saved, found = gpt(policy)
    assert {option.choice for option in policy.plan.options} == {"save"}
    assert saved.peak_bytes == whole.peak_bytes


def test_a_budget_that_is_too_small_is_named_with_the_least_that_would_do(plain: Any) -> None:
    """A run that goes on over its budget, or a number that would not do either."""
    with pytest.raises(
        BudgetError, match=r"`budget=5000` bytes .* `blocks\.\d+` alone takes \d+ bytes .* The least"
    ) as caught:
        gpt(Optimal(5000))
    least = int(str(caught.value).partition("The least that would do is ")[2].partition(" bytes")[0])
    saved, found = gpt(Optimal(least))
    assert_equal(found, plain[1])
    assert saved.peak_bytes <= least
    with pytest.raises(BudgetError):
        gpt(Optimal(least - 1))


class Linked(Optimal):
    """On a machine with a link."""

    movers: list[Any]

    def _treatments_of(self, plan: Any) -> Any:
        treatments = super()._treatments_of(plan)
        self.movers = [treatment.mover for treatment in treatments if isinstance(treatment, Moved)]
        self.copies = []
        close = MovedTensors.close
        self.movers[0].close = lambda: (self.copies.append(self.movers[0].tensors), close(self.movers[0].tensors))
        return treatments

    def bandwidth(self, chain: Chain) -> float:
        """Faster than any block."""
        return 1e15


def test_blocks_are_moved_where_the_link_is_fast(plain: Any) -> None:
    """A choice that is planned and not made."""
    whole, gradients = plain
    budget = int(0.3 * whole.peak_bytes)
    policy = Linked(budget)
    saved, found = gpt(policy)
    assert_equal(found, gradients)
    choices = [option.choice for option in policy.plan.options]
    assert "offload" in choices
    assert sum(option.seconds for option in policy.plan.options) == 0
    moved = policy.copies[0]
    assert moved.num_copies[0] > 0
    assert saved.peak_bytes + moved.peak_device_bytes <= budget
    text = io.StringIO()
    Console(file=text, width=120).print(plan_table(policy.plans))
    rows = text.getvalue().splitlines()
    assert sum("blocks." in row for row in rows) == NUM_BLOCKS
    assert "offload" in text.getvalue()
    assert any("at most" in row for row in rows)


class Head(nn.Module):
    """What a step does outside of blocks: a table of words, a norm, a product and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), words.flatten())


def _planned(blocks: nn.ModuleList, outer: Head, budget: int | str, is_hidden: bool) -> tuple[Plan, str]:
    """The plan of a training run, and its table."""
    words = torch.randint(20, (SAMPLES, POSITIONS))
    policy = Optimal(budget)
    chain = Chain([Block(f"blocks.{index}", block, index) for index, block in enumerate(blocks)])
    treated = TreatedBlocks(chain, policy.treatments(chain))
    try:
        for _ in range(2):
            hides = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
            with policy.around_batch(), hides if is_hidden else nullcontext():
                hidden = outer.words(words)
                for block in blocks:
                    hidden = block(hidden)
                outer(hidden, words).backward()
            treated.treat(policy.revised(chain, lambda own: [copy.deepcopy(own)]))
    finally:
        treated.close()
    text = io.StringIO()
    Console(file=text, width=120).print(plan_table(policy.plans))
    assert policy.plan is not None
    return policy.plan, text.getvalue()


@pytest.mark.parametrize("is_hidden", [False, True])
def test_what_lies_outside_of_blocks_is_measured(is_hidden: bool) -> None:
    """A budget that is kept and memory that runs out all the same; the input of a block, counted twice."""
    torch.manual_seed(0)
    blocks, outer = TinyTransformer(WIDTH, 3, num_positions=POSITIONS).blocks, Head()
    tokens = SAMPLES * POSITIONS
    # Words; of the norm its input, means and deviations; of the product its input; of the loss the logarithms of its
    # shares, and their number. The output of the table of words is the first block's input.
    outside = 8 * tokens + BOUNDARY + 2 * 4 * tokens + BOUNDARY + 4 * 20 * tokens + 4
    plan, table = _planned(blocks, outer, "1MiB", is_hidden)
    assert plan.outside_bytes == (None if is_hidden else outside)
    row = "not measured" if is_hidden else f"{outside / 1024:.1f} KiB"
    assert any("outside" in line and row in line for line in table.splitlines())
    said = "The budget is for blocks alone; with what is outside, a rank takes"
    assert said not in table
    _, table = _planned(blocks, outer, plan.least_bytes + outside // 2, is_hidden)
    assert (said in table) != is_hidden
    with pytest.raises(BudgetError) as caught:
        _planned(blocks, outer, plan.least_bytes - 1, is_hidden)
    assert (f"saves outside of blocks, {outside} bytes, comes on top of it." in str(caught.value)) != is_hidden


# -- the choice itself -------------------------------------------------------------------------------------------------


def _random_chain(rng: random.Random) -> list[BlockCost]:
    blocks = []
    for index in range(rng.randint(1, 5)):
        boundary = rng.randint(1, 10)
        saved = boundary + rng.randint(0, 60)
        seconds = rng.random()
        kept = rng.randint(boundary, saved)
        blocks.append(
            BlockCost(
                str(index), boundary, saved, seconds, 0, kept, seconds * rng.random(), 0, saved + rng.randint(0, 5)
            )
        )
    return blocks


def _by_hand(blocks: list[BlockCost], budget: int, num_passes: int) -> float | None:
    """The least time over all combinations of choices."""
    times = [
        sum(option.seconds for option in options)
        for options in itertools.product(*(options_of(block).values() for block in blocks))
        if peak_bytes(options, num_passes) <= budget
    ]
    return min(times, default=None)


def test_no_combination_of_choices_is_better() -> None:
    """A greedy choice, or states that are dropped though they would have won."""
    rng = random.Random(0)
    num_refused = 0
    for _ in range(150):
        blocks, budget = _random_chain(rng), rng.randint(10, 200)
        expected = _by_hand(blocks, budget, 1)
        if expected is None:
            num_refused += 1
            with pytest.raises(BudgetError):
                choose(blocks, budget)
            continue
        found = choose(blocks, budget)
        assert peak_bytes(found) <= budget
        assert sum(option.seconds for option in found) == pytest.approx(expected)
    assert 10 < num_refused < 140


def test_several_passes_at_a_time_share_the_budget() -> None:
    """A plan of one micro-batch for a pipeline that holds four."""
    rng = random.Random(1)
    num_found = 0
    for _ in range(60):
        blocks, budget = _random_chain(rng), rng.randint(50, 900)
        expected = _by_hand(blocks, budget, 4)
        if expected is None:
            with pytest.raises(BudgetError, match="in 4 passes at a time"):
                choose(blocks, budget, num_passes=4)
            continue
        found = choose(blocks, budget, num_passes=4)
        assert peak_bytes(found, 4) <= budget
        num_found += sum(option.seconds for option in found) <= expected + 0.25 * sum(b.forward_seconds for b in blocks)
    assert num_found > 20


def test_never_slower_than_a_simple_policy_of_the_same_bytes() -> None:
    """Operations that a simpler policy would not need: of equal blocks, unequal ones, and ones that grow."""
    for sizes in ([40] * NUM_BLOCKS, [20 + 13 * index % 50 for index in range(NUM_BLOCKS)], list(range(10, 34))):
        # Time is what operations take: products, which selective recomputation keeps, and some more.
        blocks = [
            BlockCost(str(i), 4, size, 100.0 * size, 100 * size, size // 2, 3.0 * size, 3 * size, size)
            for i, size in enumerate(sizes)
        ]
        for choice in ("recompute", "selective"):
            options: list[Option] = [options_of(block)[choice] for block in blocks[:-1]]
            simple = [*options, options_of(blocks[-1])["save"]]
            found = choose(blocks, peak_bytes(simple))
            assert peak_bytes(found) <= peak_bytes(simple)
            assert sum(option.flops for option in found) <= sum(option.flops for option in simple)


def test_what_was_measured_of_a_block() -> None:
    """Parameters counted as activations, one input counted for each block, operations of another block."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32, 32) / 32)

        def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
            """Saves hidden, memory, their sum's product and its result."""
            return torch.tanh((hidden * memory) @ self.weight)

    blocks = nn.ModuleList(Shared() for _ in range(3))
    chain = Chain([Block(str(index), block, index) for index, block in enumerate(blocks)])
    policy = Optimal("1MiB")
    treated = TreatedBlocks(chain, policy.treatments(chain))
    size = 8 * 32 * 4
    for _ in range(2):
        hidden, memory = torch.randn(8, 32), torch.randn(8, 32, requires_grad=True) * 1
        for block in blocks:
            hidden = block(hidden, memory)
        hidden.sum().backward()
        treated.treat(policy.revised(chain, lambda own: [copy.deepcopy(own)]))
    numbers = policy._full
    # hidden and memory; memory is that of the first block; beside them the product of both.
    assert [numbers[str(i)].input_bytes for i in range(3)] == [2 * size, size, size]
    # The result of tanh is the next block's input.
    assert [numbers[str(i)].saved_bytes for i in range(3)] == [3 * size, 2 * size, 3 * size]
    assert [numbers[str(i)].flops for i in range(3)] == [2 * 8 * 32 * 32] * 3
    assert all(numbers[str(i)].seconds > 0 for i in range(3))
    assert numbers["0"].num_passes == 1
    tried = policy._selective["0"]
    assert tried.kept_bytes == 3 * size  # inputs, and the result of the product
    treated.close()
