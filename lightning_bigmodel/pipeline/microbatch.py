"""Split one batch into micro-batches, weigh them, and put their results together again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bigmodel.pipeline.tree import children, rebuild, tensor_leaves

__all__ = [
    "MicrobatchWeight",
    "RETURNED_WEIGHT",
    "batch_size",
    "check_weight",
    "checked_weight",
    "join_outputs",
    "microbatch_weights",
    "returned_weight",
    "split_batch",
    "weighted_mean",
]

MicrobatchWeight = str | Callable[[Any], "float | Tensor"]
_NAMED_WEIGHTS = ("samples", "tokens", "equal", "sum")
RETURNED_WEIGHT = "microbatch_weight"  # where a step's dict may have the weight


def batch_size(batch: Any) -> int | None:
    """Number of samples: the size of dim 0 most tensors of the batch share (the first wins a tie); None if unknown."""
    sizes = Counter(tensor.shape[0] for tensor in tensor_leaves(batch) if tensor.ndim > 0)
    return sizes.most_common(1)[0][0] if sizes else None


def _is_per_sample_list(value: Any, num_samples: int) -> bool:
    # A list of as many plain values as samples is one value a sample (texts, ids); other lists are containers.
    return (
        isinstance(value, (list, tuple))
        and not hasattr(value, "_fields")
        and len(value) == num_samples
        and all(children(item) is None and not isinstance(item, Tensor) for item in value)
    )


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split `batch` along dim 0 into at most `num_microbatches` parts of nearly equal size, larger ones first.

    Tensors whose dim 0 is the batch size, and lists of one plain value a sample, are split; everything else (masks
    shared by all samples, numbers, None) goes to every part. A batch of fewer samples than micro-batches gives fewer
    parts. Parts are views: no memory is copied.

    Example:
        >>> [part["x"].shape[0] for part in split_batch({"x": torch.zeros(7, 3), "scale": 2}, 4)]
        [2, 2, 2, 1]
    """
    num_samples = batch_size(batch)
    if num_samples is None or num_microbatches == 1 or num_samples <= 1:
        return [batch]
    num_parts = min(num_microbatches, num_samples)
    sizes = [num_samples // num_parts + (index < num_samples % num_parts) for index in range(num_parts)]
    parts, start = [], 0
    for size in sizes:
        parts.append(_part(batch, num_samples, start, start + size))
        start += size
    return parts


def _part(value: Any, num_samples: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim > 0 and value.shape[0] == num_samples else value
    if _is_per_sample_list(value, num_samples):
        return value[start:stop]
    pairs = children(value)
    if pairs is None:
        return value
    return rebuild(value, [_part(child, num_samples, start, stop) for _, child in pairs])


def microbatch_weights(microbatches: Sequence[Any], weight: MicrobatchWeight) -> list[float]:
    """The weight of each micro-batch in the mean over a batch, an accumulation window and data ranks.

    Args:
        microbatches: The parts of one batch.
        weight: `"samples"` (number of samples: exact for losses that are means over samples), `"equal"` (one share a
            batch, whatever its size), `"sum"` (for losses that are sums over samples: every part counts whole), or a
            callable `micro-batch -> weight` (for example `TokenWeight`).

    Raises:
        ValueError: Where the callable returns a weight that is no number, negative or not finite.
    """
    if callable(weight):
        return [checked_weight(weight(microbatch), "`microbatch_weight` returned") for microbatch in microbatches]
    if weight == "equal":
        return [1.0 / len(microbatches)] * len(microbatches)
    if weight == "sum":
        return [1.0] * len(microbatches)
    return [float(batch_size(microbatch) or 1) for microbatch in microbatches]


def checked_weight(value: Any, origin: str) -> float:
    """A weight as a number.

    Args:
        value: A number, or a tensor of one element.
        origin: Where it comes from, for the message.

    Raises:
        ValueError: For anything else, and for what is negative or not finite.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"{origin} {value!r}; a weight must be a number, or a tensor of one element.")
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{origin} {number}; weights must be finite and not negative.")
    return number


def returned_weight(result: Any) -> float | None:
    """The weight of a micro-batch that the step returned beside its loss; None if it did not.

    Raises:
        ValueError: See `checked_weight`.
    """
    if not isinstance(result, Mapping) or RETURNED_WEIGHT not in result:
        return None
    return checked_weight(result[RETURNED_WEIGHT], f"`training_step` returned `{RETURNED_WEIGHT}` =")


def check_weight(weight: MicrobatchWeight) -> None:
    """Refuse an unknown `microbatch_weight`.

    Raises:
        ValueError: With the names that exist.
    """
    if isinstance(weight, type) or (not callable(weight) and weight not in _NAMED_WEIGHTS):
        raise ValueError(
            f"`microbatch_weight={weight!r}` is not known. Use one of {', '.join(map(repr, _NAMED_WEIGHTS))} or a "
            "callable that takes a micro-batch and returns its weight."
        )


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int | None], weights: Sequence[float]) -> Any:
    """Put what a step returned for each micro-batch together as one process would have returned it for the batch.

    Tensors with one row a sample are concatenated; other floating-point tensors and floats are averaged with the
    weights; anything else is taken from the last micro-batch. Keys missing in some parts are taken from the parts that
    have them.
    """
    present = [index for index, output in enumerate(outputs) if output is not None]
    if not present:
        return None
    outputs = [outputs[index] for index in present]
    sizes = [sizes[index] for index in present]
    weights = [weights[index] for index in present]
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.ndim > 0 and all(
            isinstance(o, Tensor) and o.ndim == first.ndim and o.shape[0] == size and o.shape[1:] == first.shape[1:]
            for o, size in zip(outputs, sizes, strict=True)
        ):
            return torch.cat(list(outputs))
        if first.is_floating_point() and all(isinstance(o, Tensor) and o.shape == first.shape for o in outputs):
            return weighted_mean(list(outputs), weights)
        return outputs[-1]
    if isinstance(first, float) and not isinstance(first, bool):
        return float(weighted_mean([torch.tensor(o, dtype=torch.float64) for o in outputs], weights))
    if isinstance(first, dict):
        keys = {key: None for output in outputs for key in output}
        return {key: join_outputs([output.get(key) for output in outputs], sizes, weights) for key in keys}
    pairs = children(first)
    if pairs is None or any(type(o) is not type(first) or len(children(o) or ()) != len(pairs) for o in outputs):
        return outputs[-1]
    columns = zip(*([child for _, child in children(output) or ()] for output in outputs), strict=True)
    return rebuild(first, [join_outputs(list(column), sizes, weights) for column in columns])


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Mean of equal-shaped tensors; parts of weight zero are left out, so that their NaN cannot spread."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    if not pairs:
        return values[0]
    if len(pairs) == 1:
        return pairs[0][0]
    total = sum(weight for _, weight in pairs)
    mean = torch.zeros_like(pairs[0][0])
    for value, weight in pairs:
        mean += value * (weight / total)
    return mean
