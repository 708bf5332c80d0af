"""Replicas that average their weights now and then, against the same steps in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_bigmodel import AdaptiveLocalSGD, LocalSGD
from lightning_bigmodel.testing import RanksFailedError, run_ranks
from tests.replicas.parameter_runs import (
    NUM_RANKS,
    SHAPES,
    Case,
    Run,
    assert_close,
    data_parallel,
    gradient,
    loss_of,
    rate_of,
    run_cases,
    start,
    trained,
    weight_of,
)

CASES = [
    Case(kind="LocalSGD", settings={"period": 4}),
    Case(kind="LocalSGD", settings={"period": 4}, dtype="float32"),
    Case(kind="LocalSGD", settings={"period": 1}, weights="uneven"),
    Case(kind="LocalSGD", settings={"period": 5, "warmup_steps": 3}, weights="uneven", looks=True),
    Case(kind="LocalSGD", settings={"period": 5}, weights="none"),
    Case(kind="LocalSGD", settings={"period": 4}, momentum=0.9),
    Case(kind="LocalSGD", settings={"period": 4, "optimizer_state": "average"}, momentum=0.9, weights="uneven"),
    Case(kind="LocalSGD", settings={"period": 6, "inside_period": 2, "warmup_steps": 1}, weights="uneven"),
    Case(kind="LocalSGD", settings={"period": 6, "inside_period": 3, "ranks_inside": 2}, momentum=0.9),
    Case(
        kind="LocalSGD",
        settings={"period": 6, "inside_period": 3, "optimizer_state": "average"},
        momentum=0.9,
        dtype="float32",
    ),
    Case(kind="LocalSGD", settings={"period": 6}, frozen_from=9, trained_from=4),
]
ADAPTIVE = [
    Case(kind="AdaptiveLocalSGD", settings={"initial_period": 4}, num_steps=40),
    Case(
        kind="AdaptiveLocalSGD",
        settings={"initial_period": 9, "warmup_steps": 3, "min_period": 2, "max_period": 9},
        weights="uneven",
        num_steps=40,
    ),
    Case(kind="AdaptiveLocalSGD", settings={"initial_period": 3}, losses="broken", num_steps=40),
    Case(
        kind="AdaptiveLocalSGD",
        settings={"initial_period": 8, "variant": "adacomm", "interval": 6},
        weights="uneven",
        num_steps=40,
    ),
    Case(
        kind="AdaptiveLocalSGD",
        settings={"initial_period": 6, "variant": "adacomm", "interval": 1, "shrink": 0.9, "warmup_steps": 2},
        losses="broken",
        dtype="float32",
        num_steps=40,
    ),
]


def _next_period(case: Case, period: int, step: int, interval: int, first: tuple[float, float]) -> tuple[int, int]:
    """The published rules, for the average after a step; what is no positive number changes nothing."""
    settings = case.settings
    loss, weight = _mean_loss(case, step)
    if step <= settings.get("warmup_steps", 0) or not (weight and loss > 0):
        return period, interval
    ratio = (first[1] / rate_of(step)) * (loss / first[0])
    low, high = settings.get("min_period", 1), settings.get("max_period", 16)
    if settings.get("variant") != "adacomm":
        return int(np.clip(np.ceil(np.sqrt(ratio * settings["initial_period"])), low, high)), interval
    now = (step - settings.get("warmup_steps", 0)) // settings["interval"]
    if now == interval:
        return period, interval
    proposed = int(np.ceil(np.sqrt(ratio) * settings["initial_period"]))
    if proposed >= period:
        proposed = math.floor(settings.get("shrink", 0.5) * period)
    return int(np.clip(proposed, low, high)), now


def _mean_loss(case: Case, step: int) -> tuple[float, float]:
    pairs = [(loss_of(case, rank, step), weight_of(case, rank, step)) for rank in range(NUM_RANKS)]
    pairs = [(loss, weight) for loss, weight in pairs if weight and not math.isnan(loss)]
    total = sum(weight for _, weight in pairs)
    return (sum(loss * weight for loss, weight in pairs) / total if total else math.nan), total


def _plain(case: Case) -> tuple[list[list[dict[str, np.ndarray]]], list[bool], list[int]]:
    """Steps, averages and periods of all replicas in float64."""
    settings = case.settings
    warmup, inside = settings.get("warmup_steps", 0), settings.get("inside_period")
    period = settings.get("period", settings.get("initial_period"))
    weights = [{name: start(name) for name in SHAPES} for _ in range(NUM_RANKS)]
    moments = [{name: np.zeros(SHAPES[name]) for name in SHAPES} for _ in range(NUM_RANKS)]
    pending, apart, interval, first = np.zeros(NUM_RANKS), 0, 0, None
    seen, changed, periods = [], [], []
    for step in range(1, case.num_steps + 1):
        for rank in range(NUM_RANKS):
            for name in trained(case, step):
                slope = gradient(weights[rank][name], name, rank, step)
                moments[rank][name] = case.momentum * moments[rank][name] + slope
                weights[rank][name] = weights[rank][name] - rate_of(step) * moments[rank][name]
            pending[rank] += weight_of(case, rank, step)
        apart += 1
        groups: list[list[int]] = []
        if step <= warmup or apart == period:
            groups = [list(range(NUM_RANKS))]
            apart = 0
        elif inside and apart % inside == 0:
            groups = [[0, 1], [2, 3]]
        for group in groups:
            total = pending[group].sum()
            shares = pending[group] / total if total else np.full(len(group), 1 / len(group))
            for states in (weights, moments) if settings.get("optimizer_state") == "average" else (weights,):
                for name in SHAPES:
                    mean = sum(share * states[rank][name] for share, rank in zip(shares, group, strict=True))
                    for rank in group:
                        states[rank][name] = mean
            pending[group] = 0.0 if len(group) == NUM_RANKS else total / len(group)
        if case.kind == "AdaptiveLocalSGD" and groups:
            if first is None:
                loss, _ = _mean_loss(case, 1)
                first = (loss, rate_of(1)) if loss > 0 else None
                now, _ = _mean_loss(case, step)
                first = first or ((now, rate_of(step)) if now > 0 else None)
            if first is not None:
                period, interval = _next_period(case, period, step, interval, first)
        changed.append(bool(groups))
        periods.append(period)
        seen.append([dict(state) for state in weights])
    return seen, changed, periods


@pytest.fixture(scope="module")
def runs() -> dict[str, list[list[Run]]]:
    """All runs, in the same four ranks: by rank, then by case."""
    cases = CASES + ADAPTIVE
    return {"whole": run_ranks(run_cases, NUM_RANKS, cases), "stopped": run_ranks(run_cases, NUM_RANKS, cases, 7)}


def test_weights_are_those_of_the_formulas(runs: dict[str, list[list[Run]]]) -> None:
    """An average with other weights, too late, over other replicas, or without what is not trained any more."""
    for index, case in enumerate(CASES + ADAPTIVE):
        expected, changed, _ = _plain(case)
        assert changed.count(True) > 2
        for rank in range(NUM_RANKS):
            run = runs["whole"][rank][index]
            assert run.changed == changed, case
            for step, states in enumerate(expected):
                assert_close(case, run.weights[step], states[rank], f"step {step + 1}, rank {rank}")


def test_a_period_of_one_is_data_parallel_training(runs: dict[str, list[list[Run]]]) -> None:
    """A mean that is not the one of gradients."""
    for step, expected in enumerate(data_parallel(CASES[2])):
        for rank in range(NUM_RANKS):
            assert_close(CASES[2], runs["whole"][rank][2].weights[step], expected, f"step {step + 1}, rank {rank}")


def test_periods_are_those_of_both_rules(runs: dict[str, list[list[Run]]]) -> None:
    """A root at the wrong place, other bounds, a period that a loss of NaN has spoilt, or another at each replica."""
    for index, case in enumerate(ADAPTIVE, len(CASES)):
        _, _, expected = _plain(case)
        assert len(set(expected)) >= 3, expected
        assert [run[index].periods for run in runs["whole"]] == [expected] * NUM_RANKS, case


def test_published_values() -> None:
    """Rules that fail alike here and in the test's own arithmetic."""
    sync = AdaptiveLocalSGD(initial_period=16)
    sync._set_period(0.25)
    assert sync.period == 2  # sqrt(16 / 4)
    sync = AdaptiveLocalSGD(initial_period=16, variant="adacomm", interval=10)
    seen = []
    for sync.num_steps, ratio in ((10, 0.25), (20, 0.25), (25, 0.01), (30, 0.01), (40, 9.0)):
        sync._set_period(ratio)
        seen.append(sync.period)
    assert seen == [8, 4, 4, 2, 1]  # 16 sqrt(1/4); not smaller: half; same interval; 16 sqrt(1/100); half


def test_every_replica_is_at_the_same_weights_after_an_average(runs: dict[str, list[list[Run]]]) -> None:
    """Replicas that differ in the last bit drift apart."""
    for index, case in enumerate(CASES + ADAPTIVE):
        if "inside_period" in case.settings:
            continue
        run = [runs["whole"][rank][index] for rank in range(NUM_RANKS)]
        for step in [step for step, changed in enumerate(run[0].changed) if changed]:
            for name in SHAPES:
                assert all((one.weights[step][name] == run[0].weights[step][name]).all() for one in run), (case, name)


def test_evaluation_sees_the_weighted_mean(runs: dict[str, list[list[Run]]]) -> None:
    """Weights of one replica, or of the last average."""
    case = CASES[3]
    expected, changed, _ = _plain(case)
    pending = np.zeros(NUM_RANKS)
    for step in range(case.num_steps):
        pending += [weight_of(case, rank, step + 1) for rank in range(NUM_RANKS)]
        pending *= not changed[step]
        shares = pending / pending.sum() if pending.any() else np.full(NUM_RANKS, 1 / NUM_RANKS)
        mean = {name: sum(s * w[name] for s, w in zip(shares, expected[step], strict=True)) for name in SHAPES}
        for rank in range(NUM_RANKS):
            assert_close(case, runs["whole"][rank][3].agreed[step], mean, f"step {step + 1}, rank {rank}")


def test_a_resumed_run_is_the_same_run(runs: dict[str, list[list[Run]]]) -> None:
    """A counter, a weight or a reference that is not in the state."""
    for index, case in enumerate(CASES + ADAPTIVE):
        if case.frozen_from < case.num_steps:
            continue
        for rank in range(NUM_RANKS):
            whole, stopped = runs["whole"][rank][index], runs["stopped"][rank][index]
            assert (whole.changed, whole.periods) == (stopped.changed, stopped.periods)
            for name in SHAPES:
                assert (whole.weights[-1][name] == stopped.weights[-1][name]).all(), (case, name)


def test_what_is_sent(runs: dict[str, list[list[Run]]]) -> None:
    """A message in every step, or a loss that travels by itself."""
    num_elements = sum(math.prod(shape) for shape in SHAPES.values())
    for index, num_numbers in ((0, 2), (len(CASES), 6)):
        run = runs["whole"][0][index]
        for sent, changed in zip(run.sent, run.changed, strict=True):
            assert sent == ({"all_reduce": (2, 8 * (num_elements + num_numbers))} if changed else {})


def test_another_number_of_replicas_goes_on_from_the_counters() -> None:
    """Weights of old replicas in a mean of new ones; a schedule that starts again."""
    states = []
    for rank in range(3):
        sync = AdaptiveLocalSGD(initial_period=4, warmup_steps=2)
        sync.num_steps, sync.pending_weight, sync._steps_apart = 7, 5.0 + rank, 3
        sync._first = (2.0 * rank, 1.0)
        states.append(sync.state_dict())
    merged = sync.merged_state(states)
    assert merged is not None
    assert (merged["num_steps"], merged["steps_apart"], merged["pending_weight"]) == (7, 3, 0.0)
    assert merged["first"] == (6.0, 3.0)  # the mean of 0, 2 and 4
    LocalSGD().load_state_dict(LocalSGD().merged_state([LocalSGD().state_dict()]) or {})


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (LocalSGD, {"period": 0}, r"`period=0` must be a whole number of at least 1"),
        (LocalSGD, {"warmup_steps": -1}, r"`warmup_steps=-1` must be .* at least 0"),
        (LocalSGD, {"period": 6, "inside_period": 4}, r"`inside_period=4` must divide `period=6`"),
        (LocalSGD, {"period": 6, "inside_period": 6}, r"`inside_period=6` must divide `period=6` and be smaller"),
        (LocalSGD, {"ranks_inside": 2}, r"`ranks_inside=2` needs `inside_period`"),
        (LocalSGD, {"ranks_inside": 1, "inside_period": 4}, r"`ranks_inside=1` must be .* at least 2"),
        (LocalSGD, {"optimizer_state": "mean"}, r"`optimizer_state='mean'` is not known. Use 'keep' or 'average'"),
        (AdaptiveLocalSGD, {"initial_period": 20}, r"`initial_period=20` must lie between .* `max_period=16`"),
        (AdaptiveLocalSGD, {"min_period": 8, "initial_period": 4}, r"`initial_period=4` must .* `min_period=8`"),
        (AdaptiveLocalSGD, {"variant": "fleet"}, r"`variant='fleet'` is not known. Use 'paddle_fleet' or 'adacomm'"),
        (AdaptiveLocalSGD, {"interval": 5}, r"`interval=5` needs `variant='adacomm'`"),
        (AdaptiveLocalSGD, {"shrink": 0.5}, r"`shrink=0.5` needs `variant='adacomm'`"),
        (AdaptiveLocalSGD, {"shrink": 1.0, "variant": "adacomm"}, r"`shrink=1.0` must be a number above 0 and below 1"),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, settings: dict[str, object], message: str) -> None:
    """A period of 0, or a setting that is silently of no effect."""
    with pytest.raises(ValueError, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("num_ranks", "settings", "message"),
    [
        (1, {}, r"`LocalSGD` needs at least 2 replicas to average, and this run has 1"),
        (
            2,
            {"inside_period": 4},
            r"`ranks_inside=None` is 2 neighbours here, but must be .* fewer than the 2 replicas",
        ),
        (3, {"inside_period": 4, "ranks_inside": 2}, r"`ranks_inside=2` is 2 neighbours .* divide them"),
    ],
)
def test_too_few_replicas_are_refused(num_ranks: int, settings: dict[str, object], message: str) -> None:
    """A mean of one; neighbours that are all or that some replicas lack."""
    with pytest.raises(RanksFailedError, match=message) as caught:
        run_ranks(run_cases, num_ranks, [Case(kind="LocalSGD", settings=settings)])
    assert len(caught.value.failures) == num_ranks
