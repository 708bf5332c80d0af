"""Top-k with error feedback against its formulas in plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel import TopKErrorFeedback
from lightning_bigmodel.replicas.sync import NamedGradient, StepProgress
from lightning_bigmodel.testing import CollectiveCounter, run_ranks
from tests.replicas.sync_runs import SHAPES, Arrays, Run, contribution, one_of, replicas_of, start, worst

NUM = 4
STEPS = 20
DENSE = ("layer.bias", "small.weight", "table.weight", "empty.weight")
SETTINGS: dict[str, Any] = {"density": 0.1, "threshold": "exact", "min_numel": 100, "exempt": "table.*"}


class _AdamRun(Run):
    """The same with Adam, which `DGC` refuses."""

    def __init__(self, sync: Any, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(sync, dtype)
        self.optimizer = torch.optim.Adam(self.parameters.values(), **options)  # type: ignore[assignment]
        sync.check_optimizer(self.optimizer)
        self.optimizer.param_groups[0].setdefault("momentum", 0.0)


def _trained(kind: str, settings: dict[str, Any]) -> Arrays:
    sync = TopKErrorFeedback(**settings)
    if kind == "adam":
        # In float64; where a gradient is 0 in one and 1e-17 in the other, Adam would make a step of it.
        run: Run = _AdamRun(sync, torch.float64, lr=0.05, eps=1e-3)
    else:
        run = Run(sync, getattr(torch, kind), momentum=0.9, weight_decay=0.01)
    run.steps(STEPS)
    return run.weights()


def _expected(kind: str, settings: dict[str, Any]) -> Arrays:
    w = start()
    v = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(NUM)]
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in w.items()}  # one memory
    optimizer = (
        torch.optim.Adam(parameters.values(), lr=0.05, eps=1e-3)
        if kind == "adam"
        else torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, weight_decay=0.01)
    )
    for step in range(STEPS):
        c = [contribution(w, step, k, NUM) for k in range(NUM)]
        for name, parameter in parameters.items():
            total = np.zeros(SHAPES[name])
            for k in range(NUM):
                if name in DENSE:
                    total += c[k][name]
                    continue
                v[k][name] += c[k][name]
                flat = v[k][name].reshape(-1)
                places = np.argsort(-np.abs(flat))[: math.ceil(flat.size / 10)]
                sent = flat[places].astype(settings.get("value_dtype") or np.float64).astype(np.float64)
                flat[places] -= sent
                total.reshape(-1)[places] += sent
            parameter.grad = torch.from_numpy(total)
        optimizer.step()
    return w


@pytest.mark.parametrize(
    ("kind", "changes", "limit"),
    [
        ("float64", {}, 1e-10),
        ("float32", {}, 1e-5),
        ("adam", {}, 1e-10),
        ("float64", {"value_dtype": "float16"}, 1e-10),
    ],
)
def test_equals_the_formulas(kind: str, changes: dict[str, Any], limit: float) -> None:
    """Error not kept, or kept twice; an optimizer that is changed; replicas that end with different weights."""
    settings = {**SETTINGS, **changes}
    found = run_ranks(_trained, NUM, kind, settings)
    assert worst(found[0], _expected(kind, settings)) < limit
    assert all(np.array_equal(other[name], found[0][name]) for other in found[1:] for name in SHAPES)


def _bytes_and_state() -> dict[str, tuple[int, int]]:
    first, second = (TopKErrorFeedback(0.01) for _ in range(2))
    parameters = {f"w{index}": torch.zeros(200, 200) for index in range(5)}
    numbers = torch.Generator().manual_seed(dist.get_rank())

    def step(*syncs: TopKErrorFeedback) -> list[torch.Tensor]:
        drawn = {name: torch.randn(200, 200, generator=numbers) for name in parameters}
        last = []
        for sync in syncs:
            gradients = [
                NamedGradient(name=name, value=drawn[name].clone(), parameter=tensor, options={})
                for name, tensor in parameters.items()
            ]
            sync.reduce(gradients, StepProgress())
            last.append(torch.stack([gradient.value for gradient in gradients]))
        return last

    for sync in (first, second):
        sync.begin(replicas_of(), parameters)
    with CollectiveCounter() as counter:
        step(first)
    step(first)
    second.load_state_dict(first.state_dict())
    ours, theirs = step(first, second)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(second.state_dict()["residuals"][n], v) for n, v in first.state_dict()["residuals"].items())
    return counter.as_dict()


def test_bytes_and_state() -> None:
    """More than 3 % of dense at a density of 1 %; a message a tensor; residuals that a checkpoint does not have."""
    for counts in run_ranks(_bytes_and_state, 2):
        assert set(counts) == {"all_gather"}
        assert counts["all_gather"][0] == 2
        assert counts["all_gather"][1] <= 0.03 * 5 * 200 * 200 * 4


def test_other_replicas_and_densities() -> None:
    """Residuals lost when ranks are fewer, or never sent when a run goes on dense."""
    sync = TopKErrorFeedback(1.0)
    sync.begin(one_of(1), {"w": torch.zeros(2, 2)})
    merged = sync.merged_state([{"step": 3, "residuals": {"w": torch.full((2, 2), k)}} for k in (1.0, 2.0)])
    assert merged is not None
    sync.load_state_dict(merged)
    value = torch.ones(2, 2)
    for expected in (4.0, 4.0 + 0.0):
        sync.reduce([NamedGradient(name="w", value=value, parameter=torch.zeros(2, 2), options={})], StepProgress())
        assert value.unique().tolist() == [expected]


@pytest.mark.parametrize("density", [0, 1.5, -0.1])
def test_densities_out_of_range_are_refused(density: float) -> None:
    """An error at the first step."""
    with pytest.raises(ValueError, match=rf"`density={density}` must be a number above 0 and at most 1"):
        TopKErrorFeedback(density)
