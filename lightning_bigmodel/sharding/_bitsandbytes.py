"""What bitsandbytes' optimizers need to work on rows."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from lightning_bigmodel.sharding.rows import RowShard
from lightning_bigmodel.sharding.tensor_slices import HeldSlice

__all__ = [
    "adapt_bitsandbytes",
    "is_bitsandbytes",
    "is_blockwise",
    "keep_in_full_precision",
    "why_bitsandbytes_needs_wholes",
]


def is_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes, or a subclass that changes nothing but the constructor."""
    module = sys.modules.get("bitsandbytes.optim.optimizer")
    if module is None or not isinstance(optimizer, module.Optimizer8bit):
        return False
    for kind in type(optimizer).__mro__:
        if kind is module.Optimizer8bit:
            break
        if not kind.__module__.startswith("bitsandbytes.") and not all(name.startswith("__") for name in vars(kind)):
            return False
    return True


def is_blockwise(optimizer: Any) -> bool:
    """Whether a bitsandbytes optimizer quantises the states of large parameters."""
    return bool(optimizer.args.optim_bits == 8)


def why_bitsandbytes_needs_wholes(optimizer: Any) -> str | None:
    """Returns why an optimizer of bitsandbytes does not work on rows, or None if it does."""
    if getattr(optimizer.args, "max_unorm", 0.0) > 0.0:
        return "it scales each update by norms of the whole parameter (`max_unorm`)"
    if getattr(optimizer.args, "percentile_clipping", 100) < 100:
        return "it clips each gradient by its norm (`percentile_clipping`)"
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    manager = optimizer.mng
    if manager.module_weight_config_triple or not parameters.issuperset(manager.pid2config):
        return (
            "`GlobalOptimManager` holds options of single parameters, such as `StableEmbedding` registers, which it "
            "finds by the parameter object; these objects have made way for the rows"
        )
    return None


def keep_in_full_precision(optimizer: Any, places: Collection[tuple[int, int]]) -> None:
    """Let some parameters have fp32 states.

    By their places in the groups: bitsandbytes knows them by the objects, which rows take the place of, and in one
    table for all optimizers of a process.

    Args:
        optimizer: One of bitsandbytes.
        places: Indices of the group, and of the parameter in it.
    """
    before = optimizer.get_config

    def config_by_place(self: Any, group_index: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = before(group_index, index, group)
        if (group_index, index) in places:
            config["optim_bits"] = 32
        return config

    optimizer.get_config = MethodType(config_by_place, optimizer)


def adapt_bitsandbytes(optimizer: Any, shards: Mapping[int, RowShard], slices: Mapping[int, HeldSlice]) -> None:
    """Lets the size of the whole parameter decide on 8 or 32 bits, and calls no kernel for a rank without rows."""
    kind, before = type(optimizer), optimizer.get_config

    def config_by_whole(self: Any, group_index: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = before(group_index, index, group)
        parameter = group["params"][index]
        shard, cut = shards.get(id(parameter)), slices.get(id(parameter))
        if shard is not None or cut is not None:
            shape = cut.record.full_shape if cut is not None else shard.shape  # type: ignore[union-attr]
            is_large = shape.numel() >= config["min_8bit_size"]
            config["min_8bit_size"] = 0 if is_large else parameter.numel() + 1
        return config

    def update_rows(self: Any, group: dict[str, Any], parameter: Any, group_index: int, index: int) -> None:
        if parameter.numel():
            kind.update_step(self, group, parameter, group_index, index)
        else:
            self.state[parameter]["step"] += 1

    optimizer.get_config = MethodType(config_by_whole, optimizer)
    optimizer.update_step = MethodType(update_rows, optimizer)
