"""Local SGD whose period follows the loss and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_bigmodel.replicas._checks import check_count, is_number
from lightning_bigmodel.replicas.local_sgd import LocalSGD
from lightning_bigmodel.replicas.sync import Replicas, StepProgress, refuse_unknown

__all__ = ["AdaptiveLocalSGD"]

_INTERVAL = 100
_SHRINK = 0.5


class AdaptiveLocalSGD(LocalSGD):
    """`LocalSGD` that averages more often as the loss falls, and less often as the learning rate falls.

    Early in training replicas may drift far; near the end drift is what keeps the loss up. Two published rules, with
    the loss F_t and the learning rate eta_t of the step at which replicas average, and F_0, eta_0 of the first step:

        paddle_fleet:  period = ceil(sqrt(initial_period * (eta_0 / eta_t) * (F_t / F_0)))
        adacomm:       period = ceil(initial_period * sqrt((eta_0 / eta_t) * (F_t / F_0))), or
                       shrink * (last period), rounded down, where that is not below the last period

    "paddle_fleet" is what PaddleFleet's adaptive local SGD computes, at every average after the warm-up; its period
    starts at the root of `initial_period`. "adacomm" is Wang and Joshi 2018 (arXiv 1810.08313, equations 17 to 20),
    computed at the first average of each `interval`; the paper's intervals are of wall-clock time, which replicas
    would not measure alike. Both are held between `min_period` and `max_period`. A loss or learning rate that is not
    a positive number leaves the period as it is. The loss is the mean over replicas, each by what its batch weighs.

    Do not use it for losses that may be negative, and prefer `LocalSGD` where the loss has a large floor: the ratio
    hardly falls there.

    Communication: that of `LocalSGD`; the loss travels in the small message of each average.

    Args:
        initial_period: Steps between averages at the start.
        variant: "paddle_fleet" or "adacomm".
        min_period: The period does not fall below it.
        max_period: The period does not rise above it.
        warmup_steps: First steps of the run after each of which all replicas average; the period stays as it is.
        interval: For "adacomm": steps for which a period holds. Default: 100.
        shrink: For "adacomm": gamma, the least decay of the period in each interval, above 0 and below 1. Default: 0.5.
        optimizer_state: "keep" leaves momentum and the like with each replica, "average" averages it like weights.

    Attributes:
        period: The current one.

    Raises:
        ValueError: For settings out of range or without effect; at the start of a run of one replica.

    Example:
        >>> AdaptiveLocalSGD(initial_period=20, variant="adacomm", max_period=20, interval=50).period
        20
    """

    needs_loss = True

    def __init__(
        self,
        initial_period: int = 16,
        variant: str = "paddle_fleet",
        min_period: int = 1,
        max_period: int = 16,
        warmup_steps: int = 0,
        interval: int | None = None,
        shrink: float | None = None,
        optimizer_state: str = "keep",
    ) -> None:
        check_count("initial_period", initial_period, 1)
        check_count("min_period", min_period, 1)
        check_count("max_period", max_period, 1)
        if not min_period <= initial_period <= max_period:
            raise ValueError(
                f"`initial_period={initial_period}` must lie between `min_period={min_period}` and "
                f"`max_period={max_period}`."
            )
        refuse_unknown("variant", variant, ("paddle_fleet", "adacomm"))
        if interval is not None:
            check_count("interval", interval, 1)
        if shrink is not None and not (is_number(shrink) and 0 < shrink < 1):
            raise ValueError(f"`shrink={shrink!r}` must be a number above 0 and below 1.")
        for name, value in (("interval", interval), ("shrink", shrink)):
            if value is not None and variant != "adacomm":
                raise ValueError(f"`{name}={value!r}` needs `variant='adacomm'`; {variant!r} has no such setting.")
        super().__init__(period=initial_period, warmup_steps=warmup_steps, optimizer_state=optimizer_state)
        self.initial_period, self.variant = initial_period, variant
        self.min_period, self.max_period = min_period, max_period
        self.interval = _INTERVAL if interval is None else interval
        self.shrink = _SHRINK if shrink is None else shrink
        self._first: tuple[float, float] | None = None  # this replica's first loss and its weight, until they are told
        self._reference: tuple[float, float] | None = None  # the loss of all replicas and the learning rate then
        self._first_rate = float("nan")
        self._num_intervals = 0

    @override
    def begin(self, replicas: Replicas, parameters: Mapping[str, Tensor]) -> None:
        super().begin(replicas, parameters)
        self.period = self.initial_period
        self._first, self._reference = None, None
        self._first_rate, self._num_intervals = float("nan"), 0

    @override
    def after_step(self, held: Mapping[str, Tensor], progress: StepProgress) -> bool:
        if self.num_steps == 0:
            self._first, self._first_rate = _weighed(progress), progress.learning_rate
        return super().after_step(held, progress)

    @override
    def _tell(self, progress: StepProgress) -> list[float]:
        return [*_weighed(progress), *(self._first or (0.0, 0.0))]

    @override
    def _hear(self, sums: list[float], progress: StepProgress) -> None:
        loss, first_loss = (total / weight if weight else float("nan") for total, weight in (sums[:2], sums[2:]))
        now = loss, progress.learning_rate
        first, self._first = (first_loss, self._first_rate), None
        if self._reference is None:
            self._reference = next((pair for pair in (first, now) if _is_usable(*pair)), None)
        if self.num_steps > self.warmup_steps and self._reference is not None and _is_usable(*now):
            first_loss, first_rate = self._reference
            self._set_period((first_rate / now[1]) * (loss / first_loss))

    def _set_period(self, ratio: float) -> None:
        """The rules of the class, for (eta_0 / eta_t) (F_t / F_0)."""
        if self.variant == "paddle_fleet":
            # Bound before it is rounded up: a ratio may be infinite.
            period = math.ceil(min(math.sqrt(self.initial_period * ratio), self.max_period))
        else:
            num_intervals = (self.num_steps - self.warmup_steps) // self.interval
            if num_intervals == self._num_intervals:
                return
            self._num_intervals = num_intervals
            period = math.ceil(min(self.initial_period * math.sqrt(ratio), self.max_period))
            if period >= self.period:
                period = math.floor(self.shrink * self.period)
        self.period = min(max(period, self.min_period), self.max_period)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "period": self.period,
            "first": self._first,
            "first_rate": self._first_rate,
            "reference": self._reference,
            "num_intervals": self._num_intervals,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.period, self._num_intervals = state["period"], state["num_intervals"]
        self._first, self._first_rate, self._reference = state["first"], state["first_rate"], state["reference"]

    @override
    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        merged = super().merged_state(states)
        if merged is None or merged["first"] is None:
            return merged
        # The mean of the old replicas' losses, which the new ones tell each other as theirs.
        total, weight = (sum(state["first"][place] for state in states) for place in (0, 1))
        return {**merged, "first": (total, weight)}


def _weighed(progress: StepProgress) -> tuple[float, float]:
    """A replica's loss times its weight, and the weight; nothing where there is no number."""
    if progress.weight > 0 and math.isfinite(progress.loss):
        return progress.weight * progress.loss, progress.weight
    return 0.0, 0.0


def _is_usable(loss: float, rate: float) -> bool:
    return math.isfinite(loss) and loss > 0 and math.isfinite(rate) and rate > 0
