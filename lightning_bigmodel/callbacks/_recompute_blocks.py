"""Which blocks of a model a rank computes, under `BigModelStrategy` and under Lightning's own strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from torch import nn

from lightning_bigmodel.callbacks._recompute_compiled import compilation_of, compiled_part_of
from lightning_bigmodel.recompute.install import is_treated
from lightning_bigmodel.recompute.policy import Block, Chain
from lightning_bigmodel.scaling.casting import keep_region
from lightning_bigmodel.sharding.units import find_blocks
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy
from lightning_bigmodel.strategies.sharding_settings import named_blocks

__all__ = ["chain_of"]


def chain_of(trainer: pl.Trainer, module: pl.LightningModule, blocks: Literal["auto"] | Sequence[str]) -> Chain:
    """This rank's blocks, and what a policy has to know of the layout.

    Raises:
        ValueError: Where there are no blocks, or they do not fit the stages of a pipeline.
    """
    found = _named(trainer, module, blocks) if blocks != "auto" else _auto(trainer, module)
    _refuse_others(module, found)
    strategy = trainer.strategy
    compile_options = None
    if isinstance(strategy, BigModelStrategy) and strategy._compile_blocks:
        compile_options = {} if strategy._compile_blocks is True else strategy._compile_blocks
    return Chain(
        [
            Block(name, block, index, compilation_of(name, block, module, compile_options), compiled_part_of(block))
            for index, (name, block) in enumerate(found.items())
        ],
        ends_in_backward=_ends_in_backward(strategy, module),
        is_gathered=isinstance(strategy, BigModelStrategy) and strategy._sharding.zero_stage == 3,
        keepers=[keep_region],
    )


def _refuse_others(module: pl.LightningModule, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse blocks that are computed again already: they would run three times or more."""
    for name, part in module.named_modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"`{name or type(module).__name__}` computes its layers again by itself "
                "(`gradient_checkpointing=True`), and `Recompute` would do so once more. Leave "
                "`gradient_checkpointing_enable()` out."
            )
    for name, block in blocks.items():
        if is_treated(block):
            raise ValueError(
                f"Two `Recompute` callbacks take `{name}`. Leave one of them out, or name other blocks in "
                "`Recompute(blocks=[...])`."
            )


def _auto(trainer: pl.Trainer, module: pl.LightningModule) -> Mapping[str, nn.Module]:
    strategy = trainer.strategy
    names = {part: name for name, part in module.named_modules()}
    if isinstance(strategy, BigModelStrategy):
        chosen = strategy.blocks_of_rank()
        is_found = bool(chosen) or strategy.engine.num_stages > 1
    else:
        chosen = [_inner(part) for part in find_blocks(module).values() if next(part.children(), None) is not None]
        is_found = bool(chosen)
    if not is_found:
        raise ValueError(
            f"`Recompute` found no blocks: `{type(module).__name__}` has no repeated modules. Name what is to be "
            "computed again in `Recompute(blocks=[...])`."
        )
    return {names[block]: block for block in chosen}


def _inner(module: Any) -> nn.Module:
    """Of a module that Lightning's FSDP has wrapped, what it computes once its parameters are there."""
    while type(module).__name__ == "FullyShardedDataParallel":
        module = module.module
    inner: nn.Module = module
    return inner


def _named(trainer: pl.Trainer, module: pl.LightningModule, blocks: Sequence[str]) -> Mapping[str, nn.Module]:
    chosen = {name: _inner(block) for name, block in named_blocks(module, blocks).items()}
    strategy = trainer.strategy
    if not isinstance(strategy, BigModelStrategy) or strategy.engine.num_stages == 1:
        return chosen
    names = {part: name for name, part in module.named_modules()}
    ownership = strategy.engine.planner.ownership
    assert ownership is not None, "the model is cut before callbacks start"
    for name, block in chosen.items():
        inside = [names[part] for part in block.modules() if part is not block and part in ownership.stage_of_unit]
        if inside:
            raise ValueError(
                f"`Recompute(blocks=[...])` names {name!r}, but the pipeline may be cut within it, before "
                f"{inside[0]!r}. Name that and its like."
            )
    here = {part for stage in strategy.engine.stages for unit in stage.submod.owned for part in unit.modules()}
    return {name: block for name, block in chosen.items() if block in here}


def _ends_in_backward(strategy: Any, module: pl.LightningModule) -> bool:
    """Whether nothing runs between the forward of the last block and its backward but what follows in the step."""
    if not module.automatic_optimization:
        return False
    if not isinstance(strategy, BigModelStrategy):
        return True
    engine = strategy.engine
    return engine.schedule == "1F1B" and engine.num_stages - 1 in engine.stage_indices
