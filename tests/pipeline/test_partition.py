"""Cuts of equal cost."""

from __future__ import annotations

import pytest

from lightning_bigmodel.pipeline.partition import balance


@pytest.mark.parametrize(
    ("costs", "starts", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3], 2, [0, 2]),
        ([1, 1, 1, 1], [0, 1, 2, 3], 4, [0, 1, 2, 3]),
        ([1, 1, 1, 1, 3], [0, 1, 2, 3], 2, [0, 3]),  # a large head counts
        ([3, 1, 1, 1, 1], [1, 2, 3, 4], 2, [0, 2]),  # so does what comes before the first block
        ([1, 1, 1, 1, 1, 1, 1], list(range(7)), 3, [0, 2, 4]),
        ([5, 1, 1, 1], [0, 1, 2, 3], 2, [0, 1]),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_can_be(
    costs: list[float], starts: list[int], num_stages: int, expected: list[int]
) -> None:
    """Blocks dealt out by number, whatever they cost."""
    found = balance(costs, starts, num_stages)

    def dearest(cut: list[int]) -> float:
        return max(sum(costs[a:b]) for a, b in zip(cut, [*cut[1:], len(costs)], strict=True))

    assert dearest(found) == dearest(expected)
    assert found[0] == 0
    assert set(found[1:]) <= set(starts)
