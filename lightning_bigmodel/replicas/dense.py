"""Sum whole gradients over replicas: exact, and what happens without any `replica_sync`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from typing_extensions import override

from lightning_bigmodel.replicas._checks import check_count, check_flag, float_type
from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, all_reduce_sum
from lightning_bigmodel.replicas.sync import GradientSync, NamedGradient, StepProgress

__all__ = ["AllReduce"]

_TYPES = ("float32", "bfloat16", "float16", "float64")


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
        check_count("bucket_bytes", bucket_bytes, 1)
        check_flag("overlap", overlap)
        self.bucket_bytes, self.dtype, self.overlap = bucket_bytes, float_type("dtype", dtype, _TYPES), overlap

    @override
    def reduce(self, gradients: Sequence[NamedGradient], progress: StepProgress) -> None:
        group, dtype = self.replicas.group, self.dtype or self.replicas.reduce_dtype
        all_reduce_sum([gradient.value for gradient in gradients], group, self.bucket_bytes, dtype)
