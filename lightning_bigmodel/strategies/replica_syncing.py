"""When replicas agree: the strategy's side of `replica_sync`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.mesh import build_replica_levels
from lightning_bigmodel.pipeline.gradient_watch import square_sums
from lightning_bigmodel.replicas.averaging import sum_numbers
from lightning_bigmodel.replicas.dense import AllReduce
from lightning_bigmodel.replicas.optimizer_state import average_optimizer_state
from lightning_bigmodel.replicas.sync import (
    GradientSync,
    NamedGradient,
    ParameterSync,
    Replicas,
    StepProgress,
)
from lightning_bigmodel.strategies.replica_state import ReplicaState

__all__ = ["ReplicaSyncing"]


class _AgreedFirst(Callback):
    """The first of all callbacks: they, and the module's hooks, see the agreed weights too.

    Strategies are asked after them.
    """

    def __init__(self, strategy: ReplicaSyncing) -> None:
        self._strategy = strategy

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._strategy._use_agreed_weights()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._strategy._end_replica_sync()


class ReplicaSyncing(ReplicaState):
    """What happens between replicas beside plain sums of gradients.

    A `GradientSync` is asked once a window, when each replica has its own contribution, in unscaled units and finite
    where it keeps errors. A `ParameterSync` is asked after each optimizer step; while replicas are apart, evaluation,
    checkpoints and the end of training see the weights they would agree on, and each replica's own come back after.
    """

    _losses: list[tuple[float, Tensor]]
    _taken_options: list[tuple[dict[str, Any], str, Any]]

    @property
    def _overlap(self) -> AllReduce | None:
        """The settings of sums while backward runs; None where something else is to be done."""
        sync = self._replica_sync
        if sync is None:
            return AllReduce()
        is_early = isinstance(sync, AllReduce) and sync.overlap and self.mesh.layout.data_shard == 1
        return sync if isinstance(sync, AllReduce) and is_early and self._sharded is None else None

    # -- start and end -------------------------------------------------------------------------------------------------

    def _begin_replica_sync(self) -> None:
        """At the start of training, when weights are what it starts from. Collective."""
        sync = self._replica_sync
        self._losses, self._taken_options, self._apart = [], [], None
        self._kept_at_end = None
        if sync is None:
            return
        with self._phase("replicas"):
            group = self._replica_group()
            ranks = dist.get_process_group_ranks(group)
            assert self.parallel_devices is not None
            machines = [rank // len(self.parallel_devices) for rank in ranks]
            sync.begin(
                Replicas(
                    group=group,
                    size=len(ranks),
                    rank=self.mesh.coordinates["data_replicate"],
                    ranks_a_machine=machines.count(machines[0]),
                    levels=lambda num_inside: build_replica_levels(self.mesh, num_inside),
                    norm=self._norm_of_replica if self._is_own_part() else None,
                    reduce_dtype=self._reduce_dtype(),
                    model=dict(self.engine.root.named_parameters()),
                ),
                self._held_trained(),
            )
            self._is_syncing = True
            if self._agrees_on_weights:
                trainer = self._trainer()
                _host.set_callbacks(trainer, [_AgreedFirst(self), *_host.callbacks(trainer)])
            self._resume_replicas()

    def _end_replica_sync(self) -> None:
        """At the end of training: what is left is what replicas agree on. Collective.

        Memory on the host until the next run: what a `GradientSync` has kept for later steps.
        """
        if self._is_syncing and self._agrees_on_weights:
            self._use_agreed_weights()
            self._apart = None
        if self._is_syncing and not self._agrees_on_weights:
            self._kept_at_end = self._replica_state()
        self._stop_replica_sync()

    def _close_replica_sync(self) -> None:
        """At the end of a run, also after a failure. Not collective."""
        self._stop_replica_sync()
        trainer = self._trainer()
        others = [callback for callback in _host.callbacks(trainer) if not isinstance(callback, _AgreedFirst)]
        _host.set_callbacks(trainer, others)

    def _stop_replica_sync(self) -> None:
        if self._is_syncing:
            self._is_syncing = False
            self._give_back_options()
            assert self._replica_sync is not None
            self._replica_sync.end()

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _reduce_replicas(self, parameters: Sequence[nn.Parameter]) -> None:
        """The end of a window: this replica's contributions become what all replicas step by. Collective."""
        sync, share, places = self._replica_sync, self.engine.share, self.engine.places
        assert isinstance(sync, GradientSync)
        assert share is not None
        if sync.keeps_error and self._scaling() is not None and self._unscale_early():
            return
        found: dict[int, tuple[Any, Any]] = {
            id(p): (group, optimizer.state)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        gradients = []
        for parameter in parameters:
            holder = places.holder(parameter)
            if holder.grad is not None:
                name = share.names[id(parameter)]
                if holder.grad.layout != torch.strided:
                    raise ValueError(
                        f"The gradient of `{name}` is sparse, and `{type(sync).__name__}` exchanges dense ones only. "
                        "Set `sparse=False` on the embedding."
                    )
                options, states = found.get(id(holder), ({}, {}))
                state = states.get(holder, {})
                gradients.append(
                    NamedGradient(name=name, value=holder.grad, parameter=holder.data, options=options, state=state)
                )
        with torch.no_grad():
            sync.reduce(gradients, StepProgress(epoch=self._trainer().current_epoch))
        for optimizer in self.optimizers:
            for emptied in [key for key, state in optimizer.state.items() if not state]:
                del optimizer.state[emptied]

    def _is_own_part(self) -> bool:
        """Whether other ranks hold parts of this replica."""
        return self.mesh.pipe_size > 1 or self.mesh.layout.tensor > 1 or self.mesh.layout.data_shard > 1

    @torch.no_grad()
    def _norm_of_replica(self, gradients: Sequence[NamedGradient]) -> Tensor:
        share = self.engine.share
        assert share is not None
        counted = {share.names[id(p)] for p in share.counted if self._answers_for(p)}
        values = [gradient.value for gradient in gradients if gradient.name in counted]
        total = square_sums([values])[0].to(self.root_device)
        groups = [self.mesh.pipe_group, self.mesh.tensor_group]
        if self.mesh.layout.data_shard > 1:
            groups.append(self.mesh.device_mesh.get_group("data_shard"))
        for group in groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(total, group=group)
        return total.sqrt()

    def _take_over_options(self, optimizer: Any) -> None:
        """What the sync applies itself is zero while the optimizer steps, and the user's again right after."""
        sync = self._replica_sync
        if not isinstance(sync, GradientSync):
            return
        for group in optimizer.param_groups:
            for name in sync.taken_over:
                if group.get(name):
                    self._taken_options.append((group, name, group[name]))
                    group[name] = type(group[name])(0)

    def _give_back_options(self) -> None:
        for group, name, value in self._taken_options:
            group[name] = value
        self._taken_options = []

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _note_loss(self, weight: float, loss: Tensor | None) -> None:
        if (
            loss is not None
            and weight
            and isinstance(self._replica_sync, ParameterSync)
            and self._replica_sync.needs_loss
        ):
            self._losses.append((weight, loss.detach()))

    def _loss_of_replica(self) -> float:
        """The mean loss of this step's batches; alike on all ranks of a replica. Collective over its shards."""
        weighed = [weight * float(loss) for weight, loss in self._losses]
        sums = [sum(weighed), sum(weight for weight, _ in self._losses)]
        if self.mesh.layout.data_shard > 1:
            sums = sum_numbers(sums, self.mesh.device_mesh.get_group("data_shard"), self.root_device)
        return sums[0] / sums[1] if sums[1] else float("nan")

    def _before_replica_step(self, optimizer: Any) -> None:
        """Gradients are complete."""
        if not self._is_syncing:
            return
        self._take_over_options(optimizer)
        if isinstance(self._replica_sync, ParameterSync):
            self._replica_sync.before_step(self._held_trained())

    def _after_replica_step(self, optimizer: Any) -> None:
        """The optimizer has stepped. Collective where it is time to agree."""
        sync, window = self._replica_sync, self._window
        if not self._is_syncing or not isinstance(sync, ParameterSync):
            return
        assert window is not None
        progress = StepProgress(
            epoch=self._trainer().current_epoch,
            weight=window.last_weight,
            loss=self._loss_of_replica() if sync.needs_loss else float("nan"),
            learning_rate=float(optimizer.param_groups[0]["lr"]),
        )
        held = self._held_trained()
        with torch.no_grad():
            changed = sync.after_step(held, progress)
            if changed and sync.averages_optimizer_state:
                assert self.engine.share is not None
                names = self._names_of_held()
                states = {
                    names[id(parameter)]: state
                    for parameter, state in optimizer.state.items()
                    if id(parameter) in names
                }
                average_optimizer_state(
                    {name: states.get(name, {}) for name in held}, self._replica_group(), sync.average_alike
                )
