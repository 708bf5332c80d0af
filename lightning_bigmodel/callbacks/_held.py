"""A model's weights as one rank holds them, under `BigModelStrategy` and under Lightning's own strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import Tensor

from lightning_bigmodel.checkpoint import Region, RegionLayout
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["Replaced", "check_strategy", "held_layout", "held_tensors", "moved", "saved_form"]


def check_strategy(strategy: Any, callback: str) -> None:
    """Refuse strategies whose ranks hold parts of parameters in forms of their own.

    Raises:
        ValueError: For FSDP, DeepSpeed, `ModelParallelStrategy` and unknown ones.
    """
    if isinstance(strategy, DeepSpeedStrategy) or not isinstance(
        strategy, (BigModelStrategy, DDPStrategy, SingleDeviceStrategy)
    ):
        raise ValueError(
            f"`{callback}` cannot tell what a rank holds under `{type(strategy).__name__}`. Use `BigModelStrategy` "
            "(any layout), `DDPStrategy` or a single device."
        )


def held_tensors(trainer: pl.Trainer, module: pl.LightningModule, *, with_buffers: bool) -> dict[str, Tensor]:
    """Name -> live memory of what this rank keeps of each parameter, and of persistent floating buffers.

    Under `BigModelStrategy` with `zero_stage` 1 to 3 rows, in a pipeline those of this rank's stages.
    """
    strategy = trainer.strategy
    if isinstance(strategy, BigModelStrategy):
        held = strategy.held_parameters()
    else:
        held = {name: parameter.data for name, parameter in module.named_parameters()}
    if with_buffers:
        saved = module.state_dict(keep_vars=True).keys()
        held.update((n, b) for n, b in module.named_buffers() if n in saved and b.is_floating_point())
    return held


def held_layout(trainer: pl.Trainer, tensors: Mapping[str, Tensor]) -> dict[str, RegionLayout]:
    """How each of `held_tensors` lies in the whole one; buffers whose value is another rank's are left out."""
    strategy = trainer.strategy
    if not isinstance(strategy, BigModelStrategy):
        return {name: RegionLayout.of_whole(tensor.shape) for name, tensor in tensors.items()}
    regions = strategy.held_regions()
    buffers = strategy.held_parts({name: tensor for name, tensor in tensors.items() if name not in regions})
    return {**regions, **{name: RegionLayout.of_whole(buffer.shape) for name, buffer in buffers.items()}}


def saved_form(trainer: pl.Trainer, module: pl.LightningModule, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Values for `held_tensors` under all state-dict names, as a checkpoint takes them."""
    strategy = trainer.strategy
    if isinstance(strategy, BigModelStrategy):
        return strategy.checkpoint_state(tensors)
    first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    entries = ((name, first.get(id(value), name)) for name, value in module.state_dict(keep_vars=True).items())
    return {name: tensors[own] for name, own in entries if own in tensors}


class Replaced:
    """Other values in place of the weights, until `undo` brings the training weights back, bit for bit.

    Args:
        trainer: Its strategy says what is held here.
        module: The module.
        values: Name -> what to compute with, for `held_tensors`.
        to_host: Whether the training weights wait on the host.

    Memory: what this rank holds once more; with `zero_stage` 1 and 2 also the whole parameters, so that `undo` needs no
    other rank. Communication: `apply` publishes the parameters once with `zero_stage` 1 and 2; else none. `undo` none.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, values: Mapping[str, Tensor], *, to_host: bool
    ) -> None:
        self._strategy, self._values = trainer.strategy, values
        live = held_tensors(trainer, module, with_buffers=True)
        self._held = {name: live[name] for name in values}
        targets = list(self._held.values())
        if isinstance(self._strategy, BigModelStrategy) and self._strategy.has_whole_parameters:
            held = {tensor.data_ptr(): tensor.shape for tensor in targets}
            wholes = {name: parameter.data for name, parameter in module.named_parameters() if name in values}
            targets += [whole for whole in wholes.values() if held.get(whole.data_ptr()) != whole.shape]
        self._copies = [(tensor, tensor.to("cpu" if to_host else tensor.device, copy=True)) for tensor in targets]

    @property
    def training(self) -> dict[str, Tensor]:
        """Name -> the training weights this rank holds."""
        return dict(zip(self._held, (copy for _, copy in self._copies), strict=False))

    @torch.no_grad()
    def apply(self) -> None:
        """Put the values in. Collective."""
        for name, value in self._values.items():
            self._held[name].copy_(value)
        if isinstance(self._strategy, BigModelStrategy):
            self._strategy.publish_parameters()

    @torch.no_grad()
    def undo(self, *, has_failed: bool = False) -> None:
        """Put the training weights back. No communication.

        Args:
            has_failed: Whether the run ends with an error: nothing computes any more, and gathers may have broken off.
        """
        for live, copy in self._copies:
            live.copy_(copy)
        if isinstance(self._strategy, BigModelStrategy) and not self._strategy.has_whole_parameters and not has_failed:
            self._strategy.publish_parameters()  # gives up gathered parameters, which are old now


def moved(
    kept: Mapping[str, Tensor], layout: Mapping[str, RegionLayout], wanted: Mapping[str, RegionLayout], device: Any
) -> dict[str, Tensor]:
    """What this rank wants of tensors that the ranks keep in another layout. Collective over all ranks.

    Args:
        kept: Name -> this rank's part, as before.
        layout: How each lies in the whole; what it leaves out counts for nothing.
        wanted: Name -> the part to get.
        device: Where messages are.

    Memory: one whole tensor at a time. Communication: every tensor once to every rank, and the tables of layouts.
    """
    tables: list[dict[str, tuple[RegionLayout, torch.dtype]]] = [{} for _ in range(dist.get_world_size())]
    own = {name: (layout[name], tensor.dtype) for name, tensor in kept.items() if name in layout}
    dist.all_gather_object(tables, own)
    found: dict[str, Tensor] = {}
    for name in sorted({name for table in tables for name in table}):
        pieces: dict[tuple[int, ...], tuple[int, Region]] = {}
        for rank, table in enumerate(tables):
            for region in table[name][0].regions if name in table else ():
                pieces.setdefault(region.offsets, (rank, region))
        saved_layout, dtype = next(table[name] for table in tables if name in table)
        whole = torch.empty(saved_layout.shape, dtype=dtype, device=device)
        for rank, region in pieces.values():
            message = torch.empty(region.sizes, dtype=dtype, device=device)
            if rank == dist.get_rank():
                message.copy_(kept[name][_slices(region.local_offsets, region.sizes)])
            dist.broadcast(message, src=rank)
            whole[_slices(region.offsets, region.sizes)] = message
        if name in wanted:
            found[name] = torch.empty(wanted[name].local_shape, dtype=dtype, device=device)
            for region in wanted[name].regions:
                found[name][_slices(region.local_offsets, region.sizes)] = whole[_slices(region.offsets, region.sizes)]
    return found


def _slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
