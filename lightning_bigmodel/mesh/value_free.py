"""What asks a tensor for its shape, type or place only, or makes another like it: it reads no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["VALUE_FREE"]

_ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "is_cuda",
    "itemsize",
)

VALUE_FREE: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.get_device,
        Tensor.__len__,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
        Tensor.new_empty,
        Tensor.new_tensor,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.empty_like,
        torch.rand_like,
        torch.randn_like,
        torch.is_floating_point,
        torch.numel,
    ]
)
"""Functions as `__torch_function__` gets them; subclasses that hide their values add what they allow besides."""
