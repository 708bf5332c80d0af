"""The gradient noise scale, measured while training: how large a batch is worth its cost."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_bigmodel.callbacks._noise import RatioOfAverages, WindowSquares, noise_estimate
from lightning_bigmodel.callbacks._settings import is_number
from lightning_bigmodel.callbacks._watched import WatchingCallback

__all__ = ["GradientNoiseScale"]


class GradientNoiseScale(WatchingCallback):
    """Measure the simple noise scale `tr(Sigma) / |G|^2` of the gradient, which predicts the critical batch size.

    McCandlish et al. 2018 (arXiv 1812.06162): with batches well below the critical size twice the batch halves the
    steps; well above, it only costs. Each optimizer step compares the gradients of the parts of its batch with the
    gradient of the whole (appendix A.1), without a further backward:

        |G|^2     = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
        tr(Sigma) = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)

    Parts are micro-batches, accumulated batches and data ranks, under any layout of `BigModelStrategy`; rank batches
    under Lightning's own strategies (`DDPStrategy`, one device). Parts of different sizes and a short last window enter
    with their own sizes. Both series are averaged apart and then divided; single values are never clamped, so that
    the averages are unbiased, and the ratio may be negative as long as `|G|^2` cannot be told from zero. The gradient
    is that before clipping. Do not use it where the parts of a batch are not independent samples (sequences of one
    document dealt out over ranks, say), or where a loss is no mean over samples.

    The interval is Fieller's for a ratio of two means, from the spread of both series. It takes steps to be
    independent and the gradient to change slowly against the average; it does not know of the lag of the average.

    Logged at each step: `noise_scale`, the ends `noise_scale_low` and `noise_scale_high` of its interval, and
    `critical_batch_size`, the noise scale read as a batch size, at least 1. In samples; with a callable
    `microbatch_weight` in what that counts (tokens).

    Left out of both norms, with a warning that names them: parameters used by several stages of a pipeline, and those
    of whose gradients tensor ranks have parts.

    Memory: one number a parameter and micro-batch. Communication: one all-reduce of 5 numbers a step. The device is
    waited for once a batch.

    Args:
        decay: Weight of the past in the averages, in [0, 1): about `1 / (1 - decay)` steps count.
        confidence: Probability that the interval holds the true value, in (0, 1).

    Attributes:
        noise_scale: The ratio; not a number before the first step.
        interval: Its confidence interval; (0, inf) while steps tell nothing.
        critical_batch_size: The noise scale, at least 1.
        gradient_square: Averaged estimate of `|G|^2`.
        noise_trace: Averaged estimate of `tr(Sigma)`, per sample.
        last_estimate: `(tr(Sigma), |G|^2)` of the last step alone.
        last_batch_size: B_big of the last step (where sizes differ, the size of equal weights).
        last_num_batches: Batches of this rank that the last step had.

    Raises:
        ValueError: For settings out of range; at the start of a run where a step has one part only, for manual
            optimization, `microbatch_weight="sum"`, LBFGS, a loss scale, and strategies that shard by themselves.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelStrategy, GradientNoiseScale
        >>> noise = GradientNoiseScale(decay=0.99)
        >>> strategy = BigModelStrategy(num_microbatches=4)
        >>> trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, callbacks=noise, logger=False)
        >>> noise.interval
        (0.0, inf)
    """

    def __init__(self, decay: float = 0.99, confidence: float = 0.95) -> None:
        if not (is_number(decay) and 0 <= decay < 1):
            raise ValueError(
                f"`decay={decay!r}` must be a number of at least 0 and below 1; with 1 the averages never change."
            )
        if not (is_number(confidence) and 0 < confidence < 1):
            raise ValueError(f"`confidence={confidence!r}` must be a number between 0 and 1, such as 0.95.")
        self.decay, self.confidence = decay, confidence
        self._forget()

    def _forget(self) -> None:
        self._averages = RatioOfAverages(self.decay)
        self.last_estimate: tuple[float, float] | None = None
        self.last_batch_size, self.last_num_batches = 0.0, 0
        self._is_new = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if trainer.state.fn == TrainerFn.FITTING:
            self._forget()  # a checkpoint's state is loaded later

    @property
    def noise_scale(self) -> float:
        """`tr(Sigma) / |G|^2`, in samples."""
        return self._averages.ratio

    @property
    def interval(self) -> tuple[float, float]:
        """Confidence interval of the noise scale."""
        return self._averages.interval(self.confidence)

    @property
    def critical_batch_size(self) -> float:
        """The noise scale, at least 1; not a number while it is negative."""
        scale = self.noise_scale
        return max(scale, 1.0) if scale >= 0 else float("nan")

    @property
    def noise_trace(self) -> float:
        """Averaged `tr(Sigma)`, per sample."""
        return self._averages.averages[0]

    @property
    def gradient_square(self) -> float:
        """Averaged `|G|^2`."""
        return self._averages.averages[1]

    @override
    def _window_ends(self, window: WindowSquares) -> None:
        if window.compares:
            self.last_estimate = noise_estimate(window)
            self.last_batch_size, self.last_num_batches = 1 / window.big_share, window.num_batches
            self._averages.add(*self.last_estimate)
            self._is_new = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self._is_new:
            return
        self._is_new = False
        low, high = self.interval
        values = {
            "noise_scale": self.noise_scale,
            "noise_scale_low": low,
            "noise_scale_high": high,
            "critical_batch_size": self.critical_batch_size,
        }
        for name, value in values.items():  # the same on all ranks already
            pl_module.log(name, value, on_step=True, on_epoch=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "averages": self._averages.state(),
            "last_estimate": self.last_estimate,
            "last_batch_size": self.last_batch_size,
            "last_num_batches": self.last_num_batches,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The decay is the one that is set now.
        self._averages = RatioOfAverages(**{**state_dict["averages"], "decay": self.decay})
        self.last_estimate = state_dict["last_estimate"]
        self.last_batch_size = state_dict["last_batch_size"]
        self.last_num_batches = state_dict["last_num_batches"]
