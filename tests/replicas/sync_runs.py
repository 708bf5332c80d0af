"""A small problem that replicas train on, and what each of them contributes, the same in torch and in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_bigmodel.replicas.sync import GradientSync, NamedGradient, Replicas, StepProgress

Arrays = dict[str, np.ndarray]

SHAPES: dict[str, tuple[int, ...]] = {
    "layer.weight": (24, 30),
    "conv.weight": (6, 5, 3, 3),  # in memory with channels last
    "layer.bias": (30,),
    "small.weight": (3, 4),
    "table.weight": (20, 20),
    "empty.weight": (0, 30),  # rows that other ranks hold
}
STEPS_AN_EPOCH = 4


def start() -> Arrays:
    """Weights to begin with."""
    numbers = np.random.default_rng(0)
    return {name: numbers.normal(size=shape) for name, shape in SHAPES.items()}


def contribution(weights: Arrays, step: int, rank: int, num_replicas: int, row_factor: float = 1.0) -> Arrays:
    """A replica's part of the gradient: towards a target of its own, with noise; some elements far larger.

    With a `row_factor` below 1 each row is smaller than the one before, as if the tensor were of low rank.
    """
    numbers = np.random.default_rng((7, step, rank))
    targets = np.random.default_rng((8, rank))
    parts = {}
    for name, value in weights.items():
        target = targets.normal(size=value.shape)
        noise = numbers.normal(size=value.shape) * np.exp(numbers.normal(size=value.shape))
        rows = row_factor ** np.arange(value.shape[0]).reshape(-1, *[1] * (value.ndim - 1))
        parts[name] = rows * (value - target + noise) / num_replicas
    return parts


def replicas_of(num_inside: int = 1, norm: Any = None) -> Replicas:
    """All ranks of the world, as replicas."""
    size, rank = dist.get_world_size(), dist.get_rank()

    def levels(inside: int) -> tuple[Any, Any]:
        machines = [list(range(first, first + inside)) for first in range(0, size, inside)]
        own = [dist.new_group(machine) for machine in machines]
        rails = [dist.new_group([machine[place] for machine in machines]) for place in range(inside)]
        return own[rank // inside], rails[rank % inside]

    return Replicas(group=None, size=size, rank=rank, ranks_a_machine=num_inside, levels=levels, norm=norm)


def one_of(size: int) -> Replicas:
    """The first of some replicas, for what sends nothing."""
    return Replicas(group=None, size=size, rank=0, ranks_a_machine=1, levels=lambda _: (None, None))


def parameters_of(weights: Arrays, dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    """As parameters; those of four dimensions with channels last."""
    parameters = {}
    for name, value in weights.items():
        tensor = torch.tensor(value, dtype=dtype)
        if tensor.dim() == 4:
            tensor = tensor.to(memory_format=torch.channels_last)
        parameters[name] = torch.nn.Parameter(tensor)
    return parameters


Named = Callable[[int], Sequence[str]]


class Run:
    """Trains with SGD as the strategy does: what a technique takes over is 0 while the optimizer steps."""

    def __init__(self, sync: GradientSync, dtype: torch.dtype, row_factor: float = 1.0, **options: Any) -> None:
        self.sync, self.step, self.row_factor = sync, 0, row_factor
        self.parameters = parameters_of(start(), dtype)
        self.optimizer = torch.optim.SGD(self.parameters.values(), **{"lr": 0.1, **options})
        sync.check_optimizer(self.optimizer)
        sync.begin(replicas_of(), self.parameters)

    def steps(self, number: int, named: Named | None = None, momenta: dict[int, float] | None = None) -> None:
        """Take optimizer steps, over the gradients named for each; momentum changes at the given steps."""
        size, rank = dist.get_world_size(), dist.get_rank()
        group = self.optimizer.param_groups[0]
        for _ in range(number):
            group["momentum"] = (momenta or {}).get(self.step, group["momentum"])
            weights = {name: p.detach().double().numpy() for name, p in self.parameters.items()}
            parts = contribution(weights, self.step, rank, size, self.row_factor)
            self.optimizer.zero_grad()
            gradients = []
            for name in named(self.step) if named else SHAPES:
                parameter = self.parameters[name]
                value = torch.empty_like(parameter).copy_(torch.from_numpy(parts[name]))
                parameter.grad = value
                gradients.append(NamedGradient(name=name, value=value, parameter=parameter, options=group))
            self.sync.reduce(gradients, StepProgress(epoch=self.step // STEPS_AN_EPOCH))
            kept = {name: group[name] for name in self.sync.taken_over}
            group.update(dict.fromkeys(kept, 0))
            self.optimizer.step()
            group.update(kept)
            self.step += 1

    def weights(self) -> Arrays:
        """As they are."""
        return {name: parameter.detach().numpy().copy() for name, parameter in self.parameters.items()}


def worst(found: Arrays, expected: Arrays) -> float:
    """Largest difference, relative to the largest element of its tensor."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[name] - value).max() / np.abs(value).max()) for name, value in expected.items() if value.size
    )
