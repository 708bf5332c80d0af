"""What Lightning asks of all ranks together: barriers, broadcasts, reductions, votes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_bigmodel.pipeline.gate import current_run
from lightning_bigmodel.strategies.base import StrategyBase

__all__ = ["CollectiveHooks"]


class CollectiveHooks(StrategyBase):
    """Reductions go over the data ranks: the ranks of one pipeline hold one value between them."""

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            with self._phase(f"barrier {name or ''}".strip()):
                dist.barrier(group=self.mesh.model_group if self._mesh is not None and self.world_size == 1 else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or self.world_size == 1:
            return obj
        payload = [obj]
        dist.broadcast_object_list(payload, src)
        return payload[0]

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce over the data ranks: the ranks of one pipeline hold one value between them."""
        if not isinstance(tensor, Tensor) or self._is_replaying:
            return tensor
        operation = str(reduce_op).rsplit(".", 1)[-1].lower() if reduce_op is not None else "mean"
        is_mean = operation in ("mean", "avg")
        # A mean of integers must not be floored.
        reduced = (
            tensor.detach().to(torch.get_default_dtype(), copy=True)
            if is_mean and not (tensor.is_floating_point())
            else tensor.detach().clone()
        )
        size = self.mesh.data_size
        if size > 1:
            operations = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
            dist.all_reduce(reduced, operations.get(operation, dist.ReduceOp.SUM), group=group or self.mesh.data_group)
            if is_mean:
                reduced = reduced / (dist.get_world_size(group) if group is not None else size)
        return reduced

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data ranks; also inside a step, which only the ranks of one stage run to its end."""
        if current_run() is not None and sync_grads:
            raise ValueError("`all_gather(sync_grads=True)` inside a pipelined step has no gradient to give back.")
        return super().all_gather(tensor, group=group or self.mesh.data_group, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        if self.world_size > 1:
            dist.all_reduce(votes)
        return int(votes) == self.world_size if all else bool(votes)
