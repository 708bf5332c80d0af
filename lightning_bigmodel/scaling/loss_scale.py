"""Dynamic loss scaling as a state machine: no tensors, no communication.

Gradients in float16 vanish below 6e-8. So the loss is multiplied by a scale before the backward pass and the gradients
are divided by it after (https://arxiv.org/abs/1710.03740, section 3.2). The scale should be as large as it can be
without overflow. It is found by trying: a step whose gradients overflow is skipped and may shrink the scale, a run of
good steps grows it.

Systems differ in how many overflows shrink the scale, what gives that patience back, and where the scale ends.
`LossScale.preset` has the rules of four of them.
"""

from __future__ import annotations

import difflib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

__all__ = ["LossScale", "LossScaleError"]

# Below it the inverse of the scale is no number of float32, and no gradient could be unscaled any more.
_SMALLEST_SCALE = 2.0**-126
_LARGEST_FLOAT32 = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]

_PRESETS: dict[str, dict[str, Any]] = {
    "torch": {},
    "deepspeed": {"growth_interval": 1000, "hysteresis": 2, "min_scale": 1.0, "max_consecutive_skips": 1},
    "megatron": {
        "init_scale": 2.0**32,
        "growth_interval": 1000,
        "hysteresis": 2,
        "min_scale": 1.0,
        "float32_factors": True,
    },
    "paddlefleet": {
        "init_scale": 32768.0,
        "backoff_factor": 0.8,
        "growth_interval": 1000,
        "hysteresis": 2,
        "refill_on_backoff": True,
        "min_scale": 1.0,
        "float32_factors": True,
    },
}
# What a `torch.amp.GradScaler` writes.
_TORCH_KEYS = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})


class LossScaleError(RuntimeError):
    """The gradients overflow though the scale cannot shrink any more: the run does not train."""


@dataclass(kw_only=True)
class LossScale:
    """The scale of the loss, told after each step whether its gradients overflowed.

    A good step counts towards growth: after `growth_interval` of them in a row the scale is multiplied by
    `growth_factor`. An overflow starts that count again. With `hysteresis=h`, the first h - 1 overflows only skip
    their step, and the h-th shrinks the scale by `backoff_factor`. Growth gives the h - 1 back in every rule; two
    settings say what else does.

    The scale is always a number of float32, because it multiplies losses of float32, and so is its inverse. Growth
    beyond float32 leaves the scale as it is.

    Not for bfloat16, whose range is that of float32: there nothing vanishes.

    Every rank must call `update` with the same value, see `lightning_bigmodel.scaling.found_inf.any_rank`; then the
    scales agree without a message. Costs no memory on the device and no message.

    Args:
        init_scale: The first scale. Default: 65536.
        growth_factor: What growth multiplies the scale by, over 1. Default: 2.
        backoff_factor: What an overflow multiplies the scale by, between 0 and 1. Default: 0.5.
        growth_interval: Number of good steps in a row before the scale grows. Default: 2000.
        hysteresis: Number of overflows before the scale shrinks, the one that shrinks it included. Default: 1.
        consecutive_hysteresis: Whether each good step gives all of the hysteresis back, so that only overflows in a row
            count. Default: False.
        refill_on_backoff: Whether each good step and each shrinking give the hysteresis back. Otherwise, once the
            hysteresis is used up, every overflow shrinks the scale. Default: False.
        min_scale: The scale does not shrink below it. None means 2**-126, below which its inverse is no number of
            float32. Default: None.
        max_scale: The scale does not grow above it. None means the largest number of float32. Default: None.
        dynamic: False keeps the scale at `init_scale`; overflows still skip their steps. Default: True.
        max_consecutive_skips: How many overflows in a row that find the scale at its minimum, with no hysteresis left,
            end the run. With `dynamic=False` every overflow counts. None never ends the run. Default: 50.
        float32_factors: Whether the factors are rounded to float32 before use, as in systems that keep the scale in a
            tensor and multiply it there. Of no effect for factors that are powers of two. Default: False.

    Raises:
        TypeError: If a setting is of the wrong type.
        ValueError: If a setting is out of its range.

    Example::

        scale = LossScale(init_scale=1024.0, growth_interval=2)
        scale.update(found_inf=True)  # skip the step: the scale is 512 now
        scale.update(found_inf=False)
        scale.update(found_inf=False)
        scale.scale  # 1024.0
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    refill_on_backoff: bool = False
    min_scale: float | None = None
    max_scale: float | None = None
    dynamic: bool = True
    max_consecutive_skips: int | None = 50
    float32_factors: bool = False

    scale: float = field(init=False)
    num_skipped: int = field(init=False, default=0)
    skipped_in_a_row: int = field(init=False, default=0)
    _growth_tracker: int = field(init=False, default=0)
    _overflows_left: int = field(init=False)
    _skips_at_min: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._check()
        self.scale = _to_float32(self.init_scale)
        self._overflows_left = self.hysteresis

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> LossScale:
        """The rule of a known system, step for step.

        - "torch": `torch.amp.GradScaler`.
        - "deepspeed": DeepSpeed's `DynamicLossScaler` for `fp16`. It ends the run at the first overflow that would
          shrink the minimum scale. Its setting of the same name is `consecutive_hysteresis`.
        - "megatron": Megatron-LM's `DynamicGradScaler`.
        - "paddlefleet": PaddlePaddle's `update_loss_scaling` with the defaults of Fleet's `amp_configs`.

        What differs on purpose: the scale stays a normal number of float32, where the second and third would grow it to
        infinity and the first would shrink it to zero; and `max_consecutive_skips` ends a run that cannot recover.

        Args:
            name: One of the names above.
            overrides: Settings of `LossScale` to use instead of the preset's.

        Raises:
            ValueError: If there is no such preset.

        Example::

            LossScale.preset("megatron", init_scale=2.0**16).hysteresis  # 2
        """
        if name not in _PRESETS:
            close = difflib.get_close_matches(str(name), _PRESETS, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"There is no loss scaling preset {name!r}.{hint} The presets are {sorted(_PRESETS)}.")
        return cls(**{**_PRESETS[name], **overrides})

    def update(self, found_inf: bool) -> None:
        """Takes note of a step; call once a step, on every rank with the same value.

        Args:
            found_inf: Whether a gradient on any rank is infinite or NaN. The caller skips the optimizer step then.

        Raises:
            LossScaleError: If `max_consecutive_skips` overflows in a row have found the scale at its minimum. The
                overflow is counted by then.
        """
        if found_inf:
            self._overflow()
        else:
            self._good_step()

    def state_dict(self) -> dict[str, float | int]:
        """The state in plain numbers, settings not included: a resumed run follows its own settings."""
        return {name: getattr(self, attribute) for name, attribute in _STATE.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        The settings of this object hold: a scale outside its bounds moves to the nearer one, and with `dynamic=False`
        the scale stays at `init_scale`. With the settings it was saved under, the state is restored exactly.

        Args:
            state: What `state_dict` gave here, or what that of a `torch.amp.GradScaler` gave. Of the latter only the
                scale and the number of good steps are taken.

        Raises:
            ValueError: If the keys are neither's, or a value is out of its range.
            TypeError: If a value is not a number.
        """
        given = frozenset(state)
        if given == _TORCH_KEYS:
            state = {
                "scale": state["scale"],
                "growth_tracker": state["_growth_tracker"],
                "overflows_left": self.hysteresis,
                "num_skipped": 0,
                "skipped_in_a_row": 0,
                "skips_at_min": 0,
            }
        elif given != frozenset(_STATE):
            foreign, missing = sorted(map(str, given - frozenset(_STATE))), sorted(frozenset(_STATE) - given)
            raise ValueError(
                f"This is not the state of a `LossScale`: its keys {foreign} are not known, and {missing} are missing."
                " Load what `LossScale.state_dict` or `torch.amp.GradScaler.state_dict` gave, or leave the state out"
                " to begin with `init_scale`."
            )
        scale = _number("scale", state["scale"])
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"The saved loss scale is {scale}; it must be finite and over 0. Leave the state out.")
        counts = {name: _whole_number(name, state[name], at_least=0) for name in _STATE if name != "scale"}
        if self.dynamic:
            self.scale = min(max(_to_float32(scale), self._lowest), self._highest)
        self._growth_tracker = counts["growth_tracker"]
        self._overflows_left = min(max(counts["overflows_left"], 1), self.hysteresis)
        self.num_skipped = counts["num_skipped"]
        self.skipped_in_a_row = counts["skipped_in_a_row"]
        self._skips_at_min = counts["skips_at_min"]

    @property
    def _lowest(self) -> float:
        return _SMALLEST_SCALE if self.min_scale is None else _to_float32(self.min_scale)

    @property
    def _highest(self) -> float:
        return _LARGEST_FLOAT32 if self.max_scale is None else _to_float32(self.max_scale)

    def _good_step(self) -> None:
        self.skipped_in_a_row = self._skips_at_min = 0
        if not self.dynamic:
            return
        self._growth_tracker += 1
        if self.consecutive_hysteresis or self.refill_on_backoff:
            self._overflows_left = self.hysteresis
        # A state may come from a longer interval.
        if self._growth_tracker >= self.growth_interval:
            self._growth_tracker = 0
            self._overflows_left = self.hysteresis
            self._multiply(self.growth_factor)

    def _overflow(self) -> None:
        self.num_skipped += 1
        self.skipped_in_a_row += 1
        self._growth_tracker = 0
        if self.dynamic and self._overflows_left > 1:
            self._overflows_left -= 1
            return
        if not self.dynamic or self.scale <= self._lowest:
            self._skips_at_min += 1
            self._end_if_hopeless()
        if self.dynamic:
            self._multiply(self.backoff_factor)
            if self.refill_on_backoff:
                self._overflows_left = self.hysteresis

    def _multiply(self, factor: float) -> None:
        product = _to_float32(self.scale * (_to_float32(factor) if self.float32_factors else factor))
        if math.isfinite(product):
            self.scale = min(max(product, self._lowest), self._highest)

    def _end_if_hopeless(self) -> None:
        if self.max_consecutive_skips is None or self._skips_at_min < self.max_consecutive_skips:
            return
        place = "at its minimum" if self.dynamic else "kept by `dynamic=False`"
        remedy = "lower `min_scale`" if self.dynamic else "set a smaller `init_scale`, or `dynamic=True`"
        raise LossScaleError(
            f"Gradients overflowed in {self._skips_at_min} step(s) in a row though the loss scale is {self.scale:g},"
            f" {place}; `max_consecutive_skips={self.max_consecutive_skips}` ends the run. Look for NaN in the data or"
            f" the weights, lower the learning rate, use bfloat16, {remedy}, or raise `max_consecutive_skips`."
        )

    def _check(self) -> None:
        for each in fields(self):
            if each.init and isinstance(each.default, bool) and not isinstance(getattr(self, each.name), bool):
                raise TypeError(f"`{each.name}={getattr(self, each.name)!r}` must be True or False.")
        self.init_scale = _scale_setting("init_scale", self.init_scale)
        self.growth_factor = _number("growth_factor", self.growth_factor)
        self.backoff_factor = _number("backoff_factor", self.backoff_factor)
        if not (math.isfinite(self.growth_factor) and self.growth_factor > 1):
            raise ValueError(
                f"`growth_factor={self.growth_factor}` must be finite and over 1, such as 2; use `dynamic=False` for a"
                " scale that does not change."
            )
        if not 0 < self.backoff_factor < 1:
            raise ValueError(
                f"`backoff_factor={self.backoff_factor}` must be over 0 and under 1, such as 0.5; use `dynamic=False`"
                " for a scale that does not change."
            )
        self.growth_interval = _whole_number("growth_interval", self.growth_interval)
        self.hysteresis = _whole_number("hysteresis", self.hysteresis)
        if self.max_consecutive_skips is not None:
            self.max_consecutive_skips = _whole_number("max_consecutive_skips", self.max_consecutive_skips)
        if self.min_scale is not None:
            self.min_scale = _scale_setting("min_scale", self.min_scale)
        if self.max_scale is not None:
            self.max_scale = _scale_setting("max_scale", self.max_scale)
        if self.dynamic:
            self._check_order()

    def _check_order(self) -> None:
        if self._lowest > self._highest:
            raise ValueError(
                f"`min_scale={self.min_scale}` is over `max_scale={self.max_scale}`. Exchange the two or leave one out."
            )
        if not self._lowest <= _to_float32(self.init_scale) <= self._highest:
            raise ValueError(
                f"`init_scale={self.init_scale}` must be between `min_scale={self.min_scale}` and"
                f" `max_scale={self.max_scale}`. Change it, or the bound that it is outside of."
            )


# Name in the state dict -> attribute.
_STATE = {
    "scale": "scale",
    "growth_tracker": "_growth_tracker",
    "overflows_left": "_overflows_left",
    "num_skipped": "num_skipped",
    "skipped_in_a_row": "skipped_in_a_row",
    "skips_at_min": "_skips_at_min",
}


def _to_float32(value: float) -> float:
    """The nearest number of float32; infinite beyond its range."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}={value!r}` is a {type(value).__name__}; it must be a number.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _whole_number(name: str, value: Any, at_least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}={value!r}` is a {type(value).__name__}; it must be a whole number.")
    if value < at_least:
        raise ValueError(f"`{name}={value}` must be {at_least} or more.")
    return value


def _scale_setting(name: str, value: Any) -> float:
    number = _number(name, value)
    if not (math.isfinite(number) and _SMALLEST_SCALE <= number <= _LARGEST_FLOAT32):
        raise ValueError(
            f"`{name}={value!r}` must be a positive number whose inverse is also one of float32: from 2**-126 to"
            " 3.4e38. Powers of two, such as 65536, scale without rounding."
        )
    return number
