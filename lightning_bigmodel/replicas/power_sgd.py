"""PowerSGD: send two thin factors in place of each gradient matrix."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.mesh.rng import derive_seed
from lightning_bigmodel.replicas._checks import (
    check_count,
    check_flag,
    check_names,
    float_type,
    is_number,
    refuse_unmatched,
)
from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, all_reduce_sum
from lightning_bigmodel.replicas.residuals import Kept, copied, even_share, kept_of, wide_type
from lightning_bigmodel.replicas.sync import GradientSync, NamedGradient, Replicas, StepProgress

__all__ = ["PowerSGD"]

_TYPES = ("float32", "float16", "bfloat16")


class PowerSGD(GradientSync):
    """Replicas agree on a low-rank approximation of the gradient; what it misses is added to the next.

    PowerSGD (https://arxiv.org/abs/1905.13727) with any optimizer. Unlike what `DGC` sends, its factors are
    all-reduced, so that bytes do not grow with the number of replicas; ratios are tens to hundreds, not a thousand. Not
    for fast links; not for models of many small or one-dimensional tensors, which are sent dense; not for replicas on
    unlike devices, whose bases of one matrix would differ. torch's communication hook of this name works on buckets of
    `DistributedDataParallel`; here each parameter keeps its own error and factor.

    For each tensor, as a matrix of n rows (its first dimension) and m columns, on replica k with contribution c_k,
    error e_k, and a factor Q (m, r) that all replicas share::

        d_k <- c_k + e_k
        P   <- sum of d_k Q over replicas            one all-reduce, n r numbers
        P   <- orthogonal basis of its columns
        q_k <- d_k^T P;  Q <- sum of q_k             one all-reduce, m r numbers
        e_k <- d_k - P q_k^T
        step by P Q^T

    Q is kept as the start of the next step (one step of power iteration each) and is random at first.

    Communication a step: r (n + m) elements a matrix in two all-reduces, whatever the number of tensors; what is exempt
    as dense, in the first of them. Memory: errors, as large as the parameters in at least fp32, and the factors.

    Args:
        rank: Rank r of the approximation: 1, 2 or 4 in the paper; language models take more.
        begin_step: Optimizer steps with dense gradients before.
        error_feedback: Whether what the approximation misses is added to the next gradient. Without it much is lost.
        warm_start: Whether Q goes on from step to step; False draws it anew each time.
        min_compression_rate: Matrices that would shrink by less than this, n m / (r (n + m)), are sent dense; so are
            tensors of one dimension.
        exempt: Pattern or patterns of parameter names (`*`, `?`, `[...]`) to send dense besides.
        dtype: Type in which everything is sent and summed. Default: that of the gradients, at least float32. In 16 bits
            the rounding of sums is lost.
        bucket_bytes: Size of a message.

    Raises:
        ValueError: For settings out of range.

    Example:
        >>> PowerSGD(rank=2).compresses("layer.weight", torch.zeros(1024, 1024))
        True
    """

    keeps_error = True

    def __init__(
        self,
        rank: int = 4,
        *,
        begin_step: int = 0,
        error_feedback: bool = True,
        warm_start: bool = True,
        min_compression_rate: float = 2.0,
        exempt: Sequence[str] | str = (),
        dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        check_count("rank", rank, 1)
        check_count("begin_step", begin_step, 0)
        check_flag("error_feedback", error_feedback)
        check_flag("warm_start", warm_start)
        if not (is_number(min_compression_rate) and min_compression_rate > 0):
            raise ValueError(f"`min_compression_rate={min_compression_rate!r}` must be a number above 0.")
        check_count("bucket_bytes", bucket_bytes, 1)
        self.rank = rank
        self._begin_step, self._has_feedback, self._is_warm = begin_step, error_feedback, warm_start
        self._min_rate, self._bucket_bytes = min_compression_rate, bucket_bytes
        self._exempt = check_names("exempt", exempt)
        self._dtype = float_type("dtype", dtype, _TYPES)
        self._forget()

    def _forget(self) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._step = 0
        self._errors: Kept = {}
        self._factors: Kept = {}

    def begin(self, replicas: Replicas, parameters: Mapping[str, Tensor]) -> None:
        """Start without errors; warn if everything would be sent dense.

        Raises:
            ValueError: If a pattern of `exempt` fits no parameter.
        """
        super().begin(replicas, parameters)
        refuse_unmatched("exempt", self._exempt, replicas.model)
        self._forget()
        self._shapes = {name: tensor.shape for name, tensor in parameters.items()}
        tells = not dist.is_initialized() or dist.get_rank() == 0
        if (
            tells
            and replicas.size > 1
            and parameters
            and not any(self.compresses(*item) for item in (replicas.model or parameters).items())
        ):
            warnings.warn(
                f"`PowerSGD` sends everything dense: no matrix here would shrink by "
                f"`min_compression_rate={self._min_rate}` at `rank={self.rank}`, or all are in "
                f"`exempt={list(self._exempt)!r}`. Lower them, or use `AllReduce`.",
                stacklevel=2,
            )

    def end(self) -> None:
        """Let go of what was kept."""
        self._forget()

    def _rank_of(self, rows: int, columns: int) -> int:
        return min(self.rank, rows, columns)

    def compresses(self, name: str, value: Tensor) -> bool:
        """Whether a gradient is sent as factors: if it is a matrix or more, shrinks enough and is not exempt."""
        if value.dim() < 2 or not value.numel() or not value.is_floating_point():
            return False
        rows, columns = value.shape[0], value.numel() // value.shape[0]
        shrinks = rows * columns >= self._min_rate * self._rank_of(rows, columns) * (rows + columns)
        return shrinks and not any(fnmatchcase(name, pattern) for pattern in self._exempt)

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, gradients: Sequence[NamedGradient], progress: StepProgress) -> None:
        """Replace each `value` by the agreed approximation of the sum."""
        dense, low_rank = [], []
        for gradient in gradients:
            if self._step >= self._begin_step and self.compresses(gradient.name, gradient.value):
                low_rank.append(gradient)
            elif gradient.value.numel():
                waiting = self._errors.pop(gradient.name, None)
                if waiting is not None:  # of a run that approximated it
                    gradient.value.add_(waiting.to(gradient.value.device))
                dense.append(gradient.value)
        matrices = [self._with_error(gradient) for gradient in low_rank]
        factors = [self._factor(gradient, matrix) for gradient, matrix in zip(low_rank, matrices, strict=True)]
        bases = [matrix @ factor for matrix, factor in zip(matrices, factors, strict=True)]
        self._sum([*dense, *bases])
        bases = [torch.linalg.qr(basis).Q for basis in bases]
        factors = [matrix.t() @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        if self._dtype is not None:
            factors = [factor.to(self._dtype).to(factor.dtype) for factor in factors]
        if self._has_feedback:
            for matrix, basis, factor in zip(matrices, bases, factors, strict=True):
                matrix.addmm_(basis, factor.t(), alpha=-1)  # the error itself, see `_with_error`
        self._sum(factors)
        for gradient, basis, factor in zip(low_rank, bases, factors, strict=True):
            gradient.value.copy_((basis @ factor.t()).view(gradient.value.shape))
            if self._is_warm:
                self._factors[gradient.name] = factor
        self._step += 1

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        if self.replicas.size > 1:
            all_reduce_sum(tensors, self.replicas.group, self._bucket_bytes, self._dtype)

    def _with_error(self, gradient: NamedGradient) -> Tensor:
        """(n, m): the contribution and what waits; with error feedback, the tensor in which that is kept."""
        rows = gradient.value.shape[0]
        if not self._has_feedback:
            return gradient.value.to(wide_type(gradient.value.dtype)).reshape(rows, -1)
        return kept_of(self._errors, gradient).add_(gradient.value).view(rows, -1)

    def _factor(self, gradient: NamedGradient, matrix: Tensor) -> Tensor:
        """(m, r), the same on all replicas."""
        rows, columns = matrix.shape
        shape = (columns, self._rank_of(rows, columns))
        kept = self._factors.get(gradient.name) if self._is_warm else None
        if kept is not None and kept.shape == shape:
            return kept.to(matrix.device)
        seed = derive_seed(zlib.crc32(gradient.name.encode()), 0 if self._is_warm else self._step)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(matrix)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, errors of this replica, and the factors, which are the same on all."""
        return {"step": self._step, "errors": dict(self._errors), "factors": dict(self._factors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._errors = copied(state["errors"], self._shapes, "error")
        self._factors = copied(state["factors"], {}, "factor")
        self._step = int(state["step"])

    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Errors summed over all old replicas and split evenly, those of other shapes dropped; and the factors."""
        errors = even_share([state["errors"] for state in states], self._shapes, self.replicas.size)
        return {"step": states[0]["step"], "errors": errors, "factors": dict(states[0]["factors"])}
