"""What a replica keeps of its gradients for later steps, by parameter name, and how other numbers of them share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_bigmodel.replicas.sync import NamedGradient

__all__ = ["Kept", "copied", "even_share", "kept_of", "wide_type"]

Kept = dict[str, Tensor]
"""Name of a parameter -> what is kept of it, of the shape of its gradient and in at least float32."""


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of type `dtype` are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def kept_of(table: Kept, gradient: NamedGradient) -> Tensor:
    """What is kept of a parameter, where its gradient is; zeros at first."""
    kept = table.get(gradient.name)
    if kept is None:
        dtype = wide_type(gradient.value.dtype)
        kept = torch.zeros(gradient.value.shape, dtype=dtype, device=gradient.value.device)
    elif kept.device != gradient.value.device:
        kept = kept.to(gradient.value.device)
    table[gradient.name] = kept
    return kept


def copied(kept: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], what: str) -> Kept:
    """Tensors of a checkpoint, copied.

    Args:
        kept: By parameter name.
        shapes: Those of what this rank holds of parameters; others are taken as they come.
        what: What it is, for the error.

    Raises:
        ValueError: If one has not the shape of its parameter here.
    """
    for name, tensor in kept.items():
        shape = shapes.get(name, tensor.shape)
        if tensor.shape != shape:
            raise ValueError(
                f"The {what} of `{name}` has the shape {tuple(tensor.shape)}, and this rank holds {tuple(shape)} of "
                "it. Use the state for another number of ranks that `merged_state` gives."
            )
    return {name: tensor.detach().to(wide_type(tensor.dtype), copy=True) for name, tensor in kept.items()}


def even_share(tables: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, torch.Size], num_replicas: int) -> Kept:
    """For each of `num_replicas` an even part of the sum over all old ones; what has not one shape is left out.

    Args:
        tables: One of each old replica.
        shapes: Those of what this rank holds of parameters.
        num_replicas: How many there are now.
    """
    shares: Kept = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        parts = [table[name] for table in tables if name in table]
        shape = shapes.get(name, parts[0].shape)
        if all(part.shape == shape for part in parts):
            total = parts[0].to(wide_type(parts[0].dtype), copy=True)
            for part in parts[1:]:
                total += part
            shares[name] = total.div_(num_replicas)
    return shares
