"""Top-k sparsification with error feedback, for any optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from lightning_bigmodel.replicas._checks import is_number
from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, all_reduce_sum
from lightning_bigmodel.replicas.largest import SampledThreshold
from lightning_bigmodel.replicas.residuals import kept_of
from lightning_bigmodel.replicas.sparsified import MIN_NUMEL, SparsifiedSync
from lightning_bigmodel.replicas.sync import NamedGradient, StepProgress

__all__ = ["TopKErrorFeedback"]


class TopKErrorFeedback(SparsifiedSync):
    """Each replica sends only the largest elements of its accumulated gradient; the rest is added to the next.

    For optimizers that `DGC` refuses, Adam among them: the optimizer steps by the exchanged gradient, as it is.
    Sparsified SGD with memory (https://arxiv.org/abs/1809.07599). For networks that are the wall; not for fast links,
    where selecting costs more than sending, nor for many replicas (what is gathered grows with their number; a warning
    says when it is more than dense gradients would be). With SGD and momentum `DGC` converges better at the same
    density: here momentum sees delayed gradients. Adaptive optimizers divide by the size of what arrives, which is zero
    in most steps and large in the others, so that their step sizes differ from those of dense training; compare before
    you trust it, and take a density ten times that of `DGC`.

    On replica k, with contribution c_k, for each tensor::

        v_k <- v_k + c_k
        send s_k = v_k where |v_k| is among the largest; v_k <- v_k - s_k
        step by the sum of s_k over replicas

    Communication a step, for E elements at density d: d E (v + i) bytes from each replica to each other (v bytes a
    value, i = 4 bytes an index), in two messages; exempt tensors as dense. Memory: v, as large as the parameters, in at
    least fp32, and while it runs the largest tensor's absolute values.

    Args:
        density: Which part of each gradient is sent, above 0; 1 sends all of it, dense.
        threshold: `"sampled"`, `"exact"`, or a `SampledThreshold` with its settings.
        min_numel: Tensors of fewer elements are sent dense.
        exempt: Pattern or patterns of parameter names (`*`, `?`, `[...]`) to send dense, besides one dimension.
        value_dtype: Type in which values are sent: "float16" and "bfloat16" need a quarter fewer bytes than "float32".
            Default: that of the gradients, at least float32.
        bucket_bytes: Size of the messages of what is dense.

    Raises:
        ValueError: For settings out of range.

    Example:
        >>> TopKErrorFeedback(density=0.01, exempt=["embedding.*"]).density
        0.01
    """

    def __init__(
        self,
        density: float = 0.01,
        *,
        threshold: SampledThreshold | Literal["sampled", "exact"] = "sampled",
        min_numel: int = MIN_NUMEL,
        exempt: Sequence[str] | str = (),
        value_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(
            threshold=threshold,
            min_numel=min_numel,
            exempt=exempt,
            value_dtype=value_dtype,
            bucket_bytes=bucket_bytes,
        )
        if not (is_number(density) and 0 < density <= 1):
            raise ValueError(f"`density={density!r}` must be a number above 0 and at most 1.")
        self.density = float(density)

    def _planned_densities(self) -> Iterable[float]:
        return [self.density]

    @torch.no_grad()
    def reduce(self, gradients: Sequence[NamedGradient], progress: StepProgress) -> None:
        """Replace each `value` by the sum of what all replicas sent."""
        filled = [gradient for gradient in gradients if gradient.value.numel()]
        sparse = [g for g in filled if self.density < 1 and self.compresses(g.name, g.value)]
        names = {gradient.name for gradient in sparse}
        dense = [gradient for gradient in filled if gradient.name not in names]
        for gradient in dense:
            waiting = self._residuals.pop(gradient.name, None)
            if waiting is not None:  # of a run that sent it in parts
                gradient.value.add_(waiting.to(gradient.value.device))
        if self.replicas.size > 1:
            all_reduce_sum([gradient.value for gradient in dense], self.replicas.group, self._bucket_bytes)
        for gradient in sparse:
            kept_of(self._residuals, gradient).add_(gradient.value)
        self._exchange(sparse, self.density)
        self._step += 1
