"""A block that runs twice: the same numbers, the same state left behind, and errors where that cannot be."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_bigmodel.pipeline.backward import SplitBackward
from lightning_bigmodel.recompute.frame import RecomputeError
from lightning_bigmodel.recompute.full import Full
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.policy import Block, Chain
from lightning_bigmodel.recompute.square_root import SquareRoot
from lightning_bigmodel.scaling.casting import full_precision, half_precision, in_full_precision, keep_region
from lightning_bigmodel.scaling.op_lists import OpPrecision
from tests.recompute.chains import FORWARDS, Mixed, assert_same, run


def treat(*modules: nn.Module, **options: Any) -> TreatedBlocks:
    """Full recomputation of all of them."""
    chain = Chain([Block(f"block {i}", m, i) for i, m in enumerate(modules)], ends_in_backward=False, **options)
    return TreatedBlocks(chain, Full().treatments(chain))


class Function(nn.Module):
    """A block of one function, which counts its calls."""

    def __init__(self, function: Any, width: int = 4) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function of the weight and the arguments."""
        FORWARDS["Function"] += 1
        return self.function(self.weight, *args, **kwargs)


def same_gradients(function: Any, *inputs: Tensor, loss: Any = None, **options: Any) -> Function:
    """Assert that a block of `function` has the same gradients with and without; returns it."""
    block = Function(function)
    loss = (lambda output: output.square().sum()) if loss is None else loss
    found = []
    for is_treated in (False, True):
        treated = treat(block, **options) if is_treated else None
        torch.manual_seed(5)
        leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
        FORWARDS.clear()
        result = loss(block(*leaves))
        gradients = torch.autograd.grad(result, [block.weight, *(leaf for leaf in leaves if leaf.requires_grad)])
        found.append([result, *gradients])
        if treated is not None:
            treated.close()
    assert_same(found[1], found[0])
    return block


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Full(), Full(every=2), SquareRoot(), SquareRoot(segment=4)])
def test_everything_a_block_may_do(policy: Any) -> None:
    """New dropout masks; statistics updated twice; a counter that is one ahead; random streams that went on."""
    expected = run(Mixed, None)
    found = run(Mixed, policy)
    assert_same(found, expected)
    assert found["forwards"] > expected["forwards"] == 10


def test_no_forward_runs_more_often_than_declared() -> None:
    """A forward for each tensor that backward reads, or for each of several backwards."""
    assert run(Mixed, Full(), num_blocks=6)["forwards"] == 2 * (6 + 5)
    assert run(Mixed, Full(), num_blocks=6, ends_in_backward=False)["forwards"] == 2 * 12
    assert run(Mixed, Full(every=3), num_blocks=6)["forwards"] == 2 * (6 + 2)
    assert run(Mixed, SquareRoot(), num_blocks=9)["forwards"] == 2 * (9 + 6)
    assert run(Mixed, SquareRoot(), num_blocks=9, ends_in_backward=False)["forwards"] == 2 * 18


def test_what_backward_does_not_need_is_not_computed_again() -> None:
    """A second run to the end of the block: its last products, and messages, for nothing."""
    calls: list[str] = []

    def ends_in_a_sum(weight: Tensor, x: Tensor) -> Tensor:
        hidden = torch.tanh(x * weight)
        calls.append("sum")
        return hidden + x

    same_gradients(ends_in_a_sum, torch.linspace(-1, 1, 4))
    assert len(calls) == 2


def test_several_backwards_through_one_graph() -> None:
    """Values that are gone, or computed a third time, where the graph is kept: as in a split backward."""

    def twice(loss: Tensor, parameters: list[nn.Parameter]) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same(run(Mixed, Full(), backward=twice), run(Mixed, None, backward=twice))
    assert run(Mixed, Full(), backward=twice, num_blocks=3)["forwards"] == 2 * 5

    def split(loss: Tensor, parameters: list[nn.Parameter]) -> None:
        half = SplitBackward([loss], [torch.ones(())], [inputs], parameters)
        gradients.extend(half.inputs())
        half.weights()

    found: list[Any] = []
    for is_treated in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        counted = [Function(lambda weight, x, block=block: block(x) * weight) for block in blocks]
        treated = treat(*counted) if is_treated else None
        inputs, gradients = torch.randn(2, 4, requires_grad=True), []
        hidden: Tensor = inputs
        FORWARDS.clear()
        for block in counted:
            hidden = block(hidden)
        parameters = [p for block in (*blocks, *counted) for p in block.parameters()]
        split(hidden.square().sum(), parameters)
        found.append([gradients, [parameter.grad for parameter in parameters]])
        assert FORWARDS["Function"] == (6 if is_treated else 3)
        if treated is not None:
            treated.close()
    assert_same(found[1], found[0])


def test_gradients_of_gradients() -> None:
    """A graph of the second run in place of the first one's: gradient penalties would be constants."""

    def penalty(output: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
        return gradient.square().sum()

    block = Function(lambda weight, x: torch.tanh(x * weight) * x.sum())
    found = []
    for is_treated in (False, True):
        treated = treat(block) if is_treated else None
        leaf = torch.linspace(-1, 1, 4, requires_grad=True)
        found.append(torch.autograd.grad(penalty(block(leaf)), [block.weight, leaf]))
        if treated is not None:
            treated.close()
    assert_same(found[1], found[0])


def test_a_gradient_taken_within_the_block() -> None:
    """A second run that begins before the first one is over."""

    def energy(weight: Tensor, x: Tensor) -> Tensor:
        value = torch.sin(x * weight).square().sum()
        (force,) = torch.autograd.grad(value, x, create_graph=True)
        return torch.cos(force) * weight + value

    same_gradients(energy, torch.linspace(-1, 1, 4))


def test_blocks_that_are_called_twice_and_parts_that_are_not_used() -> None:
    """One note for a module in place of one for each call; a slot whose node never runs."""

    def two(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x * weight), torch.exp(x * weight)

    same_gradients(two, torch.linspace(-1, 1, 4), loss=lambda output: output[0].square().sum())
    shared = Function(lambda weight, x: torch.tanh(x * weight))
    found = []
    for is_treated in (False, True):
        treated = treat(shared) if is_treated else None
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        found.append(torch.autograd.grad(shared(shared(x)).sum() + shared(x).square().sum(), [x, shared.weight]))
        if treated is not None:
            treated.close()
    assert_same(found[1], found[0])


def test_a_users_own_checkpoint_within_a_block_and_around_it() -> None:
    """Frames within frames."""

    def nested(weight: Tensor, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(lambda y: torch.tanh(F.dropout(y * weight, 0.5)), x, use_reentrant=False)
        return inner.exp()

    same_gradients(nested, torch.linspace(-1, 1, 4))
    for use_reentrant in (True, False):
        found = []
        for is_treated in (False, True):
            block = Function(lambda weight, x: torch.tanh(F.dropout(x * weight, 0.3)).exp())
            treated = treat(block) if is_treated else None
            torch.manual_seed(1)
            x = torch.linspace(-1, 1, 4, requires_grad=True)
            checkpoint(block, x * 1, use_reentrant=use_reentrant).sum().backward()
            found.append((x.grad, block.weight.grad))
            if treated is not None:
                treated.close()
        assert_same(found[1], found[0])


def test_a_mixture_of_experts_takes_the_same_route() -> None:
    """A router with noise that sends tokens elsewhere in the second run: shapes differ, or gradients do."""
    routes: list[list[int]] = []

    def route(weight: Tensor, x: Tensor) -> Tensor:
        scores = (x * weight).detach() + torch.randn_like(x)
        chosen = scores.argmax(1)
        routes.append(chosen.tolist())
        output = torch.zeros_like(x)
        for expert in range(x.shape[1]):
            rows = (chosen == expert).nonzero()[:, 0]
            output = output.index_add(0, rows, torch.tanh(x[rows] * weight[expert]))
        return output

    same_gradients(route, torch.randn(16, 4))
    assert len(routes) == 3
    assert len(set(map(tuple, routes))) == 1


# -- the state around --------------------------------------------------------------------------------------------------


def test_autocast_default_type_and_kernels_are_those_of_the_forward() -> None:
    """A second run in fp32, or under what happens to hold in backward."""
    seen: list[Any] = []

    def look(weight: Tensor, x: Tensor) -> Tensor:
        product = x[None] @ weight[:, None]
        kernels = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
        seen.append((product.dtype, torch.get_default_dtype(), torch.zeros(()).dtype, kernels, in_full_precision()))
        return (product.float() * x * weight).tanh()

    def within(function: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16), torch.nn.attention.sdpa_kernel([]):
            torch.set_default_dtype(torch.float64)
            try:
                return full_precision(function)()
            finally:
                torch.set_default_dtype(torch.float32)

    block = Function(look)
    treated = treat(block, keepers=[keep_region])
    x = torch.ones(4, requires_grad=True)
    output = within(lambda: block(x))
    with torch.autocast("cpu", torch.float16):
        output.sum().backward()
    assert seen == [(torch.bfloat16, torch.float64, torch.float64, (False, False), True)] * 2
    assert not in_full_precision()
    assert torch.get_default_dtype() == torch.float32
    treated.close()


def test_lists_of_operators_hold_in_the_second_run() -> None:
    """A backward outside of the lists: `softmax` would give bf16 where it gave fp32, and gradients of other numbers."""
    ops = OpPrecision(["softmax"], ["bmm"])
    found, dtypes = [], []

    def attend(weight: Tensor, x: Tensor) -> Tensor:
        scores = torch.bmm(x * weight, x.mT).softmax(-1)
        dtypes.append(scores.dtype)
        return torch.bmm(scores, half_precision(torch.tanh)(x))

    for is_treated in (False, True):
        block = Function(attend)
        treated = treat(block) if is_treated else None
        x = torch.linspace(-1, 1, 24).view(2, 3, 4).bfloat16().requires_grad_()
        with ops.active():
            output = block(x)
        output.float().square().sum().backward()
        found.append((x.grad, block.weight.grad))
        if treated is not None:
            treated.close()
    assert_same(found[1], found[0])
    assert dtypes == [torch.float32] * 3


class Remembers(nn.Module):
    """Changes collections of its own, and draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.losses: list[Tensor] = []
        self.counts = {"calls": 0}
        self.generators = torch.Generator(), random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.first, self.second, self.third, self.fourth = self.generators

    def forward(self, x: Tensor) -> Tensor:
        """Depends on all of them."""
        FORWARDS["Remembers"] += 1
        self.seen.append(len(self.seen))
        self.counts["calls"] += 1
        self.losses.append(x.sum())
        noise = torch.rand(x.shape, generator=self.first) * self.second.random()
        scale = self.third.random() * float(self.fourth.random_sample()) * sum(self.seen) * self.counts["calls"]
        return torch.tanh(x * noise + scale).exp()


def test_collections_and_generators_of_the_block_itself() -> None:
    """Random numbers that go on in the second run; lists that grow twice."""
    found: list[Any] = []
    for is_treated in (False, True):
        FORWARDS.clear()
        block = Remembers()
        block.first.manual_seed(3)
        treated = treat(block) if is_treated else None
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        loss = block(x).sum() + block(block(x)).sum() + block.losses[1]
        loss.backward()
        loss = None
        after = [float(torch.rand((), generator=block.first)), block.second.random(), block.third.random()]
        found.append([x.grad, block.seen, block.counts, len(block.losses), *after, block.fourth.random_sample()])
        assert FORWARDS["Remembers"] == (6 if is_treated else 3)
        if treated is not None:
            treated.close()
    assert_same(found[1], found[0])


# -- memory ------------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_between_forward_and_backward_nor_after_it() -> None:
    """Cycles through a graph, which only Python's collector finds, or a frame that a later step still refers to."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def note(weight: Tensor, x: Tensor) -> Tensor:
        inner = torch.exp(x * weight)
        alive.add(inner)
        return inner.square()

    block = Function(note)
    treated = treat(block)
    x = torch.ones(4, requires_grad=True)
    gc.disable()
    try:
        output = block(x * 1)
        assert len(alive) == 0
        output.sum().backward()
        del output
        assert len(alive) == 0
        reference = weakref.ref(block(x))  # a graph without a backward
        assert reference() is None
    finally:
        gc.enable()
    treated.close()


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_changed_inputs_are_detected() -> None:
    """Gradients of what an input has become since, which nothing would tell."""

    def in_place(weight: Tensor, x: Tensor) -> Tensor:
        output = x * weight
        x += 1
        return output

    message = r"`block 0` changes an input of shape \(4,\) in place.* Write `x = x \+ y`"
    block = Function(in_place)
    treated = treat(block)
    with pytest.raises(RecomputeError, match=message):
        block(torch.ones(4) * 1)
    treated.close()
    block = Function(lambda weight, x, more: (x * weight).exp() * more["scale"])
    treated = treat(block)
    x, scale = torch.ones(4, requires_grad=True) * 1, torch.ones(4)
    for changed in (x, scale):
        output = block(x, more={"scale": scale})
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    treated.close()


def test_in_place_changes_of_what_the_block_made_itself_are_fine() -> None:
    """An error where plain autograd has none."""

    def inside(weight: Tensor, x: Tensor) -> Tensor:
        hidden = x * weight
        hidden.add_(1)
        hidden[:2] *= 3
        return hidden.exp_()

    same_gradients(inside, torch.linspace(-1, 1, 4), loss=lambda output: output.sum())


def test_a_second_run_that_differs_is_named() -> None:
    """Values in the wrong slots."""
    calls = [0]

    def shorter(weight: Tensor, x: Tensor) -> Tensor:
        calls[0] += 1
        return (x * weight).exp() if calls[0] == 2 else (x * weight).exp().tanh().sin()

    def other_shape(weight: Tensor, x: Tensor) -> Tensor:
        calls[0] += 1
        return (x[: calls[0]] * weight[: calls[0]]).exp().sum()

    for function, message in (
        (shorter, r"`block 0` saved \d tensors for backward in its first run and \d in its second"),
        (other_shape, r"Tensor 0 that `block 0` saves for backward was \(1,\) .* and is \(2,\)"),
    ):
        calls[0] = 0
        block = Function(function)
        treated = treat(block)
        with pytest.raises(RecomputeError, match=message):
            block(torch.ones(4, requires_grad=True)).sum().backward()
        treated.close()


def test_a_large_buffer_that_is_written_late_is_named() -> None:
    """Old values that nobody has kept."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(200_000))
            self.writes = False

        def forward(self, x: Tensor) -> Tensor:
            """Writes when it is told to."""
            if self.writes:
                self.table += 1
            return x.exp() * self.table[:4].exp()

    block = Late()
    treated = treat(block)
    x = torch.ones(4, requires_grad=True)
    block(x).sum().backward()
    block.writes = True
    with pytest.raises(RuntimeError, match=r"The buffer `table` \(800000 bytes\) of Late is written in a forward"):
        block(x)
    treated.close()
    block = Late()
    block.writes = True
    treated = treat(block)
    x.grad = None
    block(x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp() * torch.ones(()).exp())
    assert float(block.table[0]) == 1
    treated.close()
