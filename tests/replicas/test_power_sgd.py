"""PowerSGD against its formulas in plain numpy, and what it keeps."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel import PowerSGD
from lightning_bigmodel.mesh.rng import derive_seed
from lightning_bigmodel.replicas.sync import NamedGradient, StepProgress
from lightning_bigmodel.testing import CollectiveCounter, run_ranks
from tests.replicas.sync_runs import SHAPES, Arrays, Run, contribution, one_of, replicas_of, start, worst

NUM = 4
STEPS = 20
# Rounding grows from step to step, as errors are fed back; with these two, in 20 steps, to some ten times its size.
ROW_FACTOR = 0.7
LEARNING_RATE = 0.01
CASES: dict[str, dict[str, Any]] = {
    "plain": {"rank": 2},
    "rank 1": {"rank": 1},
    "no feedback": {"rank": 2, "error_feedback": False},
    "cold start": {"rank": 2, "warm_start": False},
    "begins later": {"rank": 2, "begin_step": 6},
    "exempt": {"rank": 2, "exempt": ["table.*"]},
    "other rate": {"rank": 2, "min_compression_rate": 5.5},
    "full rank": {"rank": 1000, "min_compression_rate": 1e-3},
}


def _orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Gram-Schmidt, as in the paper."""
    columns: list[np.ndarray] = []
    for column in matrix.T:
        for _ in range(2):  # once more, for the digits that the first time loses
            for other in columns:
                column = column - other * (other @ column)
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)


def _compressed(name: str, settings: dict[str, Any]) -> tuple[int, int, int] | None:
    shape = SHAPES[name]
    if len(shape) < 2 or not math.prod(shape) or (name == "table.weight" and "exempt" in settings):
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rows, columns, settings["rank"])
    rate = rows * columns / (rank * (rows + columns))
    return (rows, columns, rank) if rate >= settings.get("min_compression_rate", 2.0) else None


def _expected(settings: dict[str, Any]) -> tuple[Arrays, set[str]]:
    """Weights after all steps, and which tensors were compressed."""
    w, compressed = start(), set()
    errors: list[dict[str, Any]] = [dict.fromkeys(SHAPES, 0.0) for _ in range(NUM)]
    factors: Arrays = {}
    for step in range(STEPS):
        c = [contribution(w, step, k, NUM, ROW_FACTOR) for k in range(NUM)]
        for name in SHAPES:
            sizes = _compressed(name, settings) if step >= settings.get("begin_step", 0) else None
            if sizes is None:
                update = sum(part[name] for part in c)
            else:
                compressed.add(name)
                rows, columns, rank = sizes
                if name not in factors or not settings.get("warm_start", True):
                    seed = derive_seed(zlib.crc32(name.encode()), 0 if settings.get("warm_start", True) else step)
                    drawn = torch.Generator().manual_seed(seed)
                    factors[name] = torch.randn(columns, rank, generator=drawn).double().numpy()
                d = [c[k][name].reshape(rows, columns) + errors[k][name] for k in range(NUM)]
                basis = _orthogonal(sum(each @ factors[name] for each in d))
                parts = [each.T @ basis for each in d]
                if settings.get("error_feedback", True):
                    for k in range(NUM):
                        errors[k][name] = d[k] - basis @ parts[k].T
                factors[name] = sum(parts)
                update = (basis @ factors[name].T).reshape(SHAPES[name])
            w[name] = w[name] - LEARNING_RATE * (update + 0.01 * w[name])
    return w, compressed


def _trained(dtype: torch.dtype, cases: list[str]) -> dict[str, Arrays]:
    ends = {}
    for name in cases:
        run = Run(PowerSGD(**CASES[name]), dtype, ROW_FACTOR, lr=LEARNING_RATE, weight_decay=0.01)
        run.steps(STEPS)
        ends[name] = run.weights()
    return ends


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_the_formulas(dtype: torch.dtype, limit: float) -> None:
    """Errors not kept, or of the wrong sign; factors that each replica has for itself; replicas that drift."""
    found = run_ranks(_trained, NUM, dtype, list(CASES))
    differences, counted = {}, {}
    for name, settings in CASES.items():
        expected, compressed = _expected(settings)
        differences[name], counted[name] = worst(found[0][name], expected), len(compressed)
        assert all(np.array_equal(other[name][key], found[0][name][key]) for other in found for key in SHAPES), name
    assert counted == {**dict.fromkeys(CASES, 3), "exempt": 2, "other rate": 1, "full rank": 4}
    assert {name: value for name, value in differences.items() if not value < limit} == {}


def _gradients(values: dict[str, torch.Tensor]) -> list[NamedGradient]:
    return [NamedGradient(name=n, value=value, parameter=value, options={}) for n, value in values.items()]


def _accounts() -> tuple[float, dict[str, tuple[int, int]]]:
    sync = PowerSGD(rank=1)
    sync.begin(replicas_of(), {"w": torch.zeros(30, 40), "v": torch.zeros(30, 40), "b": torch.zeros(40)})
    numbers = torch.Generator().manual_seed(dist.get_rank())
    sent = torch.zeros(30, 40, dtype=torch.float64)
    given = torch.zeros_like(sent)
    for _ in range(50):
        values = {
            "w": torch.randn(30, 40, dtype=torch.float64, generator=numbers),
            "v": torch.zeros(30, 40, dtype=torch.float64),
            "b": torch.zeros(40, dtype=torch.float64),
        }
        given += values["w"]
        with CollectiveCounter() as counter:
            sync.reduce(_gradients(values), StepProgress())
        sent += values["w"]
        assert not values["v"].any()  # a gradient of zeros has no basis
    kept = sync.state_dict()["errors"]["w"].clone()
    dist.all_reduce(given)
    dist.all_reduce(kept)
    return float((sent + kept - given).abs().max() / given.abs().max()), counter.as_dict()


def test_what_is_not_sent_is_kept() -> None:
    """Parts of gradients lost over 50 steps, NaN from zeros, more messages or bytes than two factors."""
    for difference, counts in run_ranks(_accounts, NUM):
        assert difference < 1e-12
        assert counts == {"all_reduce": (2, 8 * (2 * (30 + 40) + 40))}


def _halves(dtype: torch.dtype) -> tuple[float, float, int]:
    sync = PowerSGD(rank=2, dtype="bfloat16", min_compression_rate=1.0)
    sync.begin(replicas_of(), {"w": torch.zeros(30, 40)})
    numbers = torch.Generator().manual_seed(0)
    total, given = torch.zeros(30, 40), torch.zeros(30, 40)
    for _ in range(30):
        contributed = torch.randn(30, 40, generator=numbers)
        values = {"w": contributed.to(dtype)}
        given += 2 * values["w"]
        with CollectiveCounter() as counter:
            sync.reduce(_gradients(values), StepProgress())
        total += values["w"]
    left = sync.state_dict()["errors"]["w"] * 2
    return float((total + left - given).norm() / given.norm()), float(left.norm()), counter.payload_bytes["all_reduce"]


def test_sixteen_bits() -> None:
    """Errors kept in the type of the gradients; what rounding the factors takes away is lost; 32 bits are sent."""
    # The replicas' contributions are equal here, so that their sum is exact in 16 bits too.
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        for difference, left, num_bytes in run_ranks(_halves, 2, dtype):
            assert difference < limit
            assert left > 1
            assert num_bytes == 2 * 2 * (30 + 40)


def _resumed() -> None:
    settings = {"rank": 2, "begin_step": 1}
    whole, first, second = (Run(PowerSGD(**settings), torch.float32) for _ in range(3))
    whole.steps(8)
    first.steps(4)
    second.sync.load_state_dict(first.sync.state_dict())
    for ours, theirs in zip(second.parameters.values(), first.parameters.values(), strict=True):
        ours.data.copy_(theirs)
    second.step = 4
    first.steps(1)  # what was loaded is a copy
    second.steps(4)
    assert all(np.array_equal(second.weights()[name], value) for name, value in whole.weights().items())
    ours, theirs = second.sync.state_dict(), whole.sync.state_dict()
    for table in ("errors", "factors"):
        assert ours[table].keys() == theirs[table].keys()
        assert len(ours[table]) == 3
        assert all(torch.equal(ours[table][name], value) for name, value in theirs[table].items())


def test_goes_on_from_its_state() -> None:
    """Errors, factors or the step missing from a checkpoint."""
    run_ranks(_resumed, 2)


def test_another_number_of_replicas() -> None:
    """Errors of replicas that are gone are lost; an error that waits when a run goes on dense is never sent."""
    sync = PowerSGD(rank=2)
    sync.begin(one_of(2), {"w": torch.zeros(40, 40), "rows": torch.zeros(40, 40)})
    states = [
        {
            "step": 3,
            "errors": {"w": torch.full((40, 40), k), "rows": torch.zeros(int(k), 40)},
            "factors": {"w": torch.ones(40, 2)},
        }
        for k in (1.0, 2.0, 6.0)
    ]
    merged = sync.merged_state(states)
    assert merged is not None
    assert (merged["step"], list(merged["errors"])) == (3, ["w"])
    assert torch.equal(merged["errors"]["w"], torch.full((40, 40), 4.5))
    assert torch.equal(merged["factors"]["w"], torch.ones(40, 2))
    dense = PowerSGD(rank=2, exempt=["w"], min_compression_rate=1.0)
    dense.begin(one_of(1), {"w": torch.zeros(40, 40)})
    dense.load_state_dict(merged)
    value = torch.zeros(40, 40)
    for expected in (4.5, 4.5):
        dense.reduce(_gradients({"w": value}), StepProgress())
        assert value.unique().tolist() == [expected]
    assert not dense.state_dict()["errors"]
    with pytest.raises(ValueError, match=r"error of `w` has the shape \(3, 3\), and this rank holds \(40, 40\)"):
        sync.load_state_dict({**merged, "errors": {"w": torch.zeros(3, 3)}})


def test_warns_if_all_is_dense() -> None:
    """A run that compresses nothing and does not say so."""
    with pytest.warns(UserWarning, match=r"sends everything dense.*`min_compression_rate=2.0` at `rank=4`"):
        PowerSGD().begin(one_of(2), {"w": torch.zeros(8, 8)})
    PowerSGD().begin(one_of(2), {"w": torch.zeros(8, 8), "v": torch.zeros(100, 100)})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, "`rank=0` must be a whole number of at least 1"),
        ({"begin_step": -1}, "`begin_step=-1` must be"),
        ({"min_compression_rate": 0}, "`min_compression_rate=0` must be a number above 0"),
        ({"dtype": "int8"}, "`dtype='int8'` is not known. Use None, 'float32'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    """An error at the first step."""
    with pytest.raises(ValueError, match=words):
        PowerSGD(**settings)
