"""What replicas have kept for later steps, in checkpoints: the strategy's side of a `ReplicaSync`'s state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bigmodel._plain import copied
from lightning_bigmodel.replicas.dense import AllReduce
from lightning_bigmodel.replicas.sync import ParameterSync
from lightning_bigmodel.strategies.replica_weights import ReplicaWeights

__all__ = ["ReplicaState"]


class ReplicaState(ReplicaWeights):
    """Each rank saves what its `replica_sync` keeps; where replicas are apart, their own weights and moments too."""

    _saved_replicas: Mapping[str, Any] | None = None
    _kept_at_end: dict[str, Any] | None = None  # of a `GradientSync`, for checkpoints that are saved after the run

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
        found: dict[str, Any] = copied(state)
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
