"""Exponential moving average of the weights, kept by each rank of what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._average import placed_averages, update_averages, warmed_up_decay
from lightning_bigmodel.callbacks._held import Replaced, check_strategy, held_layout, held_tensors, moved, saved_form
from lightning_bigmodel.callbacks._settings import check_flag, is_count, is_number
from lightning_bigmodel.checkpoint import RegionLayout
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["ExponentialMovingAverage"]

_SET = "ema"
_KEY = f"{_SET}_state_dict"


class ExponentialMovingAverage(Callback):
    """Average the weights over the optimizer steps, and evaluate with the average.

    After an optimizer step `average = decay * average + (1 - decay) * parameter`, beginning with the parameters as they
    are after `start_step` steps. Each rank averages what it holds: its rows under ZeRO, its stages' parameters in a
    pipeline, all of them otherwise; nothing is gathered. Validation, test and predict loops compute with the averages
    (also after `fit`, while this callback has them), and the training weights are back, bit for bit, afterwards, also
    when an evaluation raises. After `fit` the module has its training weights. Do not use it where the learning rate
    falls to nothing and the last weights are the best ones: it then costs memory only. Polyak averaging with a decay:
    arXiv 1806.05594 compares it with other averages.

    Checkpoints have both: `state_dict` the training weights, `ema_state_dict` the averages by full name. With
    `BigModelStrategy` each rank writes its part into the sharded directory, any layout reads it, and `bigmodel convert`
    puts `ema_state_dict` into the single file; `bigmodel convert --ema` writes the averages as `state_dict`. Those of
    weights only (`save_weights_only=True`) lack the averages: Lightning asks callbacks for nothing there.

    Floating buffers (statistics of BatchNorm) are used as they are unless `average_buffers` is set. They belong to the
    training weights; averaged ones fit averaged weights better but still are no statistics of them, which only a pass
    over data gives (`torch.optim.swa_utils.update_bn`).

    Memory a rank: what it holds of the parameters in `dtype`; while evaluating once more what it holds, and with
    `zero_stage` 1 or 2 also the whole parameters. Communication: none in an update; one publish of the parameters at
    the start of an evaluation with `zero_stage` 1 or 2, none otherwise. A run that goes on with averages (resumed,
    continued, or an evaluation after `fit`) sends one number at its start, and the averages once to all ranks if the
    model is cut otherwise now.

    Args:
        decay: Weight of the past, in [0, 1).
        use_warmup: Use a smaller decay in the first updates: `min(decay, (1 + n) / (10 + n))` after `n` updates, as
            TensorFlow's `tf.train.ExponentialMovingAverage` does.
        update_every_num_steps: Optimizer steps from one update to the next. `decay` counts once an update.
        start_step: Optimizer steps before averaging begins; evaluations before use the training weights.
        dtype: Type of the averages, such as `"bfloat16"`. Default: float32, wider for parameters that are.
        offload_to_host: Keep the averages, and while evaluating the training weights, in host memory; each update and
            evaluation then copies them between device and host.
        average_buffers: Whether persistent floating buffers are averaged too. Statistics of data-parallel replicas
            differ; evaluations and checkpoints then have those of one replica, and an evaluation does not bring the
            replicas' training statistics to those of the first.
        evaluate_with_average: Whether evaluations compute with the averages.

    Raises:
        ValueError: For a decay outside [0, 1), counts out of range, or what is no number or flag; at the start of a run
            for a strategy that shards by itself (FSDP, DeepSpeed), and together with another callback that averages
            weights.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import ExponentialMovingAverage
        >>> average = ExponentialMovingAverage(decay=0.999, use_warmup=True)
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="bigmodel_zero3", callbacks=average, logger=False)
    """

    extra_states = (_SET,)  # `BigModelStrategy` saves and loads `ema_state_dict` in shards

    def __init__(
        self,
        decay: float = 0.999,
        *,
        use_warmup: bool = False,
        update_every_num_steps: int = 1,
        start_step: int = 0,
        dtype: str | torch.dtype | None = None,
        offload_to_host: bool = False,
        average_buffers: bool = False,
        evaluate_with_average: bool = True,
    ) -> None:
        if not (is_number(decay) and 0 <= decay < 1):
            raise ValueError(
                f"`decay={decay!r}` must be a number of at least 0 and below 1; with 1 the average never changes."
            )
        counts = (("update_every_num_steps", update_every_num_steps, 1), ("start_step", start_step, 0))
        for name, value, least in counts:
            if not is_count(value, least):
                raise ValueError(f"`{name}={value!r}` must be a whole number of at least {least}.")
        flags = {
            "use_warmup": use_warmup,
            "offload_to_host": offload_to_host,
            "average_buffers": average_buffers,
            "evaluate_with_average": evaluate_with_average,
        }
        for name, flag in flags.items():
            check_flag(name, flag)
        chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(chosen, torch.dtype) and chosen.is_floating_point):
            raise ValueError(f"`dtype={dtype!r}` is no floating-point type of torch. Use 'float32' or 'bfloat16'.")
        self.decay, self.use_warmup = decay, use_warmup
        self.update_every_num_steps, self.start_step = update_every_num_steps, start_step
        self.offload_to_host, self.average_buffers = offload_to_host, average_buffers
        self.evaluate_with_average = evaluate_with_average
        self._dtype: torch.dtype | None = chosen
        self._module: pl.LightningModule | None = None
        self._replaced: Replaced | None = None
        self._is_prepared = self._was_loaded = False
        self._forget()

    @property
    @override
    def state_key(self) -> str:
        return ExponentialMovingAverage.__qualname__  # of subclasses too: there is one average in a run

    def _forget(self) -> None:
        self._averages: dict[str, Tensor] | None = None
        self._layout: dict[str, RegionLayout] = {}
        self._num_updates = self._step = self._updated_at = 0

    @property
    def averages(self) -> dict[str, Tensor]:
        """Name -> average of what this rank holds of a parameter (or buffer); empty before averaging begins."""
        return dict(self._averages or {})

    # -- a run ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        name = type(self).__name__
        check_strategy(trainer.strategy, name)
        for other in _host.callbacks(trainer):
            if isinstance(other, (WeightAveraging, StochasticWeightAveraging)):
                raise ValueError(
                    f"`{name}` and `{type(other).__name__}` both put averages in place of weights. Keep one of them."
                )
        self._is_prepared = self._was_loaded = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def _prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Once a run: forget averages of other weights, and bring the others to where this run has its parameters."""
        if self._is_prepared:
            return
        self._is_prepared = True
        fits = trainer.state.fn == TrainerFn.FITTING
        if self._averages is not None and not self._was_loaded:
            if trainer.ckpt_path:
                rank_zero_warn(
                    f"`{trainer.ckpt_path}` has no averages of weights: `{type(self).__name__}` has none now."
                )
                self._forget()
            elif fits and (self._module is not module or self._step != trainer.global_step):
                self._forget()
        if self._averages is None:
            return
        held = held_tensors(trainer, module, with_buffers=self.average_buffers)
        layout = held_layout(trainer, held)
        if self._is_elsewhere(trainer, layout):
            strategy = trainer.strategy
            wanted = {name: layout.get(name) or RegionLayout.of_whole(tensor.shape) for name, tensor in held.items()}
            self._averages = moved(self._averages, self._layout, wanted, strategy.root_device)
        self._place(held, layout)

    def _is_elsewhere(self, trainer: pl.Trainer, layout: dict[str, RegionLayout]) -> bool:
        """Whether on any rank the parameters lie in another way than the averages."""
        if not isinstance(trainer.strategy, BigModelStrategy) or trainer.world_size == 1:
            return False
        differs = torch.tensor(float(layout != self._layout), device=trainer.strategy.root_device)
        dist.all_reduce(differs)
        return bool(differs)

    def _place(self, held: Mapping[str, Tensor], layout: dict[str, RegionLayout]) -> None:
        self._averages = placed_averages(self._averages or {}, held, self._dtype, to_host=self.offload_to_host)
        self._layout = layout

    # -- updates -------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._prepare(trainer, pl_module)
        self._begin(trainer, pl_module)

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        if self._averages is None and self._step >= self.start_step:
            held = held_tensors(trainer, module, with_buffers=self.average_buffers)
            self._place(held, held_layout(trainer, held))
            self._module, self._num_updates, self._updated_at = module, 0, self._step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._averages is None:
            self._begin(trainer, pl_module)
            return
        self._step = trainer.global_step  # as before while gradients accumulate
        if self._step - self._updated_at >= self.update_every_num_steps:
            held = held_tensors(trainer, pl_module, with_buffers=self.average_buffers)
            decay = warmed_up_decay(self.decay, self._num_updates) if self.use_warmup else self.decay
            update_averages(self._averages, held, decay)
            self._num_updates += 1
            self._updated_at = self._step

    # -- evaluations ---------------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation(trainer, pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation(trainer, pl_module)

    def _start_evaluation(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self.evaluate_with_average or (trainer.state.fn != TrainerFn.FITTING and self._module is not module):
            return
        self._prepare(trainer, module)
        if self._averages is not None:
            self._replaced = Replaced(trainer, module, self._averages, to_host=self.offload_to_host)
            self._replaced.apply()

    def _end_evaluation(self, *, has_failed: bool = False) -> None:
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            replaced.undo(has_failed=has_failed)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation()

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation()

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_evaluation(has_failed=True)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end_evaluation()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates, "step": self._step, "updated_at": self._updated_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_updates, self._step = state_dict["num_updates"], state_dict["step"]
        self._updated_at = state_dict["updated_at"]

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._averages is not None and self._module is pl_module:
            checkpoint[_KEY] = saved_form(trainer, pl_module, self._averages)
        if self._replaced is not None:  # saved within an evaluation: the module has the averages
            training = saved_form(trainer, pl_module, self._replaced.training)
            state = checkpoint["state_dict"]
            state.update((name, value) for name, value in training.items() if name in state)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._forget()
        saved = checkpoint.get(_KEY)
        if saved is None:
            if self.state_key not in checkpoint["callbacks"]:
                rank_zero_warn(
                    f"The checkpoint was saved without `{type(self).__name__}`: it has no averages of weights."
                )
            return
        held = held_tensors(trainer, pl_module, with_buffers=self.average_buffers)
        names = dict(pl_module.named_parameters()).keys() & held.keys() & pl_module.state_dict(keep_vars=True).keys()
        if pl_module.strict_loading and (missing := sorted(names - saved.keys())):
            raise ValueError(
                f"`{_KEY}` in the checkpoint lacks {missing}. Set `strict_loading=False` on the module to begin their "
                "averages with the loaded weights."
            )
        self._averages = {name: saved[name] for name in held if name in saved}
        self._layout = held_layout(trainer, held)
        self._module, self._was_loaded = pl_module, True
