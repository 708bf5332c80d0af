"""The arithmetic of an exponential moving average of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["placed_averages", "update_averages", "warmed_up_decay"]


def warmed_up_decay(decay: float, num_updates: int) -> float:
    """A decay that is small at first: `min(decay, (1 + n) / (10 + n))` after `n` updates.

    The formula is that of `num_updates` in TensorFlow's `tf.train.ExponentialMovingAverage`.

    Example:
        >>> [round(warmed_up_decay(0.9, n), 3) for n in (0, 10, 1000)]
        [0.1, 0.55, 0.9]
    """
    return min(decay, (1 + num_updates) / (10 + num_updates))


@torch.no_grad()
def update_averages(averages: Mapping[str, Tensor], values: Mapping[str, Tensor], decay: float) -> None:
    """`average = decay * average + (1 - decay) * value`, in place and in the type of the average.

    What is no floating-point number is copied. Memory: one value at a time, where its type or device is another.
    """
    for name, average in averages.items():
        value = values[name].to(average.device, average.dtype)
        if average.is_floating_point() or average.is_complex():
            average.lerp_(value, 1 - decay)
        else:
            average.copy_(value)


@torch.inference_mode(False)
@torch.no_grad()
def placed_averages(
    known: Mapping[str, Tensor], values: Mapping[str, Tensor], dtype: torch.dtype | None, *, to_host: bool
) -> dict[str, Tensor]:
    """An average for each value: the known one, or a copy of the value to begin with.

    Args:
        known: Averages there are.
        values: What is averaged.
        dtype: Type of the averages. None: float32, or that of values whose type is wider.
        to_host: Keep them on the host, not where the values are.

    Raises:
        ValueError: If shapes differ.
    """
    if wrong := sorted(name for name, value in values.items() if name in known and known[name].shape != value.shape):
        raise ValueError(f"The averages of {wrong} have other shapes than the parameters: they are of another model.")
    averages = {}
    for name, value in values.items():
        source = known.get(name, value)
        device = torch.device("cpu") if to_host else value.device
        wanted = dtype or torch.promote_types(value.dtype, torch.float32)
        averages[name] = source.to(device, wanted if value.is_floating_point() else value.dtype, copy=source is value)
    return averages
