"""Predict the sizes of block outputs for batch shapes that were not traced.

Padded text has a new length at nearly every step; tracing each would cost a fake forward a step. After a few traces
most sizes turn out to be either constant or equal to one size of the batch, and then no further trace is needed. A rule
is used only where the traces seen so far have varied in every size in which the new batch differs; everything else is
traced.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SizeRules"]

_MAX_EXAMPLES = 16


class SizeRules:
    """Learns `outputs = f(inputs)` over integer vectors from examples.

    Each output may be constant or copy an input; anything else stays unknown.

    Example:
        >>> rules = SizeRules()
        >>> rules.add((2, 16), (2, 16, 64)); rules.add((2, 12), (2, 12, 64))
        >>> rules.predict((2, 9))
        (2, 9, 64)
        >>> rules.predict((1, 9)) is None  # the first size has not varied yet: unknown
        True
    """

    def __init__(self) -> None:
        self._examples: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def add(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Record one traced example."""
        self._examples.append((tuple(inputs), tuple(outputs)))
        del self._examples[:-_MAX_EXAMPLES]

    def predict(self, inputs: Sequence[int]) -> tuple[int, ...] | None:
        """The output sizes for `inputs`, or None where the examples do not determine them."""
        examples = [pair for pair in self._examples if len(pair[0]) == len(inputs)]
        for seen, outputs in examples:
            if seen == tuple(inputs):
                return outputs
        if len(examples) < 2 or len({len(outputs) for _, outputs in examples}) != 1:
            return None
        columns = list(zip(*(seen for seen, _ in examples), strict=True))
        for size, column in zip(inputs, columns, strict=True):
            if size not in column and len(set(column)) < 2:
                return None
        predicted = []
        for outputs_column in zip(*(outputs for _, outputs in examples), strict=True):
            # Every input that agrees with the column everywhere explains it, and so does a constant. Where several
            # explanations give different answers for this batch, it has to be traced.
            candidates = {inputs[index] for index, column in enumerate(columns) if column == outputs_column}
            if len(set(outputs_column)) == 1:
                candidates = {outputs_column[0]}
            if len(candidates) != 1:
                return None
            predicted.append(candidates.pop())
        return tuple(predicted)
