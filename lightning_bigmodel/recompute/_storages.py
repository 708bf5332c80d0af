"""Which memory a tensor that autograd saves takes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel import _host

__all__ = ["is_activation", "lasting_storages", "storage_of"]


def is_activation(tensor: Tensor, lasting: Collection[Any] = ()) -> bool:
    """Whether a tensor is plain memory of its own, and neither a parameter nor a view of one.

    Args:
        tensor: What autograd saves.
        lasting: Storages that are there anyway: `detach` hides whose view a tensor is.
    """
    base = tensor if tensor._base is None else tensor._base
    if type(tensor) is not Tensor or isinstance(base, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not lasting or _host.storage_reference(tensor) not in lasting


def lasting_storages(module: nn.Module) -> frozenset[Any]:
    """References to the memory of a module's parameters and buffers, which saving a view of keeps from nothing."""
    tensors = [*module.parameters(), *module.buffers()]
    plain = [tensor for tensor in tensors if type(tensor) in (nn.Parameter, Tensor) and not _host.is_fake(tensor)]
    return frozenset(_host.storage_reference(tensor) for tensor in plain if tensor.layout is torch.strided)


def storage_of(tensor: Tensor) -> tuple[Any, int]:
    """A reference to the storage, equal for equal ones, and its bytes."""
    return _host.storage_reference(tensor), tensor.untyped_storage().nbytes()
