"""One rule for gradients: weighted sums over batches, owners and data ranks, divided once; norms over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel.pipeline.gradients import GradientPlaces, GradientWindow, clip_by_norm
from lightning_bigmodel.testing import run_ranks


def _sum(tensors: Sequence[Tensor], group: Any) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def _parameter(gradient: float | None) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = None if gradient is None else torch.full((2,), gradient)
    return parameter


def _add(window: GradientWindow, parameter: nn.Parameter, gradient: float, weight: float) -> None:
    factor = window.add(weight)
    assert parameter.grad is not None
    parameter.grad += factor * gradient


def _weighted() -> list[float]:
    """Two data ranks with batches of 3 and 1, and of 2 samples, and a last one that weighs nothing."""
    rank = dist.get_rank()
    parameter, other = _parameter(0.0), _parameter(None if rank else 6.0)
    window = GradientWindow([parameter, other], {}, {}, None, GradientPlaces(None), _sum)
    for gradient, weight in [[(1.0, 3.0), (5.0, 1.0)], [(7.0, 2.0), (9.0, 0.0)]][rank]:
        _add(window, parameter, gradient, weight)
    window.synchronize()
    window.synchronize()  # once more must do nothing
    assert parameter.grad is not None
    assert other.grad is not None
    return [*parameter.grad.tolist(), *other.grad.tolist()]


def test_gradients_are_the_mean_over_all_samples() -> None:
    """Ranks averaged alike whatever their samples; a parameter that one rank did not use left out on the other."""
    expected = (1.0 * 3 + 5.0 * 1 + 7.0 * 2) / 6
    reference = {0: 3.0, 1: 2.0}  # each rank's first batch entered with exactly 1
    first, second = run_ranks(_weighted, 2)
    assert first == pytest.approx([expected, expected, 6.0 * reference[0] / 6, 6.0 * reference[0] / 6])
    assert second == pytest.approx(first)


def _tied() -> tuple[list[float], Any, Any]:
    """Two stages hold one parameter; a second they hold is frozen out of the loss, a third is this rank's own."""
    rank = dist.get_rank()
    tied, unused, own = _parameter(float(rank + 1)), _parameter(None), _parameter(10.0 * (rank + 1))
    solo = [dist.new_group([index]) for index in range(2)][rank]
    window = GradientWindow(
        [tied, unused, own],
        {(0, 1): [tied, unused]},
        {(0, 1): dist.group.WORLD},
        lambda: {id(tied), id(own)},
        GradientPlaces(solo),
        _sum,
    )
    window.add(4.0)
    window.synchronize()
    assert tied.grad is not None
    assert own.grad is not None
    return tied.grad.tolist(), unused.grad, own.grad.tolist()


def test_tied_parameters_get_the_sum_of_their_owners() -> None:
    """Each copy would follow its own part of the gradient; and a parameter without one must stay without."""
    first, second = run_ranks(_tied, 2)
    assert first == ([3.0, 3.0], None, [10.0, 10.0])
    assert second == ([3.0, 3.0], None, [20.0, 20.0])


def _clipped(norm_type: float, max_norm: float) -> tuple[float, list[list[float]]]:
    """A tied gradient that only rank 0 counts, and one of each rank's own; rank 2 has none."""
    rank = dist.get_rank()
    tied, own = torch.full((1,), 3.0), torch.full((1,), [4.0, 12.0, 0.0][rank])
    gradients = [[tied, own], [tied, own], []][rank]
    counted = [[tied, own], [own], []][rank]
    total = clip_by_norm(gradients, counted, max_norm, [None], norm_type)
    return float(total), [gradient.tolist() for gradient in gradients]


@pytest.mark.parametrize(
    ("norm_type", "expected"), [(2.0, math.sqrt(9 + 16 + 144)), (1.0, 19.0), (math.inf, 12.0)], ids=["2", "1", "inf"]
)
def test_norm_is_over_all_ranks_and_counts_tied_parameters_once(norm_type: float, expected: float) -> None:
    """A norm of one rank's part scales ranks apart from each other; a rank without gradients must take part."""
    results = run_ranks(_clipped, 3, norm_type, 1.0)
    reference = [torch.full((1,), value, requires_grad=True) for value in (3.0, 4.0, 12.0)]
    for parameter in reference:
        parameter.grad = parameter.detach().clone()
    nn.utils.clip_grad_norm_(reference, 1.0, norm_type)
    scaled = [float(parameter.grad) for parameter in reference if parameter.grad is not None]
    for total, gradients in results:
        assert total == pytest.approx(expected)
        for (tied,), (own,) in [gradients] if gradients else []:
            assert tied == pytest.approx(scaled[0])
            assert own in (pytest.approx(scaled[1]), pytest.approx(scaled[2]))
    untouched = run_ranks(_clipped, 3, norm_type, 100.0)
    assert untouched[0][1] == [[3.0], [4.0]]
