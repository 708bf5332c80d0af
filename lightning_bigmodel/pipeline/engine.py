"""Run a user's training and evaluation steps as a pipeline, and give back what one process would have given.

This is the plain-torch heart of the strategy:

    plan:  trace the step on one micro-batch -> units -> cut -> owners of parameters
    step:  split the batch -> run the schedule (each stage runs the user's whole step, gated) -> gather logs, outputs
           and attribute changes over the pipeline -> one loss tensor, one autograd node
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel.mesh.build import RankMesh
from lightning_bigmodel.mesh.rng import derive_seed, seeded_rng
from lightning_bigmodel.pipeline import gate as gates
from lightning_bigmodel.pipeline.exchange import gather_objects
from lightning_bigmodel.pipeline.gradient_watch import GradientWatch, WatchedMicrobatch
from lightning_bigmodel.pipeline.gradients import GradientPlaces
from lightning_bigmodel.pipeline.metrics import MetricLink, merged_value
from lightning_bigmodel.pipeline.microbatch import (
    MicrobatchWeight,
    batch_size,
    join_outputs,
    microbatch_weights,
    split_batch,
    weighted_mean,
)
from lightning_bigmodel.pipeline.ownership import ParameterShare
from lightning_bigmodel.pipeline.passes import Passes
from lightning_bigmodel.pipeline.planning import Planner
from lightning_bigmodel.pipeline.schedules import (
    build_schedule,
    check_schedule,
    rank_of_stage,
    run_forwards,
    run_schedule,
    stages_of_rank,
)
from lightning_bigmodel.pipeline.stage import MicrobatchStage, MicrobatchTask, StageModule, loss_of
from lightning_bigmodel.pipeline.step_log import LogEntry, StepLog, combine_logs
from lightning_bigmodel.pipeline.step_state import StepState
from lightning_bigmodel.pipeline.tree import detached, map_tensors, tensor_leaves

__all__ = ["PipelineEngine", "StepOutcome"]

Step = Callable[[Any], Any]
_SMALL_RESULT_BYTES = 64 * 1024


@contextmanager
def _replaced_log(root: nn.Module, log: StepLog, metrics: MetricLink | None) -> Iterator[None]:
    """`root.log` records within; `log_dict` goes through `log` in the host."""
    if metrics is not None:
        metrics.begin_step()
    root.__dict__["log"] = log
    try:
        yield
    finally:
        del root.__dict__["log"]


@dataclass
class StepOutcome:
    """What one step gave, the same on every rank of a pipeline.

    Attributes:
        result: What the user's step returned for the whole batch (None if it returned None for all of it); of a
            training step in a schedule, what it returned beside the loss.
        loss: Its loss: the weighted mean over micro-batches; None outside of training or where there was none.
        weight: Weight of this rank's batch in the mean over an accumulation window and data ranks.
        logs: (entry, value, batch size) of everything logged (see `step_log.combine_logs`).
        metric_values: Module name of a logged metric object -> its value for this batch.
        signal: Whether the host's signal (see `PipelineEngine.signal`) was up on any rank.
    """

    result: Any
    loss: Tensor | None
    weight: float
    logs: list[tuple[LogEntry, Tensor | None, int]]
    metric_values: dict[str, Any]
    signal: bool = False


@dataclass
class _Payload:
    """What one rank tells the others after a step."""

    data_rank: int
    pipe_rank: int
    tensor_rank: int
    logs: list[LogEntry]
    metric_parts: dict[str, Any]
    is_last: bool = False
    losses: list[Tensor | None] = field(default_factory=list)
    result: Any = None
    result_follows: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    signal: bool = False


class PipelineEngine:
    """Runs steps of one module over the ranks of one pipeline.

    Args:
        root: The user's module.
        rank_mesh: This rank's mesh.
        device: Where this rank computes.
        schedule: Name of the schedule (see `schedules.SCHEDULES`).
        num_microbatches: Parts a training batch is split into; evaluation batches stay whole, so that metrics need no
            weighting.
        blocks: Where the model may be cut.
        weight: How micro-batches weigh in the mean.
        ignored_attributes: Attribute names of the module that belong to the host.
        seed: Base of the random streams; equal on all ranks.

    Raises:
        ValueError: For a schedule that cannot take these numbers.
    """

    def __init__(
        self,
        root: nn.Module,
        rank_mesh: RankMesh,
        device: torch.device,
        *,
        schedule: str,
        num_microbatches: int,
        blocks: str | Sequence[str],
        weight: MicrobatchWeight,
        ignored_attributes: Collection[str],
        seed: int,
    ) -> None:
        self.root, self.mesh, self.device = root, rank_mesh, device
        self.schedule = schedule if rank_mesh.pipe_size > 1 else "1F1B"
        spec = check_schedule(self.schedule, rank_mesh.pipe_size, num_microbatches)
        self.num_stages = rank_mesh.pipe_size * spec.stages_per_rank if rank_mesh.pipe_size > 1 else 1
        self.num_microbatches = num_microbatches
        self.planner = Planner(root, self.num_stages, blocks, device)
        self.share: ParameterShare | None = None
        self.num_steps = 0
        # A flag of the host that user code may raise on one rank and all must follow (stop training).
        self.signal: Callable[[], bool] = lambda: False
        self._weight, self._ignored, self._seed = weight, ignored_attributes, seed
        self._stages: list[MicrobatchStage] = []
        self._torch_schedule: Any = None
        self._owned: list[nn.Parameter] | None = None
        self._checked_gradients = False
        self.places = GradientPlaces(rank_mesh.data_group)
        self.metrics: MetricLink | None = None
        self.watches: list[GradientWatch] = []
        self._loose_buffers: list[str] = []

    @property
    def is_pipelined(self) -> bool:
        """Whether training runs a schedule (several stages or micro-batches)."""
        return self.num_stages > 1 or self.num_microbatches > 1

    @property
    def stage_indices(self) -> list[int]:
        """Stages of this rank."""
        return stages_of_rank(self.schedule, self.mesh.pipe_size, self.mesh.pipe_rank) if self.num_stages > 1 else [0]

    @property
    def passes(self) -> Passes:
        """Told of the passes of this rank's first stage."""
        return self._stages[0].passes

    @property
    def stages(self) -> list[MicrobatchStage]:
        """This rank's stages, in order."""
        return self._stages

    # -- set up and take down ------------------------------------------------------------------------------------------

    def partition(self, batch: Any, step: Step) -> None:
        """Trace and cut, on the same batch on every rank. No communication; nothing is changed in the module.

        Raises:
            ValueError, TraceError: Where the module cannot be pipelined, on every rank alike.
        """
        self._refuse_batch_statistics()
        ownership = self.planner.partition(split_batch(batch, self.num_microbatches)[0], step)
        pipe_size = self.mesh.pipe_size
        owners = {
            key: tuple(sorted({rank_of_stage(self.schedule, pipe_size, stage) for stage in stages}))
            for key, stages in ownership.stages_of_parameter.items()
        }
        names = {module: name for name, module in self.root.named_modules()}
        buffer_owners = {
            f"{names[module]}.{name}": rank_of_stage(self.schedule, pipe_size, stages[0])
            for module, stages in ownership.stage_of_unit.items()
            for name, _ in module.named_buffers()
        }
        # Buffers outside of units: code of every stage may write them, the last stage's is the truth.
        last = rank_of_stage(self.schedule, pipe_size, self.num_stages - 1)
        loose = [name for name, _ in self.root.named_buffers() if name not in buffer_owners]
        buffer_owners.update(dict.fromkeys(loose, last))
        self._loose_buffers = loose if self.num_stages > 1 else []
        self.share = ParameterShare(self.root, owners, buffer_owners, self.mesh.line_group)

    def install(self) -> None:
        """Give up the parameters of other ranks, gate the units and build this rank's stages."""
        assert self.share is not None, "`partition` comes first"
        assert self.planner.ownership is not None, "`partition` comes first"
        ownership = self.planner.ownership
        if self.num_stages > 1:
            self.share.release()
            gates.gate(ownership.stage_of_unit)
        for index in self.stage_indices:
            owned = [module for module, stages in ownership.stage_of_unit.items() if index in stages]
            inside = {id(parameter) for module in owned for parameter in module.parameters()}
            loose = [
                parameter
                for parameter in self.root.parameters()
                if index in ownership.stages_of_parameter[id(parameter)] and id(parameter) not in inside
            ]
            stage = MicrobatchStage(
                StageModule(owned, loose), index, self.num_stages, self.device, self.mesh.pipe_group
            )
            stage.stage_index_to_group_rank = {
                stage_index: rank_of_stage(self.schedule, self.mesh.pipe_size, stage_index)
                for stage_index in range(self.num_stages)
            }
            stage.watches = self.watches
            self._stages.append(stage)
        self.metrics = MetricLink(self.root, self.mesh.line_group, self.mesh.data_group)

    def uninstall(self, *, restore: bool) -> None:
        """Remove the gates; with `restore`, put the whole model on every rank (collective over the pipeline)."""
        if self.planner.ownership is not None:
            gates.ungate(self.planner.ownership.stage_of_unit)
        if self.metrics is not None:
            self.metrics.close()
        self._stages, self._torch_schedule, self.metrics = [], None, None
        if restore and self.share is not None:
            self.share.restore()

    def _refuse_batch_statistics(self) -> None:
        for name, module in self.root.named_modules():
            if type(module).__name__ == "_SpectralNorm" and module.training and self.num_microbatches > 1:
                raise ValueError(
                    f"`{name}` (spectral_norm) takes a step of its power iteration at each call, but "
                    f"`num_microbatches={self.num_microbatches}` calls it once a micro-batch; its results would differ "
                    "from one process. Set `num_microbatches=1` (with `schedule='GPipe'` in a pipeline)."
                )
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and self.num_microbatches > 1:
                raise ValueError(
                    f"`{name}` ({type(module).__name__}) normalises by statistics of the whole batch, but "
                    f"`num_microbatches={self.num_microbatches}` shows it one micro-batch at a time; its results would "
                    "differ from one process. Use GroupNorm or LayerNorm, freeze it with `.eval()`, or set "
                    "`num_microbatches=1` (with `schedule='GPipe'` in a pipeline)."
                )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def train(self, batch: Any, step: Step, *, counts: bool = True) -> StepOutcome:
        """Run one training batch: forwards and backwards.

        Gradients accumulate in `parameter.grad` as the gradient of the batch's loss (weighted mean over its
        micro-batches).

        Args:
            batch: This rank's batch, the same on all ranks of the pipeline.
            step: The user's step on a micro-batch.
            counts: False for a batch that only keeps this data rank in step with the others; it weighs nothing.
        """
        microbatches = split_batch(batch, self.num_microbatches)
        weights = microbatch_weights(microbatches, self._weight) if counts else [0.0] * len(microbatches)
        total = sum(weights)
        shares = weights if self._weight == "sum" or not total else [weight / total for weight in weights]
        if self._torch_schedule is None:
            self._torch_schedule = build_schedule(self.schedule, self._stages, self.num_microbatches)
        seeds = shares
        if self.places.sums_early and self._weight != "sum":
            # Gradients of several ranks are summed within the schedule, so a rank's weight enters there.
            reference = self.places.common_reference(total) or 1.0
            seeds = [weight / reference for weight in weights]
        log, before = StepLog(self.root), StepState(self.root, self._ignored, self._loose_buffers)
        self._set_tasks("train", microbatches, seeds, weights, step, log)
        with _replaced_log(self.root, log, self.metrics):
            run_schedule(self._torch_schedule, self.num_microbatches, self.device)
        self.places.settle()
        own = self._payload("train", log if counts else None, before, microbatches, shares)
        if not self._checked_gradients:
            own.missing = self._untrained_names()
        group = dist.group.WORLD if self.mesh.data_size > 1 else self.mesh.model_group
        payloads = self._exchange(own, group)
        outcome = self._outcome(payloads, before)
        last = self._last_of_pipeline(payloads)
        if not self._checked_gradients and any(loss is not None for loss in last.losses) and counts:
            self._check_gradients(payloads)
        kept = [weight for weight, loss in zip(weights, last.losses, strict=True) if loss is not None]
        losses = [(loss, share) for loss, share in zip(last.losses, shares, strict=True) if loss is not None]
        if losses:
            outcome.loss, rescale = self._mean_loss(losses, sum(kept), total)
            if rescale != 1.0 and seeds is shares:
                self._scale_gradients(rescale)
        is_kept_weight = self._weight not in ("equal", "sum") or (self._weight == "equal" and seeds is not shares)
        outcome.weight = sum(kept) if is_kept_weight else float(counts and bool(kept))
        if self.watches:
            # What is left of a batch makes up for micro-batches without a loss where each batch has one share.
            whole = outcome.weight / (sum(kept) or 1.0)
            shares = [
                0.0 if loss is None else weight * whole for weight, loss in zip(weights, last.losses, strict=True)
            ]
            watched = zip(microbatches, shares, seeds, strict=True)
            self.tell_batch([(microbatch, share, seed) for microbatch, share, seed in watched])
        return outcome

    def tell_batch(self, microbatches: Sequence[tuple[Any, float, float]]) -> None:
        """Tell the watches that a batch's backwards are over: (micro-batch, weight in the window, seed) of each."""
        told = [
            WatchedMicrobatch(index=index, weight=weight, seed=seed, size=self._size_of(microbatch, weight))
            for index, (microbatch, weight, seed) in enumerate(microbatches)
        ]
        for watch in self.watches:
            watch.end_batch(told)

    def _size_of(self, microbatch: Any, weight: float) -> float:
        return weight if callable(self._weight) else float(batch_size(microbatch) or 1)

    def _mean_loss(self, losses: list[tuple[Tensor, float]], kept: float, total: float) -> tuple[Tensor, float]:
        """Loss of the batch, and the factor by which micro-batches without a loss must be made up for."""
        values = [loss.to(self.device) for loss, _ in losses]
        if self._weight == "sum":
            return torch.stack([value * share for value, (_, share) in zip(values, losses, strict=True)]).sum(), 1.0
        shares = [share for _, share in losses]
        if not any(shares):
            return torch.stack(values).mean(), 1.0
        return weighted_mean(values, shares), total / kept if kept and kept != total else 1.0

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self.places.accumulating(self.trained_parameters()):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def evaluate(self, kind: str, batch: Any, step: Step) -> StepOutcome:
        """Run one evaluation batch, whole, forward only."""
        log, before = StepLog(self.root), StepState(self.root, self._ignored, self._loose_buffers)
        log.num_samples = batch_size(batch) or 1
        log.weight = float(log.num_samples)
        with _replaced_log(self.root, log, self.metrics):
            if self.num_stages == 1:
                with self.passes.forward(0), self._common_rng():
                    result = step(batch)
            else:
                self._set_tasks(kind, [batch], [1.0], [log.weight], step, log)
                run_forwards(self._stages, 1)
        own = self._payload(kind, log, before, [batch], [1.0])
        if self.num_stages == 1:
            own.result = result
        return self._outcome(self._exchange(own, self.mesh.model_group), before)

    def observe(self, batch: Any, step: Step, *, counts: bool = True) -> StepOutcome:
        """Run one training batch without a schedule (one stage, one micro-batch), leaving the backward to the host."""
        log = StepLog(self.root)
        log.num_samples = batch_size(batch) or 1
        weights = microbatch_weights([batch], self._weight) if counts else [0.0]
        log.weight = weights[0]
        with _replaced_log(self.root, log, self.metrics):
            with self.passes.forward(0), self._common_rng():
                result = step(batch)
            log.note_loss(loss_of(result))
        own = self._logged(log if counts else None)
        own.is_last = True
        payloads = self._exchange(own, dist.group.WORLD) if self.mesh.data_size > 1 else [own]
        weight = weights[0] if self._weight not in ("equal", "sum") else float(counts)
        logs = combine_logs([payload.logs for payload in payloads], losses_are_sums=self._weight == "sum")
        signal = any(payload.signal for payload in payloads)
        return StepOutcome(result, None, weight, logs, self._metric_values(payloads), signal)

    def _common_rng(self) -> AbstractContextManager[Any]:
        """Tensor ranks draw the same numbers, data ranks their own; alone, a step draws as in one process."""
        if self.mesh.layout.tensor == 1:
            return nullcontext()
        self.num_steps += 1
        return seeded_rng(derive_seed(self._seed, self.num_steps, self.mesh.data_rank))

    def _set_tasks(
        self, kind: str, microbatches: list[Any], shares: list[float], weights: list[float], step: Step, log: StepLog
    ) -> None:
        plans = [self.planner.plans(kind, microbatch, step) for microbatch in microbatches]
        self.num_steps += 1
        for stage in self._stages:
            tasks = []
            for index, microbatch in enumerate(microbatches):
                # The stages of one data rank share the stream of code outside of units; units draw from their own.
                seeds = (self._seed, self.num_steps, index, self.mesh.data_rank)
                plan = plans[index][stage.stage_index]
                call = self._call(
                    step,
                    map_tensors(torch.clone, microbatch) if plan.trace.edits_batch else microbatch,
                    weights[index],
                    log,
                    keeps_state=stage.is_last,
                    returns_loss=kind == "train" and stage.is_last,
                )
                shared, own = derive_seed(*seeds), derive_seed(*seeds, 1 + stage.stage_index)
                tasks.append(MicrobatchTask(call, plan, shares[index], shared, own))
            stage.tasks = tasks

    def _call(
        self, step: Step, microbatch: Any, weight: float, log: StepLog, *, keeps_state: bool, returns_loss: bool
    ) -> Callable[[], Any]:
        def call() -> Any:
            log.weight, log.num_samples = weight, batch_size(microbatch) or 1
            state = None if keeps_state else StepState(self.root, self._ignored, self._loose_buffers)
            try:
                result = step(microbatch)
                if returns_loss:
                    log.note_loss(loss_of(result))
                return result
            finally:
                if state is not None:
                    state.restore()

        return call

    # -- after a step --------------------------------------------------------------------------------------------------

    def _logged(self, log: StepLog | None) -> _Payload:
        entries = list(log.entries.values()) if log is not None else []
        names = {entry.metric for entry in entries if entry.metric is not None}
        parts = self.metrics.batch_values(names) if self.metrics is not None else {}
        return _Payload(
            self.mesh.data_rank, self.mesh.pipe_rank, self.mesh.tensor_rank, entries, parts, signal=self.signal()
        )

    def _payload(
        self, kind: str, log: StepLog | None, before: StepState, microbatches: list[Any], shares: list[float]
    ) -> _Payload:
        payload = self._logged(log)
        last = next((stage for stage in self._stages if stage.is_last), None)
        if last is None:
            return payload
        payload.is_last = True
        if last.tasks:
            payload.losses = [None if task.loss is None else task.loss.detach().cpu() for task in last.tasks]
            results = [detached(task.result) for task in last.tasks]
            joined = join_outputs(results, [batch_size(microbatch) for microbatch in microbatches], shares)
            if "train" in kind:  # the loss is sent by itself
                joined = {k: v for k, v in joined.items() if k != "loss"} if isinstance(joined, Mapping) else None
            payload.result = map_tensors(lambda tensor: tensor.cpu(), joined)
        payload.changes = before.changes() if self.mesh.pipe_size > 1 else {}
        for stage in self._stages:
            stage.tasks = ()
            stage.clear_runtime_states()
        return payload

    def _exchange(self, own: _Payload, group: Any) -> list[_Payload]:
        if dist.get_world_size(group) == 1:
            return [own]
        # A large result concerns the ranks of its own pipeline only; small ones ride along.
        large = sum(tensor.nbytes for tensor in tensor_leaves(own.result)) > _SMALL_RESULT_BYTES
        result, own.result, own.result_follows = own.result, None if large else own.result, large
        # Tensor ranks have the same to tell; each listens to those with its own index.
        payloads = [p for p in gather_objects(own, group) if p.tensor_rank == self.mesh.tensor_rank]
        payloads.sort(key=lambda payload: (payload.data_rank, payload.pipe_rank))
        last = self._last_of_pipeline(payloads)
        if last.result_follows:
            held = [result if last.pipe_rank == self.mesh.pipe_rank else None]
            dist.broadcast_object_list(held, group_src=last.pipe_rank, group=self.mesh.line_group)
            last.result = held[0]
        return payloads

    def _last_of_pipeline(self, payloads: list[_Payload]) -> _Payload:
        # Not by `next`: the host would take its StopIteration for the end of the data.
        (last,) = [p for p in payloads if p.data_rank == self.mesh.data_rank and p.is_last]
        return last

    def _outcome(self, payloads: list[_Payload], before: StepState) -> StepOutcome:
        last = self._last_of_pipeline(payloads)
        if last.pipe_rank != self.mesh.pipe_rank:
            before.apply(last.changes)
        result = map_tensors(lambda tensor: tensor.to(self.device), last.result)
        logs = combine_logs([payload.logs for payload in payloads], losses_are_sums=self._weight == "sum")
        signal = any(payload.signal for payload in payloads)
        return StepOutcome(result, None, 1.0, logs, self._metric_values(payloads), signal)

    def _metric_values(self, payloads: list[_Payload]) -> dict[str, Any]:
        names = {name for payload in payloads for name in payload.metric_parts}
        return {
            name: merged_value([payload.metric_parts.get(name) for payload in payloads], self.device)
            for name in sorted(names)
        }

    # -- gradients -----------------------------------------------------------------------------------------------------

    def trained_parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank that take gradients."""
        assert self.share is not None, "`partition` comes first"
        if self._owned is None:
            # Every step asks, and walking the module tree costs as much as a small layer.
            self._owned = self.share.owned
        return [parameter for parameter in self._owned if parameter.requires_grad]

    def _untrained_names(self) -> set[str]:
        trace = self.planner.first_trace
        if trace is None or trace.flow.data_sized_at is not None or self.share is None:
            return set()
        return {
            self.share.names[id(parameter)]
            for parameter in self.trained_parameters()
            if not self.places.had_gradient(parameter) and id(parameter) in trace.trained
        }

    def _check_gradients(self, payloads: list[_Payload]) -> None:
        """After the first step: every parameter that has a gradient in one process must have one on some owner."""
        self._checked_gradients = True
        assert self.share is not None, "`partition` comes first"
        mine = [payload.missing for payload in payloads if payload.data_rank == self.mesh.data_rank]
        lost = sorted(
            name
            for name in set().union(*mine)
            if sum(name in missing for missing in mine) == len(self.share.owners_of(name))
        )
        if lost:
            shown = ", ".join(f"`{name}`" for name in lost[:10]) + (
                f" and {len(lost) - 10} more" if len(lost) > 10 else ""
            )
            raise RuntimeError(
                f"{shown} got no gradient in the pipeline, although in one process the loss depends on them. A value "
                "derived from them reaches the loss on a way the cut cannot follow. Return such values from their "
                "block."
            )
