"""One rule for gradients: weighted sums over micro-batches, accumulated batches and data ranks, divided once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GradientPlaces", "GradientWindow", "clip_by_norm"]

SumTensors = Callable[[Sequence[Tensor], "dist.ProcessGroup | None"], None]


class GradientPlaces:
    """Where gradients are: in the parameters, unless sharding puts them elsewhere.

    Args:
        data_group: The ranks over which gradients of whole parameters are summed.
    """

    sums_early = False  # whether gradients of several ranks may be summed before `complete`

    def __init__(self, data_group: dist.ProcessGroup | None) -> None:
        self.data_group = data_group

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

    def common_reference(self, weight: float) -> float | None:
        """What all ranks take weights relative to, given that of a first batch; None: each its own. Collective."""
        return None

    def settle(self) -> None:
        """The schedule of a batch is over. Collective where states are sharded."""

    def complete(self) -> None:
        """Move what is left into the holders. Collective where states are sharded."""

    def show(self) -> None:
        """The window is over: let user code see gradients."""


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
    ) -> None:
        self._partial, self._partial_group = partial, partial_group
        self._parameters, self._shared, self._groups = parameters, shared, shared_groups
        self._trained, self._places, self._sum = trained, places, sum_tensors
        self._data_size = dist.get_world_size(places.data_group)
        self._divides = divides
        self._reference: float | None = None
        self._total = 0.0
        self._dirty = False

    def add(self, weight: float) -> float:
        """Note one batch; returns the factor by which its gradient enters the sum.

        Weights are taken relative to the window's first batch, so that equal batches enter with exactly 1.
        """
        if self._reference is None:
            self._reference = self._places.common_reference(weight) or weight or 1.0
        self._total += weight
        self._dirty = True
        return weight / self._reference

    @torch.no_grad()
    def synchronize(self) -> None:
        """Complete the gradient of the mean over the whole window, on every rank. Does nothing twice."""
        if not self._dirty:
            return
        places = self._places
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
        reference, total = self._reference or 1.0, self._total
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        parameters, total = self._agree(parameters, total, tied)
        if (
            not total
        ):  # no batch of the window had a loss: a gradient of zero would still move moments and decay weights
            for parameter in self._parameters:
                places.holder(parameter).grad = None
            parameters = []
        holders = [places.holder(parameter) for parameter in parameters]
        if total and self._divides:
            factor = reference / total
            gradients = [holder.grad for holder in holders if holder.grad is not None]
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
        if self._data_size > 1:
            by_group: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
            for parameter, holder in zip(parameters, holders, strict=True):
                by_group.setdefault(places.summed_over(parameter), []).append(holder)
            for group, members in by_group.items():
                if dist.get_world_size(group) > 1:
                    self._sum(_filled(members), group)
        self._reference, self._total, self._dirty = None, 0.0, False
        places.show()

    def _agree(
        self, parameters: list[nn.Parameter], total: float, tied: Collection[int]
    ) -> tuple[list[nn.Parameter], float]:
        """Which parameters have a gradient on any data rank, and the weight of all of them."""
        device = parameters[0].device if parameters else torch.device("cpu")
        present = [float(id(p) in tied or self._places.had_gradient(p)) for p in parameters]
        sums = [total, *present]
        if self._data_size > 1:
            numbers = torch.tensor(sums, dtype=torch.float64, device=device)
            dist.all_reduce(numbers, group=self._places.data_group)
            sums = numbers.tolist()
        for parameter, count in zip(parameters, sums[1:], strict=True):
            if not count:  # unused everywhere: the optimizer must leave it and its moments alone
                self._places.holder(parameter).grad = None
        return [p for p, count in zip(parameters, sums[1:], strict=True) if count], sums[0]

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
    if device is None:
        device = gradients[0].device if gradients else torch.device("cpu")
    norms = [
        torch.stack([norm.float() for norm in torch._foreach_norm(part, norm_type)]).to(device)
        for part in _by_device(counted)
    ]
    total = torch.linalg.vector_norm(torch.cat(norms), norm_type) if norms else torch.zeros((), device=device)
    if norm_type == float("inf"):
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
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
