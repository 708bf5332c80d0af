"""Run a user's training and evaluation steps as a pipeline, and give back what one process would have given.

This is the plain-torch heart of the strategy:

    plan:  trace the step on one micro-batch -> units -> cut -> owners of parameters
    step:  split the batch -> run the schedule (each stage runs the user's whole step, gated) -> gather logs, outputs
           and attribute changes over the pipeline -> one loss tensor, one autograd node
"""

from __future__ import annotations

import gc
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
from lightning_bigmodel.pipeline.batch_norm import (
    DeferredStatistics,
    deferred_layers,
    refuse_batch_statistics,
)
from lightning_bigmodel.pipeline.exchange import gather_objects, start_gather
from lightning_bigmodel.pipeline.gradient_watch import GradientWatch, WatchedMicrobatch
from lightning_bigmodel.pipeline.gradients import GradientPlaces
from lightning_bigmodel.pipeline.memory_limit import MemoryLimit, measured_bytes
from lightning_bigmodel.pipeline.metrics import MetricLink, merged_value
from lightning_bigmodel.pipeline.microbatch import (
    RETURNED_WEIGHT,
    MicrobatchWeight,
    batch_size,
    join_outputs,
    microbatch_weights,
    returned_weight,
    split_batch,
    weighted_mean,
)
from lightning_bigmodel.pipeline.microbatch_size import MicrobatchSizer
from lightning_bigmodel.pipeline.ownership import ParameterShare
from lightning_bigmodel.pipeline.passes import Passes
from lightning_bigmodel.pipeline.planning import Planner
from lightning_bigmodel.pipeline.schedules import (
    build_schedule,
    check_schedule,
    next_legal,
    rank_of_stage,
    run_forwards,
    run_schedule,
    stages_of_rank,
)
from lightning_bigmodel.pipeline.snapshot import StepSnapshot
from lightning_bigmodel.pipeline.stage import MicrobatchStage, MicrobatchTask, StageModule, loss_of
from lightning_bigmodel.pipeline.step_log import LogEntry, StepLog, combine_logs
from lightning_bigmodel.pipeline.step_state import StepState
from lightning_bigmodel.pipeline.trace import saved_bytes
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
        signal: The host's signals (see `PipelineEngine.signal`) that were up on any rank.
    """

    result: Any
    loss: Tensor | None
    weight: float
    logs: list[tuple[LogEntry, Tensor | None, int]]
    metric_values: dict[str, Any]
    signal: int = 0


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
    weights: list[float | None] = field(default_factory=list)  # that the step returned
    # Micro-batches that count and have a loss (last stage): those whose step returned a weight, and those without.
    num_weighted: int = 0
    num_unweighted: int = 0
    result: Any = None
    result_follows: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    signal: int = 0
    is_training: bool = False
    ran_out: str | None = None  # of memory; why smaller micro-batches would not help, or nothing
    batch_norm_calls: dict[int, int] = field(default_factory=dict)


def _shares(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights] if total else weights


def _any_rank(payloads: Sequence[_Payload]) -> int:
    """The signals that are up on any rank."""
    signal = 0
    for payload in payloads:
        signal |= payload.signal
    return signal


def _returns_weights(payloads: Sequence[_Payload]) -> bool:
    """Whether the steps of this batch, on all data ranks, return their weights.

    Raises:
        ValueError: On every rank alike, where some do and some do not.
    """
    num_with = sum(payload.num_weighted for payload in payloads)
    num_without = sum(payload.num_unweighted for payload in payloads)
    if num_with and num_without:
        without = sorted({payload.data_rank for payload in payloads if payload.num_unweighted})
        raise ValueError(
            f"`training_step` returned `{RETURNED_WEIGHT}` for {num_with} of {num_with + num_without} micro-batches of "
            f"a batch; it is missing on data ranks {without}. Return it always, or never; a micro-batch that does not "
            "count has weight 0."
        )
    return num_with > 0


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
        sizer: Finds the number of micro-batches of each batch, at least `num_microbatches`; None: it stays that.
        limit: What running out of memory is, where the device does not say so.
        deferred_batch_norm: Whether running statistics are those of whole batches (see `batch_norm`).

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
        sizer: MicrobatchSizer | None = None,
        limit: MemoryLimit | None = None,
        deferred_batch_norm: bool = False,
    ) -> None:
        self.root, self.mesh, self.device = root, rank_mesh, device
        self.schedule = schedule if rank_mesh.pipe_size > 1 else "1F1B"
        spec = check_schedule(self.schedule, rank_mesh.pipe_size, num_microbatches)
        self.num_stages = rank_mesh.pipe_size * spec.stages_per_rank if rank_mesh.pipe_size > 1 else 1
        self.num_microbatches = num_microbatches
        self.planner = Planner(root, self.num_stages, blocks, device)
        self.share: ParameterShare | None = None
        self.num_steps = 0
        # Flags of the host, a bit each, that may go up on one rank and all must follow (stop training).
        self.signal: Callable[[], int] = lambda: 0
        self._weight, self._ignored, self._seed = weight, ignored_attributes, seed
        self._stages: list[MicrobatchStage] = []
        self._torch_schedules: dict[int, Any] = {}
        self.sizer, self._limit = sizer, limit
        self.loss_scale: Callable[[], float] = lambda: 1.0  # what gradients are multiplied by while they are made
        self.backward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.resident_bytes: Callable[[], int] = lambda: 0  # parameters, gradients, optimizer states of this rank
        # Told of tensors kept for backward that hooks on saved tensors do not see (see `measured_bytes`).
        self.noting_hidden: Callable[[Callable[[object, Tensor], None]], AbstractContextManager[Any]] = nullcontext
        self._kept: tuple[Any, int, int, int] | None = None  # measured of a step (see `MicrobatchSizer.measured`)
        self.num_parts = 0  # micro-batches of the last batch
        self._owned: list[nn.Parameter] | None = None
        self._checked_gradients = False
        self._returned_before: bool | None = None  # whether the steps of this run return their weights
        self.places = GradientPlaces(rank_mesh.data_group)
        self.metrics: MetricLink | None = None
        self.watches: list[GradientWatch] = []
        self._loose_buffers: list[str] = []
        self._defers_statistics = deferred_batch_norm
        self._statistics: DeferredStatistics | None = None

    @property
    def is_pipelined(self) -> bool:
        """Whether training runs a schedule (several stages or micro-batches)."""
        return self.num_stages > 1 or self.num_microbatches > 1 or self.sizer is not None

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

    def reseed(self, seed: int) -> None:
        """Let random streams derive from another base, equal on all ranks."""
        self._seed = seed

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
            stage.limit, stage.recovers = self._limit, self.sizer is not None
            stage.watches = self.watches
            stage.backward_context = self.backward_context
            self._stages.append(stage)
        self.metrics = MetricLink(self.root, self.mesh.line_group, self.mesh.data_group)
        if self._defers_statistics:
            self._defer_statistics()

    def uninstall(self, *, restore: bool) -> None:
        """Remove the gates; with `restore`, put the whole model on every rank (collective over the pipeline)."""
        if self.planner.ownership is not None:
            gates.ungate(self.planner.ownership.stage_of_unit)
        if self.metrics is not None:
            self.metrics.close()
        if self._statistics is not None:
            self._statistics.close()
            self._statistics = None
        self._stages, self._torch_schedules, self.metrics = [], {}, None
        if restore and self.share is not None:
            self.share.restore()

    def _refuse_batch_statistics(self) -> None:
        num_microbatches = self.num_microbatches if self.sizer is None else max(2, self.num_microbatches)
        for name, module in self.root.named_modules():
            if type(module).__name__ == "_SpectralNorm" and module.training and num_microbatches > 1:
                raise ValueError(
                    f"`{name}` (spectral_norm) takes a step of its power iteration at each call, but "
                    f"`num_microbatches={num_microbatches}` calls it once a micro-batch; its results would differ "
                    "from one process. Set `num_microbatches=1` (with `schedule='GPipe'` in a pipeline)."
                )
        refuse_batch_statistics(self.root, num_microbatches, is_deferred=self._defers_statistics)

    def _defer_statistics(self) -> None:
        assert self.planner.ownership is not None, "`partition` comes first"
        layers = deferred_layers(self.root)
        stages_of = {
            inner: stages for unit, stages in self.planner.ownership.stage_of_unit.items() for inner in unit.modules()
        }
        here = set(self.stage_indices)
        last_stage = self.num_stages - 1
        loose = [name for name, layer in layers.items() if layer not in stages_of] if self.num_stages > 1 else []
        self._statistics = DeferredStatistics(
            layers,
            owned=[name for name, layer in layers.items() if here & set(stages_of.get(layer, (last_stage,)))],
            loose=loose,
            device=self.device,
            data_group=self.mesh.data_group,
            pipe_group=self.mesh.pipe_group,
            last_pipe_rank=rank_of_stage(self.schedule, self.mesh.pipe_size, last_stage) if loose else 0,
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
        num_parts = self.num_microbatches if self.sizer is None else self._find_num_parts(batch, step)
        outcome = self._attempt(batch, step, num_parts, counts=counts)
        while outcome is None:
            num_parts = self._agreed(num_parts + 1)
            outcome = self._attempt(batch, step, num_parts, counts=counts)
        self.num_parts = num_parts
        if self.sizer is not None:
            self.sizer.fitted(batch, num_parts)
        return outcome

    def _attempt(self, batch: Any, step: Step, num_parts: int, *, counts: bool) -> StepOutcome | None:
        """As `_train`; the first time in a search, what it keeps is measured.

        The trace knows of one micro-batch what all its operators keep, and nothing of what is computed again.
        """
        if self.sizer is None or self.sizer.is_measured or self._kept is not None or self.num_stages == 1:
            return self._train(batch, step, num_parts, counts=counts)
        with measured_bytes(self._stages, self._limit, self.noting_hidden) as kept:
            outcome = self._train(batch, step, num_parts, counts=counts)
        if outcome is not None:
            num_held = max(1, min(stage.most_in_flight for stage in self._stages))
            self._kept = (batch, num_parts, kept.peak_bytes, num_held)
        return outcome

    def _find_num_parts(self, batch: Any, step: Step) -> int:
        """How many micro-batches a batch needs on the rank that needs most. Collective: one number."""
        assert self.sizer is not None
        if self._limit is not None:
            self._limit.resident_bytes = self.resident_bytes()
        if self._kept is not None:  # and the optimizer has its states by now
            kept, self._kept = self._kept, None
            self.sizer.measured(*kept, self._free_bytes())
        if not self.sizer.is_estimated:
            self.sizer.estimate(batch, self._needed_bytes(batch, step), self._free_bytes())
        return self._agreed(self.sizer.num_parts(batch))

    def _agreed(self, num_parts: int) -> int:
        numbers = torch.tensor(num_parts)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return next_legal(self.schedule, self.mesh.pipe_size, int(numbers))

    def _needed_bytes(self, batch: Any, step: Step) -> float:
        """What one micro-batch of the whole batch would keep for backward here, by the trace. No communication."""
        if self.num_stages == 1:
            try:
                return float(saved_bytes(self.root, lambda: step(batch), self.device))
            except Exception:  # what no fake run can follow is found out by running out of memory
                return 0.0
        trace = self.planner.first_trace
        assert trace is not None, "`partition` comes first"
        total = 0.0
        for index in self.stage_indices:
            own = sum(
                call.saved_bytes
                for call, stage in zip(trace.units, self.planner.first_stages, strict=True)
                if stage == index
            )
            total += own * max(1, self.num_stages - index)  # as many micro-batches are under way
        return total * self.num_microbatches

    def _free_bytes(self) -> float:
        if self._limit is not None:
            return float(self._limit.num_bytes - self._limit.resident_bytes)
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return float(free + cached)

    def _train(self, batch: Any, step: Step, num_parts: int, *, counts: bool) -> StepOutcome | None:
        """One attempt; None where memory ran out on some rank, with everything as it was before."""
        microbatches = split_batch(batch, num_parts)
        weights = microbatch_weights(microbatches, self._weight) if counts else [0.0] * len(microbatches)
        total = sum(weights)
        shares = weights if self._weight == "sum" else _shares(weights)
        if num_parts not in self._torch_schedules:
            self._torch_schedules[num_parts] = build_schedule(self.schedule, self._stages, num_parts)
        scale = self.loss_scale()
        reference = self.places.common_reference(total) / scale if self.weighs_in_schedule else None
        seeds = [s * scale for s in shares] if reference is None else [weight / reference for weight in weights]
        log, before = StepLog(self.root), StepState(self.root, self._ignored, self._loose_buffers)
        snapshot = None if self.sizer is None else StepSnapshot(self.root)
        self._set_tasks("train", microbatches, seeds, weights, step, log, reference if self._takes_weights else None)
        with _replaced_log(self.root, log, self.metrics):
            run_schedule(self._torch_schedules[num_parts], num_parts, self.device)
        self.places.settle()
        given = [task.returned for stage in self._stages if stage.is_last for task in stage.tasks]
        ran_out = any(stage.ran_out for stage in self._stages)
        if counts and not ran_out and any(weight is not None for weight in given):
            shares = _shares([weight or 0.0 for weight in given])
        own = self._payload("train", log if counts else None, before, microbatches, shares)
        if counts:
            with_loss = [w for w, loss in zip(own.weights, own.losses, strict=True) if loss is not None]
            own.num_unweighted = with_loss.count(None)
            own.num_weighted = len(with_loss) - own.num_unweighted
        if ran_out:
            own.ran_out = self._lack_memory(batch, num_parts)
        if not self._checked_gradients:
            own.missing = self._untrained_names()
        group = dist.group.WORLD if self.mesh.data_size > 1 else self.mesh.model_group
        payloads = self._exchange(own, group)
        if snapshot is not None and any(payload.ran_out is not None for payload in payloads):
            self._undo(snapshot, payloads)
            return None
        outcome = self._outcome(payloads, before)
        self._move_statistics(payloads, counts)
        last = self._last_of_pipeline(payloads)
        if counts and any(weight is not None for weight in last.weights):
            weights = [weight or 0.0 for weight in last.weights]
            total, shares = sum(weights), _shares(weights)
        kept = [weight for weight, loss in zip(weights, last.losses, strict=True) if loss is not None]
        if not self._checked_gradients and sum(kept) > 0:
            self._check_gradients(payloads)
        losses = [(loss, share) for loss, share in zip(last.losses, shares, strict=True) if loss is not None]
        if losses:
            outcome.loss = self._mean_loss(losses)
        outcome.weight = sum(kept) if self.weighs_in_schedule else float(counts and bool(kept))
        if self.watches:
            seeds = seeds if reference is None else [weight / reference for weight in weights]
            counted = [0.0 if loss is None else weight for weight, loss in zip(weights, last.losses, strict=True)]
            self.tell_batch(list(zip(microbatches, counted, seeds, strict=True)))
        return outcome

    def _lack_memory(self, batch: Any, num_parts: int) -> str:
        """Note that this batch does not fit; returns why smaller parts would not help, or nothing."""
        assert self.sizer is not None
        self.sizer.failed(batch, num_parts)
        if not self.sizer.is_hopeless(batch, num_parts):
            return ""
        limit = "" if self._limit is None else f" within `memory_limit_bytes={self._limit.num_bytes}`"
        return (
            f'Rank {dist.get_rank()} ran out of memory{limit} with `num_microbatches="auto"` on a micro-batch of one '
            "sample. Shard more (`zero_stage`, `tensor_parallel_size`, `pipeline_parallel_size`), shorten the samples, "
            "or checkpoint activations."
        )

    def _undo(self, snapshot: StepSnapshot, payloads: list[_Payload]) -> None:
        """Before the same batch runs again in smaller parts."""
        snapshot.restore()
        if self._statistics is not None:
            self._statistics.forget()
        for parameter in self.places.accumulating(self.trained_parameters()):
            parameter.grad = None
        self.num_steps -= 1
        for watch in self.watches:
            watch.end_batch([])
        gc.collect()  # graphs without a backward, whose hooks lie in cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        hopeless = [payload.ran_out for payload in payloads if payload.ran_out]
        if hopeless:
            raise RuntimeError(hopeless[0])

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

    def _mean_loss(self, losses: list[tuple[Tensor, float]]) -> Tensor:
        """Loss of the batch: the mean over the micro-batches that have one."""
        values = [loss.to(self.device) for loss, _ in losses]
        shares = [share for _, share in losses]
        if self._weight == "sum":
            return torch.stack([value * share for value, share in zip(values, shares, strict=True)]).sum()
        return weighted_mean(values, shares) if any(shares) else torch.stack(values).mean()

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

    def observe(self, batch: Any, step: Step, *, counts: bool = True) -> tuple[Any, float, Callable[[], StepOutcome]]:
        """Run one training batch without a schedule (one stage, one micro-batch), leaving the backward to the host.

        Returns:
            The step's result, the weight of the batch, and what waits for the other data ranks: every rank calls it at
            the same place among its collectives, at best after the backward, so that nobody stands still before it.
        """
        log = StepLog(self.root)
        log.num_samples = batch_size(batch) or 1
        weights = microbatch_weights([batch], self._weight) if counts else [0.0]
        log.weight = weights[0]
        with _replaced_log(self.root, log, self.metrics):
            with self.passes.forward(0), self._common_rng(), self._collecting("train", is_last_stage=True):
                result = step(batch)
            returned = returned_weight(result) if counts else None
            if returned is not None and not self._takes_weights:
                raise ValueError(
                    f"`training_step` returns `{RETURNED_WEIGHT}`, but the strategy was given "
                    f"`microbatch_weight={self._weight!r}`, which takes no weights. Leave one of them out."
                )
            weights = weights if returned is None else [returned]
            loss = loss_of(result)
            log.note_loss(loss, returned)
        own = self._logged(log if counts else None)
        own.is_last = own.is_training = True
        if counts and loss is not None:
            own.num_weighted, own.num_unweighted = int(returned is not None), int(returned is None)
        gather = start_gather(own, dist.group.WORLD) if self.mesh.data_size > 1 else lambda: [own]
        weight = weights[0] if self._weight not in ("equal", "sum") else float(counts)

        def finish() -> StepOutcome:
            payloads = self._of_own_slices(gather())
            logs = self._combined_logs(payloads)
            self._move_statistics(payloads, counts)
            return StepOutcome(result, None, weight, logs, self._metric_values(payloads), _any_rank(payloads))

        return result, weight, finish

    @property
    def weighs_in_schedule(self) -> bool:
        """Whether the gradients of a schedule have the weights in them already, and not the shares of a batch."""
        return self._weight != "sum"

    def _collecting(self, kind: str, *, is_last_stage: bool) -> AbstractContextManager[Any]:
        if self._statistics is None or kind != "train":
            return nullcontext()
        return self._statistics.collecting(is_last_stage=is_last_stage)

    def _move_statistics(self, payloads: list[_Payload], counts: bool) -> None:
        if self._statistics is not None:
            self._statistics.finish([payload.batch_norm_calls for payload in payloads], counts=counts)

    @property
    def _takes_weights(self) -> bool:
        """Whether a step may return the weight of its micro-batch."""
        return self._weight not in ("equal", "sum")

    def _common_rng(self) -> AbstractContextManager[Any]:
        """Tensor ranks draw the same numbers, data ranks their own; alone, a step draws as in one process."""
        if self.mesh.layout.tensor == 1:
            return nullcontext()
        self.num_steps += 1
        return seeded_rng(derive_seed(self._seed, self.num_steps, self.mesh.data_rank))

    def _set_tasks(
        self,
        kind: str,
        microbatches: list[Any],
        seeds_of_losses: list[float],
        weights: list[float],
        step: Step,
        log: StepLog,
        reference: float | None = None,
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
                    kind=kind,
                    is_last_stage=stage.is_last,
                )
                shared, own = derive_seed(*seeds), derive_seed(*seeds, 1 + stage.stage_index)
                tasks.append(MicrobatchTask(call, plan, seeds_of_losses[index], reference, shared, own))
            stage.tasks = tasks

    def _call(
        self, step: Step, microbatch: Any, weight: float, log: StepLog, *, kind: str, is_last_stage: bool
    ) -> Callable[[], Any]:
        def call() -> Any:
            log.weight, log.num_samples = weight, batch_size(microbatch) or 1
            state = None if is_last_stage else StepState(self.root, self._ignored, self._loose_buffers)
            try:
                with self._collecting(kind, is_last_stage=is_last_stage):
                    result = step(microbatch)
                if kind == "train" and is_last_stage:
                    log.note_loss(loss_of(result), returned_weight(result) if weight else None)
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
        place = (self.mesh.data_rank, self.mesh.pipe_rank, self.mesh.tensor_rank)
        calls = self._statistics.news() if self._statistics is not None else {}
        return _Payload(*place, entries, parts, signal=self.signal(), batch_norm_calls=calls)

    def _payload(
        self, kind: str, log: StepLog | None, before: StepState, microbatches: list[Any], shares: list[float]
    ) -> _Payload:
        payload = self._logged(log)
        payload.is_training = kind == "train"
        last = next((stage for stage in self._stages if stage.is_last), None)
        if last is None:
            return payload
        payload.is_last = True
        if last.tasks:
            payload.weights = [task.returned for task in last.tasks]
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
        payloads = self._of_own_slices(gather_objects(own, group))
        last = self._last_of_pipeline(payloads)
        if last.result_follows:
            held = [result if last.pipe_rank == self.mesh.pipe_rank else None]
            dist.broadcast_object_list(held, group_src=last.pipe_rank, group=self.mesh.line_group)
            last.result = held[0]
        return payloads

    def _of_own_slices(self, payloads: list[_Payload]) -> list[_Payload]:
        # Tensor ranks have the same to tell; each listens to those with its own index.
        own = [payload for payload in payloads if payload.tensor_rank == self.mesh.tensor_rank]
        return sorted(own, key=lambda payload: (payload.data_rank, payload.pipe_rank))

    def _last_of_pipeline(self, payloads: list[_Payload]) -> _Payload:
        # Not by `next`: the host would take its StopIteration for the end of the data.
        (last,) = [p for p in payloads if p.data_rank == self.mesh.data_rank and p.is_last]
        return last

    def _outcome(self, payloads: list[_Payload], before: StepState) -> StepOutcome:
        last = self._last_of_pipeline(payloads)
        if last.pipe_rank != self.mesh.pipe_rank:
            before.apply(last.changes)
        result = map_tensors(lambda tensor: tensor.to(self.device), last.result)
        logs = self._combined_logs(payloads)
        signal = _any_rank(payloads)
        return StepOutcome(result, None, 1.0, logs, self._metric_values(payloads), signal)

    def _combined_logs(self, payloads: list[_Payload]) -> list[tuple[LogEntry, Tensor | None, int]]:
        """Of all ranks; a ValueError where they disagree on what weighs (see `_returns_weights`)."""
        weighs = self._returns_weights(payloads) or (callable(self._weight) and payloads[0].is_training)
        parts = [payload.logs for payload in payloads]
        return combine_logs(parts, losses_are_sums=self._weight == "sum", counts_weights=weighs)

    def _returns_weights(self, payloads: list[_Payload]) -> bool:
        """The same of a batch as of those before it, as their weights are summed up."""
        returns = _returns_weights(payloads)
        if any(payload.num_weighted or payload.num_unweighted for payload in payloads):
            if self._returned_before not in (None, returns):
                raise ValueError(
                    f"`training_step` returned `{RETURNED_WEIGHT}` for "
                    + (
                        "this batch, but not for those before it"
                        if returns
                        else "earlier batches, but not for this one"
                    )
                    + ": weights of batches are compared with each other. Return it always, or never; a batch that "
                    "does not count has weight 0."
                )
            self._returned_before = returns
        return returns

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
