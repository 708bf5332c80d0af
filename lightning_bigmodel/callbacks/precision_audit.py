"""`PrecisionAudit`: which blocks and operators 16 bits cost most, and what to compute in fp32 instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._audit_blocks import HALF_TYPES, check_audit, own_blocks
from lightning_bigmodel.callbacks._audit_proposal import Proposer, complete_proposal
from lightning_bigmodel.callbacks._audit_report import AuditFindings, Proposal, RankFindings
from lightning_bigmodel.callbacks._block_audit import BlockAudit
from lightning_bigmodel.pipeline.gate import current_run
from lightning_bigmodel.pipeline.snapshot import StepSnapshot
from lightning_bigmodel.precision.bigmodel import BigModelPrecision
from lightning_bigmodel.scaling.audit import OperatorAudit, OperatorKey
from lightning_bigmodel.scaling.comparison import Comparison
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy
from lightning_bigmodel.strategies.sharding_settings import named_blocks

__all__ = ["PrecisionAudit"]

# The error of one block is about the type's step, grown by a few operators one after another.
_STEPS_OF_TOLERANCE = 8


class PrecisionAudit(Callback):
    """Compare blocks and operators in 16 bits with fp32 for a few steps, and propose what to keep in full precision.

    In an audited step the first call of each block is kept: inputs, random state, and the gradients of its output. Once
    the backward is over, the block is run again, in 16 bits and in fp32, and outputs and gradients are compared. What
    mixed precision loses and why: Micikevicius et al., arXiv 1710.03740, section 3. Each operator that gives 16 bits is
    also run in fp32 on what it was given (see `scaling.audit`).

    After `num_steps` audited steps, or at the end of training, the first rank prints blocks and operators by error, and
    a `BigModelPrecision(...)` to copy. It is tried out: the operators in it are the fewest that, in fp32, bring a block
    under the tolerance; where that takes more than three, or does not help, the block's name is proposed instead.
    Operators outside of blocks are proposed where they overflow or lose more than the tolerance by themselves. Written
    are `blocks.csv`, `operators.csv` and, where matplotlib is installed, `blocks.png`.

    Training goes on to the same numbers, bit for bit. Works under `BigModelStrategy` with pipelines, replicas and ZeRO,
    and under Lightning's `DDPStrategy` and on a single device. Each rank audits its own blocks on its first
    micro-batch. Do not use it to judge a whole run: what overflows after a thousand steps does not show in the first.

    An error is what one block adds, as both runs are given the same inputs and weights. With ZeRO, weights that are
    kept in 16 bits are taken as they are; elsewhere the rounding of weights counts too. Where 16 bits turn the sign of
    what a ReLU is given, gradients differ by whole samples: with a handful of samples a gradient error may be chance.
    Where gradients overflow, a block is compared at smaller loss scales. A block within
    `checkpoint(..., use_reentrant=True)` has no gradient to compare.

    Cost of an audited step: each block's forward and backward twice more, each operator twice, and for a block over
    the tolerance one more run for each of its operators. Memory: inputs and gradients of outputs of all blocks for one
    micro-batch, and with `zero_stage=3` their parameters on the host. Communication: the tables once, at the end. Other
    steps cost nothing.

    Args:
        num_steps: Optimizer steps to audit, the first batch of each.
        every_num_steps: Audit one of so many steps.
        output_path: Folder for the files. Default: `precision_audit` in the Trainer's `default_root_dir`.
        blocks: `"auto"`: the model's repeated modules and the layers beside them; or names or patterns of modules.
        tolerance: Relative error (L2) that is taken for what 16 bits are. Default: 8 times the type's step: 0.0078 in
            fp16, 0.063 in bf16.

    Attributes:
        findings: Numbers of all ranks, once reported: `findings.blocks` and `findings.operators`, worst first.
        proposal: What to give `BigModelPrecision`, once reported.

    Raises:
        ValueError: For settings out of range; at the start of a run in full precision or fp8, with manual optimization,
            tensor parallelism or `compile_blocks`, and under strategies that shard by themselves.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelStrategy, PrecisionAudit
        >>> trainer = Trainer(
        ...     accelerator="cpu", devices=1, strategy=BigModelStrategy(), precision="16-mixed", logger=False,
        ...     callbacks=[PrecisionAudit(num_steps=3)],
        ... )
    """

    # `on_after_backward` is only a time at which parameters are as they were in the step.
    sees_parameter_grads = False

    def __init__(
        self,
        num_steps: int = 3,
        every_num_steps: int = 1,
        output_path: str | Path | None = None,
        blocks: Literal["auto"] | Sequence[str] = "auto",
        tolerance: float | None = None,
    ) -> None:
        for name, value in (("num_steps", num_steps), ("every_num_steps", every_num_steps)):
            if type(value) is not int or value < 1:
                raise ValueError(f"`{name}={value!r}` must be a whole number of at least 1.")
        names = list(blocks) if isinstance(blocks, (list, tuple)) else []
        if blocks != "auto" and not (names and all(isinstance(name, str) for name in names)):
            raise ValueError(f"`blocks={blocks!r}` must be 'auto' or a list of module names, such as ['layers.*'].")
        is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
        if tolerance is not None and not (is_number and 0 < tolerance < 1):
            raise ValueError(f"`tolerance={tolerance!r}` must be a relative error between 0 and 1, such as 0.01.")
        if output_path is not None and not isinstance(output_path, (str, Path)):
            raise ValueError(f"`output_path={output_path!r}` must be the path of a folder.")
        self.num_steps, self.every_num_steps = num_steps, every_num_steps
        self.output_path = None if output_path is None else Path(output_path)
        self.blocks: Literal["auto"] | list[str] = "auto" if blocks == "auto" else names
        self.tolerance = tolerance
        self.findings: AuditFindings | None = None
        self.proposal: Proposal | None = None
        self._audit: BlockAudit | None = None
        self._unwatch: Callable[[], Any] | None = None

    # -- a run ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        check_audit(trainer)
        if self.blocks != "auto":
            named_blocks(pl_module, self.blocks)  # says what matches nothing
        self.findings = self.proposal = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        strategy, precision = trainer.strategy, trainer.precision_plugin
        self._half_dtype = HALF_TYPES[str(trainer.precision)]
        self._limit = self.tolerance or _STEPS_OF_TOLERANCE * torch.finfo(self._half_dtype).eps
        given: list[str] = []
        backward_context: Any = nullcontext
        if isinstance(precision, BigModelPrecision):
            given = [*precision.full_precision_ops, *precision._ops.half_precision_ops]
            backward_context = precision.backward_context
        self._proposer = Proposer(self._limit, takes_ops="mixed" in str(trainer.precision), excluded=given)
        self._operators = OperatorAudit(self._half_dtype)
        self._audit = BlockAudit(
            own_blocks(trainer, pl_module, self.blocks),
            half_dtype=self._half_dtype,
            device_type=strategy.root_device.type,
            keeps_parameters=isinstance(strategy, BigModelStrategy) and not strategy.has_whole_parameters,
            half_context=precision.forward_context,
            backward_context=backward_context,
            operators=self._operators,
        )
        self._found = RankFindings()
        self._num_batches = self._num_audited = 0

    # -- an audited step -----------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step, place = divmod(self._num_batches, trainer.accumulate_grad_batches)
        self._num_batches += 1
        if self._audit is None or place or step % self.every_num_steps:
            return
        self._audit.start()
        self._watch_step(trainer)

    def _watch_step(self, trainer: pl.Trainer) -> None:
        """Operators outside of blocks are seen in the step itself, the first time each stage of this rank enters it."""
        precision, operators = trainer.precision_plugin, self._operators
        before = precision.train_step_context
        watched: set[int | None] = set()

        @contextmanager
        def train_step_context() -> Iterator[None]:
            run = current_run()
            stage = None if run is None else run.plan.first
            num_seen = operators.num_seen
            try:
                with before(), operators.watching("", "forward") if stage not in watched else nullcontext():
                    yield
            finally:
                if operators.num_seen > num_seen:  # else it was only traced
                    watched.add(stage)

        precision.__dict__["train_step_context"] = train_step_context
        self._unwatch = lambda: precision.__dict__.pop("train_step_context", None)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gradients are complete and parameters not stepped yet: nothing is under way."""
        if self._audit is None or not self._audit.calls:
            return
        self._note_operators()
        before = StepSnapshot(pl_module)
        pl_module.__dict__["log"] = _log_nothing
        try:
            self._compare(trainer)
        finally:
            before.restore()
        self._audit.calls.clear()

    def _compare(self, trainer: pl.Trainer) -> None:
        audit, scale = self._audit, _loss_scale(trainer.precision_plugin)
        assert audit is not None
        self._proposer.begin_step()
        for name in list(audit.calls):
            numbers, full = audit.compare(name, scale)
            seen = self._note_operators()
            self._found.add_block(name, numbers)
            if full is not None and numbers.exceeds(self._limit):
                self._proposer.consider(audit, name, full, seen)
            del audit.calls[name]

    def _note_operators(self) -> dict[OperatorKey, Comparison]:
        seen = self._operators.read()
        self._found.add_operators(seen)
        return seen

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._audit is None or self._unwatch is None:
            return
        self._end_step()
        self._num_audited += 1
        if self._num_audited == self.num_steps:
            self._report(trainer)

    # -- the end -------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._audit is not None:  # fewer steps than asked for
            self._end_step()
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        """Put together what all ranks have seen. Collective."""
        self._found.ops, self._found.modules = self._proposer.ops, self._proposer.modules
        found = RankFindings()
        for of_rank in _host.all_objects(self._found):
            found.add(of_rank)
        self.findings = AuditFindings(found.blocks, found.operators, tolerance=self._limit, num_steps=self._num_audited)
        # One step of one rank may have been an exception.
        found.modules = [name for name in found.modules if found.blocks[name].exceeds(self._limit)]
        if "mixed" in str(trainer.precision):
            found.ops += self.findings.loose_ops()
        self.proposal = complete_proposal(trainer, found.ops, found.modules)
        self._close()
        if trainer.is_global_zero:
            self.findings.show(self.proposal, bool(found.ops or found.modules))
            folder = self.output_path or Path(trainer.default_root_dir) / "precision_audit"
            rank_zero_info(self.findings.write(folder))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def _end_step(self) -> None:
        if self._audit is not None:
            self._audit.stop()
        if self._unwatch is not None:
            self._unwatch()
        self._unwatch = None

    def _close(self) -> None:
        self._end_step()
        self._audit = None


def _loss_scale(precision: Any) -> float:
    if isinstance(precision, BigModelPrecision):
        return precision.scale
    scaler = getattr(precision, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass
