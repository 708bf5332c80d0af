"""Gradients of whole models: summed over the replicas while backward runs."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from lightning_bigmodel.mesh import RankMesh
from lightning_bigmodel.pipeline.gradients import GradientPlaces, largest_weight
from lightning_bigmodel.pipeline.ownership import ParameterShare
from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES
from lightning_bigmodel.replicas.overlap import OverlappedAllReduce

__all__ = ["ReplicatedGradients"]


class ReplicatedGradients(GradientPlaces):
    """Gradients stay in their parameters, and are summed over the data ranks early.

    Args:
        mesh: This rank's place.
        share: What this rank holds of the model.
        dtype: In which gradients are summed; see `replicas.all_reduce.sum_dtype`.
        later: Parameters that are summed over other ranks first: tied ones, and those of which tensor ranks have parts.
        bucket_bytes: Size of a message.
    """

    def __init__(
        self,
        mesh: RankMesh,
        share: ParameterShare,
        later: Collection[nn.Parameter],
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(mesh.data_group)
        excluded = {id(parameter) for parameter in later}
        parameters = [parameter for parameter in share.owned if id(parameter) not in excluded]
        self._reduction = OverlappedAllReduce(parameters, share.names, mesh.data_group, bucket_bytes, dtype)
        self._alone = mesh.device_mesh.get_group("data_shard")  # of one rank: nothing is sharded
        self._is_launched = False

    @override
    def begin(self) -> None:
        self._reduction.begin()

    @override
    def launch(self) -> bool:
        self._reduction.launch()
        self._is_launched = True
        return True

    @override
    def complete(self) -> None:
        self._reduction.complete()

    @override
    def show(self) -> None:
        self._is_launched = False

    @property
    @override
    def has_late(self) -> bool:
        return self._reduction.has_late

    @override
    def add_late(self) -> None:
        self._reduction.add_late()

    @override
    def had_gradient(self, parameter: nn.Parameter) -> bool:
        if self._is_launched and id(parameter) in self._reduction.covers:
            return id(parameter) in self._reduction.present
        return parameter.grad is not None

    @override
    def summed_over(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        return self._alone if id(parameter) in self._reduction.covers else self.data_group

    @override
    def _largest(self, weight: float) -> float:
        return largest_weight(weight, self.data_group)

    @override
    def close(self) -> None:
        self._reduction.close()
