"""`Recompute`: which activations are kept, computed again or moved off the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_bigmodel.callbacks._recompute_blocks import chain_of
from lightning_bigmodel.recompute.full import Full
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.policy import RecomputePolicy

__all__ = ["Recompute"]


class Recompute(Callback):
    """Pay compute or the host link for memory: block by block, for any module, under any strategy.

    What a block's forward keeps for backward is, as `policy` says, given up and computed again in backward (arXiv
    1604.06174), kept in part, or moved to the host and fetched back ahead of its use. Gradients are those without it,
    bit for bit: the second run has the first one's random states, autocast, lists of operators and buffers, which are
    updated once; a block that cannot be run twice alike raises. Do not use it where activations fit: it costs time.

    Blocks are the model's repeated modules (those the pipeline is cut between), or as named. Their `forward` is
    overridden from the start of `fit` to its end: names in checkpoints, module types and hooks stay, and the order of
    callbacks does not matter. Works under `BigModelStrategy` with every layout and schedule (a block runs twice a
    micro-batch, also where a schedule splits its backward), with `compile_blocks`, and under Lightning's strategies.
    Key-value caches of transformers are left out of calls, as they do it themselves.

    Args:
        policy: `Full()`, `SquareRoot()`, `Selective(...)` or `Offload(...)`. Default: `Full()`.
        blocks: `"auto"`: the model's repeated modules; or names or patterns of modules.

    Raises:
        ValueError: For settings that are none; at the start of a run where no blocks are found, or a policy cannot take
            effect.
        RecomputeError: In a step where a block changes its input in place, or does something else in its second run.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelStrategy, Recompute
        >>> trainer = Trainer(
        ...     accelerator="cpu", devices=1, strategy=BigModelStrategy(), logger=False, callbacks=[Recompute()]
        ... )
    """

    def __init__(self, policy: RecomputePolicy | None = None, blocks: Literal["auto"] | Sequence[str] = "auto") -> None:
        if policy is not None and not isinstance(policy, RecomputePolicy):
            raise ValueError(f"`policy={policy!r}` must be a policy such as `Full()`, or None for that.")
        names = list(blocks) if isinstance(blocks, (list, tuple)) else []
        if blocks != "auto" and not (names and all(isinstance(name, str) for name in names)):
            raise ValueError(f"`blocks={blocks!r}` must be 'auto' or a list of module names, such as ['layers.*'].")
        self.policy = Full() if policy is None else policy
        self.blocks: Literal["auto"] | list[str] = "auto" if blocks == "auto" else names
        self._treated: TreatedBlocks | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is sharded and compiled by now, whatever the strategy; nothing has run yet."""
        self._close()
        chain = chain_of(trainer, pl_module, self.blocks)
        self._treated = TreatedBlocks(chain, self.policy.treatments(chain))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Before the strategy takes down what lies beneath.
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        treated, self._treated = self._treated, None
        if treated is not None:
            treated.close()
