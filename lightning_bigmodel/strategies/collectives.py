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
        # Inside a step the ranks of a pipeline are at different places, and wait for each other anyway.
        if dist.is_initialized() and current_run() is None:
            with self._phase(f"barrier {name or ''}".strip()):
                dist.barrier(group=self.mesh.model_group if self._mesh is not None and self.world_size == 1 else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or self.world_size == 1:
            return obj
        self._refuse_in_step("broadcast")
        payload = [obj]
        dist.broadcast_object_list(payload, src)
        return payload[0]

    def _from_all_ranks(self, value: Any) -> list[Any]:
        """What every rank gives, by rank. Collective."""
        if not dist.is_initialized() or self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

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
        group = self._data_ranks(group)
        size = dist.get_world_size(group)
        if size > 1:
            operations = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
            dist.all_reduce(reduced, operations.get(operation, dist.ReduceOp.SUM), group=group)
            if is_mean:
                reduced = reduced / size
        return reduced

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data ranks; also inside a step, which only the ranks of one stage run to its end."""
        if current_run() is not None and sync_grads:
            raise ValueError("`all_gather(sync_grads=True)` inside a pipelined step has no gradient to give back.")
        return super().all_gather(tensor, group=self._data_ranks(group), sync_grads=sync_grads)

    def _data_ranks(self, group: Any | None) -> Any:
        # `LightningModule.all_gather` says WORLD where the user said nothing.
        return self.mesh.data_group if group is None or group is dist.group.WORLD else group

    def _refuse_in_step(self, what: str) -> None:
        if current_run() is not None:
            raise RuntimeError(
                f"`{what}` over all ranks inside a step would hang: the ranks of a pipeline leave the step at "
                "different places. Call it in a hook, before or after the step."
            )

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._refuse_in_step("reduce_boolean_decision")
        votes = torch.tensor(int(decision), device=self.root_device)
        if self.world_size > 1:
            dist.all_reduce(votes)
        return int(votes) == self.world_size if all else bool(votes)
