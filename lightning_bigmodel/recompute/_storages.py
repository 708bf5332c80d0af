"""Which memory a tensor that autograd saves takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel import _host

__all__ = ["is_activation", "storage_of"]


def is_activation(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory of its own, and neither a parameter nor a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return type(tensor) is Tensor and not isinstance(base, nn.Parameter) and tensor.layout is torch.strided


def storage_of(tensor: Tensor) -> tuple[Any, int]:
    """A reference to the storage, equal for equal ones, and its bytes."""
    return _host.storage_reference(tensor), tensor.untyped_storage().nbytes()
