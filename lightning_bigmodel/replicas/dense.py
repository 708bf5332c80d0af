"""Sum whole gradients over replicas: exact, and what happens without any `replica_sync`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, all_reduce_sum
from lightning_bigmodel.replicas.sync import GradientSync, NamedGradient, StepProgress, refuse_unknown

__all__ = ["AllReduce", "dtype_of"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def dtype_of(name: str, value: Any) -> torch.dtype | None:
    """The torch type a setting names.

    Raises:
        ValueError: For what is none of the types that are sent.
    """
    if value is None or value in _DTYPES.values():
        found: torch.dtype | None = value
        return found
    refuse_unknown(name, value, _DTYPES)
    return _DTYPES[value]


class AllReduce(GradientSync):
    """All replicas take the step that one process would: gradients are summed whole.

    The default of `BigModelStrategy`, with its settings. PyTorch Distributed (arXiv 2006.15704). On links much slower
    than the backward pass see `DGC`, `PowerSGD`, `LocalSGD` and `DiLoCo`, which change the numbers to send less.

    Communication a step: all gradients once (in a ring each rank sends `2 (n - 1) / n` of their bytes), in messages of
    `bucket_bytes`. Memory: the messages become the gradients; without `overlap` two messages besides.

    Args:
        bucket_bytes: Size of a message; a larger gradient is its own.
        dtype: In which gradients are sent and summed: `"float32"`, `"bfloat16"`, `"float16"` or `"float64"`. Default:
            the precision's `reduce_dtype`, else their own but at least fp32.
        overlap: Whether a message goes as soon as backward has made all of it, while earlier layers are computed; else
            all go at the end. Under ZeRO gradients of rows are summed over replicas at the end either way.

    Raises:
        ValueError: For a setting that is none.

    Example:
        >>> from lightning_bigmodel import AllReduce, BigModelStrategy
        >>> strategy = BigModelStrategy(replica_sync=AllReduce(dtype="bfloat16"))
    """

    def __init__(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
        overlap: bool = True,
    ) -> None:
        if type(bucket_bytes) is not int or bucket_bytes < 1:
            raise ValueError(f"`bucket_bytes={bucket_bytes!r}` must be a whole number of bytes of at least 1.")
        if type(overlap) is not bool:
            raise ValueError(f"`overlap={overlap!r}` must be True or False.")
        self.bucket_bytes, self.dtype, self.overlap = bucket_bytes, dtype_of("dtype", dtype), overlap

    @override
    def reduce(self, gradients: Sequence[NamedGradient], progress: StepProgress) -> None:
        group, dtype = self.replicas.group, self.dtype or self.replicas.reduce_dtype
        all_reduce_sum([gradient.value for gradient in gradients], group, self.bucket_bytes, dtype)
