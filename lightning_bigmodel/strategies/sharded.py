"""What a run keeps where under ZeRO: ties the row shards of `sharding` to the stages of `pipeline`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bigmodel.mesh import RankMesh
from lightning_bigmodel.pipeline.engine import PipelineEngine
from lightning_bigmodel.pipeline.gradients import NO_RANKS, GradientPlaces, largest_weight
from lightning_bigmodel.pipeline.ownership import ParameterShare
from lightning_bigmodel.replicas.all_reduce import all_reduce_sum
from lightning_bigmodel.sharding.disk_states import DiskStates
from lightning_bigmodel.sharding.gather import ParameterShards
from lightning_bigmodel.sharding.guard import RowGradient
from lightning_bigmodel.sharding.offload import HostCopies, OffloadPolicy
from lightning_bigmodel.sharding.optimizers import adapt_optimizer
from lightning_bigmodel.sharding.passes import GatherPasses
from lightning_bigmodel.sharding.reduce import BucketReducer, reduce_leftovers
from lightning_bigmodel.sharding.rows import RowShard
from lightning_bigmodel.sharding.tensor_slices import HeldSlice
from lightning_bigmodel.sharding.units import make_units
from lightning_bigmodel.sharding.zero import ComputeDtype, ZeroShards
from lightning_bigmodel.strategies.stage_passes import ReducePasses, StageGatherPasses, distinct_units, stage_parts

__all__ = ["ShardedRun"]


class ShardedRun(GradientPlaces):
    """Row shards of one rank, and where gradients are.

    Args:
        engine: With its stages installed.
        share: What this rank holds of the model.
        mesh: Its place.
        device: Where it computes.
        zero_stage: 1, 2 or 3.
        keep_gathered: See `ParameterShards`.
        reduce_every_microbatch: Whether gradients become rows after each micro-batch, or once a step.
        shows_gradients: Whether user code may look at `parameter.grad` after a window.
        compute_dtype: See `ZeroShards`.
        reduce_dtype: In which gradients are sent and summed.
        prepare: Makes parameters on the meta device real; see `ParameterShards`.
        blocks: Modules gathered as a whole in stage 3, by name; default: found by structure.
        offload: What is kept outside of the device.
        sums_replicas: Whether gradients are summed over replicas here too; else only within one.
    """

    sums_early = True

    def __init__(
        self,
        engine: PipelineEngine,
        share: ParameterShare,
        mesh: RankMesh,
        device: torch.device,
        *,
        zero_stage: int,
        keep_gathered: bool,
        reduce_every_microbatch: bool,
        shows_gradients: bool,
        compute_dtype: ComputeDtype = None,
        reduce_dtype: torch.dtype | None = None,
        prepare: Callable[[Sequence[nn.Parameter]], None] | None = None,
        blocks: Mapping[str, nn.Module] | None = None,
        offload: OffloadPolicy | None = None,
        sums_replicas: bool = True,
    ) -> None:
        super().__init__(mesh.data_group if sums_replicas else mesh.device_mesh.get_group("data_shard"))
        self._offload = offload
        self._states: DiskStates | None = None
        copies = None if offload is None else HostCopies(device)
        self._mesh, self._device, self._reduce_dtype = mesh, device, reduce_dtype
        self._shows_gradients = shows_gradients
        self._shown: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._whole_of: dict[int, nn.Parameter] | None = None
        self.reduces_every_microbatch = reduce_every_microbatch
        self._group = mesh.device_mesh.get_group("data_shard")
        self._replicate_group = mesh.device_mesh.get_group("data_replicate") if sums_replicas else NO_RANKS
        held = {share.names[id(p)]: p for p in share.owned if p.ndim and p.numel()}
        self._gathering: ParameterShards | None = None
        self._reducers: list[BucketReducer] = []
        parts = stage_parts(engine, share, list(held.values()), blocks)
        # One rank alone has all rows: there is nothing to gather.
        if zero_stage == 3 and mesh.layout.data_shard > 1:
            units_by_stage = [
                make_units(
                    modules,
                    parameters,
                    [module for module in modules.values() if next(module.children(), None) is not None],
                )
                for modules, parameters in parts
            ]
            units = distinct_units(units_by_stage)
            self._gathering = ParameterShards(
                units,
                share.names,
                group=self._group,
                device=device,
                keep_gathered=keep_gathered,
                copies=copies,
                prepare=prepare,
                compute_dtype=compute_dtype,
            )
            self.shards: ZeroShards = self._gathering
            for stage, own in zip(engine.stages, units_by_stage, strict=True):
                passes = GatherPasses(self._gathering, own, reduce_every_microbatch=reduce_every_microbatch)
                self._reducers.append(passes.reducer)
                stage.passes = StageGatherPasses(passes)
        else:
            if prepare is not None:
                prepare(list(held.values()))
            self.shards = ZeroShards(
                held, stage=zero_stage, group=self._group, copies=copies, compute_dtype=compute_dtype
            )
            seen: set[int] = set()
            for stage, (_, parameters) in zip(engine.stages, parts, strict=True):
                new = [p for p in parameters if id(p) not in seen]
                seen |= {id(p) for p in new}
                reducer = BucketReducer(self.shards, new, while_backward=reduce_every_microbatch)
                self._reducers.append(reducer)
                if reduce_every_microbatch:
                    stage.passes = ReducePasses(reducer)
        self.shards.reduce_dtype = reduce_dtype
        self._passes = [stage.passes for stage in engine.stages]

    # -- parameters ----------------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether every parameter of this rank is whole between steps."""
        return self._gathering is None

    def whole_bytes(self) -> int:
        """Of whole parameters at once: all of them, or the largest two units in turn."""
        if self._gathering is None:
            return sum(p.numel() * p.element_size() for p in self.shards.parameters)
        sizes = [sum(p.numel() * p.element_size() for p in unit.parameters) for unit in self._gathering.units]
        return sum(sizes if self._gathering.keep_gathered else sorted(sizes)[-2:])

    @property
    def records(self) -> dict[int, RowShard]:
        """id(row shard) -> which rows of what."""
        return self.shards.shard_records()

    def parameter_of(self, held: Any) -> Any:
        """The module's parameter for what an optimizer holds."""
        if self._whole_of is None:
            self._whole_of = {id(self.shards.shard_of(parameter)): parameter for parameter in self.shards.parameters}
        return self._whole_of.get(id(held), held)

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether `parameter` has row shards."""
        return id(parameter) in self.shards.shards

    def gathered(self, *, write: bool) -> AbstractContextManager[None]:
        """All parameters of this rank whole within. Collective."""
        return self._gathering.gathered(write=write) if self._gathering is not None else self._written(write)

    @contextmanager
    def _written(self, write: bool) -> Iterator[None]:
        yield  # row shards are views of the whole parameters, or on the host
        self.shards.take_changes()

    def idle_pass(self) -> None:
        """Take part in one forward of the other data ranks, which have more batches. Collective over the shards."""
        for passes in self._passes:
            with torch.no_grad(), passes.forward("idle"):
                pass

    def give_up(self) -> None:
        """After a failure, without the other ranks."""
        self.hide()  # moving a module would gather gradients that are shown
        for reducer in self._reducers:
            reducer.close()
        if self._gathering is not None:
            self._gathering.give_up()
        self._close_states()

    def restore(self) -> None:
        """Whole parameters again; optimizers keep their row shards. Collective."""
        for reducer in self._reducers:
            reducer.close()
        self.hide()
        self.shards.start_window()
        self.shards.restore()
        self._close_states()

    def _close_states(self) -> None:
        if self._states is not None:
            self._states.close()

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def hand_to(self, optimizers: Sequence[Optimizer], slices: Mapping[int, HeldSlice]) -> None:
        """Optimizers step row shards from now on, exactly or not at all. Collective with `offload` to a disk.

        Args:
            optimizers: The optimizers.
            slices: By id of a row shard, which slice under tensor parallelism the rows are of.
        """
        for optimizer in optimizers:
            self.shards.hand_to(optimizer)
        if self._offload is not None and self._offload.kind == "disk":
            self._states = DiskStates(optimizers, self.records.keys(), self._offload, rank=dist.get_rank())
        for optimizer in optimizers:
            adapt_optimizer(optimizer, self.records, slices)

    @property
    def state_device(self) -> torch.device:
        """Where optimizers keep their states."""
        return self._device if self._offload is None else torch.device("cpu")

    def sum_gradients(self, gradients: Sequence[Tensor], group: Any) -> None:
        """`all_reduce_sum` on the device, whose groups may not know the host; what takes copies goes one by one."""
        copies = self.shards.copies
        if copies is None or self._device.type == "cpu":
            all_reduce_sum(gradients, group, dtype=self._reduce_dtype)
            return
        for gradient in gradients:
            moved = copies.to_device(gradient)
            all_reduce_sum([moved], group, dtype=self._reduce_dtype)
            if moved is not gradient:
                gradient.copy_(moved)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @override
    def holder(self, parameter: nn.Parameter) -> nn.Parameter:
        return self.shards.shard_of(parameter)

    @override
    def accumulating(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        if self.reduces_every_microbatch:
            return [self.shards.shard_of(parameter) for parameter in parameters]
        return list(parameters)

    @override
    def had_gradient(self, parameter: nn.Parameter) -> bool:
        if self.is_sharded(parameter):
            return id(parameter) in self.shards.present or parameter.grad is not None
        return parameter.grad is not None

    @override
    def summed_over(self, parameter: nn.Parameter) -> Any:
        return self._replicate_group if self.is_sharded(parameter) else self.data_group

    @override
    def _largest(self, weight: float) -> float:
        return largest_weight(weight, self._mesh.data_group)

    @override
    def settle(self) -> None:
        """After the backwards of a batch: reduce gradients that came late on any rank. Communication: one number."""
        if self.reduces_every_microbatch:
            reduce_leftovers(self._reducers, self._group, self._device)

    @override
    def complete(self) -> None:
        if self.reduces_every_microbatch:
            self.settle()
            return
        for reducer in self._reducers:
            reducer.flush()

    @override
    def show(self) -> None:
        self.shards.start_window()
        self.show_gradients()

    def show_gradients(self) -> None:
        """Let user code see the gradients there are; in stage 1 they are whole until the window's end."""
        if not self._shows_gradients:
            return
        for parameter in self.shards.trained():
            gradient = self.shards.shards[id(parameter)].grad
            if gradient is not None and parameter.grad is None:
                record = self.shards.records[id(parameter)]
                gather = functools.partial(self.shards.whole_of, parameter)
                # Of the parameter's own type, as gradients are.
                shown = RowGradient.wrap(gradient, parameter.shape, gather, record.rows, parameter)
                parameter.grad = shown
                self._shown[id(parameter)] = (parameter, shown)

    def has_shown(self, parameter: nn.Parameter) -> bool:
        """Whether user code was shown a gradient of `parameter`, which it may have replaced."""
        return id(parameter) in self._shown

    def hide(self) -> None:
        """Before the next backward: take off what `show` has set."""
        for parameter, _ in self._shown.values():
            parameter.grad = None
        self._shown.clear()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Take over gradients that a hook has replaced: another tensor, or None for a parameter not to be stepped."""
        for key, (parameter, shown) in list(self._shown.items()):
            gradient = parameter.grad
            if gradient is shown:
                continue
            shard = self.shards.shards[key]
            if gradient is None:
                shard.grad = None
            else:
                rows = self.shards.records[key].rows(gradient.contiguous())
                shard.grad = rows.to(device=shard.device, dtype=shard.dtype, copy=True)
            del self._shown[key]
            parameter.grad = None
        self.show_gradients()

    def clipping_groups(self) -> list[Any]:
        """Axes beside the pipeline over which parts of one model lie."""
        return [self._group] if self._mesh.layout.data_shard > 1 else []

    def whole_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole gradient after a window. Collective over the shards."""
        holder = self.holder(parameter)
        if holder is parameter or holder.grad is None:
            return holder.grad
        return self.shards.whole_of(parameter, holder.grad)
