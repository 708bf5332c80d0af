"""What an audit can look at: precisions and layouts, a model's blocks, and which of them are a rank's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_bigmodel.callbacks._held import check_strategy
from lightning_bigmodel.sharding.units import find_blocks
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy
from lightning_bigmodel.strategies.sharding_settings import named_blocks

__all__ = ["HALF_TYPES", "audited_blocks", "check_audit", "own_blocks"]

HALF_TYPES = {
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}


def check_audit(trainer: pl.Trainer) -> None:
    """Refuse what computes nothing in 16 bits, or cannot run a block again.

    Raises:
        ValueError: With what to change.
    """
    strategy, precision = trainer.strategy, str(trainer.precision)
    check_strategy(strategy, "PrecisionAudit")
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "`PrecisionAudit` runs blocks again between the backward and the optimizer step, which with manual "
            "optimization are parts of the step that it watches. Set `automatic_optimization=True`, or leave the "
            "callback out."
        )
    if precision not in HALF_TYPES:
        why = (
            "rounds within the layers it has converted, whose operators would do so in fp32 too. Audit 'bf16-mixed'"
            if precision == "fp8"
            else f"computes nothing in 16 bits that it could compare. Use one of {list(HALF_TYPES)}"
        )
        raise ValueError(f"`PrecisionAudit`: `precision={precision!r}` {why}, or leave the callback out.")
    if isinstance(strategy, BigModelStrategy):
        if strategy.mesh.layout.tensor > 1:
            raise ValueError(
                "`PrecisionAudit` runs blocks once more, but the parts of a block that "
                f"`tensor_parallel_size={strategy.mesh.layout.tensor}` cuts it into exchange messages in each run. "
                "Audit with `tensor_parallel_size=1`, if need be a copy of the model with fewer blocks."
            )
        if strategy._compile_blocks:
            raise ValueError(
                "`PrecisionAudit` cannot see operators within compiled code. Leave `compile_blocks` out while auditing."
            )


def audited_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """The repeated modules of a model, whole modules of other classes between them, and the layers beside them.

    Example:
        >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> list(audited_blocks(nn.ModuleList([layer(), nn.TransformerEncoderLayer(2, 1), layer(), nn.Linear(2, 2)])))
        ['0', '1', '2', '3']
    """
    found = find_blocks(root)
    whole = [name for name, module in found.items() if next(module.children(), None) is not None]
    chains = {name.rpartition(".")[0] for name in whole}

    def block_of(name: str) -> str:
        for chain in chains:
            prefix = f"{chain}." if chain else ""
            if name.startswith(prefix):
                sibling = prefix + name[len(prefix) :].partition(".")[0]
                if not any(other.startswith(f"{sibling}.") for other in whole):
                    return sibling
        return name

    modules = dict(root.named_modules())
    return {block: modules[block] for block in dict.fromkeys(map(block_of, found))}


def own_blocks(
    trainer: pl.Trainer, module: pl.LightningModule, blocks: Literal["auto"] | Sequence[str]
) -> dict[str, nn.Module]:
    """Blocks that this rank computes; in a pipeline by default the units that it is cut between."""
    chosen = None if blocks == "auto" else named_blocks(module, blocks)
    strategy = trainer.strategy
    if not isinstance(strategy, BigModelStrategy) or strategy.engine.num_stages == 1:
        return audited_blocks(module) if chosen is None else chosen
    names = {id(each): name for name, each in module.named_modules()}
    units = [unit for stage in strategy.engine.stages for unit in stage.submod.owned]
    if chosen is None:
        return {names[id(unit)]: unit for unit in units}
    here = {id(part) for unit in units for part in unit.modules()}
    return {name: block for name, block in chosen.items() if id(block) in here}
