"""Let callbacks look at micro-batches' own gradients, and at the norm of complete ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_bigmodel import _host
from lightning_bigmodel.pipeline.gradient_watch import GradientWatch, square_sums
from lightning_bigmodel.strategies.steps import StepHooks

__all__ = ["GradientWatching"]


class GradientWatching(StepHooks):
    """Which parameters a rank watches, so that sums over all ranks count each gradient once."""

    @property
    def weighs_by(self) -> str:
        """The name of `microbatch_weight`, or "callable"."""
        return self._microbatch_weight if isinstance(self._microbatch_weight, str) else "callable"

    def watch_gradients(self, watch: GradientWatch) -> None:
        """Tell `watch` of every backward from now on, until the run ends. Call it on all ranks together."""
        self.engine.watches.append(watch)

    def watched_parameters(self) -> tuple[dict[int, str], list[str]]:
        """What this rank answers for, as id -> name; and, alike on all ranks, what no rank can watch.

        The gradient a micro-batch gives to a parameter of several stages, or one that tensor ranks have parts of, is
        nowhere whole.
        """
        share, tensor, ownership = self.engine.share, self._tensor, self.engine.planner.ownership
        assert share is not None
        assert ownership is not None
        partial = {id(parameter) for parameter in tensor.slices.partial_gradients} if tensor is not None else set()
        spread = {key for key, stages in ownership.stages_of_parameter.items() if len(stages) > 1}
        hidden = partial | spread
        own = {
            id(parameter): share.names[id(parameter)]
            for parameter in share.counted
            if id(parameter) not in hidden and (tensor is None or tensor.counts(parameter))
        }
        return own, sorted(name for key, name in share.names.items() if key in hidden)

    def complete_squares(self, group_of: Mapping[int, int], num_groups: int) -> Tensor:
        """The squares of this rank's part of the complete gradient, by group of parameters (by id).

        Summed over all ranks, each gradient counts once.
        """
        share, places = self.engine.share, self.engine.places
        assert share is not None
        groups: list[list[Tensor]] = [[] for _ in range(num_groups)]
        if self.mesh.coordinates["data_replicate"] == 0:
            for parameter in share.counted:
                gradient = places.holder(parameter).grad
                if id(parameter) in group_of and gradient is not None and self._answers_for(parameter):
                    groups[group_of[id(parameter)]].append(gradient)
        return square_sums(groups)

    def parameter_of(self, held: Tensor) -> Tensor:
        """The module's parameter for what an optimizer of this run holds."""
        found: Tensor = held if self._sharded is None else self._sharded.parameter_of(held)
        return found

    @property
    def num_parts_a_batch(self) -> int:
        """Parts with a gradient of their own that one batch of all data ranks has: known after the mesh is."""
        return self.mesh.data_size * self._microbatches_for(self.mesh.pipe_size)

    def _microbatches_for(self, pipeline_size: int) -> int:
        raise NotImplementedError

    @property
    def speaks_first(self) -> bool:
        """Whether this rank tells what its whole model replica knows."""
        return self.mesh.pipe_rank == 0 and self.mesh.tensor_rank == 0

    def device_for_numbers(self) -> torch.device:
        """Where a few numbers can be summed over all ranks."""
        return _host.device_for_numbers(None, self.root_device)
