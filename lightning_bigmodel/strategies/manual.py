"""Manual optimization: several backwards and optimizer steps within one training step, without a schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.mesh import MeshLoader
from lightning_bigmodel.pipeline.microbatch import microbatch_weights
from lightning_bigmodel.pipeline.scheduled_loss import scaled_backward
from lightning_bigmodel.strategies.steps import StepHooks

__all__ = ["ManualOptimization"]


class ManualOptimization(StepHooks):
    """Steps of modules with `automatic_optimization=False`.

    Each backward enters with its data rank's share of the batch and is complete when it ends, as in one process: the
    user clips, accumulates and steps in any order. Communication a backward: the gradients of what takes any, once
    (ZeRO 1 to 3: as rows); a batch: one number.
    """

    _batch_share = 1.0
    _summed: dict[int, tuple[Any, int]]

    def _begin_manual(self) -> None:
        module = self.lightning_module
        assert module is not None
        self._is_manual = self._trainer().training and not module.automatic_optimization
        self._summed = {}
        self._steps_optimizer = False
        if self._is_manual:
            self._step_hooks = [
                optimizer.register_step_pre_hook(self._refuse_raw_step)
                for optimizer in self.optimizers
                if self._sharded is not None
            ]
            _host.follow_toggles(module, self._copy_toggles)

    def _end_manual(self) -> None:
        if self._is_manual:
            assert self.lightning_module is not None
            _host.unfollow_toggles(self.lightning_module)
            for hook in self._step_hooks:
                hook.remove()
        self._is_manual = False

    def _copy_toggles(self) -> None:
        """`toggle_optimizer` freezes what the other optimizers hold: rows, for which the parameters must follow."""
        if self._sharded is not None:
            for parameter in self._sharded.shards.parameters:
                parameter.requires_grad = self._sharded.holder(parameter).requires_grad

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_manual:
            batch, batch_index = args[0], args[1] if len(args) > 1 else 0
            loader = _host.train_loader(self._trainer())
            counts = not (isinstance(loader, MeshLoader) and loader.is_padding(batch_index))
            weight = microbatch_weights([batch], self._microbatch_weight)[0] if counts else 0.0
            self._batch_share = weight if self._microbatch_weight == "sum" else self._share_of(weight)
        return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if not self._is_manual:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._refuse_foreign_gradients(optimizer)
        self._steps_optimizer = True
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._steps_optimizer = False

    def _refuse_raw_step(self, optimizer: Any, *_: Any) -> None:
        """A hook of optimizers that hold row shards."""
        if not self._steps_optimizer:
            raise RuntimeError(
                f"`{type(optimizer).__name__}.step()` was called past the strategy, which hands the rows it changes to "
                "the other ranks. Step what `self.optimizers()` returns, without `use_pl_optimizer=False`."
            )

    def _refuse_foreign_gradients(self, optimizer: Any) -> None:
        """Gradients that `manual_backward` did not make are those of one rank."""
        for group in optimizer.param_groups:
            for held in group["params"]:
                if self._is_foreign(held):
                    assert self.engine.share is not None
                    parameter = held if self._sharded is None else self._sharded.parameter_of(held)
                    raise RuntimeError(
                        f"`{self.engine.share.names.get(id(parameter), 'a parameter')}` has a gradient that "
                        "`self.manual_backward` did not make: it is that of one rank, and the ranks would drift apart. "
                        "Call `self.manual_backward(loss)` in place of `loss.backward()`, with a loss that has in it "
                        "all that the gradient is made of."
                    )

    def _is_foreign(self, held: Any) -> bool:
        sharded = self._sharded
        if sharded is not None:
            parameter = sharded.parameter_of(held)
            if sharded.is_sharded(parameter):
                return parameter.grad is not None and not sharded.has_shown(parameter)
        num_ranks = dist.get_world_size(self.engine.places.summed_over(held))
        return num_ranks > 1 and held.grad is not None and id(held) not in self._summed and not self._blocks_sync

    def _share_of(self, weight: float) -> float:
        total = torch.tensor(weight, dtype=torch.float64)
        if self.mesh.data_size > 1:
            dist.all_reduce(total, group=self.mesh.data_group)
        return weight / float(total) if total else 0.0

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._is_manual:
            share = self._batch_share * self.engine.loss_scale()
            closure_loss = scaled_backward(closure_loss, lambda outer: outer * share)
            self._unsum()
            assert self._window is not None
            self._window.add(1.0)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._is_manual and not self._blocks_sync:
            self._note_sums()

    def _note_sums(self) -> None:
        """What is summed over ranks now must not be summed again with the next backward."""
        places = self.engine.places
        for parameter in self.engine.trained_parameters():
            holder = places.holder(parameter)
            size = dist.get_world_size(places.summed_over(parameter))
            if size > 1 and holder.grad is not None:
                self._summed[id(holder)] = (holder, size)

    @torch.no_grad()
    def _unsum(self) -> None:
        for holder, size in self._summed.values():
            if holder.grad is not None:
                holder.grad.div_(size)
        self._summed.clear()
        if self._is_unscaled:  # what the next backward adds is scaled
            self._multiply(self.engine.loss_scale())
            self._is_unscaled = False
        if self._sharded is not None:
            self._sharded.hide()
            # What the user has not erased is still there, whatever the next backward makes gradients of.
            shards = self._sharded.shards
            kept = {id(p) for p in shards.parameters if shards.shard_of(p).grad is not None}
            shards.present |= kept
