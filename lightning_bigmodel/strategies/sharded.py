"""What a run keeps where under ZeRO: ties the row shards of `sharding` to the stages of `pipeline`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bigmodel.mesh import RankMesh
from lightning_bigmodel.pipeline.engine import PipelineEngine
from lightning_bigmodel.pipeline.gradients import GradientPlaces
from lightning_bigmodel.pipeline.ownership import ParameterShare
from lightning_bigmodel.pipeline.passes import Passes
from lightning_bigmodel.sharding.gather import ParameterShards, Unit
from lightning_bigmodel.sharding.guard import RowGradient
from lightning_bigmodel.sharding.passes import GatherPasses
from lightning_bigmodel.sharding.reduce import BucketReducer, reduce_leftovers
from lightning_bigmodel.sharding.rows import RowShard
from lightning_bigmodel.sharding.units import find_blocks, make_units
from lightning_bigmodel.sharding.zero import ZeroShards

__all__ = ["ShardedRun"]


class _ReducePasses(Passes):
    """Stage 2: whole parameters, gradients reduced after each micro-batch."""

    def __init__(self, reducer: BucketReducer) -> None:
        self._reducer = reducer

    @override
    def begin_backward(self, microbatch: Any) -> None:
        self._reducer.open()

    @override
    def end_backward(self, microbatch: Any) -> None:
        self._reducer.flush()


class _GatherPasses(Passes):
    """Stage 3, as a stage calls it."""

    def __init__(self, passes: GatherPasses) -> None:
        self._passes = passes

    @override
    def forward(self, microbatch: Any) -> AbstractContextManager[Any]:
        return self._passes.forward(microbatch)

    @override
    def begin_backward(self, microbatch: Any) -> None:
        self._passes.begin_backward(microbatch)

    @override
    def pause_backward(self, microbatch: Any) -> None:
        self._passes.pause_backward()

    @override
    def end_backward(self, microbatch: Any) -> None:
        self._passes.end_backward(microbatch)


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
        blocks: Modules gathered as a whole in stage 3, by name; default: found by structure.
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
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__(mesh.data_group)
        self._mesh, self._device = mesh, device
        self._shows_gradients = shows_gradients
        self._shown: list[nn.Parameter] = []
        self.reduces_every_microbatch = reduce_every_microbatch
        self._group = mesh.device_mesh.get_group("data_shard")
        self._replicate_group = mesh.device_mesh.get_group("data_replicate")
        held = {share.names[id(p)]: p for p in share.owned if p.ndim}
        self._gathering: ParameterShards | None = None
        self._reducers: list[BucketReducer] = []
        parts = _stage_parts(engine, share, list(held.values()), blocks)
        # One rank alone has all rows: there is nothing to gather.
        if zero_stage == 3 and mesh.layout.data_shard > 1:
            units_by_stage = [make_units(modules, parameters, list(modules.values())) for modules, parameters in parts]
            units = _distinct(units_by_stage)
            self._gathering = ParameterShards(
                units, share.names, group=self._group, device=device, keep_gathered=keep_gathered
            )
            self.shards: ZeroShards = self._gathering
            for stage, own in zip(engine.stages, units_by_stage, strict=True):
                passes = GatherPasses(self._gathering, own, reduce_every_microbatch=reduce_every_microbatch)
                self._reducers.append(passes.reducer)
                stage.passes = _GatherPasses(passes)
        else:
            self.shards = ZeroShards(held, stage=zero_stage, group=self._group)
            seen: set[int] = set()
            for stage, (_, parameters) in zip(engine.stages, parts, strict=True):
                new = [p for p in parameters if id(p) not in seen]
                seen |= {id(p) for p in new}
                reducer = BucketReducer(self.shards, new, while_backward=reduce_every_microbatch)
                self._reducers.append(reducer)
                if reduce_every_microbatch:
                    stage.passes = _ReducePasses(reducer)
        self._passes = [stage.passes for stage in engine.stages]

    # -- parameters ----------------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether every parameter of this rank is whole between steps."""
        return self._gathering is None

    @property
    def records(self) -> dict[int, RowShard]:
        """id(row shard) -> which rows of what."""
        return self.shards.shard_records()

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether `parameter` has row shards."""
        return id(parameter) in self.shards.shards

    def gathered(self, *, write: bool) -> AbstractContextManager[None]:
        """All parameters of this rank whole within. Collective."""
        return self._gathering.gathered(write=write) if self._gathering is not None else self._written(write)

    @contextmanager
    def _written(self, write: bool) -> Iterator[None]:
        yield  # row shards are views of the whole parameters: what is written into those is written into both

    def idle_pass(self) -> None:
        """Take part in one forward of the other data ranks, which have more batches. Collective over the shards."""
        for passes in self._passes:
            with torch.no_grad(), passes.forward("idle"):
                pass

    def give_up(self) -> None:
        """After a failure, without the other ranks."""
        for reducer in self._reducers:
            reducer.close()
        if self._gathering is not None:
            self._gathering.give_up()

    def restore(self) -> None:
        """Whole parameters again; optimizers keep their row shards. Collective."""
        for reducer in self._reducers:
            reducer.close()
        self.discard()
        self.shards.restore()

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
        if not self._shows_gradients:
            return
        for parameter in self.shards.trained():
            gradient = self.shards.shards[id(parameter)].grad
            if gradient is not None:
                record = self.shards.records[id(parameter)]
                # Of the parameter's own type, as gradients are.
                rows = gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)
                gather = functools.partial(self._whole, parameter)
                parameter.grad = RowGradient.wrap(rows, parameter.shape, gather, record.rows)
                self._shown.append(parameter)

    @override
    def discard(self) -> None:
        self.hide()
        self.shards.start_window()

    def hide(self) -> None:
        """Before the next backward: take off what `show` has set."""
        for parameter in self._shown:
            parameter.grad = None
        self._shown.clear()

    def clipping_groups(self) -> list[Any]:
        """Axes beside the pipeline over which parts of one model lie."""
        return [self._group] if self._mesh.layout.data_shard > 1 else []

    def counted(self, share: ParameterShare) -> set[int]:
        """Ids of the gradient holders this rank answers for."""
        first = self._mesh.coordinates["data_shard"] == 0
        return {id(self.holder(parameter)) for parameter in share.counted if first or self.is_sharded(parameter)}

    def whole_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole gradient after a window. Collective over the shards."""
        holder = self.holder(parameter)
        if holder is parameter or holder.grad is None:
            return holder.grad
        return self._whole(parameter, holder.grad)

    def _whole(self, parameter: nn.Parameter, own: Tensor) -> Tensor:
        rows = self.shards.rows_of([parameter])
        whole = torch.empty(parameter.shape, dtype=own.dtype, device=own.device)
        rows.unpack(rows.gather(rows.pack_own([own], own.dtype)).wait(), [whole])
        return whole


def _distinct(units_by_stage: list[list[Unit]]) -> list[Unit]:
    """All units; those of one parameter that two stages of this rank use are the first stage's in both."""
    unit_of: dict[int, Unit] = {}
    for units in units_by_stage:
        for unit in list(units):
            shared = [p for p in unit.parameters if id(p) in unit_of]
            if shared:
                unit.parameters = [p for p in unit.parameters if id(p) not in unit_of]
                for owner in dict.fromkeys(unit_of[id(p)] for p in shared):
                    owner.modules += [module for module in unit.modules if module not in owner.modules]
                    units.append(owner)
            for parameter in unit.parameters:
                unit_of[id(parameter)] = unit
        units[:] = [unit for unit in units if unit.parameters]
    return list(dict.fromkeys(unit for units in units_by_stage for unit in units))


def _stage_parts(
    engine: PipelineEngine,
    share: ParameterShare,
    held: Sequence[nn.Parameter],
    blocks: Mapping[str, nn.Module] | None,
) -> list[tuple[dict[str, nn.Module], list[nn.Parameter]]]:
    """For each stage of this rank its modules by name, and its parameters."""
    ownership = engine.planner.ownership
    assert ownership is not None, "sharded after the model was cut"
    if engine.num_stages == 1:
        return [(dict(blocks) if blocks is not None else find_blocks(engine.root), list(held))]
    names = {module: name for name, module in engine.root.named_modules()}
    parts = []
    for index in engine.stage_indices:
        modules = {names[module]: module for module, stages in ownership.stage_of_unit.items() if index in stages}
        parameters = [p for p in held if index in ownership.stages_of_parameter[id(p)]]
        parts.append((modules, parameters))
    return parts
