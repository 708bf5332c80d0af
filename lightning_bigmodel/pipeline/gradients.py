"""One rule for gradients: weighted sums over micro-batches, accumulated batches and data ranks, divided once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GradientWindow", "clip_by_norm"]

SumTensors = Callable[[Sequence[Tensor], "dist.ProcessGroup | None"], None]


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
        data_group: The data ranks.
        sum_tensors: Sums a list of tensors over a group, in place.
        divides: False leaves the plain sum, for losses that are sums over samples.

    Communication a window: the gradients of tied parameters within their owners; with several data ranks, one small
    all-reduce and all gradients once.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shared: Mapping[tuple[int, ...], Sequence[nn.Parameter]],
        shared_groups: Mapping[tuple[int, ...], dist.ProcessGroup | None],
        trained: Callable[[], Collection[int]] | None,
        data_group: dist.ProcessGroup | None,
        sum_tensors: SumTensors,
        *,
        divides: bool = True,
    ) -> None:
        self._parameters, self._shared, self._groups = parameters, shared, shared_groups
        self._trained, self._data_group, self._sum = trained, data_group, sum_tensors
        self._data_size = dist.get_world_size(data_group)
        self._divides = divides
        self._reference: float | None = None
        self._total = 0.0
        self._dirty = False

    def add(self, weight: float) -> float:
        """Note one batch; returns the factor by which its gradient enters the sum.

        Weights are taken relative to the window's first batch, so that equal batches enter with exactly 1.
        """
        if self._reference is None:
            self._reference = weight or 1.0
        self._total += weight
        self._dirty = True
        return weight / self._reference

    def discard(self) -> None:
        """Forget the window: the host has erased the gradients."""
        self._reference, self._total, self._dirty = None, 0.0, False

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make `parameter.grad` the gradient of the mean over the whole window, on every rank. Does nothing twice."""
        if not self._dirty:
            return
        for owners, parameters in self._shared.items():
            group = self._groups.get(owners)
            if group is not None:
                self._sum(self._filled([p for p in parameters if self._is_trained(p)]), group)
        reference, total = self._reference or 1.0, self._total
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        if self._data_size > 1:
            parameters, total = self._agree(parameters, total)
        if total and self._divides:
            factor = reference / total
            gradients = [p.grad for p in parameters if p.grad is not None]
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
        if self._data_size > 1:
            self._sum(self._filled(parameters), self._data_group)
        self.discard()

    def _agree(self, parameters: list[nn.Parameter], total: float) -> tuple[list[nn.Parameter], float]:
        """Which parameters have a gradient on any data rank, and the weight of all of them."""
        device = parameters[0].device if parameters else torch.device("cpu")
        present = [float(p.grad is not None) for p in parameters]
        numbers = torch.tensor([total, *present], dtype=torch.float64, device=device)
        dist.all_reduce(numbers, group=self._data_group)
        sums = numbers.tolist()
        return [p for p, count in zip(parameters, sums[1:], strict=True) if count], sums[0]

    def _is_trained(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and (self._trained is None or id(parameter) in self._trained())

    @staticmethod
    def _filled(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients


@torch.no_grad()
def clip_by_norm(
    gradients: Sequence[Tensor],
    counted: Sequence[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale this rank's gradients by the norm over all ranks of the pipeline.

    Args:
        gradients: What to scale.
        counted: Those of them this rank answers for, so that tied parameters count once.
        max_norm: Largest norm allowed.
        group: The pipeline.
        norm_type: 2, another p, or infinity.

    Returns:
        The total norm, equal on every rank. Communication: one number.
    """
    device = gradients[0].device if gradients else torch.device("cpu")
    norms = torch._foreach_norm(list(counted), norm_type) if counted else []
    own = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), norm_type) if norms else None
    total = torch.zeros((), device=device) if own is None else own.to(device)
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    else:
        total = total**norm_type
        dist.all_reduce(total, group=group)
        total = total ** (1.0 / norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
    if gradients:
        torch._foreach_mul_(list(gradients), factor)
    return total
