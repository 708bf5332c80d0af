"""Look at each micro-batch's own gradient, before it is accumulated, reduced or made into rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GradientWatch", "MicrobatchSquares", "WatchedMicrobatch", "square_sums"]


@dataclass(frozen=True, kw_only=True)
class WatchedMicrobatch:
    """How one micro-batch's gradient enters the mean over a window.

    Attributes:
        index: Its number within the batch.
        weight: Its weight in the mean; the weights of a window need not sum to 1.
        size: How many samples it averages over (or of what the weight counts).
        seed: The gradient its loss was given: what its gradient is multiplied by when it is seen.
    """

    index: int
    weight: float
    size: float
    seed: float


class GradientWatch:
    """Told of every micro-batch's backward on this rank, of its end, and of complete windows."""

    def begin_backward(self, microbatch: int) -> None:
        """A backward of this micro-batch begins; or one half of it, or that of another stage of this rank."""

    def end_backward(self) -> None:
        """It is over, whether it failed or not."""

    def end_batch(self, microbatches: Sequence[WatchedMicrobatch]) -> None:
        """All backwards of a batch are over; the micro-batches are those that count."""

    def end_window(self) -> None:
        """The gradients between two optimizer steps are complete, and nothing has clipped them. Collective."""

    def drop_window(self) -> None:
        """In place of `end_window` where they have overflowed and there is no step."""


class MicrobatchSquares(GradientWatch):
    """Sums up the squares of each micro-batch's gradient, by group of parameters.

    A hook on a parameter sees what one backward gives it, whole: all uses of the parameter are summed already, and
    neither earlier micro-batches nor other ranks are in it yet.

    Args:
        names: id(parameter) -> its name, of the parameters to watch.
        group_of: id(parameter) -> number of its group; read when a gradient comes, so that it may change.
        num_groups: Number of groups; read likewise.

    Memory: one number a parameter and micro-batch, until the batch ends. Communication: none.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> squares = MicrobatchSquares({id(weight): "weight"}, {id(weight): 0}, lambda: 1)
        >>> squares.follow([weight])
        >>> squares.begin_backward(0)
        >>> (3 * weight).sum().mul(0.5).backward()
        >>> squares.end_batch([WatchedMicrobatch(index=0, weight=2.0, size=2.0, seed=0.5)])
        >>> round(squares.small.item(), 4)  # the weight times 3 ** 2 + 3 ** 2
        36.0
    """

    def __init__(self, names: dict[int, str], group_of: dict[int, int], num_groups: Callable[[], int]) -> None:
        self._names, self._group_of, self._num_groups = names, group_of, num_groups
        self._hooks: dict[int, Any] = {}
        self._current: int | None = None
        self._norms: dict[int, dict[int, list[Tensor]]] = {}  # micro-batch -> group -> norms
        self._seen: set[tuple[int, int]] = set()
        self.start_window()

    def start_window(self) -> None:
        """Forget the last window."""
        self.weight = self.small_share = self.big_share = 0.0
        self.small = torch.zeros(self._num_groups(), dtype=torch.float64)

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put hooks on those that take gradients by now."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = parameter.register_hook(functools.partial(self._arrived, id(parameter)))

    def begin_backward(self, microbatch: int) -> None:
        """What arrives from now on belongs to this micro-batch."""
        self._current = microbatch

    def end_backward(self) -> None:
        """Gradients that the user's code takes elsewhere are its own."""
        self._current = None

    @torch.no_grad()
    def _arrived(self, key: int, gradient: Tensor) -> None:
        group = self._group_of.get(key)
        if self._current is None or group is None:
            return
        if (self._current, key) in self._seen:
            raise RuntimeError(
                f"`{self._names[key]}` got its gradient of one micro-batch in several parts, of which the norm of the "
                "whole cannot be told. A backward within the backward does so, as that of "
                "`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`; set `use_reentrant=False`."
            )
        self._seen.add((self._current, key))
        self._norms.setdefault(self._current, {}).setdefault(group, []).append(_norm(gradient))

    @torch.no_grad()
    def end_batch(self, microbatches: Sequence[WatchedMicrobatch]) -> None:
        """Undo the seeds and add up."""
        if len(self.small) < self._num_groups():
            self.small = torch.cat([self.small, self.small.new_zeros(self._num_groups() - len(self.small))])
        for microbatch in microbatches:
            weight, size = microbatch.weight, microbatch.size
            if not weight or not microbatch.seed:
                continue
            self.weight += weight
            self.small_share += weight / size
            self.big_share += weight * weight / size
            for group, norms in self._norms.get(microbatch.index, {}).items():
                self.small[group] += weight / microbatch.seed**2 * _square_sum(norms)
        self._norms.clear()
        self._seen.clear()

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._norms.clear()
        self._seen.clear()


@torch.no_grad()
def square_sums(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Sum of the squares of each group of gradients, in double precision on the host."""
    return torch.tensor([_square_sum([_norm(g) for g in group]) for group in groups], dtype=torch.float64)


def _norm(gradient: Tensor) -> Tensor:
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return norm


def _square_sum(norms: Sequence[Tensor]) -> float:
    total = 0.0
    for device in {norm.device for norm in norms}:
        total += float(torch.stack([norm.double() for norm in norms if norm.device == device]).square().sum())
    return total
