"""What a user may ask for in sharding, and what cannot take effect."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_bigmodel import _host
from lightning_bigmodel.pipeline.schedules import SCHEDULES
from lightning_bigmodel.precision.bigmodel import BigModelPrecision
from lightning_bigmodel.sharding.offload import OffloadPolicy

# Layers whose weights autocast casts to 16 bits at each use.
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Operators that take no weights of those.
_WEIGHTLESS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm", "gelu", "silu", "relu")

__all__ = ["ShardingSettings", "mixed_precision_rule", "named_blocks"]


@dataclass(frozen=True)
class ShardingSettings:
    """What a user asked for; see `BigModelStrategy`."""

    zero_stage: int
    data_replicate_size: int | None
    keep_gathered: bool
    reduce_every_microbatch: bool | None
    offload: Any = None

    @property
    def policy(self) -> OffloadPolicy | None:
        """What `offload` means."""
        return OffloadPolicy.of(self.offload)

    @property
    def reduces_every_microbatch(self) -> bool:
        """With the stage's default."""
        chosen = self.reduce_every_microbatch
        return self.zero_stage >= 2 if chosen is None else chosen

    def check(self, schedule: str) -> None:
        """Refuse what cannot take effect.

        Raises:
            ValueError: With the nearest setting that can.
        """
        stage = self.zero_stage
        if type(stage) is not int or stage not in (0, 1, 2, 3):
            raise ValueError(f"`zero_stage={stage!r}` is not known. Use 0, 1, 2 or 3.")
        replicas = self.data_replicate_size
        if replicas is not None and (isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1):
            raise ValueError(f"`data_replicate_size={replicas!r}` must be a whole number of at least 1.")
        for name in ("keep_gathered", "reduce_every_microbatch"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "reduce_every_microbatch"):
                raise ValueError(f"`{name}={value!r}` must be True or False.")
        if self.keep_gathered and stage != 3:
            raise ValueError(
                f"`keep_gathered=True` keeps gathered parameters, but with `zero_stage={stage}` parameters are whole "
                "all the time. Leave it out, or set `zero_stage=3`."
            )
        if self.reduce_every_microbatch is not None and stage < 2 and self.reduce_every_microbatch:
            raise ValueError(
                f"`reduce_every_microbatch=True` keeps gradients as shards, but with `zero_stage={stage}` they stay "
                "whole until the optimizer step. Leave it out, or set `zero_stage=2`."
            )
        if self.policy is not None and stage == 0:
            raise ValueError(
                f"`offload={self.offload!r}` moves row shards off the device, but with `zero_stage=0` there are none. "
                "Leave it out, or set `zero_stage=1`."
            )
        spec = SCHEDULES.get(schedule)
        if stage == 3 and not self.keep_gathered and spec is not None and spec.splits_backward:
            raise ValueError(
                f"`schedule={schedule!r}` computes the gradients of weights long after those of inputs, so that "
                "`zero_stage=3` could not give parameters up in between. Set `keep_gathered=True`, or use "
                '`schedule="1F1B"` or `zero_stage=2`.'
            )

    def replicas(self, world_size: int, pipeline_size: int, tensor_size: int, ranks_a_machine: int) -> int | None:
        """Whole-model replicas: as given, else so that the shards of one model lie within a machine."""
        if self.zero_stage == 0 or self.data_replicate_size is not None:
            return self.data_replicate_size
        data_size = world_size // (pipeline_size * tensor_size)
        fits = [n for n in range(1, data_size + 1) if data_size % n == 0 and ranks_a_machine % (n * tensor_size) == 0]
        return data_size // max(fits, default=data_size) if data_size else None


def mixed_precision_rule(root: nn.Module, precision: Any) -> Callable[[nn.Parameter], torch.dtype | None] | None:
    """Which whole parameters are kept in the type of mixed precision: those that autocast casts to it at each use.

    Weights and biases of linear and convolution layers compute to the same bits either way, in half the memory. The
    others (embeddings, norms, recurrent layers, raw parameters, what is shared with those, what the user's lists keep
    in full precision) stay as they are.
    """
    dtype = _host.compute_dtype(precision)
    if dtype is None:
        return None
    full: set[int] = set()
    if isinstance(precision, BigModelPrecision):
        if not set(precision.full_precision_ops) <= {*_WEIGHTLESS, "cross_entropy", "mse_loss"}:
            return None  # a weight may be used in full precision
        full = precision.full_precision_ids(root)
    allowed: dict[int, bool] = {}
    for module in root.modules():
        is_cast = type(module) in _CAST and id(module) not in full
        for parameter in module._parameters.values():
            if parameter is not None:
                allowed[id(parameter)] = allowed.get(id(parameter), True) and is_cast
    return lambda parameter: dtype if allowed.get(id(parameter)) and parameter.dtype == torch.float32 else None


def named_blocks(root: nn.Module, blocks: str | Sequence[str]) -> dict[str, nn.Module]:
    """The modules that names and patterns say, with the rest of the model's layers beside them.

    Raises:
        ValueError: For a pattern that matches nothing.
    """
    patterns = [blocks] if isinstance(blocks, str) else list(blocks)
    modules = dict(root.named_modules())
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3)
            raise ValueError(
                f"`blocks` has {pattern!r}, which matches no module" + (f"; near it: {near}." if near else ".")
            )
        chosen.update((name, modules[name]) for name in found)
    return {name: m for name, m in chosen.items() if not any(name.startswith(f"{other}.") for other in chosen)}
