"""DiLoCo, whole and streaming, against the papers' formulas in numpy."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from lightning_bigmodel import DiLoCo
from lightning_bigmodel.replicas.fragments import fragments_of
from lightning_bigmodel.replicas.outer_exchange import DenseMean, QuantizedMean, _pack, _unpack
from lightning_bigmodel.replicas.sync import StepProgress
from lightning_bigmodel.testing import run_ranks
from tests.replicas.parameter_runs import (
    NUM_RANKS,
    SHAPES,
    Case,
    Run,
    assert_close,
    data_parallel,
    gradient,
    rate_of,
    replicas,
    run_cases,
    start,
    trained,
    weight_of,
)

PLAIN = {"outer_optimizer": "torch.optim.SGD", "outer_options": {"lr": 1.0}}
ADAM = {"outer_optimizer": "torch.optim.Adam", "outer_options": {"lr": 0.05}}
CASES = [
    Case(kind="DiLoCo", settings={"period": 4}),
    Case(kind="DiLoCo", settings={"period": 4, "snapshot_device": None}, dtype="float32", weights="uneven"),
    Case(kind="DiLoCo", settings={"period": 1, **PLAIN}, weights="uneven", looks=True),
    Case(kind="DiLoCo", settings={"period": 5, **ADAM}, momentum=0.9),
    Case(kind="DiLoCo", settings={"period": 4, "mixing": 0.6}, weights="none"),
    Case(kind="DiLoCo", settings={"period": 6, "num_fragments": 3}, weights="uneven", looks=True),
    Case(
        kind="DiLoCo",
        settings={"period": 8, "num_fragments": 2, "fragment_delay": 3, "mixing": 0.5},
        weights="uneven",
        momentum=0.9,
    ),
    Case(
        kind="DiLoCo",
        settings={"period": 8, "num_fragments": 2, "fragment_delay": 1, "mixing": 0.5, **ADAM},
        dtype="float32",
    ),
    Case(kind="DiLoCo", settings={"period": 4, "quantize": "int8"}, weights="uneven"),
    Case(
        kind="DiLoCo",
        settings={"period": 8, "num_fragments": 2, "fragment_delay": 3, "mixing": 0.5, "quantize": "float8"},
        weights="uneven",
    ),
    Case(kind="DiLoCo", settings={"period": 6, "num_fragments": 2, "mixing": 0.5}, frozen_from=9, trained_from=4),
]
FRAGMENTS = {1: [0] * 5, 2: [0, 1, 1, 1, 1], 3: [0, 1, 2, 2, 2]}


class _Outer:
    """SGD with Nesterov momentum, or Adam, of one parameter, by the books."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.is_adam = settings.get("outer_optimizer") == "torch.optim.Adam"
        self.rate = settings.get("outer_options", {}).get("lr", 0.7)
        self.momentum = 0.0 if "outer_optimizer" in settings else 0.9
        self.first: Any = 0.0
        self.second: Any = 0.0
        self.count = 0

    def step(self, theta: np.ndarray, slope: np.ndarray) -> np.ndarray:
        self.count += 1
        if self.is_adam:
            self.first = 0.9 * self.first + 0.1 * slope
            self.second = 0.999 * self.second + 0.001 * slope**2
            bias = np.sqrt(1 - 0.999**self.count)
            return theta - self.rate / (1 - 0.9**self.count) * self.first / (np.sqrt(self.second) / bias + 1e-8)
        self.first = self.momentum * self.first + slope
        return theta - self.rate * (slope + self.momentum * self.first if self.momentum else slope)


def _rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """To what a byte and the scale of its block of 256 can say."""
    blocks = np.pad(values, (0, -len(values) % 256)).reshape(-1, 256)
    largest = 127 if kind == "int8" else 448
    scales = (np.abs(blocks).max(1, keepdims=True) / largest).astype(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.nan_to_num(blocks / scales)
        if kind == "float8":  # 3 bits behind the point, exponents from -6
            exponents = np.maximum(np.nan_to_num(np.floor(np.log2(np.abs(scaled))), neginf=-6), -6)
            grid = 2.0 ** (exponents - 3)
            scaled = np.rint(scaled.astype(np.float32) / grid) * grid
        else:
            scaled = np.rint(scaled)
    return (scaled * scales).reshape(-1)[: len(values)]


def _mean(case: Case, changes: list[np.ndarray], weights: np.ndarray) -> np.ndarray:
    """Of flat changes of all replicas, as it comes over the wire."""
    shares = weights / weights.sum() if weights.any() else np.full(NUM_RANKS, 1 / NUM_RANKS)
    kind = case.settings.get("quantize")
    if kind is None:
        return np.sum([share * change for share, change in zip(shares, changes, strict=True)], axis=0)
    part = math.ceil(len(changes[0]) / (NUM_RANKS * 256)) * 256
    padded = [np.pad(change, (0, NUM_RANKS * part - len(change))).reshape(NUM_RANKS, part) for change in changes]
    means = []
    for place in range(NUM_RANKS):
        mean = sum(share * _rounded(one[place], kind) for share, one in zip(shares, padded, strict=True))
        means.append(_rounded(mean, kind))
    return np.concatenate(means)[: len(changes[0])]


def _plain(case: Case) -> tuple[list[list[dict[str, np.ndarray]]], list[bool], list[np.ndarray]]:
    """Weights of all replicas after each step, whether any were changed, and what each fragment's replicas weigh."""
    settings = case.settings
    num_fragments, delay = settings.get("num_fragments", 1), settings.get("fragment_delay", 0)
    mixing, stride = settings.get("mixing", 1.0), settings["period"] // num_fragments
    weights = [{name: start(name) for name in SHAPES} for _ in range(NUM_RANKS)]
    moments = [{name: np.zeros(SHAPES[name]) for name in SHAPES} for _ in range(NUM_RANKS)]
    common = {name: start(name) for name in SHAPES}
    outers = {name: _Outer(settings) for name in SHAPES}
    fragments = dict(zip(SHAPES, FRAGMENTS[num_fragments], strict=True))
    pending = np.zeros((num_fragments, NUM_RANKS))
    left: set[str] = set()
    seen, changed, weighed = [], [], []
    under_way: tuple[int, list[str], np.ndarray, np.ndarray] | None = None
    for step in range(1, case.num_steps + 1):
        now = trained(case, step)
        for rank in range(NUM_RANKS):
            for name in now:
                slope = gradient(weights[rank][name], name, rank, step)
                moments[rank][name] = case.momentum * moments[rank][name] + slope
                weights[rank][name] = weights[rank][name] - rate_of(step) * moments[rank][name]
            pending[:, rank] += weight_of(case, rank, step)
        if step % stride == 0:
            fragment = (step // stride - 1) % num_fragments
            known = [name for name in SHAPES if not (name == "last" and step < case.trained_from)]
            names = [name for name in known if fragments[name] == fragment and name not in left]
            if names:
                flat = [np.concatenate([(common[n] - weights[r][n]).ravel() for n in names]) for r in range(NUM_RANKS)]
                under_way = fragment, names, pending[fragment].copy(), _mean(case, flat, pending[fragment])
        uses = under_way is not None and step % stride == delay
        if uses:
            assert under_way is not None
            (fragment, names, own, mean), under_way, place = under_way, None, 0
            for name in names:
                slope = mean[place : place + common[name].size].reshape(SHAPES[name])
                place += common[name].size
                common[name] = outers[name].step(common[name], slope)
                part = mixing if name in now else 1.0
                left |= set() if name in now else {name}
                for rank in range(NUM_RANKS):
                    weights[rank][name] = (1 - part) * weights[rank][name] + part * common[name]
            pending[fragment] -= own
        changed.append(uses)
        seen.append([dict(state) for state in weights])
        weighed.append(pending.copy())
    return seen, changed, weighed


@pytest.fixture(scope="module")
def runs() -> dict[str, list[list[Run]]]:
    """All runs, in the same four ranks: by rank, then by case."""
    return {
        "whole": run_ranks(run_cases, NUM_RANKS, CASES),
        "stopped": run_ranks(run_cases, NUM_RANKS, CASES, 6),
        "later": run_ranks(run_cases, NUM_RANKS, CASES[6:10], 9),
    }


def test_weights_are_those_of_the_formulas(runs: dict[str, list[list[Run]]]) -> None:
    """An outer gradient of the wrong sign, from the wrong weights, or at the wrong step."""
    for index, case in enumerate(CASES):
        expected, changed, _ = _plain(case)
        for rank in range(NUM_RANKS):
            run = runs["whole"][rank][index]
            assert run.changed == changed, case
            for step, states in enumerate(expected):
                assert_close(case, run.weights[step], states[rank], f"step {step + 1}, rank {rank}")


def test_a_period_of_one_and_plain_sgd_is_data_parallel_training(runs: dict[str, list[list[Run]]]) -> None:
    """An outer gradient that is not the mean of steps."""
    for step, expected in enumerate(data_parallel(CASES[2])):
        for rank in range(NUM_RANKS):
            assert_close(CASES[2], runs["whole"][rank][2].weights[step], expected, f"step {step + 1}, rank {rank}")


def test_a_resumed_run_is_the_same_run(runs: dict[str, list[list[Run]]]) -> None:
    """Common weights, outer momentum, a counter or a part under way that is not in the state."""
    whole = [run[6:10] for run in runs["whole"]]
    for cases, expected, found in ((CASES, runs["whole"], runs["stopped"]), (CASES[6:10], whole, runs["later"])):
        for index, case in enumerate(cases):
            for rank in range(NUM_RANKS):
                assert expected[rank][index].changed == found[rank][index].changed
                for name in SHAPES:
                    last = expected[rank][index].weights[-1][name], found[rank][index].weights[-1][name]
                    assert (last[0] == last[1]).all(), (case, name)


def test_evaluation_sees_the_mean_by_what_each_fragment_weighs(runs: dict[str, list[list[Run]]]) -> None:
    """One weight for fragments that were agreed on at different times."""
    for index in (2, 5):
        case = CASES[index]
        expected, _, weighed = _plain(case)
        for step in range(case.num_steps):
            mean = {}
            for name, fragment in zip(SHAPES, FRAGMENTS[case.settings.get("num_fragments", 1)], strict=True):
                own = weighed[step][fragment]
                shares = own / own.sum() if own.any() else np.full(NUM_RANKS, 1 / NUM_RANKS)
                mean[name] = sum(s * w[name] for s, w in zip(shares, expected[step], strict=True))
            for rank in range(NUM_RANKS):
                assert_close(case, runs["whole"][rank][index].agreed[step], mean, f"step {step + 1}, rank {rank}")


def test_what_is_sent(runs: dict[str, list[list[Run]]]) -> None:
    """Messages in every step; a fragment that is sent when it is used, so that nothing overlaps; 8 bits as 32."""
    num_elements = sum(math.prod(shape) for shape in SHAPES.values())
    whole, delayed, quantised = (runs["whole"][0][index].sent for index in (0, 6, 9))
    for step, sent in enumerate(whole, 1):
        assert sent == ({"all_reduce": (2, 8 * (num_elements + 1))} if step % 4 == 0 else {})
    sizes = [35, num_elements - 35]
    for step, sent in enumerate(delayed, 1):
        assert sent == ({"all_reduce": (2, 8 * (sizes[step // 4 % 2 - 1] + 1))} if step % 4 == 0 else {})
    block = 256 + 4
    for step, sent in enumerate(quantised, 1):
        expected = {0: {"all_to_all": (1, 4 * (block + 8))}, 1: {"all_gather": (1, block)} if step > 4 else {}}
        assert sent == expected.get(step % 4, {})


def test_the_loss_falls(runs: dict[str, list[list[Run]]]) -> None:
    """Steps uphill in the common weights, which the formulas above would have in common with the code."""
    for index in (0, 5, 8):
        last = runs["whole"][0][index].weights[-1]["first"]
        assert np.square(last).sum() < 0.7 * np.square(start("first")).sum()  # minima are drawn around 0


def _half(dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor]]:
    held = {"weight": torch.full((3,), 100.0, dtype=dtype)}
    sync = DiLoCo(period=1, outer_optimizer="torch.optim.SGD", outer_options={"lr": 0.1})
    sync.begin(replicas(), held)
    seen = []
    for _ in range(12):
        sync.before_step(held)
        held["weight"] -= 1.0
        sync.after_step(held, StepProgress())
        seen.append(held["weight"][0].item())
    return seen, list(sync.state_dict()["common"].values())


def test_common_weights_of_half_precision_models_are_fp32() -> None:
    """Outer steps below the spacing of bf16 that never add up; rounding that counts as a step of the replicas."""
    for seen, (common,) in run_ranks(_half, 2, torch.bfloat16):
        assert common.dtype == torch.float32
        np.testing.assert_allclose(common.numpy(), 100 - 0.1 * 12, rtol=1e-6)
        assert seen[0] == 100.0  # 99.9 in bf16
        assert seen[-1] == 99.0  # 98.8


def _broken(kind: str | None) -> list[list[bool]]:
    rank = torch.distributed.get_rank()
    found = []
    for value in (math.nan, math.inf):
        tensors = [torch.ones(300), torch.ones(5)]
        if rank == 1:
            tensors[0][7] = value
        mean = DenseMean(None, 2) if kind is None else QuantizedMean(None, 2, kind)
        mean.start(tensors, 1.0)
        found.append([bool(result.isfinite().all()) for result in mean.result()])
    return found


@pytest.mark.parametrize("kind", [None, "int8", "float8"])
def test_what_is_not_finite_is_not_hidden(kind: str | None) -> None:
    """A replica whose weights are not a number goes on unseen once they are quantised."""
    assert run_ranks(_broken, 2, kind) == [[[False, True]] * 2] * 2


def _alone(kinds: list[str | None]) -> list[list[torch.Tensor]]:
    found = []
    for kind in kinds:
        mean = DenseMean(None, 1) if kind is None else QuantizedMean(None, 1, kind)
        mean.start([torch.arange(200.0), torch.tensor(-7.0)], 3.0)
        found.append(mean.result())
    return found


def test_one_replica_is_its_own_mean() -> None:
    """Bytes that lie where numbers of 8 bytes cannot."""
    ((dense, int8, float8),) = run_ranks(_alone, 1, [None, "int8", "float8"])
    for found, tolerance in ((dense, 1e-6), (int8, 2.0), (float8, 16.0)):
        torch.testing.assert_close(found[0], torch.arange(200.0), rtol=0, atol=tolerance)
        torch.testing.assert_close(found[1], torch.tensor(-7.0), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_quantising_is_within_half_a_step(kind: str) -> None:
    """Blocks of zeros, of tiny and of huge values."""
    values = torch.randn(4, 256) * torch.tensor([0.0, 1e-30, 1.0, 1e30])[:, None]
    found = _unpack(_pack(values.view(-1), kind), kind, torch.float32).view(4, 256)
    largest = values.abs().amax(1, keepdim=True)
    step = largest / 127 if kind == "int8" else torch.maximum(values.abs() / 8, largest / 448 / 512)
    assert ((found - values).abs() <= step / 2 * (1 + 1e-5)).all()


def test_fragments_are_consecutive_and_even() -> None:
    """Empty fragments; all the bytes in one."""
    assert fragments_of([4, 4, 4, 4], 2) == [0, 0, 1, 1]
    assert fragments_of([1, 1, 1, 9, 1, 1, 1], 3) == [0, 0, 0, 1, 2, 2, 2]
    assert fragments_of([100, 1, 1], 3) == [0, 1, 2]
    assert fragments_of([1, 1, 100], 3) == [0, 1, 2]
    assert fragments_of([0, 0, 0], 2) == [0, 0, 1]
    generator = np.random.default_rng(0)
    for _ in range(200):
        sizes = generator.integers(0, 50, size=generator.integers(1, 12)).tolist()
        num_fragments = int(generator.integers(1, len(sizes) + 1))
        places = fragments_of(sizes, num_fragments)
        assert sorted(set(places)) == list(range(num_fragments))
        assert places == sorted(places)
        bytes_of = [sum(s for s, p in zip(sizes, places, strict=True) if p == f) for f in range(num_fragments)]
        assert max(bytes_of) <= sum(sizes) / num_fragments + 2 * max(sizes)


def _states() -> list[dict[str, Any]]:
    sync = DiLoCo(period=4, num_fragments=2)
    sync._fragments = {}
    states = []
    for weight in (3.0, 5.0):
        state = sync.state_dict()
        states.append({**state, "num_steps": 7, "weights": [weight, 0.0], "under_way": {"fragment": 0}})
    return states


def test_another_number_of_replicas_keeps_what_is_common() -> None:
    """Weights of old replicas in a mean of new ones, or a part under way that new ones have not sent."""
    common = {"a": torch.ones(2), "b": torch.zeros(3)}
    outer = {"a": {"momentum_buffer": torch.full((2,), 5.0)}}
    states = [{**state, "common": common, "outer": outer, "fragments": {"a": 0, "b": 1}} for state in _states()]
    sync = DiLoCo(period=4, num_fragments=2)
    merged = sync.merged_state(states)
    assert merged is not None
    sync.load_state_dict(merged)
    found = sync.state_dict()
    assert (found["num_steps"], found["weights"], found["under_way"]) == (7, [0.0, 0.0], None)
    assert found["outer"]["a"]["momentum_buffer"].tolist() == [5.0, 5.0]
    assert found["common"]["b"].tolist() == [0.0, 0.0, 0.0]
    whole = DiLoCo(period=4)  # of another schedule
    whole.load_state_dict(states[0])
    assert whole.state_dict()["fragments"] == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 0}, r"`period=0` must be a whole number of at least 1"),
        ({"period": 50, "num_fragments": 4}, r"`num_fragments=4` must divide `period=50`"),
        ({"period": 2, "num_fragments": 4}, r"`num_fragments=4` must divide `period=2`"),
        (
            {"period": 8, "num_fragments": 4, "fragment_delay": 2},
            r"`fragment_delay=2` must be below `period / num_fragments`, here 8 / 4 = 2",
        ),
        ({"mixing": 0.0}, r"`mixing=0.0` must be a number above 0 and at most 1"),
        ({"mixing": 1.5}, r"`mixing=1.5` must be a number above 0 and at most 1"),
        ({"quantize": "int4"}, r"`quantize='int4'` is not known. Use None, 'int8' or 'float8'"),
        ({"snapshot_device": "disk"}, r"`snapshot_device='disk'` is not known. Use None or 'cpu'"),
        ({"outer_optimizer": "SGD"}, r"`outer_optimizer='SGD'` cannot be imported .* Use a full path"),
        ({"outer_optimizer": "torch.optim.Sgd"}, r"'torch.optim.Sgd'` cannot be imported .* no attribute 'Sgd'"),
        ({"outer_optimizer": "torch.optim.LBFGS"}, r"'torch.optim.LBFGS'` .* cannot be made or stepped .*closure"),
        ({"outer_options": {"rate": 1.0}}, r"`outer_options={'rate': 1.0}` cannot be made .*'rate'"),
        ({"outer_options": {1: 1.0}}, r"`outer_options={1: 1.0}` must be a dict of keyword arguments"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    """An error of torch's own at the first outer step, after hours."""
    with pytest.raises(ValueError, match=message):
        DiLoCo(**settings)


class _Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        """Counts in its group."""
        super().step(closure)
        self.param_groups[0]["count"] = 1


def test_outer_optimizers_that_keep_state_in_groups_are_refused() -> None:
    """State that no checkpoint has."""
    with pytest.raises(ValueError, match="keeps state beside that of its parameters"):
        DiLoCo(outer_optimizer=_Counting)
    with pytest.raises(ValueError, match=r"`num_fragments=3` must be at most the number of parameters, here 2"):
        DiLoCo(period=3, num_fragments=3).begin(None, dict.fromkeys("ab", torch.ones(1)))  # type: ignore[arg-type]


def test_callables_and_yaml() -> None:
    """A setting that works in Python only."""
    sync = DiLoCo(outer_optimizer=functools.partial(torch.optim.SGD, lr=0.5))
    sync.before_step({"weight": torch.ones(2)})
    assert sync._outer is not None
    assert sync._outer.param_groups[0]["lr"] == 0.5
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(DiLoCo, "sync")
    text = "{class_path: lightning_bigmodel.DiLoCo, init_args: {outer_optimizer: torch.optim.Adam, period: 8, "
    text += "outer_options: {lr: 0.1, betas: [0.9, 0.95]}}}"
    given = parser.parse_object({"sync": yaml.safe_load(text)}).sync
    sync = DiLoCo(**given.init_args.as_dict())  # as LightningCLI does
    sync.before_step({"weight": torch.ones(2)})
    assert isinstance(sync._outer, torch.optim.Adam)
    assert sync._outer.param_groups[0]["lr"] == 0.1
