"""What a way for whole-model replicas to agree sees, when, and what it keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, all_reduce_sum

__all__ = [
    "GradientSync",
    "NamedGradient",
    "ParameterSync",
    "ReplicaSync",
    "Replicas",
    "StepProgress",
    "mean_of",
    "refuse_unknown",
]


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The ranks that hold the same part of the model, one a replica.

    Attributes:
        group: These ranks. Carries tensors of the device the model is on.
        size: How many there are.
        rank: This rank among them.
        ranks_a_machine: How many of them share a machine (the last may have fewer).
        levels: Number of neighbouring replicas -> the groups `(inside, across)`: those neighbours, and the ranks with
            the same place among theirs. Collective over all ranks of the run: call it in `begin` only.
        norm: Gradients of this rank -> the 2-norm of all gradients of this replica, whose other parts other ranks hold;
            the same number on all of them, collective over them. None where this rank holds all of the replica.
        reduce_dtype: Type in which the user wants gradients summed; None for their own but at least fp32.
        model: Name -> parameter, of the whole model, whatever this rank holds of it: for names and shapes only. Empty
            where that is not known.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    ranks_a_machine: int
    levels: Callable[[int], tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]]
    norm: Callable[[Sequence[NamedGradient]], Tensor] | None = None
    reduce_dtype: torch.dtype | None = None
    model: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NamedGradient:
    """One parameter's gradient before an optimizer step.

    Attributes:
        name: Name of the parameter in the user's module.
        value: This replica's contribution, in unscaled units; contributions of all replicas sum up to the gradient of
            the mean loss. Of the shape of what the optimizer holds: the parameter, or this rank's rows of it.
        parameter: What the optimizer holds.
        options: Its group in the optimizer: `lr`, `weight_decay` and the like.
        state: What the optimizer keeps of it. What takes over an option may take out what belongs to that.
    """

    name: str
    value: Tensor
    parameter: Tensor
    options: Mapping[str, Any]
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Where training is.

    Attributes:
        epoch: Epochs completed before this one.
        weight: What the batches of this step weigh in this replica: samples, tokens, ... (see `microbatch_weight`); 0
            for a replica that had no batch.
        loss: This replica's mean training loss in this step; NaN where it had no batch.
        learning_rate: That of the optimizer's first group in this step.
    """

    epoch: int = 0
    weight: float = 1.0
    loss: float = float("nan")
    learning_rate: float = 0.0


class ReplicaSync:
    """How whole-model replicas agree: on each gradient (`GradientSync`), or on weights now and then (`ParameterSync`).

    An object serves one run at a time: `begin`, then steps, then `end`. All methods but the constructor and
    `state_dict` are called on all ranks together, and only for optimizer steps that are taken: a step that mixed
    precision skips, every replica skips, and nothing here hears of it.
    """

    replicas: Replicas

    def begin(self, replicas: Replicas, parameters: Mapping[str, Tensor]) -> None:
        """Training starts, or starts again.

        Args:
            replicas: Who must agree.
            parameters: Name -> what the optimizer holds of each parameter here: all of it, or rows.
        """
        self.replicas = replicas

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that this cannot work with. Not collective, alike on all ranks.

        Raises:
            ValueError: With what to use.
        """

    def state_dict(self) -> dict[str, Any]:
        """What this rank must have to go on: counters, residuals by parameter name. Tensors may be views."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; after `begin`, on the same number of replicas, or from what `merged_state` gave."""

    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The state for each replica of another number of them, from those of all old ones; None drops it.

        Call it after `begin`. The one who asks tells the user what was dropped.
        """
        return None

    def end(self) -> None:
        """Training is over: let go of hooks and groups of one's own."""


class GradientSync(ReplicaSync, ABC):
    """Replicas take equal steps, by gradients that they exchange each time."""

    keeps_error = False
    """Whether something of a gradient is kept for later steps: then gradients must be finite and unscaled before."""

    taken_over: tuple[str, ...] = ()
    """Options of the optimizer's groups that this applies itself; they are 0 while the optimizer steps."""

    @abstractmethod
    def reduce(self, gradients: Sequence[NamedGradient], progress: StepProgress) -> None:
        """Replace each `value`, in place, by what all replicas step by: the sum of contributions, or near it.

        Every rank passes the same names in the same order; a replica without a gradient passes zeros.
        """


class ParameterSync(ReplicaSync, ABC):
    """Replicas step by their own gradients, and agree on weights after some steps.

    `held` is always name -> what the optimizer holds of each parameter that is trained, with equal names in equal order
    on all replicas.
    """

    pending_weight: float = 0.0
    """What this replica's batches weighed since it last agreed with the others."""

    needs_loss = False
    """Whether `after_step` looks at `StepProgress.loss`, which is NaN otherwise: reading it waits for the device."""

    averages_optimizer_state = False
    """Whether optimizer state is averaged whenever weights are (the caller does it when `after_step` says so)."""

    @property
    def apart(self) -> Mapping[str, Tensor]:
        """By name, what may differ between replicas: it has stepped since they agreed on it, even if frozen by now."""
        return {}

    def before_step(self, held: Mapping[str, Tensor]) -> None:
        """The optimizer is about to step. Not collective; weights may be copied here, never changed."""

    @abstractmethod
    def after_step(self, held: Mapping[str, Tensor], progress: StepProgress) -> bool:
        """The optimizer has stepped: agree if it is time to, by changing `held` in place.

        Returns:
            Whether anything in `held` was changed; alike on all ranks.
        """

    def average_alike(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors, in place, as weights were when `after_step` last returned True; for optimizer state.

        Collective, before the next step. Here the plain mean over all replicas.
        """
        total = mean_of(dict(zip(map(str, range(len(tensors))), tensors, strict=True)), self.replicas.group, 1.0)
        for tensor, mean in zip(tensors, total.values(), strict=True):
            tensor.copy_(mean)

    def agreed(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors: what evaluation, checkpoints and the end of training see in place of `held`.

        The mean over replicas of their weights as they are now, each replica by what its batches weighed since the last
        agreement. Nothing is changed. Communication: all of `held` once.
        """
        return mean_of(held, self.replicas.group, self.pending_weight)


@torch.no_grad()
def mean_of(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, weight: float, bucket_bytes: int = BUCKET_BYTES
) -> dict[str, Tensor]:
    """New tensors: the means over `group`, each rank counting by `weight`; the plain mean if no rank weighs anything.

    Communication: one number, then all bytes once in messages of `bucket_bytes`, in at least fp32.
    """
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    weights = torch.tensor([weight, 1.0], dtype=torch.float64, device=device)
    dist.all_reduce(weights, group=group)
    total, count = weights.tolist()
    factor = weight / total if total else 1.0 / count
    wide = {
        name: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
        for name, value in tensors.items()
    }
    for value in wide.values():
        value.mul_(factor)
    all_reduce_sum(list(wide.values()), group, bucket_bytes)
    return {name: value.to(tensors[name].dtype) for name, value in wide.items()}


def refuse_unknown(name: str, value: object, known: Iterable[object]) -> None:
    """Refuse a setting that is none of the known ones.

    Raises:
        ValueError: With those.
    """
    choices = list(known)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices[:-1])
        raise ValueError(f"`{name}={value!r}` is not known. Use {listed} or {choices[-1]!r}.")
