"""How much of each gradient is left out, from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_bigmodel.replicas._checks import check_count, is_number

__all__ = ["SparsitySchedule"]

_STAGES = 4  # of a warm-up by steps, as in the paper's by epochs: 75 %, 93.75 %, 98.4 %, 99.6 %, then 99.9 %


def _is_sparsity(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


class SparsitySchedule:
    """Sparsity of each step: none before `begin_step`, rising over a warm-up, then constant.

    Arguments and errors are those of `DGC`.
    """

    def __init__(
        self,
        sparsity: float,
        begin_step: int,
        warmup_steps: int,
        warmup_epochs: int,
        warmup_sparsities: Sequence[float] | None,
    ) -> None:
        if not _is_sparsity(sparsity):
            raise ValueError(f"`sparsity={sparsity!r}` must be a number of at least 0 and below 1.")
        for name, count in (("begin_step", begin_step), ("warmup_steps", warmup_steps)):
            check_count(name, count, 0)
        check_count("warmup_epochs", warmup_epochs, 0)
        if warmup_steps and warmup_epochs:
            raise ValueError(
                f"`warmup_steps={warmup_steps}` and `warmup_epochs={warmup_epochs}` both say how long the warm-up is. "
                "Leave one of them out."
            )
        self.begin_step = begin_step
        self.counts_epochs = warmup_epochs > 0
        self._sparsity = float(sparsity)
        self._length = warmup_steps or warmup_epochs
        self._stages = self._checked(warmup_sparsities)

    def _checked(self, given: Sequence[float] | None) -> list[float]:
        if given is None:
            if not self._length:
                return []
            num_stages = self._length if self.counts_epochs else min(_STAGES, self._length)
            density = 1 - self._sparsity
            return [1 - density ** ((stage + 1) / (num_stages + 1)) for stage in range(num_stages)]
        start = f"`warmup_sparsities={given!r}`"
        if not (isinstance(given, Sequence) and not isinstance(given, (str, bytes)) and given):
            raise ValueError(f"{start} must be a list of numbers, such as [0.75, 0.9375, 0.984].")
        if not all(_is_sparsity(sparsity) for sparsity in given) or list(given) != sorted(given):
            raise ValueError(f"{start} must be numbers of at least 0 and below 1, none less than the one before.")
        if given[-1] > self._sparsity:
            raise ValueError(f"{start} must not go over `sparsity={self._sparsity}`, to which the warm-up leads.")
        if not self._length:
            raise ValueError(f"{start} needs `warmup_steps` or `warmup_epochs`, over which they are spread evenly.")
        if len(given) > self._length:
            unit = "epochs" if self.counts_epochs else "steps"
            raise ValueError(
                f"{start} are {len(given)}, and the warm-up has only `warmup_{unit}={self._length}`. Use as many or "
                "fewer."
            )
        return [float(sparsity) for sparsity in given]

    def sparsity(self, step: int, epochs_since_begin: int) -> float:
        """That of one step.

        Args:
            step: Optimizer steps taken before.
            epochs_since_begin: Epochs completed since the one in which `begin_step` came.
        """
        if step < self.begin_step:
            return 0.0
        passed = epochs_since_begin if self.counts_epochs else step - self.begin_step
        if passed >= self._length:
            return self._sparsity
        return self._stages[passed * len(self._stages) // self._length]

    @property
    def all_sparsities(self) -> list[float]:
        """Every sparsity there will be, but for the dense steps before `begin_step`."""
        return [*self._stages, self._sparsity]
