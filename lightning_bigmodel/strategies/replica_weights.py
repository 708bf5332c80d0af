"""What replicas hold of the weights, and what they would agree on: the strategy's side of `ParameterSync`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.replicas.sync import ParameterSync, ReplicaSync
from lightning_bigmodel.strategies.loss_scaling import LossScaling

__all__ = ["ReplicaWeights"]


class ReplicaWeights(LossScaling):
    """While replicas are apart, the weights they would agree on can take the place of each one's own, and back."""

    _replica_sync: ReplicaSync | None = None
    _is_syncing = False  # between the start and the end of training
    _apart: dict[str, Tensor] | None = None  # this replica's own weights, while the agreed ones are in their place

    @property
    def _agrees_on_weights(self) -> bool:
        """Whether each replica steps by its own gradients."""
        return isinstance(self._replica_sync, ParameterSync)

    def _replica_group(self) -> dist.ProcessGroup:
        return self.mesh.device_mesh.get_group("data_replicate")

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
