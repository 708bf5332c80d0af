"""Accumulation windows that change while training: by a schedule, or with the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._learning_rate import StepFactors
from lightning_bigmodel.callbacks._settings import is_count
from lightning_bigmodel.callbacks._watched import WatchingCallback
from lightning_bigmodel.callbacks.adascale import AdaScale
from lightning_bigmodel.callbacks.noise_scale import GradientNoiseScale

__all__ = ["AdaptiveAccumulation"]

_RULES = {None: lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}
# How far the batch may be from the critical one, as a power of two, before the window changes: more than half a
# doubling, so that a scale between two windows does not switch from one to the other.
_BAND = 0.75


class AdaptiveAccumulation(Callback):
    """Set `accumulate_grad_batches` while training, by a schedule or so that batches stay near the critical size.

    Lightning finds the first and the last batch of a window by `batch_idx % accumulate_grad_batches`, so that a change
    between windows may add gradients of two windows, or step early. A new window therefore begins at the first batch
    of an epoch, or at a batch whose index is a multiple of both the old and the new one; until then the old one goes
    on. (Lightning's `GradientAccumulationScheduler` changes at epochs only.)

    With the noise scale (a `GradientNoiseScale` among the callbacks) windows are `min_window` times a power of two, so
    that one begins where another ends, and follow the critical batch size of arXiv 1812.06162 up to `max_window`.

    A learning-rate rule multiplies the rate by how much the window has grown since the first: `"linear"` by the ratio,
    as for SGD, `"sqrt"` by its root, as for Adam. It does so for each optimizer step and puts the rate back: schedules
    go on as they would, on top. Schedulers that run by steps count optimizer steps, of which larger windows leave
    fewer: those built from `trainer.estimated_stepping_batches` do not follow, which a warning says.

    Logged at each batch: `accumulate_grad_batches`. Memory and communication: none of its own.

    Args:
        schedule: Epoch (or step) -> window from then on, such as `{0: 1, 4: 2, 8: 4}`; before the first, 1. Without
            a schedule the noise scale decides.
        unit: What the schedule counts: `"epoch"`, or `"step"` for optimizer steps.
        min_window: Smallest window, in batches, and the first; for the noise scale.
        max_window: Largest window; for the noise scale.
        every_num_steps: Optimizer steps between two decisions; for the noise scale.
        lr_rule: None, `"linear"` or `"sqrt"`.

    Attributes:
        window: The window in use.
        first_window: That of the start of training, which the learning rate is meant for.

    Raises:
        ValueError: For windows that are no whole numbers of at least 1, `min_window` above `max_window`, settings that
            do not go together; at the start of a run without the `GradientNoiseScale` that is to decide, together with
            another callback or setting of windows, for manual optimization, and for strategies that accumulate by
            themselves (DeepSpeed).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import AdaptiveAccumulation, GradientNoiseScale
        >>> by_noise = [GradientNoiseScale(), AdaptiveAccumulation(min_window=2, max_window=64, lr_rule="sqrt")]
        >>> trainer = Trainer(accelerator="cpu", devices=1, callbacks=by_noise, logger=False)
        >>> AdaptiveAccumulation({0: 1, 10: 0})
        Traceback (most recent call last):
        ValueError: `schedule={0: 1, 10: 0}` has the window 0; windows are whole numbers of at least 1 batch.
    """

    def __init__(
        self,
        schedule: Mapping[int, int] | None = None,
        unit: Literal["epoch", "step"] = "epoch",
        min_window: int = 1,
        max_window: int | None = None,
        every_num_steps: int = 100,
        lr_rule: Literal["linear", "sqrt"] | None = None,
    ) -> None:
        if lr_rule is not None and not (isinstance(lr_rule, str) and lr_rule in _RULES):
            raise ValueError(f"`lr_rule={lr_rule!r}` is not known. Use None, 'linear' or 'sqrt'.")
        if unit not in ("epoch", "step"):
            raise ValueError(f"`unit={unit!r}` is not known. Use 'epoch' or 'step'.")
        for name, value in (("min_window", min_window), ("every_num_steps", every_num_steps)):
            if not is_count(value, 1):
                raise ValueError(f"`{name}={value!r}` must be a whole number of at least 1.")
        if schedule is None:
            if not is_count(max_window, 1):
                raise ValueError(
                    f"`max_window={max_window!r}` must be a whole number of at least 1: without a `schedule` the noise "
                    "scale decides, up to that window."
                )
            assert max_window is not None
            if min_window > max_window:
                raise ValueError(f"`min_window={min_window}` is above `max_window={max_window}`. Exchange them.")
        else:
            if max_window is not None or min_window != 1:
                raise ValueError(
                    "`schedule` says all windows, and `min_window` and `max_window` are for the noise scale. Leave "
                    "out the one or the others."
                )
            _check_schedule(schedule)
        self.schedule = None if schedule is None else dict(sorted(schedule.items()))
        self.unit, self.every_num_steps, self.lr_rule = unit, every_num_steps, lr_rule
        self.min_window, self.max_window = min_window, max_window
        self.first_window = min_window if self.schedule is None else self.schedule.get(0, 1)
        self.window = self._goal = self.first_window
        self._decided_at = 0
        self._factors: StepFactors | None = None
        self._hook: Any = None
        self._is_set = False

    @property
    def largest_window(self) -> int:
        """The largest window that there may be."""
        return self._limit() if self.schedule is None else max(self.first_window, *self.schedule.values())

    # -- a run ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._check(trainer, pl_module)
        self.window = self._goal = self.first_window
        self._decided_at = 0
        # Before the strategy and the optimizers look at it.
        trainer.accumulate_grad_batches = self.first_window
        self._is_set = True

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        name, others = type(self).__name__, [c for c in _host.callbacks(trainer) if c is not self]
        if not module.automatic_optimization:
            raise ValueError(
                f"`{name}` sets when the Trainer steps, but `{type(module).__name__}` uses manual optimization and "
                "steps by itself. Set `automatic_optimization=True`, or accumulate in the step."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"`accumulate_grad_batches={trainer.accumulate_grad_batches}` and `{name}` both set the window. Leave "
                "out the Trainer's; the first window is `schedule={0: ...}` or `min_window`."
            )
        for other in others:
            if isinstance(other, (GradientAccumulationScheduler, StochasticWeightAveraging, AdaptiveAccumulation)):
                raise ValueError(f"`{type(other).__name__}` and `{name}` both set the window. Keep one of them.")
            if isinstance(other, AdaScale) and self.lr_rule is not None:
                raise ValueError(
                    f"`{type(other).__name__}` and `lr_rule={self.lr_rule!r}` both scale the learning rate with the "
                    "batch. Set `lr_rule=None`."
                )
        if trainer.strategy.handles_gradient_accumulation:
            raise ValueError(
                f"`{type(trainer.strategy).__name__}` accumulates by itself and takes no other window while it runs. "
                "Use `BigModelStrategy`."
            )
        if self.schedule is None:
            if self._noise(trainer) is None:
                raise ValueError(
                    f"`{name}` without a `schedule` follows the noise scale, which nothing measures. Add "
                    "`GradientNoiseScale()` to the callbacks, or give a `schedule`."
                )
            if self.min_window * WatchingCallback._parts_a_batch(trainer) == 1:
                raise ValueError(
                    "`min_window=1` with one data rank and one micro-batch leaves nothing to measure the noise scale "
                    "by. Set `min_window=2`, or `num_microbatches=2` of `BigModelStrategy`."
                )

    @staticmethod
    def _noise(trainer: pl.Trainer) -> GradientNoiseScale | None:
        found = [callback for callback in _host.callbacks(trainer) if isinstance(callback, GradientNoiseScale)]
        return found[0] if found else None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.accumulate_grad_batches = self.window  # of the checkpoint, where there is one
        if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            rank_zero_warn(
                f"`{type(self).__name__}` changes how many optimizer steps there are. A learning-rate scheduler that "
                "was built from `trainer.estimated_stepping_batches` does not follow: it counts with windows of "
                f"{self.first_window} batches throughout."
            )
        if self.lr_rule is not None:
            self._close()
            self._factors = StepFactors(trainer.optimizers[0])
            self._hook = trainer.optimizers[0].register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        assert self._factors is not None
        factor = _RULES[self.lr_rule](self.window / self.first_window)
        self._factors.apply([factor] * len(optimizer.param_groups))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self.window:
            return  # within a window
        wanted = self._wanted(trainer)
        if batch_idx % wanted == 0:
            self.window = trainer.accumulate_grad_batches = wanted

    def _wanted(self, trainer: pl.Trainer) -> int:
        step = trainer.global_step
        if self.schedule is not None:
            now = trainer.current_epoch if self.unit == "epoch" else step
            reached = [window for start, window in self.schedule.items() if start <= now]
            return reached[-1] if reached else self.first_window
        if step - self._decided_at >= self.every_num_steps:
            noise = self._noise(trainer)
            assert noise is not None
            self._decided_at = step
            if 0 < noise.noise_scale < math.inf and noise.last_num_batches:
                batch = noise.last_batch_size / noise.last_num_batches
                self._goal = self._window_for(noise.noise_scale / batch)
        return self._goal

    def _window_for(self, batches: float) -> int:
        """The window next to that many batches, among those between which training can change."""
        if abs(math.log2(batches / self._goal)) <= _BAND:
            return self._goal
        power = max(0, round(math.log2(batches / self.min_window)))
        return min(self.min_window << power, self._limit())

    def _limit(self) -> int:
        assert self.max_window is not None
        return self.min_window << ((self.max_window // self.min_window).bit_length() - 1)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log("accumulate_grad_batches", float(self.window), on_step=True, on_epoch=False)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()
        if self._is_set:
            trainer.accumulate_grad_batches = 1
            self._is_set = False

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def _close(self) -> None:
        if self._factors is not None:
            self._factors.close()
            self._hook.remove()
        self._factors = self._hook = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window, "goal": self._goal, "decided_at": self._decided_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.window, self._goal = state_dict["window"], state_dict["goal"]
        self._decided_at = state_dict["decided_at"]


def _check_schedule(schedule: Any) -> None:
    if not isinstance(schedule, Mapping) or not schedule:
        raise ValueError(
            f"`schedule={schedule!r}` must be a dict of epochs or steps to windows, such as {{0: 1, 4: 2}}."
        )
    for start, window in schedule.items():
        if not is_count(start, 0):
            raise ValueError(f"`schedule={schedule!r}` has the key {start!r}; keys are whole numbers of at least 0.")
        if not is_count(window, 1):
            raise ValueError(
                f"`schedule={schedule!r}` has the window {window!r}; windows are whole numbers of at least 1 batch."
            )
