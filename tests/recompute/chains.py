"""Chains of blocks without a Trainer, with and without a policy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.policy import Block, Chain, RecomputePolicy

# Outside of the modules: a second run leaves their own attributes as they were.
FORWARDS: Counter[str] = Counter()


class Mixed(nn.Module):
    """Everything a block may do: dropout of three libraries, running statistics, counters, nested inputs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("level", torch.ones(width))
        self.calls, self.kept = 0, None

    def forward(self, hidden: Tensor, *, given: dict[str, Any], flag: bool = True) -> Tensor:
        """`given["pair"]`: two tensors and None."""
        FORWARDS["Mixed"] += 1
        self.calls += 1
        self.seen += 1
        self.level.mul_(0.9).add_(hidden.detach().square().mean(0), alpha=0.1)
        scaled = self.inner(hidden) / self.level.sqrt() * self.calls
        self.kept = scaled.detach()
        mixed = self.dropout(torch.tanh(self.norm(scaled))) * random.random() * float(np.random.rand())
        first, second, _ = given["pair"]
        return hidden + mixed * first + (second if flag else 0.0)


class Model(nn.Module):
    """Blocks that share what is given by keyword."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        """A loss."""
        given = {"pair": (hidden.sum(1, keepdim=True).tanh(), hidden * 0.5, None)}
        for block in self.blocks:
            hidden = block(hidden, given=given) if isinstance(block, Mixed) else block(hidden)
        return hidden.square().mean()


def chain_of(model: Model, **options: Any) -> Chain:
    """Its blocks."""
    blocks = [Block(f"blocks.{index}", block, index) for index, block in enumerate(model.blocks)]
    return Chain(blocks, **options)


def seed() -> None:
    """Every generator."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def run(
    make: Callable[[], nn.Module],
    policy: RecomputePolicy | None,
    *,
    num_blocks: int = 5,
    num_steps: int = 2,
    around: Callable[[], Any] | None = None,
    backward: Callable[[Tensor, list[nn.Parameter]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses, gradients, buffers, random numbers drawn afterwards, and counted forwards of the blocks."""
    seed()
    FORWARDS.clear()
    model = Model([make() for _ in range(num_blocks)])
    chain = chain_of(model, **options)
    treated = None if policy is None else TreatedBlocks(chain, policy.treatments(chain))
    parameters = list(model.parameters())
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(6, 8)
        if around is None:
            loss = model(inputs)
        else:
            with around():
                loss = model(inputs)
        loss.backward() if backward is None else backward(loss, parameters)
        losses.append(loss.item())
    if treated is not None:
        treated.close()
    assert not any("forward" in block.__dict__ for block in model.blocks)
    return {
        "losses": losses,
        "gradients": [parameter.grad for parameter in parameters],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "attributes": [(block.calls, block.kept.clone()) for block in model.blocks if isinstance(block, Mixed)],
        "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),
        "forwards": sum(FORWARDS.values()),
    }


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Bit by bit, `forwards` left out."""
    if isinstance(expected, Tensor):
        assert not expected.is_floating_point() or expected.isfinite().all(), where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        for key, value in expected.items():
            if key != "forwards":
                assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == expected, where
