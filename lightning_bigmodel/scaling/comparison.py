"""Values of 16 bits against those of fp32: how far apart, how near to the limits of the type.

For a type with smallest normal number `t` and largest number `m`:

- overflow: values that are infinite or NaN where the reference is finite;
- underflow: the share of references other than 0 whose value is 0 or below `t`, where bits are missing;
- headroom: `log2(m / largest value)`, in bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

__all__ = ["Comparison", "PairSums"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Values of 16 bits against those of 32, over any number of tensors; sums, so that two can be added.

    Attributes:
        num_calls: Comparisons added up.
        num_values: Values seen.
        num_compared: Of those, with a reference other than 0.
        num_overflows: See the module.
        num_underflows: See the module.
        num_underflows_unscaled: The same, had there been no loss scale.
        largest: Largest finite magnitude.
        fullness: The same as a share of the type's largest number; 0 where nothing was of 16 bits.
        difference: Sum of squared differences, of finite values.
        reference: Sum of squared references.
    """

    num_calls: float = 0.0
    num_values: float = 0.0
    num_compared: float = 0.0
    num_overflows: float = 0.0
    num_underflows: float = 0.0
    num_underflows_unscaled: float = 0.0
    largest: float = 0.0
    fullness: float = 0.0
    difference: float = 0.0
    reference: float = 0.0

    def __add__(self, other: Comparison) -> Comparison:
        """Both together."""
        merged = {}
        for field in fields(self):
            one, two = getattr(self, field.name), getattr(other, field.name)
            merged[field.name] = max(one, two) if field.name in ("largest", "fullness") else one + two
        return Comparison(**merged)

    @property
    def error(self) -> float:
        """Relative error in the L2 norm, of the finite values."""
        if not self.difference:
            return 0.0
        return math.sqrt(self.difference / self.reference) if self.reference else math.inf

    @property
    def underflow(self) -> float:
        """Share of the values, from 0 to 1."""
        return self.num_underflows / self.num_compared if self.num_compared else 0.0

    @property
    def underflow_unscaled(self) -> float:
        """Share of the values without the loss scale."""
        return self.num_underflows_unscaled / self.num_compared if self.num_compared else 0.0

    @property
    def headroom_bits(self) -> float:
        """Bits between the largest value and the largest number."""
        return -math.log2(self.fullness) if self.fullness else math.inf

    @property
    def rank(self) -> tuple[bool, float]:
        """To sort by: overflows are worse than any error."""
        return self.num_overflows > 0, self.error

    def exceeds(self, tolerance: float) -> bool:
        """Whether anything overflowed, or the error is larger."""
        return self.rank > (False, tolerance)


class PairSums:
    """Adds up comparisons on the device; nothing waits before `read`.

    Args:
        half_dtype: The type whose limits count.
    """

    def __init__(self, half_dtype: torch.dtype) -> None:
        self._limits = torch.finfo(half_dtype)
        self._half_dtype = half_dtype
        self._sums: Tensor | None = None
        self._peaks: Tensor | None = None
        self._num_calls = self._num_values = 0.0

    @torch.no_grad()
    def add(self, value: Tensor, reference: Tensor | None, scale: float = 1.0) -> None:
        """One tensor. A few reductions; memory of some fp32 copies of it."""
        self._num_calls += 1
        self._num_values += value.numel()
        if not value.numel():
            return
        is_half = value.dtype == self._half_dtype
        value = value.float()
        magnitude = value.abs()
        is_finite = torch.isfinite(value)
        largest = torch.where(is_finite, magnitude, 0.0).amax().double()
        peaks = torch.stack([largest, largest / self._limits.max if is_half else torch.zeros_like(largest)])
        self._peaks = peaks if self._peaks is None else torch.maximum(self._peaks, peaks.to(self._peaks.device))
        if reference is None:
            return
        reference = reference.float()
        is_known = torch.isfinite(reference)
        counts = is_known & (reference != 0)
        both = is_finite & is_known
        sums = torch.stack(
            [
                counts.sum().double(),
                (is_known & ~is_finite).sum().double(),
                (counts & (magnitude < self._limits.tiny)).sum().double(),
                (counts & (reference.abs() / scale < self._limits.tiny)).sum().double(),
                _square_sum(torch.where(both, value - reference, 0.0)),
                _square_sum(torch.where(both, reference, 0.0)),
            ]
        )
        self._sums = sums if self._sums is None else self._sums + sums.to(self._sums.device)

    def read(self) -> Comparison:
        """The numbers. Waits for the device."""
        sums = [0.0] * 6 if self._sums is None else self._sums.tolist()
        peaks = [0.0] * 2 if self._peaks is None else self._peaks.tolist()
        return Comparison(
            num_calls=self._num_calls,
            num_values=self._num_values,
            num_compared=sums[0],
            num_overflows=sums[1],
            num_underflows=sums[2],
            num_underflows_unscaled=sums[3],
            largest=peaks[0],
            fullness=peaks[1],
            difference=sums[4],
            reference=sums[5],
        )


def _square_sum(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()
