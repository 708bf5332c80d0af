"""`Recompute`: which activations are kept, computed again or moved off the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._recompute_blocks import chain_of
from lightning_bigmodel.recompute.compilation import check_compiled
from lightning_bigmodel.recompute.full import Full
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.optimal import Optimal
from lightning_bigmodel.recompute.plan_table import plan_table
from lightning_bigmodel.recompute.policy import RecomputePolicy
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

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
    micro-batch, also where a schedule splits its backward) and under Lightning's strategies.

    With `torch.compile`, gradients are those of the compiled run without it, bit for bit. Blocks that are compiled one
    by one, by `compile_blocks` or by `block.compile()`, go with every policy and backend, but `Selective` needs one
    whose partitioner computes again: `"inductor"` or `"aot_eager"`. Where a whole module or the step is compiled, by
    one of these too, `Full` and `Selective` mark each block for it; other policies are refused. What a compiler
    computes again by itself is no second forward: the block must compile in one graph and must not write its own
    buffers, half precision needs Inductor's `emulate_precision_casts`, and equal bits were seen on CPUs only: on a GPU
    other fused kernels may round otherwise. Torch's `activation_memory_budget` (of `torch._functorch.config`) is
    another means, within each graph.

    A key-value cache of transformers is filled in a copy that each run of a block throws away: what is in it counts (a
    learned prefix), and the cache that a training step returns lacks the blocks that run again.

    Args:
        policy: `Full()`, `SquareRoot()`, `Selective(...)`, `Offload(...)` or `Optimal(...)`. Default: `Full()`.
        budget: Bytes that blocks may save on the device of a rank, as a number or `"24GiB"`: in place of a policy, for
            the choice for each block that pays least (`Optimal`). Weights, gradients, optimizer states, and what the
            step saves outside of blocks come on top; the last is measured, and a line of the table.
        blocks: `"auto"`: the model's repeated modules; or names or patterns of modules.

    Raises:
        ValueError: For settings that are none; at the start of a run where no blocks are found, or a policy cannot take
            effect.
        RecomputeError: In a step where a block changes its input in place, or does something else in its second run;
            before a step by gradients that the compiler would get wrong.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelStrategy, Recompute
        >>> trainer = Trainer(
        ...     accelerator="cpu", devices=1, strategy=BigModelStrategy(), logger=False, callbacks=[Recompute()]
        ... )
    """

    def __init__(
        self,
        policy: RecomputePolicy | None = None,
        budget: int | str | None = None,
        blocks: Literal["auto"] | Sequence[str] = "auto",
    ) -> None:
        if policy is not None and not isinstance(policy, RecomputePolicy):
            raise ValueError(f"`policy={policy!r}` must be a policy such as `Full()`, or None for that.")
        if budget is not None and policy is not None:
            raise ValueError(
                f"`budget={budget!r}` chooses for each block by itself, and `policy={policy!r}` must be left out then. "
                "Give one of them."
            )
        names = list(blocks) if isinstance(blocks, (list, tuple)) else []
        if blocks != "auto" and not (names and all(isinstance(name, str) for name in names)):
            raise ValueError(f"`blocks={blocks!r}` must be 'auto' or a list of module names, such as ['layers.*'].")
        chosen = Full() if budget is None else Optimal(budget)
        self.policy: RecomputePolicy = chosen if policy is None else policy
        self.blocks: Literal["auto"] | list[str] = "auto" if blocks == "auto" else names
        self._treated: TreatedBlocks | None = None
        self._around_batch = ExitStack()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is sharded and compiled by now, whatever the strategy; nothing has run yet."""
        self._close()
        strategy = trainer.strategy
        is_cut = isinstance(strategy, BigModelStrategy) and strategy.engine.num_stages > 1
        if isinstance(self.policy, Optimal) and isinstance(strategy, BigModelStrategy) and strategy.engine.sizer:
            raise ValueError(
                f"`Recompute(budget={self.policy.budget})` plans for micro-batches of one size, which "
                '`num_microbatches="auto"` goes on changing. Give `num_microbatches` as a number, or a policy such as '
                "`Selective()` in place of `budget`."
            )
        chain = chain_of(trainer, pl_module, self.blocks)
        treatments = self.policy.treatments(chain)
        check_compiled(type(self.policy).__name__, chain.blocks, treatments)
        if not is_cut and not any(treatments):
            raise ValueError(
                f"`Recompute` has nothing to do: {len(chain.blocks)} block(s), of which the last is left out as its "
                "backward directly follows its forward. Leave the callback out, or name finer `blocks`."
            )
        self._treated = TreatedBlocks(chain, treatments)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._treated is not None:
            self._treated.note_state()
        self._around_batch.enter_context(self.policy.around_batch())

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        if self._treated is not None:
            self._treated.check_state()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._around_batch.close()
        if self._treated is None:
            return
        revised = self.policy.revised(self._treated.chain, _host.all_objects)
        if revised is None:
            return
        check_compiled(type(self.policy).__name__, self._treated.chain.blocks, revised)
        self._treated.treat(revised)
        if trainer.is_global_zero and isinstance(self.policy, Optimal) and self.policy.plans:
            Console().print(plan_table(self.policy.plans))

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
        self._around_batch.close()
        treated, self._treated = self._treated, None
        if treated is not None:
            treated.close()
