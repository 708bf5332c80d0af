"""The table of what goes together, checked before any work starts, on every rank alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn, optim

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "check_callbacks",
    "check_checkpoint_settings",
    "check_host_parts",
    "check_memory_limit",
    "check_module",
    "check_op_lists",
    "check_optimizers",
    "check_precision",
    "check_process_group_settings",
    "check_quantized_layers",
]


def check_host_parts(**parts: tuple[Any, type]) -> None:
    """Refuse what is no object of the host's, such as the name that the Trainer's argument takes.

    Args:
        parts: Name of an argument -> what was given, and the class it must be of.

    Raises:
        ValueError: With where it belongs.
    """
    for name, (part, kind) in parts.items():
        is_right = part is None or isinstance(part, kind)
        if is_right and isinstance(part, list):
            is_right = all(isinstance(device, torch.device) for device in part)
        if not is_right:
            what = "a list of `torch.device`" if kind is list else f"a `{kind.__name__}`"
            raise ValueError(
                f"`{name}={part!r}` must be {what}. Leave it out: the Trainer sets it, by arguments of its own."
            )


def check_checkpoint_settings(kind: Any, parameters: Any, in_background: bool) -> None:
    """Refuse settings of checkpoints that are unknown or do not go together.

    Raises:
        ValueError: With what to write.
    """
    for name, value, known in (
        ("checkpoint_format", kind, ("sharded", "single")),
        ("checkpoint_parameters", parameters, ("all", "trainable")),
    ):
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"`{name}={value!r}` is not known. Use {known[0]!r} or {known[1]!r}.")
    if kind == "single" and in_background:
        raise ValueError(
            "`async_checkpoint=True` writes each rank's part in the background, but `checkpoint_format='single'` puts "
            "all parts into one file. Leave one of them out."
        )


def check_memory_limit(limit: Any, num_microbatches: Any) -> None:
    """Refuse a limit that is none, or that nothing looks at.

    Raises:
        ValueError: With what to write.
    """
    if limit is None:
        return
    if num_microbatches != "auto":
        raise ValueError(
            f"`memory_limit_bytes={limit!r}` limits what micro-batches take, but their number is given: "
            f"`num_microbatches={num_microbatches!r}`. "
            'Set `num_microbatches="auto"`, or leave the limit out.'
        )
    if type(limit) is not int or limit < 1:
        raise ValueError(f"`memory_limit_bytes={limit!r}` must be a whole number of bytes of at least 1.")


def check_process_group_settings(backend: Any, timeout: Any) -> None:
    """Refuse what torch.distributed would not understand, before it starts.

    Raises:
        ValueError: For an unknown backend or what is no time.
    """
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ValueError(
            f"`timeout={timeout!r}` must be a `datetime.timedelta` above zero, such as `timedelta(minutes=30)`."
        )
    if backend is None:
        return
    names = [part.rpartition(":")[2] for part in backend.split(",")] if isinstance(backend, str) else [None]
    for name in names:
        if name is None or not dist.is_backend_available(name):
            raise ValueError(
                f"`process_group_backend={backend!r}` is not available here. Leave it out, or use a backend of "
                "torch.distributed such as 'gloo', or one for each device such as 'cpu:gloo,cuda:nccl'."
            )


def check_precision(precision: Any, name: str) -> None:
    """Refuse a loss scaler that looks at one rank only.

    Raises:
        ValueError: For Lightning's fp16 mixed precision: each rank would decide by itself whether to skip a step.
    """
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        raise ValueError(
            f"`{name}` cannot run with Lightning's `MixedPrecision({precision.precision!r})`: its gradient scaler "
            "looks at the gradients of one rank, and ranks would disagree whether to step. Give "
            '`Trainer(precision="16-mixed")` alone, or `plugins=[BigModelPrecision("16-mixed", init_scale=...)]`.'
        )


def check_op_lists(precision: Any, compile_blocks: Any, tensor_parallel_size: int) -> None:
    """Refuse lists of operators where compiled code would not ask them, and fp8 layers that would be cut.

    Raises:
        ValueError: For the two together.
    """
    if getattr(precision, "precision", None) == "fp8" and tensor_parallel_size > 1:
        raise ValueError(
            f"`tensor_parallel_size={tensor_parallel_size}` cuts layers, and the scale of a cut fp8 layer would be "
            "that of one rank. Use `precision='bf16-mixed'`, or shard with `zero_stage=3`."
        )
    if compile_blocks and getattr(precision, "has_op_lists", False):
        raise ValueError(
            "`compile_blocks` traces operators before `full_precision_ops` and `half_precision_ops` can choose their "
            "types. Use `full_precision_modules`, or leave `compile_blocks` out."
        )


def check_module(module: pl.LightningModule, *, is_scheduled: bool = True) -> None:
    """Refuse what a training step under this strategy cannot do right.

    Args:
        module: The user's module.
        is_scheduled: Whether its steps run under a schedule (several stages or micro-batches).

    Raises:
        ValueError: For manual optimization under a schedule, or a step that pulls its own batches.
    """
    name = type(module).__name__
    if is_scheduled and not module.automatic_optimization:
        raise ValueError(
            f"`{name}` uses manual optimization (`automatic_optimization=False`), but the backward of a pipeline or of "
            "several micro-batches is part of the schedule and not of the step. Set `automatic_optimization=True`, or "
            "`pipeline_parallel_size=1` and `num_microbatches=1` (ZeRO and replicas take manual optimization)."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"`{name}.training_step(dataloader_iter)` takes batches by itself, so they cannot be split into "
            "micro-batches or shared by the ranks of a pipeline. Use `training_step(batch, batch_idx)`."
        )


def check_quantized_layers(module: nn.Module, *, zero_stage: int, is_cut: bool) -> None:
    """Refuse bitsandbytes' own layers where what they keep beside their parameters would be lost, or be old.

    Args:
        module: The user's module.
        zero_stage: Of the strategy.
        is_cut: Whether ranks hold parts of the model: a pipeline, or tensor parallelism.

    Raises:
        ValueError: With the layer's name.
    """
    theirs: Any = sys.modules.get("bitsandbytes.nn")
    if theirs is None or not (zero_stage or is_cut):
        return
    for name, layer in module.named_modules():
        if isinstance(layer, theirs.Linear8bitLt) and layer.state.has_fp16_weights:
            raise ValueError(
                f"{name!r} is a `Linear8bitLt` that is trained: it quantises its weight anew only in a forward before "
                "which there is no gradient, so that its numbers depend on when gradients are there, and with shards "
                "or stages would be others. Build it as `nn.Linear`, and let the callback "
                "`lightning_bigmodel.Quantize(bits=8, trained=True)` convert it."
            )
        if isinstance(layer, theirs.Linear8bitLt) or (is_cut and isinstance(layer, theirs.Linear4bit)):
            raise ValueError(
                f"{name!r} is bitsandbytes' `{type(layer).__name__}`, which keeps scales beside its parameters, where "
                "stages, shards and slices cannot take them along. Build it as `nn.Linear`, and let the callback "
                "`lightning_bigmodel.Quantize` convert it."
            )


def check_callbacks(callbacks: Sequence[Any], *, is_partial: bool) -> None:
    """Refuse callbacks that keep a second copy of the whole model.

    Args:
        callbacks: The Trainer's.
        is_partial: Whether a rank holds only a part of the weights.

    Raises:
        ValueError: For Lightning's weight averaging where each rank holds only its share of the weights.
    """
    for callback in callbacks:
        if is_partial and isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"`{type(callback).__name__}` averages the whole model on every rank, but in a pipeline, under tensor "
                "parallelism and with `zero_stage=3` each rank holds only its share of the weights. Use "
                "`lightning_bigmodel.ExponentialMovingAverage`, or `pipeline_parallel_size=1`, "
                "`tensor_parallel_size=1` and `zero_stage=2` or less."
            )


def check_optimizers(optimizers: list[Any]) -> None:
    """Refuse optimizers that run the step several times.

    Raises:
        ValueError: For LBFGS.
    """
    for optimizer in optimizers:
        if isinstance(getattr(optimizer, "optimizer", optimizer), optim.LBFGS):
            raise ValueError(
                "LBFGS calls the training step several times an optimizer step and needs all parameters on one rank. "
                "Use a first-order optimizer such as AdamW."
            )
