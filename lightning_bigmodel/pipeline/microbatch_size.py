"""Find the largest micro-batch that fits, and remember it."""

from __future__ import annotations

import math
from typing import Any

from lightning_bigmodel.pipeline.microbatch import batch_size
from lightning_bigmodel.pipeline.tree import tensor_leaves

__all__ = ["MicrobatchSizer", "num_elements"]

# By so much more than what should fit by measured bytes, memory surely runs out.
_SURELY = 1.25


def num_elements(batch: Any) -> int:
    """Elements of the tensors with one row a sample: what the memory of a micro-batch grows with."""
    num_samples = batch_size(batch)
    return sum(t.numel() for t in tensor_leaves(batch) if t.ndim > 0 and t.shape[0] == num_samples)


class MicrobatchSizer:
    """How many micro-batches a batch needs, from what fitted and what did not.

    Sizes are counted in elements, so that what is learnt on long sequences holds for short ones: micro-batches grow
    again when shapes shrink. The first size follows from an estimate of the memory a batch needs; between the largest
    that fitted and the smallest that did not, later steps try the middle.

    Args:
        least: Micro-batches a batch is always split into, at least.

    Example:
        >>> sizer = MicrobatchSizer(1)
        >>> batch = torch.zeros(8, 100)
        >>> sizer.num_parts(batch)          # nothing is known yet
        1
        >>> sizer.failed(batch, 1)
        >>> sizer.num_parts(batch)
        2
        >>> sizer.fitted(batch, 2); sizer.num_parts(torch.zeros(8, 50))    # 400 elements fitted
        1
    """

    def __init__(self, least: int = 1) -> None:
        self.least = least
        self.largest_fit = 0
        self.smallest_misfit = math.inf
        self.is_estimated = self.is_measured = False
        self._has_failed = False
        self._first: float | None = None  # elements that should fit, by the estimate

    def estimate(self, batch: Any, needed_bytes: float, free_bytes: float) -> None:
        """Begin with what should fit, given the memory that `batch` would need as one micro-batch."""
        self.is_estimated = True
        if needed_bytes > free_bytes and not self.largest_fit:
            self.smallest_misfit = min(self.smallest_misfit, num_elements(batch))
            self._first = max(1.0, num_elements(batch) * max(free_bytes, 0.0) / needed_bytes)

    def measured(self, batch: Any, num_parts: int, kept_bytes: int, num_held: int, free_bytes: float) -> None:
        """Go on with what a step really kept in place of the estimate.

        With m micro-batches of a batch, of which up to h are held at a time, min(h, m) / m of the batch's bytes are
        kept: all of them where m is no more than h. Where memory has run out since, that is known better.

        Args:
            batch: The batch.
            num_parts: Micro-batches it ran in.
            kept_bytes: The most that was kept for backward.
            num_held: Micro-batches that were held for it.
            free_bytes: What there is for them.
        """
        self.is_measured = True
        if self._has_failed:
            return
        self.smallest_misfit, self._first = math.inf, None
        size, _ = self._largest_part(batch, num_parts)
        of_one_part = kept_bytes * (batch_size(batch) or 1) / size
        if of_one_part / num_held > free_bytes:
            self._first = max(1.0, num_elements(batch) * max(free_bytes, 0.0) / of_one_part)
            self.smallest_misfit = _SURELY * self._first

    def _rows(self, batch: Any) -> tuple[int, float]:
        num_samples = batch_size(batch) or 1
        return num_samples, max(num_elements(batch) / num_samples, 1.0)

    def num_parts(self, batch: Any) -> int:
        """Micro-batches this batch should be split into. Other ranks may need more: take the most."""
        num_samples, per_sample = self._rows(batch)
        fits = int(self.largest_fit // per_sample)
        if math.isinf(self.smallest_misfit):
            size = num_samples
        elif self._first is not None and (not self.largest_fit or self._first // per_sample > fits):
            size = int(self._first // per_sample)
        else:
            misfits = math.ceil(self.smallest_misfit / per_sample)  # the smallest number of samples that does
            size = (fits + misfits) // 2 if misfits - fits > 1 else fits
        return max(self.least, math.ceil(num_samples / max(1, min(size, num_samples))))

    def _largest_part(self, batch: Any, num_parts: int) -> tuple[int, float]:
        num_samples, per_sample = self._rows(batch)
        return math.ceil(num_samples / num_parts), per_sample

    def fitted(self, batch: Any, num_parts: int) -> None:
        """A batch ran in so many micro-batches."""
        size, per_sample = self._largest_part(batch, num_parts)
        self.largest_fit = max(self.largest_fit, int(size * per_sample))
        if self.largest_fit >= self.smallest_misfit:  # memory that was taken then is free now
            self.smallest_misfit = self.largest_fit + per_sample

    def failed(self, batch: Any, num_parts: int) -> None:
        """It did not: memory ran out on this rank."""
        self._has_failed = True
        size, per_sample = self._largest_part(batch, num_parts)
        self.smallest_misfit = min(self.smallest_misfit, size * per_sample)
        if self.largest_fit >= self.smallest_misfit:  # what fitted then does no more
            self.largest_fit = 0
        if self._first is not None:
            self._first /= 2

    def is_hopeless(self, batch: Any, num_parts: int) -> bool:
        """Whether one sample at a time is tried already."""
        return self._largest_part(batch, num_parts)[0] <= 1

    def state_dict(self) -> dict[str, float]:
        """What has been learnt."""
        return {"largest_fit": self.largest_fit, "smallest_misfit": self.smallest_misfit}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on with it."""
        self.largest_fit, self.smallest_misfit = int(state["largest_fit"]), state["smallest_misfit"]
        self.is_estimated = self.is_measured = True
