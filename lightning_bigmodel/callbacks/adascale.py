"""AdaScale SGD: the learning rate follows what a larger batch is worth at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._learning_rate import StepFactors
from lightning_bigmodel.callbacks._noise import WindowSquares
from lightning_bigmodel.callbacks._settings import is_number
from lightning_bigmodel.callbacks._watched import WatchingCallback
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["AdaScale"]

_LEAST_VARIANCE = 1e-6


class AdaScale(WatchingCallback):
    """Scale the learning rate of each step by AdaScale's gain, in [1, `scale`] (arXiv 2007.05105).

    A step whose batch is S (`scale`) times that for which the learning rate was chosen is worth as many of those steps
    as `gain = (var + sqr) / (var / S + sqr)`, with `sqr` the square of the gradient's mean and `var` the trace of the
    covariance of a gradient of the original batch: near S while noise dominates, near 1 once it does not. For n parts
    of equal size with gradients `g_i` and mean `g` (appendix B.3, as in `fairscale.optim.AdaScale`):

        var = (sum of |g_i|^2) (S / n) / (n - 1) - |g|^2 S / (n - 1)      sqr = |g|^2 - var / S

    and both are averaged over steps, by group of the optimizer's parameters, after `var` is kept above 1e-6 and `sqr`
    above 0. Parts are micro-batches, accumulated batches and data ranks under `BigModelStrategy`, rank batches under
    Lightning's own strategies; parts of different sizes enter with their sizes, and a short last window with the S it
    really has. Made for SGD: adaptive optimizers rescale gradients anyway. Schedules should run over
    `scale_invariant_steps`, the sum of the gains: training ends when it reaches the steps planned for the small batch.

    The rate is scaled for the step alone and put back: schedulers work as they did, and monitors show the rate before
    the gain. Gains are logged as `adascale_gain` and the sum as `scale_invariant_steps`. Differs from fairscale in what
    is divided: gradients here are means already. As in fairscale, each group gets a gain of its own.

    Memory: one number a parameter and micro-batch. Communication: one all-reduce of 3 numbers and 2 a group a step.
    The device is waited for once a batch.

    Args:
        scale: How many times larger a step's batch is than the one the learning rate was chosen for. Default: data
            ranks times accumulated batches, for a rate chosen for one rank's batch. With `AdaptiveAccumulation` that
            of its first window; it grows with the window.
        smoothing: Weight of the past in the averages, in [0, 1). Default: `max(0, 1 - n / 1000)`.

    Attributes:
        gain: That of all groups together at the last step; 1 before the first.
        gains: One for each group.
        scale_invariant_steps: Sum of the gains.

    Raises:
        ValueError: For settings out of range; at the start of a run where a step has one part only or nothing says by
            how much the batch has grown, and for all that `GradientNoiseScale` refuses.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import AdaScale
        >>> trainer = Trainer(
        ...     accelerator="cpu", devices=2, strategy="bigmodel_zero1", callbacks=AdaScale(), logger=False
        ... )
    """

    def __init__(self, scale: float | None = None, smoothing: float | None = None) -> None:
        if scale is not None and not (is_number(scale) and 1 <= scale < float("inf")):
            raise ValueError(f"`scale={scale!r}` must be a number of at least 1: by how much the batch has grown.")
        if smoothing is not None and not (is_number(smoothing) and 0 <= smoothing < 1):
            raise ValueError(f"`smoothing={smoothing!r}` must be a number of at least 0 and below 1, such as 0.9.")
        self.scale, self.smoothing = scale, smoothing
        self._factors: StepFactors | None = None
        self._first_window = 1
        self._forget()

    def _forget(self) -> None:
        self.gain, self.gains = 1.0, [1.0]
        self.scale_invariant_steps = 0.0
        # A value for each group: biased averages, and the weight they have so far.
        self._var: list[float] = []
        self._sqr: list[float] = []
        self._mass: list[float] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._forget()
        name = type(self).__name__
        windows = [c.first_window for c in _host.callbacks(trainer) if hasattr(c, "first_window")]
        self._first_window = windows[0] if windows else trainer.accumulate_grad_batches
        if self.scale is None and self._num_ranks(trainer) * self._largest_window(trainer) == 1:
            raise ValueError(
                f"`{name}` scales the learning rate of one rank's batch up to that of all, but there is one data rank "
                "and no accumulation. Set `scale` to how many times larger the batch is than the one the rate was "
                "chosen for."
            )

    @staticmethod
    def _num_ranks(trainer: pl.Trainer) -> int:
        strategy = trainer.strategy
        return strategy.mesh.data_size if isinstance(strategy, BigModelStrategy) else trainer.world_size

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if len(trainer.optimizers) != 1:
            raise ValueError(f"`{type(self).__name__}` needs one optimizer, but there are {len(trainer.optimizers)}.")
        self._factors = StepFactors(trainer.optimizers[0])

    @override
    def _groups(self) -> Sequence[Sequence[Tensor]]:
        return [group["params"] for group in self._trainer.optimizers[0].param_groups]

    @override
    def _window_ends(self, window: WindowSquares) -> None:
        assert self._factors is not None
        data_size = self._num_ranks(self._trainer)
        base = float(data_size * self._first_window) if self.scale is None else self.scale
        scale = base * window.num_batches / self._first_window
        if window.compares:
            self._add(window, scale)
        ratios = [(var / mass, sqr / mass) for var, sqr, mass in zip(self._var, self._sqr, self._mass, strict=True)]
        if not ratios:
            return
        self.gains = [_gain(var, sqr, scale) for var, sqr in ratios]
        self.gain = _gain(sum(var for var, _ in ratios), sum(sqr for _, sqr in ratios), scale)
        self.scale_invariant_steps += self.gain
        self._factors.apply(self.gains)

    def _add(self, window: WindowSquares, scale: float) -> None:
        num_parts = self._parts_a_batch(self._trainer) * self._trainer.accumulate_grad_batches
        past = max(0.0, 1 - num_parts / 1000) if self.smoothing is None else self.smoothing
        for values in (self._var, self._sqr, self._mass):
            values += [0.0] * (len(window.big) - len(values))
        # The variance of the whole gradient, by which the mean of the squares of its parts exceeds its own.
        share = window.big_share / (window.small_share - window.big_share)
        for group, (small, big) in enumerate(zip(window.small, window.big, strict=True)):
            of_whole = share * (small - big)
            var, sqr = max(scale * of_whole, _LEAST_VARIANCE), max(big - of_whole, 0.0)
            self._var[group] = past * self._var[group] + (1 - past) * var
            self._sqr[group] = past * self._sqr[group] + (1 - past) * sqr
            self._mass[group] = past * self._mass[group] + (1 - past)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        pl_module.log("adascale_gain", self.gain, on_step=True, on_epoch=False)
        pl_module.log("scale_invariant_steps", self.scale_invariant_steps, on_step=True, on_epoch=False)

    @override
    def _close(self) -> None:
        super()._close()
        if self._factors is not None:
            self._factors.close()
        self._factors = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "gain": self.gain,
            "gains": self.gains,
            "scale_invariant_steps": self.scale_invariant_steps,
            "averages": (self._var, self._sqr, self._mass),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.gain, self.gains = state_dict["gain"], list(state_dict["gains"])
        self.scale_invariant_steps = state_dict["scale_invariant_steps"]
        self._var, self._sqr, self._mass = (list(values) for values in state_dict["averages"])


def _gain(var: float, sqr: float, scale: float) -> float:
    return (var + sqr) / (var / scale + sqr)
