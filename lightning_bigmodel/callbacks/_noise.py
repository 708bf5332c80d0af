"""The arithmetic of the gradient noise scale: an unbiased estimate a step, and the ratio of their averages."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

__all__ = ["RatioOfAverages", "WindowSquares", "noise_estimate"]


@dataclass(frozen=True, kw_only=True)
class WindowSquares:
    """What one optimizer step tells, the same on every rank.

    With `w_i` the weights of the window's micro-batches, summing to 1, `b_i` their sizes and `g_i` their gradients:

    Attributes:
        small: Sum of `w_i |g_i|^2`, by group of parameters.
        big: `|sum of w_i g_i|^2`, likewise.
        small_share: Sum of `w_i / b_i`: 1 / B_small where all are of one size.
        big_share: Sum of `w_i^2 / b_i`: 1 / B_big.
        num_batches: Batches of the window.
    """

    small: tuple[float, ...]
    big: tuple[float, ...]
    small_share: float
    big_share: float
    num_batches: int

    @property
    def compares(self) -> bool:
        """Whether there are two different batch sizes to compare."""
        return self.small_share > self.big_share * (1 + 1e-9)


def noise_estimate(window: WindowSquares) -> tuple[float, float]:
    """Unbiased estimates of `tr(Sigma)` and `|G|^2` from one step (arXiv 1812.06162, appendix A.1).

    `E small = |G|^2 + tr(Sigma) small_share` and `E big = |G|^2 + tr(Sigma) big_share`, whatever the sizes. Either
    estimate may be negative: a clamped one would be biased.

    Example:
        >>> window = WindowSquares(small=(3.0,), big=(2.0,), small_share=1 / 2, big_share=1 / 4, num_batches=1)
        >>> noise_estimate(window)
        (4.0, 1.0)
    """
    small, big = sum(window.small), sum(window.big)
    between = window.small_share - window.big_share
    return (small - big) / between, (big * window.small_share - small * window.big_share) / between


@dataclass
class RatioOfAverages:
    """Exponential moving averages of two series, corrected for their start, and the ratio of them.

    A ratio of averages, not an average of ratios: single values are noisy, and may be zero or negative below.

    Args:
        decay: Weight of the past in one step, in [0, 1).
        num_values: Pairs so far.
        mass: Sum of the weights `a_t` so far.
        above: Weighted sum of the numerators.
        below: Weighted sum of the denominators.
        squares: Sums of `a_t^2` times 1, x, y, x^2, x y and y^2, from which the spread of both averages comes.
    """

    decay: float
    num_values: int = 0
    mass: float = 0.0
    above: float = 0.0
    below: float = 0.0
    squares: list[float] = field(default_factory=lambda: [0.0] * 6)

    def add(self, above: float, below: float) -> None:
        """Take in one pair; pairs that are not finite are left out."""
        if not (math.isfinite(above) and math.isfinite(below)):
            return
        past, new = self.decay, 1 - self.decay
        self.num_values += 1
        self.mass = past * self.mass + new
        self.above = past * self.above + new * above
        self.below = past * self.below + new * below
        terms = (1.0, above, below, above * above, above * below, below * below)
        self.squares = [past**2 * old + new**2 * term for old, term in zip(self.squares, terms, strict=True)]

    @property
    def averages(self) -> tuple[float, float]:
        """Both averages; not a number before the first pair."""
        if not self.num_values:
            return math.nan, math.nan
        return self.above / self.mass, self.below / self.mass

    @property
    def ratio(self) -> float:
        """The ratio of the averages, not clamped."""
        above, below = self.averages
        return above / below if below else math.nan

    def interval(self, confidence: float) -> tuple[float, float]:
        """Where the true ratio lies with this confidence, if pairs are independent (Fieller, Biometrika 1940).

        `X - rho Y` has mean zero at the true ratio `rho`; the interval is every `rho` at which the averages X and Y are
        no further from that than their spread explains. It is (0, inf) while Y cannot be told from zero.
        """
        if self.num_values < 3:
            return 0.0, math.inf
        x, y = self.averages
        one, ax, ay, axx, axy, ayy = (value / self.mass**2 for value in self.squares)
        # Unbiased where the weights are equal, and nearly so otherwise.
        factor = _t_quantile(confidence, 1 / one - 1) ** 2 / (1 - one)
        var_x = factor * max(axx - 2 * x * ax + x * x * one, 0.0)
        var_y = factor * max(ayy - 2 * y * ay + y * y * one, 0.0)
        covariance = factor * (axy - x * ay - y * ax + x * y * one)
        a, b, c = y * y - var_y, x * y - covariance, x * x - var_x
        if a <= 0:
            return 0.0, math.inf
        root = math.sqrt(max(b * b - a * c, 0.0))
        return (b - root) / a, (b + root) / a

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return asdict(self)


def _t_quantile(confidence: float, freedom: float) -> float:
    """Two-sided quantile of Student's t, by the first terms of its expansion in 1 / degrees of freedom."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
