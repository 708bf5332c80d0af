"""What `replica_sync` goes together with, checked before any work starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_bigmodel import _host
from lightning_bigmodel.mesh import Layout
from lightning_bigmodel.replicas.dense import AllReduce
from lightning_bigmodel.replicas.sync import GradientSync, ParameterSync, ReplicaSync

__all__ = ["check_replica_run", "check_replica_sync"]

# Callbacks that reckon with gradients or weights of all data ranks in each step, by name: they import this package.
_NEED_ALL_GRADIENTS = ("AdaScale", "AdaptiveAccumulation", "GradientNoiseScale")
_AVERAGE_WEIGHTS = ("ExponentialMovingAverage",)


def check_replica_sync(sync: Any, offload: Any) -> None:
    """Refuse what is no way to agree, or cannot reach what is kept on the host.

    Raises:
        ValueError: With what to write.
    """
    if sync is None:
        return
    if not isinstance(sync, (GradientSync, ParameterSync)):
        raise ValueError(
            f"`replica_sync={sync!r}` must be an object such as `AllReduce()`, `DGC(sparsity=0.999)`, "
            "`LocalSGD(period=16)` or `DiLoCo(period=50)`, all of which import from `lightning_bigmodel`."
        )
    if offload is not None:
        raise ValueError(
            f"`offload={offload!r}` keeps rows and their gradients on the host, where `{type(sync).__name__}` cannot "
            "exchange them. Leave one of them out: without `replica_sync` gradients are summed whole."
        )


def check_replica_run(
    sync: ReplicaSync | None,
    layout: Layout,
    zero_stage: int,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    reduce_dtype: torch.dtype | None,
) -> None:
    """Refuse combinations that have no meaning; alike on all ranks.

    Raises:
        ValueError: With the reason and what to change.
    """
    if sync is None:
        return
    name = type(sync).__name__
    if layout.data_replicate == 1:
        where = (
            f"with `zero_stage={zero_stage}` all {layout.data_size} data ranks shard one model, so that no rank has a "
            "gradient or a step of its own. Set `data_replicate_size=2` or more, or `zero_stage=0`"
            if layout.data_shard > 1
            else f"all {layout.world_size} ranks hold parts of one model. Start more ranks, or leave `replica_sync` out"
        )
        raise ValueError(f"`replica_sync={name}` says how whole-model replicas agree, but there is only one: {where}.")
    if isinstance(sync, AllReduce):
        return
    if reduce_dtype is not None and layout.data_shard == 1:
        raise ValueError(
            f"`reduce_dtype={str(reduce_dtype).removeprefix('torch.')!r}` is the type in which gradients are summed, "
            f"but `replica_sync={name}` does not sum them over replicas as they are. Leave it out; the types of "
            f"messages are settings of `{name}` where it has any."
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"`replica_sync={name}` follows optimizer steps, which `{type(module).__name__}` takes by itself "
            "(`automatic_optimization=False`). Set it to True, or use `replica_sync=AllReduce()`."
        )
    if isinstance(sync, GradientSync) and sync.taken_over and trainer.gradient_clip_val:
        raise ValueError(
            f"`Trainer(gradient_clip_val={trainer.gradient_clip_val})` would clip what `{name}` makes of gradients, "
            "momentum and what was left of earlier steps. Clip each replica's gradient before that: "
            f"`{name}(gradient_clip_val=...)`."
        )
    _check_callbacks(sync, _host.callbacks(trainer))


def _check_callbacks(sync: ReplicaSync, callbacks: Sequence[Any]) -> None:
    name = type(sync).__name__
    for callback in callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if isinstance(sync, ParameterSync) and (
            kinds & set(_AVERAGE_WEIGHTS) or isinstance(callback, (StochasticWeightAveraging, WeightAveraging))
        ):
            raise ValueError(
                f"`{type(callback).__name__}` averages over steps the weights of each replica, which under `{name}` "
                "differ between agreements. Leave the callback out: the agreed weights are a mean already."
            )
        if kinds & set(_NEED_ALL_GRADIENTS) and (isinstance(sync, ParameterSync) or _changes(sync)):
            raise ValueError(
                f"`{type(callback).__name__}` compares gradients with the whole gradient over all replicas, which "
                f"`{name}` never makes. Leave the callback out, or use `replica_sync=AllReduce()`."
            )


def _changes(sync: ReplicaSync) -> bool:
    return isinstance(sync, GradientSync) and sync.keeps_error
