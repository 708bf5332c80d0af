"""When replicas agree: the strategy's side of `replica_sync`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
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
    ReplicaSync,
    StepProgress,
)
from lightning_bigmodel.strategies.loss_scaling import LossScaling

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


class ReplicaSyncing(LossScaling):
    """What happens between replicas beside plain sums of gradients.

    A `GradientSync` is asked once a window, when each replica has its own contribution, in unscaled units and finite
    where it keeps errors. A `ParameterSync` is asked after each optimizer step; while replicas are apart, evaluation,
    checkpoints and the end of training see the weights they would agree on, and each replica's own come back after.
    """

    _replica_sync: ReplicaSync | None = None
    _is_syncing = False  # between the start and the end of training
    _apart: dict[str, Tensor] | None = None  # this replica's own weights, while the agreed ones are in their place
    _saved_replicas: Mapping[str, Any] | None = None
    _losses: list[tuple[float, Tensor]]
    _taken_options: list[tuple[dict[str, Any], str, Any]]
    _kept_at_end: dict[str, Any] | None = None  # of a `GradientSync`, for checkpoints that are saved after the run

    # -- what it decides -----------------------------------------------------------------------------------------------

    @property
    def _agrees_on_weights(self) -> bool:
        """Whether each replica steps by its own gradients."""
        return isinstance(self._replica_sync, ParameterSync)

    @property
    def _overlap(self) -> AllReduce | None:
        """The settings of sums while backward runs; None where something else is to be done."""
        sync = self._replica_sync
        if sync is None:
            return AllReduce()
        is_early = isinstance(sync, AllReduce) and sync.overlap and self.mesh.layout.data_shard == 1
        return sync if isinstance(sync, AllReduce) and is_early and self._sharded is None else None

    def _replica_group(self) -> dist.ProcessGroup:
        return self.mesh.device_mesh.get_group("data_replicate")

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
        options = {
            id(p): group for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
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
                gradients.append(
                    NamedGradient(
                        name=name, value=holder.grad, parameter=holder.data, options=options.get(id(holder), {})
                    )
                )
        with torch.no_grad():
            sync.reduce(gradients, StepProgress(epoch=self._trainer().current_epoch))

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

    # -- weights -------------------------------------------------------------------------------------------------------

    def _held_owned(self, only_trained: bool = False) -> dict[str, Tensor]:
        """Name -> what is held of each parameter here; in one order on all replicas."""
        share, sharded = self.engine.share, self._sharded
        assert share is not None
        holder = self.engine.places.holder if sharded is None else sharded.holder
        return {share.names[id(p)]: holder(p).data for p in share.owned if p.requires_grad or not only_trained}

    def _held_trained(self) -> dict[str, Tensor]:
        """What optimizers hold of each parameter that takes gradients."""
        return self._held_owned(only_trained=True)

    def _held_apart(self) -> dict[str, Tensor]:
        """What is trained, and what was until it was frozen and replicas have not agreed on since."""
        assert isinstance(self._replica_sync, ParameterSync)
        held = self._held_owned()
        return {name: held[name] for name in {**self._held_trained(), **self._replica_sync.apart}}

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

    def _names_of_held(self) -> dict[int, str]:
        share, sharded = self.engine.share, self._sharded
        assert share is not None
        found = dict(share.names)
        if sharded is not None:
            found.update({key: record.name for key, record in sharded.records.items()})
        return found

    def _agreed_weights(self) -> dict[str, Tensor]:
        """What stands in a checkpoint for this replica's own weights; nothing where it is in use. Collective."""
        if not self._is_syncing or not self._agrees_on_weights or self._apart is not None:
            return {}
        assert isinstance(self._replica_sync, ParameterSync)
        with self._phase("agreeing on weights"):
            return self._replica_sync.agreed(self._held_apart())

    def _use_agreed_weights(self) -> None:
        """Until `_use_own_weights`. Memory: the weights once more. Collective."""
        agreed = self._agreed_weights()
        if agreed:
            self._apart = {name: value.clone() for name, value in self._held_apart().items()}
            self._write_weights(agreed)

    def _use_own_weights(self) -> None:
        own, self._apart = self._apart, None
        if own is not None:
            self._write_weights(own)

    @torch.no_grad()
    def _write_weights(self, weights: Mapping[str, Tensor]) -> None:
        # What takes gradients may be other than when they were kept: callbacks freeze and unfreeze in between.
        held = self._held_owned()
        for name, value in weights.items():
            held[name].copy_(value)
        if self._sharded is not None:
            self._sharded.shards.publish()

    # -- state ---------------------------------------------------------------------------------------------------------

    def _replica_state(self) -> dict[str, Any] | None:
        """What this rank needs to go on where it is: copies on the host."""
        sync = self._replica_sync
        if sync is None or not hasattr(sync, "replicas"):
            return None
        if self._kept_at_end is not None:
            return self._kept_at_end
        state: dict[str, Any] = {
            "kind": type(sync).__name__,
            "sync": sync.state_dict(),
            "weights": None,
            "states": None,
        }
        if isinstance(sync, ParameterSync):
            if self._is_syncing:
                state["weights"] = self._held_apart() if self._apart is None else self._apart
            if self._engine is not None and sync.replicas.rank:  # those of the first are the checkpoint's
                names = self._names_of_held()
                state["states"] = [
                    {names[id(p)]: entries for p, entries in optimizer.state.items() if id(p) in names}
                    for optimizer in self.optimizers
                ]
        found: dict[str, Any] = _on_host(state)
        return found

    def _take_replica_state(self, states: Sequence[Mapping[str, Any] | None] | None, *, is_own: bool) -> None:
        """Keep what a checkpoint has until training starts.

        Args:
            states: Of this rank if `is_own`; else of all replicas that saved it; None if their parts have no like here.
            is_own: Whether the layout is the one that saved.
        """
        sync = self._replica_sync
        self._saved_replicas = None
        saved = [state for state in states or () if state is not None]
        if sync is None and saved and saved[0]["kind"] != AllReduce.__name__:
            rank_zero_info(
                f"The checkpoint was saved with `replica_sync={saved[0]['kind']}`, and this run has none: what its "
                "replicas had kept for later steps is left. Weights, optimizer states and schedules are taken over."
            )
        if sync is None or (states is not None and not saved):
            return
        own_kind = type(sync).__name__
        if states is None or any(state["kind"] != own_kind for state in saved):
            what = "another layout" if states is None else f"`{saved[0]['kind']}`"
            rank_zero_info(
                f"The checkpoint was saved under {what}, so `{own_kind}` begins anew: what its replicas had kept for "
                "later steps is left. Weights, optimizer states and schedules are taken over."
            )
            return
        self._saved_replicas = saved[0] if is_own else {"merge": [state["sync"] for state in saved]}

    def _note_no_replica_state(self, path: Any) -> None:
        """Of a file, which has nothing of the kind."""
        if self._replica_sync is not None and not isinstance(self._replica_sync, AllReduce):
            rank_zero_info(
                f"`{path}` is one file, which has no place for what replicas keep for later steps: "
                f"`{type(self._replica_sync).__name__}` begins anew, its warm-up too."
            )

    def _resume_replicas(self) -> None:
        """Collective where ZeRO has to hand rows on."""
        saved, self._saved_replicas = self._saved_replicas, None
        sync = self._replica_sync
        if saved is None or sync is None:
            return
        if "merge" in saved:
            merged = sync.merged_state(saved["merge"])
            rank_zero_info(
                f"The checkpoint was saved by {len(saved['merge'])} replicas and is loaded by {sync.replicas.size}: "
                f"what `{type(sync).__name__}` had kept for later steps is "
                + ("shared out among them." if merged is not None else "left.")
                + (" All replicas begin with the agreed weights." if self._agrees_on_weights else "")
            )
            if merged is not None:
                sync.load_state_dict(merged)
            return
        sync.load_state_dict(saved["sync"])
        if saved["weights"] is not None:
            assert isinstance(sync, ParameterSync)
            self._write_weights(saved["weights"])
            held = self._held_owned()
            sync.before_step({name: held[name] for name in saved["weights"]})  # apart, whatever is trained from here on
        if saved["states"] is not None:
            names = self._names_of_held()
            keys = {name: key for key, name in names.items()}
            for optimizer, entries in zip(self.optimizers, saved["states"], strict=True):
                of_id = {id(p): p for group in optimizer.param_groups for p in group["params"]}
                # A replica that has not used a parameter yet has no state of it, whatever the first one has.
                for unused in [p for p in optimizer.state if names.get(id(p), "") not in ("", *entries)]:
                    del optimizer.state[unused]
                for name, own in entries.items():
                    parameter = of_id.get(keys[name])
                    if parameter is not None:
                        _copy_state(optimizer.state[parameter], own, parameter.device)


@torch.no_grad()
def _copy_state(state: dict[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    for key, value in saved.items():
        if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
            state[key].copy_(value)
        else:
            # Counts of steps stay on the host, where optimizers look at them.
            state[key] = value.to(device) if isinstance(value, Tensor) and value.ndim else value


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value
