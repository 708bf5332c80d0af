"""Sizes predicted for batch shapes that were never traced."""

from __future__ import annotations

from lightning_bigmodel.pipeline.shapes import SizeRules


def rules(*examples: tuple[tuple[int, ...], tuple[int, ...]]) -> SizeRules:
    """Rules that have seen these examples."""
    made = SizeRules()
    for inputs, outputs in examples:
        made.add(inputs, outputs)
    return made


def test_sizes_that_varied_are_copied_and_others_kept() -> None:
    """A new length must not need a new trace at every step."""
    made = rules(((2, 16), (2, 16, 64)), ((2, 12), (2, 12, 64)))
    assert made.predict((2, 9)) == (2, 9, 64)


def test_a_size_seen_at_one_value_only_is_not_predicted() -> None:
    """A constant that only looked constant."""
    made = rules(((2, 16), (2, 16, 64)), ((2, 12), (2, 12, 64)))
    assert made.predict((3, 12)) is None


def test_two_explanations_that_disagree_are_not_predicted() -> None:
    """Batch size and length moved together: nobody knows which one the output follows."""
    made = rules(((4, 4), (4,)), ((2, 2), (2,)))
    assert made.predict((3, 5)) is None
    assert made.predict((5, 5)) == (5,)


def test_computed_sizes_are_not_predicted() -> None:
    """A product or a halved length follows no copy rule."""
    made = rules(((4, 6), (24, 3)), ((2, 8), (16, 4)))
    assert made.predict((3, 10)) is None
    assert made.predict((2, 8)) == (16, 4)


def test_memory_is_bounded() -> None:
    """One example kept for every shape that ever came along."""
    made = SizeRules()
    for size in range(1000):
        made.add((size,), (size, 2 * size))
    assert len(made._examples) < 100
