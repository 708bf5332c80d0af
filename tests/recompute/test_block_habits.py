"""What blocks of users do, under every policy: weights, buffers, generators and random numbers of a run without one."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bigmodel import Full, Offload, Optimal, Selective, SquareRoot
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.policy import Block, Chain
from tests.recompute.chains import assert_same, seed
from tests.recompute.test_moved import Late

WIDTH = 8
FORWARDS: Counter[str] = Counter()
GENERATOR = torch.Generator()


class Habit(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(samples, WIDTH)`."""
        FORWARDS["Habit"] += 1
        output: Tensor = hidden + self.last(torch.tanh(self.inner(hidden)))
        return output

    def inner(self, hidden: Tensor) -> Tensor:
        """What is special."""
        raise NotImplementedError


class OwnGenerator(Habit):
    """Several draws from a generator of its own, of operators that are kept and of ones that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def inner(self, hidden: Tensor) -> Tensor:
        """Noise of three kinds."""
        kept = torch.bernoulli(torch.full_like(hidden, 0.5), generator=self.generator)
        scale = torch.rand(hidden.shape, generator=self.generator)
        noise = torch.empty_like(hidden).normal_(generator=self.generator)
        return self.first(hidden * scale) * kept + torch.rand(hidden.shape, generator=self.generator) + noise


class GeneratorsElsewhere(Habit):
    """In a collection, in another object, and in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = {"a": [torch.Generator().manual_seed(1)]}
        self.noise = type("Noise", (), {"generator": torch.Generator().manual_seed(2)})()

    def inner(self, hidden: Tensor) -> Tensor:
        """One draw of each."""
        for generator in (self.generators["a"][0], self.noise.generator, GENERATOR, torch.default_generator):
            hidden = hidden * torch.rand(hidden.shape, generator=generator)
        return self.first(hidden)


class Codebook(Habit):
    """Buffers that are moved by `data`, as vector quantisation does, and one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("counts", torch.ones(5))
        self.first.register_buffer("counts", self.counts)

    def inner(self, hidden: Tensor) -> Tensor:
        """Straight through the nearest code."""
        inside = self.first(hidden)
        nearest = torch.cdist(inside.detach(), self.codes).argmin(1)
        chosen = F.one_hot(nearest, 5).float()
        self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.codes.data.lerp_(chosen.t() @ inside.detach() / self.first.counts[:, None], 0.1)
        return (inside + (self.codes[nearest] - inside).detach()) * self.counts.mean()


class GradientInside(Habit):
    """A force: the gradient of an energy, of which a gradient is taken later on."""

    def inner(self, hidden: Tensor) -> Tensor:
        """Of the square of what it was."""
        place = hidden.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.first(place).square().sum(), place, create_graph=True)
        return force + hidden


class WrittenWhileSaved(Habit):
    """An operator that writes to what autograd has saved of its arguments."""

    def inner(self, hidden: Tensor) -> Tensor:
        """Random slopes."""
        return F.rrelu(self.first(hidden), 0.1, 0.9, training=True)


class Detached(Habit):
    """Weights without their gradient: by `detach`, by `data`, and parts of these."""

    def inner(self, hidden: Tensor) -> Tensor:
        """Products of them."""
        part = hidden[:, :4] @ self.first.weight.detach()[:4] * self.last.bias.detach()
        return hidden @ self.first.weight.detach().t() @ self.last.weight.data + part + self.first(hidden)


class HooksOnBothEnds(Habit):
    """A bias that one hook takes away and another puts back, as tensor parallelism does to add it once."""

    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_pre_hook(self._hide)
        self.last.register_forward_hook(self._add)

    def _hide(self, layer: nn.Linear, args: Any) -> None:
        self.hidden, layer._parameters["bias"] = layer.bias, None

    def _add(self, layer: nn.Linear, args: Any, output: Tensor) -> Tensor:
        layer._parameters["bias"] = self.hidden
        return output + layer.bias

    def inner(self, hidden: Tensor) -> Tensor:
        """As it is."""
        return self.first(hidden)


HABITS = (
    OwnGenerator,
    GeneratorsElsewhere,
    Codebook,
    GradientInside,
    WrittenWhileSaved,
    Detached,
    HooksOnBothEnds,
)


def _trained(cls: Any, policy: Any, num_passes: int) -> dict[str, Any]:
    seed()
    FORWARDS.clear()
    GENERATOR.manual_seed(5)
    blocks = nn.ModuleList(cls() for _ in range(3))
    chain = Chain([Block(str(i), block, i) for i, block in enumerate(blocks)], ends_in_backward=num_passes == 1)
    treated = TreatedBlocks(chain, [None] * 3 if policy is None else policy.treatments(chain))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        passes = []
        for _ in range(num_passes):
            hidden = torch.randn(4, WIDTH)
            for block in blocks:
                hidden = block(hidden)
            passes.append(hidden.square().mean())
        for loss in passes:
            loss.backward()
        optimizer.step()
        losses += [loss.item() for loss in passes]
        revised = None if policy is None else policy.revised(chain, lambda own: [copy.deepcopy(own)])
        if revised is not None:
            treated.treat(revised)
    treated.close()
    generators = [GENERATOR, *(block.generator for block in blocks if isinstance(block, OwnGenerator))]
    return {
        "losses": losses,
        "weights": [*blocks.parameters(), *blocks.buffers()],
        "generators": [float(torch.rand((), generator=generator)) for generator in generators],
        "random": float(torch.rand(())),
        "forwards": FORWARDS["Habit"],
    }


@pytest.mark.parametrize("cls", HABITS)
@pytest.mark.parametrize("num_passes", [1, 2])
def test_numbers_are_those_without(cls: type[Habit], num_passes: int) -> None:
    """Random numbers that go on, buffers that move twice, gradients of values that were not there yet, third runs."""
    expected = _trained(cls, None, num_passes)
    random_too = Selective(["matmul", "bernoulli", "rand"])
    for policy in (
        Full(),
        SquareRoot(),
        Selective(),
        random_too,
        Offload(min_bytes=0),
        Offload(saved="inputs", min_bytes=0),
        Optimal("1MiB"),
    ):
        found = _trained(cls, policy, num_passes)
        assert_same(found, expected, type(policy).__name__)
        assert found["forwards"] <= 2 * expected["forwards"], policy


def test_weights_are_not_moved() -> None:
    """A copy of each weight that a block reads without its gradient; bytes in the plan that are there anyway."""
    policy, optimal = Late(), Optimal("1MiB")
    for each in (policy, optimal):
        _trained(Detached, each, 2)
    # Nothing is larger than what is of 4 samples; a weight would be.
    assert max(policy.links[0].sizes[0]) == 4 * WIDTH * 4 < WIDTH * WIDTH * 4
    assert optimal.plan is not None
    assert optimal.plan.saved_bytes == (2 * 4 * WIDTH * 4,) * 3  # the input and what `last` takes


@pytest.mark.parametrize("by_data", [False, True])
def test_a_block_that_writes_its_parameters_is_named(by_data: bool) -> None:
    """A weight that shrinks twice a step."""

    class Shrinks(Habit):
        def inner(self, hidden: Tensor) -> Tensor:
            """Writes first."""
            with torch.no_grad():
                (self.first.weight.data if by_data else self.first.weight).mul_(0.9)
            return self.first(hidden)

    with pytest.raises(RuntimeError, match=r"The parameter `weight` of Linear is written in the block's forward"):
        _trained(Shrinks, Full(), 1)
    _trained(Shrinks, Offload(min_bytes=0), 1)  # which runs it once


class Compiled(Habit):
    """A part that is compiled, in one graph."""

    def __init__(self) -> None:
        super().__init__()
        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, -1)), nn.GELU(), nn.Flatten(1))
        self.part = torch.compile(part, backend="eager", fullgraph=True)

    def inner(self, hidden: Tensor) -> Tensor:
        """By it."""
        output: Tensor = self.part(hidden)
        return output


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # within torch.compile
@pytest.mark.parametrize("policy", [Full(), SquareRoot(), Offload(min_bytes=0)])
def test_parts_that_are_compiled(policy: Any) -> None:
    """A mode around the block, or hooks on what it saves, that code within cannot be compiled with."""
    assert_same(_trained(Compiled, policy, 1), _trained(Compiled, None, 1))
