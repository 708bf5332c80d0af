"""One rule for gradients: weighted sums over micro-batches, accumulated batches and data ranks, divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel import _host

__all__ = ["NO_RANKS", "GradientPlaces", "GradientWindow", "clip_by_norm", "largest_weight"]

# In the place of a group: there is nothing to sum. `dist.get_world_size` knows it.
NO_RANKS: Any = dist.GroupMember.NON_GROUP_MEMBER

SumTensors = Callable[[Sequence[Tensor], "dist.ProcessGroup | None"], None]


class GradientPlaces:
    """Where gradients are: in the parameters, unless sharding puts them elsewhere.

    Args:
        data_group: The ranks over which gradients of whole parameters are summed.
    """

    sums_early = False  # whether gradients of several ranks may be summed before `complete`
    batches_a_window = 1  # how many are expected, of all ranks

    def __init__(self, data_group: dist.ProcessGroup | None) -> None:
        self.data_group = data_group
        self._reference: float | None = None

    def holder(self, parameter: nn.Parameter) -> nn.Parameter:
        """What has this rank's part of the gradient of `parameter` once `complete` was called."""
        return parameter

    def accumulating(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What gradients accumulate in while a schedule runs."""
        return list(parameters)

    def had_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has made a gradient of `parameter` since the window began."""
        return parameter.grad is not None

    def summed_over(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """The ranks that still have to sum what `holder` has."""
        return self.data_group

    def common_reference(self, weight: float) -> float:
        """What weights are taken relative to in this run, given that of the first batch. Collective the first time."""
        if self._reference is None:
            self._reference = self._largest(weight) * self.batches_a_window
        return self._reference

    def _largest(self, weight: float) -> float:
        """The weight that all ranks begin with, where their gradients are summed before the total weight is known."""
        return weight or 1.0

    def begin(self) -> None:
        """The last backward of a window begins, outside of a schedule: sums may start as gradients arrive."""

    def launch(self) -> bool:
        """Start what `complete` waits for; whether `had_gradient` and `has_late` are known from then on."""
        return False

    @property
    def has_late(self) -> bool:
        """Whether `complete` left something; if so on any rank, all call `add_late`."""
        return False

    def add_late(self) -> None:
        """Sum what was left. Collective."""

    def settle(self) -> None:
        """The schedule of a batch is over. Collective where states are sharded."""

    def complete(self) -> None:
        """Move what is left into the holders. Collective where states are sharded."""

    def show(self) -> None:
        """The window is over: let user code see gradients."""

    def close(self) -> None:
        """The run is over."""


def largest_weight(weight: float, group: dist.ProcessGroup | None) -> float:
    """The largest first weight of all ranks, or 1 where none has any. Collective, once a run."""
    largest = torch.tensor(weight, dtype=torch.float64)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return float(largest) or 1.0


class GradientWindow:
    """Gradients between two optimizer steps.

    Each batch adds its gradient times its weight; `synchronize` sums tied parameters over the pipeline ranks that hold
    them, then everything over the data ranks, and divides by the total weight. A short last window, uneven ranks and
    batches of weight zero come out exact.

    Args:
        parameters: What this rank holds; of these, what takes gradients at the time counts.
        shared: Owner set -> parameters held by several ranks of the pipeline, on every rank alike.
        shared_groups: Owner set -> its process group (None where this rank is not a member).
        trained: Tells the ids of the parameters the loss depends on; None if unknown. Only these get zeros where a rank
            has no gradient.
        places: Where gradients are.
        sum_tensors: Sums a list of tensors over a group, in place.
        divides: False leaves the plain sum, for losses that are sums over samples.
        partial: Whole parameters of which each tensor rank has a part of the gradient.
        partial_group: The tensor ranks.
        agreeing: The ranks that count weights and gradients together. Default: those of `places.data_group`.
        reduce_replicas: Called last, with the parameters that have a gradient on any of these ranks, where more than
            plain sums is to be done between replicas. Not called for a window without a loss anywhere.

    Communication a window: the gradients of tied parameters within their owners; with several data ranks, one small
    all-reduce and all gradients once.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shared: Mapping[tuple[int, ...], Sequence[nn.Parameter]],
        shared_groups: Mapping[tuple[int, ...], dist.ProcessGroup | None],
        trained: Callable[[], Collection[int]] | None,
        places: GradientPlaces,
        sum_tensors: SumTensors,
        *,
        divides: bool = True,
        partial: Sequence[nn.Parameter] = (),
        partial_group: dist.ProcessGroup | None = None,
        agreeing: dist.ProcessGroup | None = None,
        reduce_replicas: Callable[[Sequence[nn.Parameter]], None] | None = None,
    ) -> None:
        self._partial, self._partial_group = partial, partial_group
        self._agreeing = places.data_group if agreeing is None else agreeing
        self._reduce_replicas = reduce_replicas
        self._parameters, self._shared, self._groups = parameters, shared, shared_groups
        self._trained, self._places, self._sum = trained, places, sum_tensors
        self._num_agreeing = dist.get_world_size(self._agreeing)
        self._divides = divides
        self._reference: float | None = None
        self._total = 0.0
        self._dirty = False
        self._last_weight = 0.0

    @property
    def last_weight(self) -> float:
        """What the batches of all agreeing ranks weighed in the window that was completed last."""
        return self._last_weight

    @property
    def is_open(self) -> bool:
        """Whether batches came since the last optimizer step."""
        return self._dirty

    def state_dict(self) -> dict[str, Any]:
        """Of a window that is not over, but for the gradients; and what weights are relative to throughout the run."""
        return {
            "is_open": self._dirty,
            "reference": self._reference,
            "total": self._total,
            "run_reference": self._places._reference,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on all ranks."""
        self._dirty, self._reference, self._total = state["is_open"], state["reference"], state["total"]
        self._places._reference = state["run_reference"]

    def add(self, weight: float) -> float:
        """Note one batch; returns the factor by which its gradient enters the sum.

        Weights are taken relative to that of a window of batches like the first one, so that with equal batches the sum
        is the mean already.
        """
        if self._reference is None:
            self._reference = self._places.common_reference(weight)
        self._total += weight
        self._dirty = True
        return weight / self._reference

    @torch.no_grad()
    def synchronize(self) -> bool:
        """Complete the gradient of the mean over the whole window, on every rank. Does nothing twice.

        Returns:
            Whether there was something to do.
        """
        if not self._dirty:
            return False
        places = self._places
        agreed: Callable[[], list[float]] | None = None
        if places.launch() and not self._shared and not self._partial:
            agreed = self._sum_numbers(self._own_numbers(()))  # under way together with the gradients
        places.complete()
        if self._partial:
            held = {id(parameter) for parameter in self._parameters if parameter.requires_grad}
            self._sum(_filled([places.holder(p) for p in self._partial if id(p) in held]), self._partial_group)
        tied: set[int] = set()
        for owners, parameters in self._shared.items():
            group = self._groups.get(owners)
            if group is not None:
                trained = [p for p in parameters if self._is_trained(p)]
                tied |= {id(p) for p in trained}
                self._sum(_filled([places.holder(p) for p in trained]), group)
        reference = self._reference or 1.0
        parameters, total = self._agree(agreed or self._sum_numbers(self._own_numbers(tied)))
        if not total:
            # No batch of the window had a loss: a gradient of zero would still move moments and decay weights.
            for parameter in self._parameters:
                places.holder(parameter).grad = None
            parameters = []
        holders = [places.holder(parameter) for parameter in parameters]
        if total and self._divides:
            factor = reference / total
            gradients = [holder.grad for holder in holders if holder.grad is not None]
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
        if self._num_agreeing > 1:
            by_group: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
            for parameter, holder in zip(parameters, holders, strict=True):
                by_group.setdefault(places.summed_over(parameter), []).append(holder)
            for group, members in by_group.items():
                if dist.get_world_size(group) > 1:
                    self._sum(_filled(members), group)
            if self._reduce_replicas is not None:
                _filled(holders)
        if self._reduce_replicas is not None and total:
            self._reduce_replicas(parameters)
        self._last_weight = total
        self._reference, self._total, self._dirty = None, 0.0, False
        places.show()
        return True

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _own_numbers(self, tied: Collection[int]) -> list[float]:
        """The weight of this rank, whether gradients came late, and of which parameters there are any."""
        places = self._places
        present = [float(id(p) in tied or places.had_gradient(p)) for p in self._trainable()]
        return [self._total, float(places.has_late), *present]

    def _agree(self, agreed: Callable[[], list[float]]) -> tuple[list[nn.Parameter], float]:
        """Which parameters have a gradient on any data rank, and the weight of all of them."""
        places, parameters = self._places, self._trainable()
        total, late, *counts = agreed()
        if late:
            places.add_late()
        for parameter, count in zip(parameters, counts, strict=True):
            if not count:  # unused everywhere: the optimizer must leave it and its moments alone
                places.holder(parameter).grad = None
        return [p for p, count in zip(parameters, counts, strict=True) if count], total

    def _sum_numbers(self, numbers: list[float]) -> Callable[[], list[float]]:
        """Start to sum over the data ranks; returns what waits for the result."""
        if self._num_agreeing == 1:
            return lambda: numbers
        group = self._agreeing
        # On the host, where it can be: what the device still computes need not be waited for.
        device = _host.device_for_numbers(group, self._parameters[0].device if self._parameters else None)
        summed = torch.tensor(numbers, dtype=torch.float64, device=device)
        work = dist.all_reduce(summed, group=group, async_op=True)

        def wait() -> list[float]:
            if work is not None:
                work.wait()
            found: list[float] = summed.tolist()
            return found

        return wait

    def _is_trained(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and (self._trained is None or id(parameter) in self._trained())


def _filled(holders: Sequence[nn.Parameter]) -> list[Tensor]:
    gradients = []
    for holder in holders:
        if holder.grad is None:
            holder.grad = torch.zeros_like(holder)
        gradients.append(holder.grad)
    return gradients


@torch.no_grad()
def clip_by_norm(
    gradients: Sequence[Tensor],
    counted: Sequence[Tensor],
    max_norm: float,
    groups: Sequence[dist.ProcessGroup | None],
    norm_type: float = 2.0,
    device: torch.device | None = None,
) -> Tensor:
    """Scale this rank's gradients by the norm over all ranks that hold parts of one model.

    Args:
        gradients: What to scale.
        counted: Those of them this rank answers for, so that each parameter counts once.
        max_norm: Largest norm allowed.
        groups: Axes of the mesh over which parts of one model lie: the pipeline, the shards.
        norm_type: 2, another p, or infinity.
        device: Where the groups communicate; gradients may be elsewhere, such as on the host. Default: where they are.

    Returns:
        The total norm, equal on every rank. Communication: one number a group.
    """
    if not norm_type:
        raise ValueError(
            "`norm_type=0` counts gradients that are not zero, which ranks that hold parts of them cannot. Use another "
            "number, or infinity."
        )
    if device is None:
        device = gradients[0].device if gradients else torch.device("cpu")
    norms = [
        torch.stack([norm.float() for norm in torch._foreach_norm(part, norm_type)]).to(device)
        for part in _by_device(counted)
    ]
    # Of no gradients, which change no rank's sum, largest or smallest.
    none = torch.full((), math.inf if norm_type < 0 else 0.0, device=device)
    total = torch.linalg.vector_norm(torch.cat(norms), norm_type) if norms else none
    if math.isinf(norm_type):
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group=group)
    else:
        total = total**norm_type
        for group in groups:
            dist.all_reduce(total, group=group)
        total = total ** (1.0 / norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for part in _by_device(gradients):
        torch._foreach_mul_(part, factor.to(part[0].device))
    return total


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())
