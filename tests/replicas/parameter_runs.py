"""Four replicas that step by gradients known in closed form, under a way to agree on weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_bigmodel
from lightning_bigmodel.replicas.sync import ParameterSync, Replicas, StepProgress
from lightning_bigmodel.testing import CollectiveCounter

NUM_RANKS = 4
# A matrix, one that is stored by columns, a scalar, and rows of which this rank has none.
SHAPES: dict[str, tuple[int, ...]] = {"first": (5, 7), "columns": (6, 4), "scale": (), "rows": (0, 3), "last": (11,)}
LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: a class of the package with its settings, and what the replicas meet."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    num_steps: int = 24
    momentum: float = 0.0
    weights: str = "even"
    losses: str = "falling"
    frozen_from: int = 10_000
    """From this step on the matrix is not trained."""
    trained_from: int = 0
    """From this step on the last vector is trained."""
    looks: bool = False
    """Whether to note what evaluation would see after each step."""


def start(name: str) -> np.ndarray:
    """The weights that all replicas start from."""
    seed = list(SHAPES).index(name)
    return np.random.default_rng(seed).normal(size=SHAPES[name])


def gradient(weights: np.ndarray, name: str, rank: int, step: int) -> np.ndarray:
    """Of a function that has another minimum on each replica and at each step."""
    place = np.random.default_rng([list(SHAPES).index(name), rank, step]).normal(size=SHAPES[name])
    return ((1 + 0.3 * rank) * (weights - place) + 0.2 * np.sin(3 * weights)).astype(weights.dtype)


def weight_of(case: Case, rank: int, step: int) -> float:
    """What the batch of a replica weighs."""
    if case.weights == "even":
        return 8.0
    if case.weights == "none":
        return 0.0
    # Replica 3 runs out of batches, replica 1 has none for a while.
    idle = (rank == 3 and step > 8) or (rank == 1 and 5 <= step <= 12)
    return 0.0 if idle else float(1 + (3 * rank + 5 * step) % 7)


def loss_of(case: Case, rank: int, step: int) -> float:
    """A replica's loss."""
    if weight_of(case, rank, step) == 0.0:
        return float("nan")
    if case.losses == "broken":  # the first steps, later ones of a replica, then all
        if step <= 2 or rank == 2:
            return float("nan")
        if 10 <= step <= 13:
            return 0.0 if step % 2 else -1.0
    return 4.0 / (1 + 0.2 * step) + 0.1 * rank


def rate_of(step: int) -> float:
    """A learning rate that falls by a factor after some steps."""
    return LEARNING_RATE if step <= 14 else LEARNING_RATE / 8


def trained(case: Case, step: int) -> list[str]:
    """Names that are trained in a step."""
    return [
        name
        for name in SHAPES
        if not (name == "first" and step >= case.frozen_from) and not (name == "last" and step < case.trained_from)
    ]


def tensors(case: Case) -> dict[str, Tensor]:
    """What the optimizer holds at the start."""
    held = {name: torch.tensor(start(name), dtype=getattr(torch, case.dtype)) for name in SHAPES}
    held["columns"] = held["columns"].t().contiguous().t()
    assert not held["columns"].is_contiguous()
    return held


def replicas() -> Replicas:
    """Two machines of two."""

    def levels(num_inside: int) -> tuple[Any, Any]:
        mine: list[Any] = [None, None]
        rows = torch.arange(dist.get_world_size()).view(-1, num_inside)
        for level, table in enumerate((rows, rows.t())):
            for members in table.tolist():
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    mine[level] = group
        return mine[0], mine[1]

    return Replicas(group=None, size=dist.get_world_size(), rank=dist.get_rank(), ranks_a_machine=2, levels=levels)


@dataclass
class Run:
    """What one rank saw: at index t, after step t + 1."""

    weights: list[dict[str, np.ndarray]] = field(default_factory=list)
    agreed: list[dict[str, np.ndarray]] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)
    periods: list[int] = field(default_factory=list)
    sent: list[dict[str, tuple[int, int]]] = field(default_factory=list)


def run_case(case: Case, stop_after: int | None = None) -> Run:
    """Train; with `stop_after`, everything but the weights and the state is made anew after that step."""
    rank, held, run = dist.get_rank(), tensors(case), Run()
    sync = _begin(case, held)
    moments: dict[str, Tensor] = {}
    for step in range(1, case.num_steps + 1):
        now = {name: held[name] for name in trained(case, step)}
        sync.before_step(now)
        for name, value in now.items():
            slope = torch.from_numpy(np.asarray(gradient(value.numpy(), name, rank, step)))
            if case.momentum:
                slope = moments[name] = moments.get(name, torch.zeros_like(slope)) * case.momentum + slope
            value.sub_(slope * rate_of(step))
        progress = StepProgress(
            weight=weight_of(case, rank, step), loss=loss_of(case, rank, step), learning_rate=rate_of(step)
        )
        with CollectiveCounter() as counter:
            changed = sync.after_step(now, progress)
        if changed and sync.averages_optimizer_state:
            sync.average_alike(list(moments.values()))  # type: ignore[attr-defined]
        run.sent.append(counter.as_dict())
        run.changed.append(changed)
        run.periods.append(getattr(sync, "period", 0))
        run.weights.append({name: value.numpy().copy() for name, value in held.items()})
        if case.looks:
            run.agreed.append({name: value.numpy().copy() for name, value in sync.agreed(now).items()})
        if step == stop_after:
            state = copy.deepcopy(sync.state_dict())
            sync.end()
            sync = _begin(case, held)
            sync.load_state_dict(state)
    sync.end()
    return run


def _begin(case: Case, held: Mapping[str, Tensor]) -> ParameterSync:
    sync: ParameterSync = getattr(lightning_bigmodel, case.kind)(**case.settings)
    sync.begin(replicas(), held)
    return sync


def run_cases(cases: list[Case], stop_after: int | None = None) -> list[Run]:
    """Several runs in the same ranks."""
    return [run_case(case, stop_after) for case in cases]


def data_parallel(case: Case) -> list[dict[str, np.ndarray]]:
    """Plain data-parallel SGD, by the gradient of the mean over all replicas' batches."""
    weights, seen = {name: start(name) for name in SHAPES}, []
    for step in range(1, case.num_steps + 1):
        own = np.array([weight_of(case, rank, step) for rank in range(NUM_RANKS)])
        for name in SHAPES:
            slopes = [gradient(weights[name], name, rank, step) for rank in range(NUM_RANKS)]
            mean = sum(share * slope for share, slope in zip(own / own.sum(), slopes, strict=True))
            weights[name] = weights[name] - rate_of(step) * mean
        seen.append(dict(weights))
    return seen


def assert_close(case: Case, found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], where: str) -> None:
    """Compare every parameter."""
    tolerance = 1e-10 if case.dtype == "float64" else 1e-5
    for name, value in found.items():
        np.testing.assert_allclose(
            value, expected[name], rtol=tolerance, atol=tolerance, err_msg=f"{case}, {where}, {name}"
        )
