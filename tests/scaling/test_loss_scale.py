"""`LossScale` against each system's rule, written again here from its documentation, and torch's own operator."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bigmodel.scaling import LossScale, LossScaleError

# A recorded run: o is a good step, X an overflow. Alone, in pairs, around growth, and in long runs of both.
_RECORDED = [c == "X" for c in "oooXooXXoooooXoXoXooooooooXXXXooooXXXoXooooooooooXooooooXXooooooooXoX"]


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def torch_rule(steps, *, scale, growth, backoff, interval):
    """The operator that `torch.amp.GradScaler.update` calls, on real tensors."""
    current, tracker = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
    for found_inf in steps:
        torch._amp_update_scale_(current, tracker, torch.tensor(float(found_inf)), growth, backoff, interval)
        yield current.item()


def deepspeed_rule(steps, *, scale, interval, hysteresis, consecutive, minimum=1.0, factor=2.0):
    """Counts iterations since the last overflow; the window is a multiple of them. Yields None where it raises."""
    last_overflow, left = -1, hysteresis
    for iteration, found_inf in enumerate(steps):
        if found_inf:
            if left == 1:
                if scale == minimum:
                    yield None
                    return
                scale = max(scale / factor, minimum)
            else:
                left -= 1
            last_overflow = iteration
        else:
            if consecutive:
                left = hysteresis
            if (iteration - last_overflow) % interval == 0:
                left = hysteresis
                scale *= factor
        yield scale


def megatron_rule(steps, *, scale, growth, backoff, interval, hysteresis, minimum=1.0):
    """On a tensor of float32; the hysteresis may go below zero, and only growth gives it back."""
    current, tracker, left = torch.tensor([scale]), 0, hysteresis
    for found_inf in steps:
        if found_inf:
            tracker, left = 0, left - 1
            if left <= 0:
                current = torch.max(current * backoff, torch.tensor([minimum]))
        else:
            tracker += 1
            if tracker == interval:
                tracker, left = 0, hysteresis
                current = current * growth
        yield current.item()


def paddle_rule(steps, *, scale, growth, backoff, interval, hysteresis):
    """Two counts that reset each other, in float32 with float32 factors; not below 1, not to infinity."""
    scale, growth, backoff = (torch.tensor(value) for value in (scale, growth, backoff))
    good = bad = 0
    for found_inf in steps:
        if found_inf:
            good, bad = 0, bad + 1
            if bad == hysteresis:
                scale, bad = torch.clamp(scale * backoff, min=1.0), 0
        else:
            good, bad = good + 1, 0
            if good == interval:
                larger = scale * growth
                scale, good = (larger if torch.isfinite(larger) else scale), 0
        yield scale.item()


def scales(machine: LossScale, steps):
    """Scale after each step; None, and the end, where the rule ends the run."""
    for found_inf in steps:
        try:
            machine.update(found_inf)
        except LossScaleError:
            yield None
            return
        yield machine.scale


@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.7, 0.3), (3.1, 0.9)])
@pytest.mark.parametrize("interval", [1, 3, 5])
def test_torch_preset_is_torch(growth, backoff, interval):
    """A scale one rounding away from GradScaler's makes a resumed run differ."""
    machine = LossScale.preset("torch", growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    expected = torch_rule(_RECORDED, scale=65536.0, growth=growth, backoff=backoff, interval=interval)
    assert list(scales(machine, _RECORDED)) == list(expected)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize(("interval", "hysteresis"), [(3, 2), (2, 1), (4, 3)])
def test_deepspeed_preset_is_deepspeed(consecutive, interval, hysteresis):
    """Giving the hysteresis back at the wrong moment shrinks the scale at other steps."""
    machine = LossScale.preset(
        "deepspeed",
        init_scale=64.0,
        growth_interval=interval,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
    )
    expected = deepspeed_rule(_RECORDED, scale=64.0, interval=interval, hysteresis=hysteresis, consecutive=consecutive)
    assert list(scales(machine, _RECORDED)) == list(expected)


def test_deepspeed_preset_ends_where_deepspeed_raises():
    """At the minimum, DeepSpeed first uses the hysteresis up and then ends the run."""
    steps = [True] * 8
    expected = list(deepspeed_rule(steps, scale=4.0, interval=5, hysteresis=2, consecutive=False))
    assert expected == [4.0, 2.0, 1.0, None]
    machine = LossScale.preset("deepspeed", init_scale=4.0, growth_interval=5)
    assert list(scales(machine, steps)) == expected
    assert machine.num_skipped == machine.skipped_in_a_row == 4


@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.7, 0.3)])
@pytest.mark.parametrize(("interval", "hysteresis"), [(3, 2), (2, 1), (4, 3)])
def test_megatron_preset_is_megatron(growth, backoff, interval, hysteresis):
    """Once its hysteresis is used up, Megatron shrinks at every overflow until it grows."""
    choice = {"growth_interval": interval, "hysteresis": hysteresis}
    machine = LossScale.preset("megatron", growth_factor=growth, backoff_factor=backoff, **choice)
    expected = megatron_rule(
        _RECORDED, scale=2.0**32, growth=growth, backoff=backoff, interval=interval, hysteresis=hysteresis
    )
    assert list(scales(machine, _RECORDED)) == list(expected)


@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.8), (1.7, 0.3)])
@pytest.mark.parametrize(("interval", "hysteresis"), [(3, 2), (2, 1), (4, 3)])
def test_paddlefleet_preset_is_paddle(growth, backoff, interval, hysteresis):
    """Paddle counts overflows in a row, and starts that count again after each shrinking."""
    choice = {"growth_interval": interval, "hysteresis": hysteresis}
    machine = LossScale.preset("paddlefleet", growth_factor=growth, backoff_factor=backoff, **choice)
    expected = paddle_rule(
        _RECORDED, scale=32768.0, growth=growth, backoff=backoff, interval=interval, hysteresis=hysteresis
    )
    assert list(scales(machine, _RECORDED)) == list(expected)


def test_the_presets_differ_on_the_recorded_run():
    """A recorded run on which all rules agree tells none of them from another."""
    runs = {
        name: tuple(scales(LossScale.preset(name, init_scale=2.0**10, growth_interval=4, **extra), _RECORDED))
        for name, extra in {
            "torch": {},
            "deepspeed": {"consecutive_hysteresis": True},
            "megatron": {},
            "paddlefleet": {"backoff_factor": 0.5},
        }.items()
    }
    assert len(_RECORDED) >= 60
    assert len(set(runs.values())) == 4


@given(
    steps=st.lists(st.booleans(), max_size=80),
    interval=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    growth=st.floats(1.01, 8.0),
    backoff=st.floats(0.05, 0.95),
)
@settings(max_examples=60, deadline=None)
def test_any_run_of_overflows_follows_each_rule(steps, interval, hysteresis, growth, backoff):
    """The recorded run may miss an order of overflows that a rule treats otherwise."""
    factors = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval, "init_scale": 1024.0}
    rule = {"growth": growth, "backoff": backoff, "interval": interval, "scale": 1024.0}
    machine = LossScale.preset("torch", max_consecutive_skips=None, **factors)
    # Where torch's scale is too small to be inverted, ours stays.
    for ours, theirs in zip(scales(machine, steps), torch_rule(steps, **rule), strict=True):
        if theirs < 2.0**-126:
            break
        assert ours == theirs
    for consecutive in (False, True):
        machine = LossScale.preset(
            "deepspeed",
            init_scale=16.0,
            growth_interval=interval,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive,
        )
        expected = deepspeed_rule(steps, scale=16.0, interval=interval, hysteresis=hysteresis, consecutive=consecutive)
        assert list(scales(machine, steps)) == list(expected)
    machine = LossScale.preset("megatron", hysteresis=hysteresis, max_consecutive_skips=None, **factors)
    for ours, theirs in zip(scales(machine, steps), megatron_rule(steps, hysteresis=hysteresis, **rule), strict=True):
        if math.isinf(theirs):
            break
        assert ours == theirs
    machine = LossScale.preset("paddlefleet", hysteresis=hysteresis, max_consecutive_skips=None, **factors)
    assert list(scales(machine, steps)) == list(paddle_rule(steps, hysteresis=hysteresis, **rule))


_SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": st.floats(2.0, 2.0**20),
        "growth_factor": st.floats(1.001, 1e6),
        "backoff_factor": st.floats(1e-6, 0.999),
        "growth_interval": st.integers(1, 5),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "refill_on_backoff": st.booleans(),
        "min_scale": st.none() | st.floats(2.0**-100, 2.0),
        "max_scale": st.none() | st.floats(2.0**20, 2.0**120),
        "dynamic": st.booleans(),
        "max_consecutive_skips": st.none() | st.integers(1, 10),
        "float32_factors": st.booleans(),
    }
)


@given(config=_SETTINGS, steps=st.lists(st.booleans(), max_size=60), data=st.data())
@settings(max_examples=100, deadline=None)
def test_scale_stays_in_bounds_and_resumes_exactly(config, steps, data):
    """A counter left out of the state moves the next growth; a scale out of its bounds is infinite or zero."""
    cut = data.draw(st.integers(0, len(steps)))
    whole = LossScale(**config)
    expected = list(scales(whole, steps))
    first, second = LossScale(**config), LossScale(**config)
    begin = list(scales(first, steps[:cut]))
    if begin and begin[-1] is None:
        assert begin == expected
        return
    second.load_state_dict(first.state_dict())
    assert second == first
    assert begin + list(scales(second, steps[cut:])) == expected
    assert second == whole
    seen = [scale for scale in expected if scale is not None]
    low = f32(config["min_scale"]) if config["min_scale"] is not None else 2.0**-126
    high = f32(config["max_scale"]) if config["max_scale"] is not None else f32(3.4028234e38)
    if config["dynamic"]:
        assert all(low <= scale <= high and f32(scale) == scale for scale in seen)
    else:
        assert set(seen) <= {f32(config["init_scale"])}
    assert whole.num_skipped == sum(steps[: len(expected)])
    assert {type(value) for value in whole.state_dict().values()} <= {int, float}


def test_counts_of_skipped_steps():
    """The count in a row is what a callback warns by; the total is what is logged."""
    machine = LossScale(growth_interval=3)
    for found_inf in (True, False, True, True):
        machine.update(found_inf)
    assert (machine.num_skipped, machine.skipped_in_a_row) == (3, 2)
    machine.update(False)
    assert (machine.num_skipped, machine.skipped_in_a_row) == (3, 0)


def test_a_run_that_cannot_recover_ends():
    """NaN weights overflow for ever; the run would go on skipping until its time is up."""
    machine = LossScale(init_scale=4.0, min_scale=1.0, max_consecutive_skips=3)
    for _ in range(4):
        machine.update(True)
    # A good step starts the count again.
    machine.update(False)
    machine.update(True)
    machine.update(True)
    with pytest.raises(
        LossScaleError, match=r"3 step\(s\) in a row .* is 1, .*`max_consecutive_skips=3`.*learning rate"
    ):
        machine.update(True)
    assert machine.skipped_in_a_row == 3


def test_without_a_minimum_the_scale_stays_invertible():
    """A scale of zero, or one whose inverse is infinite, makes every later step overflow."""
    machine = LossScale(max_consecutive_skips=2)
    assert list(scales(machine, [True] * 200))[-1] is None
    assert machine.scale == 2.0**-126
    assert torch.isfinite(torch.tensor(1 / machine.scale))


def test_growth_stops_at_the_last_number_of_float32():
    """An infinite scale makes every later step overflow."""
    machine = LossScale(init_scale=2.0**126, growth_interval=1)
    assert list(scales(machine, [False] * 3)) == [2.0**127] * 3
    bounded = LossScale(init_scale=2.0**10, growth_interval=1, max_scale=3000.0)
    assert list(scales(bounded, [False] * 3)) == [2048.0, 3000.0, 3000.0]


def test_a_static_scale_stays_and_still_counts():
    """A fixed scale must neither move nor go on for ever when every step overflows."""
    machine = LossScale(init_scale=128.0, dynamic=False, growth_interval=1, max_consecutive_skips=3)
    assert list(scales(machine, [True, True, False, False, True, True])) == [128.0] * 6
    assert machine.num_skipped == 4
    with pytest.raises(LossScaleError, match="kept by `dynamic=False`"):
        machine.update(True)


def test_state_of_torchs_scaler_loads():
    """A run that began with GradScaler goes on at its scale and at its place in the growth interval."""
    ours = LossScale.preset("torch", growth_interval=4)
    theirs = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4, "_growth_tracker": 3}
    live = torch.amp.GradScaler("cpu", growth_interval=4)
    assert live.state_dict().keys() == theirs.keys()
    ours.load_state_dict(theirs)
    ours.update(False)
    assert ours.scale == 2048.0
    ours.load_state_dict(live.state_dict())
    assert ours.scale == 65536.0


def test_the_settings_of_the_resumed_run_hold():
    """A state saved under wider settings must not put the scale out of bounds, or growth out of reach."""
    wide = LossScale(growth_interval=100, hysteresis=4)
    for _ in range(50):
        wide.update(False)
    narrow = LossScale(init_scale=8.0, growth_interval=10, hysteresis=2, max_scale=512.0)
    narrow.load_state_dict(wide.state_dict())
    assert narrow.scale == 512.0
    narrow.update(False)
    narrow.update(True)
    narrow.update(True)
    assert narrow.scale == 256.0
    static = LossScale(init_scale=8.0, dynamic=False)
    static.load_state_dict(wide.state_dict())
    assert static.scale == 8.0


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({}, ValueError, "missing"),
        ({"loss_scaler": 1}, ValueError, r"\['loss_scaler'\] are not known"),
        ({"scale": math.nan}, ValueError, "saved loss scale is nan"),
        ({"scale": 0.0}, ValueError, "over 0"),
        ({"scale": "big"}, TypeError, "`scale='big'`"),
        ({"growth_tracker": -1}, ValueError, "`growth_tracker=-1` must be 0 or more"),
        ({"num_skipped": 1.5}, TypeError, "`num_skipped=1.5`"),
    ],
)
def test_a_foreign_state_is_refused(state, error, message):
    """A state of something else, read in part, resumes at a wrong scale without a word."""
    machine = LossScale()
    if set(state) <= set(machine.state_dict()) and state:
        state = {**machine.state_dict(), **state}
    before = LossScale()
    with pytest.raises(error, match=message):
        machine.load_state_dict(state)
    assert machine == before


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"init_scale": "65536"}, TypeError, "`init_scale='65536'`"),
        ({"init_scale": True}, TypeError, "`init_scale=True`"),
        ({"init_scale": math.inf}, ValueError, "`init_scale=inf`"),
        ({"init_scale": 0.0}, ValueError, "`init_scale=0.0`"),
        ({"init_scale": -2.0}, ValueError, "`init_scale=-2.0`"),
        ({"init_scale": 1e39}, ValueError, "`init_scale=1e"),
        ({"init_scale": 10**400}, ValueError, "`init_scale=1000"),
        ({"growth_factor": 1.0}, ValueError, "`growth_factor=1.0` must be finite and over 1"),
        ({"growth_factor": math.nan}, ValueError, "`growth_factor=nan`"),
        ({"backoff_factor": 1.0}, ValueError, "`backoff_factor=1.0` must be over 0 and under 1"),
        ({"backoff_factor": 0}, ValueError, "`backoff_factor=0.0`"),
        ({"growth_interval": 0}, ValueError, "`growth_interval=0` must be 1 or more"),
        ({"growth_interval": 2000.0}, TypeError, "`growth_interval=2000.0` is a float"),
        ({"hysteresis": 0}, ValueError, "`hysteresis=0`"),
        ({"hysteresis": None}, TypeError, "`hysteresis=None`"),
        ({"max_consecutive_skips": 0}, ValueError, "`max_consecutive_skips=0`"),
        ({"dynamic": "no"}, TypeError, "`dynamic='no'` must be True or False"),
        ({"consecutive_hysteresis": 1}, TypeError, "`consecutive_hysteresis=1`"),
        ({"min_scale": 8.0, "max_scale": 4.0}, ValueError, "`min_scale=8.0` is over `max_scale=4.0`"),
        ({"init_scale": 2.0, "min_scale": 4.0}, ValueError, "`init_scale=2.0` must be between `min_scale=4.0`"),
        ({"init_scale": 8.0, "max_scale": 4.0}, ValueError, "`max_scale=4.0`"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, error, message):
    """A scale that never changes, or is infinite at the start, trains nothing."""
    with pytest.raises(error, match=message):
        LossScale(**wrong)


def test_an_unknown_preset_is_named():
    """A typo must not give the default rule."""
    with pytest.raises(ValueError, match="'deepsped'. Did you mean 'deepspeed'.*'paddlefleet'"):
        LossScale.preset("deepsped")
