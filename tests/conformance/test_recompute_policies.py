"""What every recompute policy must do: found by walking the subclasses, so that a new one is tested by being there."""

from __future__ import annotations

import copy
import pickle
import pkgutil
from importlib import import_module
from typing import Any

import pytest
import torch

import lightning_bigmodel.recompute
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.policy import RecomputePolicy
from tests.recompute.chains import FORWARDS, Mixed, Model, assert_same, chain_of, seed

# What has no default.
ARGUMENTS: dict[str, dict[str, Any]] = {"Optimal": {"budget": "1MiB"}}


def _policies() -> list[type[RecomputePolicy]]:
    for module in pkgutil.iter_modules(lightning_bigmodel.recompute.__path__):
        import_module(f"lightning_bigmodel.recompute.{module.name}")
    found, queue = [], [RecomputePolicy]
    while queue:
        cls = queue.pop()
        found += [cls] if cls.__module__.startswith("lightning_bigmodel.") and cls is not RecomputePolicy else []
        queue += cls.__subclasses__()
    return sorted(found, key=lambda cls: cls.__name__)


POLICIES = _policies()


def _trained(policy: RecomputePolicy | None, ends_in_backward: bool) -> dict[str, Any]:
    seed()
    model = Model([Mixed() for _ in range(5)])
    before = {name: dict(part.__dict__) for name, part in model.named_modules()}
    names = list(model.state_dict())
    chain = chain_of(model, ends_in_backward=ends_in_backward)
    treated = None if policy is None else TreatedBlocks(chain, policy.treatments(chain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most = 0
    for _ in range(4):
        optimizer.zero_grad()
        FORWARDS.clear()
        losses = [model(torch.randn(6, 8)) for _ in range(1 if ends_in_backward else 2)]
        with torch.no_grad():
            model(torch.ones(6, 8))
        for loss in losses:
            loss.backward()
        optimizer.step()
        most = max(most, FORWARDS["Mixed"])
        if treated is not None:
            revised = policy.revised(chain, lambda own: [copy.deepcopy(own)])
            if revised is not None:
                treated.treat(revised)
    assert list(model.state_dict()) == names
    if treated is not None:
        treated.close()
    for name, part in model.named_modules():
        assert part.__dict__.keys() == before[name].keys()
    return {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "buffers": list(model.buffers()),
        "random": float(torch.rand(())),
        "forwards": most,
    }


@pytest.mark.parametrize("cls", POLICIES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("ends_in_backward", [True, False])
def test_a_policy_changes_no_number_and_leaves_nothing_behind(
    cls: type[RecomputePolicy], ends_in_backward: bool
) -> None:
    """Other weights, buffers or random numbers; a third run of a block; attributes that stay."""
    policy = cls(**ARGUMENTS.get(cls.__name__, {}))
    policy = pickle.loads(pickle.dumps(policy))  # launchers send it to other processes
    expected = _trained(None, ends_in_backward)
    for _ in range(2):  # a policy is used again by the next run
        found = _trained(policy, ends_in_backward)
        assert_same(found, expected)
        assert found["forwards"] <= 2 * expected["forwards"]


def test_the_policies_are_found() -> None:
    """A walk over none."""
    names = {cls.__name__ for cls in POLICIES}
    assert {"Full", "Offload", "Optimal", "Selective", "SquareRoot"} <= names
    assert {name for name in names if name in lightning_bigmodel.__all__} == names
