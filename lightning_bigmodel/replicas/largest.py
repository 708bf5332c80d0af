"""Find the largest elements of a tensor, exactly or by a threshold that a sample gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bigmodel.replicas._checks import check_count, check_flag, is_number

__all__ = ["SampledThreshold", "largest_elements", "num_largest"]


@dataclass(frozen=True)
class SampledThreshold:
    """Take the largest elements by a threshold estimated from a sample: one pass, where exact selection has to sort.

    Deep Gradient Compression (https://arxiv.org/abs/1712.01887, section 5) with the corrections of its authors' code:
    the threshold is the quantile of a sample, and is changed as long as it selects far too many or too few. How many
    are selected then lies between the bounds; `threshold="exact"` selects precisely as many as asked for, and suits
    tensors of some ten thousand elements, where it costs little.

    Args:
        sample_ratio: Part of the elements to look at; never fewer than let two of the sample be selected.
        strided: Sample at equal distances from a random start; False draws each place.
        upper_bound: Times the wanted number that are still taken.
        lower_bound: Times the wanted number below which the threshold is lowered by this factor.
        max_adaptations: How often the threshold may be changed; if it selects too many or too few even then, exactly
            the wanted number is taken.
        resample: Where too many lie above the threshold, take the largest of those; False raises the threshold by
            `upper_bound`, until `max_adaptations`.

    Raises:
        ValueError: For what is out of these ranges.

    Example:
        >>> SampledThreshold(sample_ratio=0.05).lower_bound
        0.8
    """

    sample_ratio: float = 0.01
    strided: bool = True
    upper_bound: float = 1.3
    lower_bound: float = 0.8
    max_adaptations: int = 10
    resample: bool = True

    def __post_init__(self) -> None:
        if not (is_number(self.sample_ratio) and 0 < self.sample_ratio <= 1):
            raise ValueError(f"`sample_ratio={self.sample_ratio!r}` must be a number above 0 and at most 1.")
        if not (is_number(self.upper_bound) and self.upper_bound > 1):
            raise ValueError(f"`upper_bound={self.upper_bound!r}` must be a number above 1.")
        if not (is_number(self.lower_bound) and 0 < self.lower_bound < 1):
            raise ValueError(f"`lower_bound={self.lower_bound!r}` must be a number above 0 and below 1.")
        check_count("max_adaptations", self.max_adaptations, 0)
        check_flag("strided", self.strided)
        check_flag("resample", self.resample)

    @classmethod
    def of(cls, value: Any) -> SampledThreshold | None:
        """What the setting `threshold` means; None is exact selection.

        Raises:
            ValueError: For what is not known.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in ("sampled", "exact"):
            return cls() if value == "sampled" else None
        raise ValueError(
            f"`threshold={value!r}` is not known. Use 'sampled', 'exact' or `SampledThreshold(...)` with settings."
        )

    def select(self, importance: Tensor, wanted: int, seed: int) -> Tensor:
        """Indices of about `wanted` elements, the largest; never of zeros. `importance`: (n,), at least 0."""
        sample = self._sample(importance, wanted, seed)
        count = max(1, math.ceil(sample.numel() * wanted / importance.numel() - 1e-9))
        # Zeros are nothing to send, and where most elements are zeros the sampled threshold is zero.
        tiny = torch.finfo(importance.dtype).tiny
        threshold = sample.topk(count, sorted=False).values.min().clamp_min(tiny)
        indices = _reaching(importance, threshold)
        for _ in range(self.max_adaptations):
            if indices.numel() > self.upper_bound * wanted:
                if self.resample:
                    break
                threshold = threshold * self.upper_bound
            elif indices.numel() < self.lower_bound * wanted and threshold > tiny:
                threshold = (threshold * self.lower_bound).clamp_min(tiny)
            else:
                break
            indices = _reaching(importance, threshold)
        if indices.numel() > self.upper_bound * wanted:
            return indices[importance[indices].topk(wanted, sorted=False).indices]
        if indices.numel() < self.lower_bound * wanted and threshold > tiny:
            return _exactly(importance, wanted)
        return indices

    def _sample(self, importance: Tensor, wanted: int, seed: int) -> Tensor:
        size = importance.numel()
        num_samples = max(math.ceil(size * self.sample_ratio), math.ceil(2 * size / wanted))
        if num_samples >= size:
            return importance
        if not self.strided:
            generator = torch.Generator().manual_seed(seed)
            return importance[torch.randint(size, (num_samples,), generator=generator).to(importance.device)]
        stride = size // num_samples
        # A stride that divides the length of a row would look at some columns only.
        while math.gcd(stride, size) > 1:
            stride -= 1
        return importance[seed % stride :: stride]


def num_largest(num_elements: int, density: float) -> int:
    """How many elements of a tensor are sent: the given part, rounded up, but at least one."""
    return max(1, math.ceil(num_elements * density - 1e-6))


def largest_elements(values: Tensor, density: float, threshold: SampledThreshold | None, seed: int) -> Tensor:
    """Indices of the elements with the largest absolute value; never of zeros, which are nothing to send.

    NaN counts as largest: it is sent, and shows on all replicas, instead of staying where nobody sees it.

    Args:
        values: Of shape (n,).
        density: Which part of all elements; see `num_largest`.
        threshold: How to find them; None for exactly as many.
        seed: Where sampling starts.
    """
    importance = values.abs()
    wanted = num_largest(values.numel(), density)
    if threshold is None or wanted == values.numel():
        return _exactly(importance, wanted)
    return threshold.select(importance, wanted, seed)


def _exactly(importance: Tensor, wanted: int) -> Tensor:
    places = importance.topk(wanted, sorted=False).indices
    return places[importance[places] != 0]


def _reaching(importance: Tensor, threshold: Tensor) -> Tensor:
    return (importance < threshold).logical_not_().nonzero().view(-1)  # so written, NaN is in
