"""What ways of sending only the largest elements of gradients have in common."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.mesh.rng import derive_seed
from lightning_bigmodel.replicas._checks import check_count, check_names, float_type, refuse_unmatched
from lightning_bigmodel.replicas.largest import SampledThreshold, largest_elements
from lightning_bigmodel.replicas.residuals import Kept, copied, even_share, wide_type
from lightning_bigmodel.replicas.sparse_exchange import PlannedBytes, add_selected
from lightning_bigmodel.replicas.sync import GradientSync, NamedGradient, Replicas

__all__ = ["MIN_NUMEL", "SparsifiedSync"]

MIN_NUMEL = 16384
_LARGEST_HALF = torch.finfo(torch.float16).max
_VALUE_TYPES = ("float32", "float16", "bfloat16")


class SparsifiedSync(GradientSync):
    """Sends the largest elements of what has accumulated, and keeps the rest for later steps.

    Arguments and errors are those of `DGC`.
    """

    keeps_error = True

    def __init__(
        self,
        *,
        threshold: SampledThreshold | Literal["sampled", "exact"],
        min_numel: int,
        exempt: Sequence[str] | str,
        value_dtype: str | torch.dtype | None,
        bucket_bytes: int,
    ) -> None:
        self._threshold = SampledThreshold.of(threshold)
        check_count("min_numel", min_numel, 1)
        check_count("bucket_bytes", bucket_bytes, 1)
        self._min_numel, self._bucket_bytes = min_numel, bucket_bytes
        self._exempt = check_names("exempt", exempt)
        self._value_dtype = float_type("value_dtype", value_dtype, _VALUE_TYPES)
        self._forget()

    def _forget(self) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._step = 0
        self._residuals: Kept = {}

    def begin(self, replicas: Replicas, parameters: Mapping[str, Tensor]) -> None:
        """Start with nothing kept, and warn of what would cost more than it saves.

        Raises:
            ValueError: If a pattern of `exempt` fits no parameter.
        """
        super().begin(replicas, parameters)
        refuse_unmatched("exempt", self._exempt, replicas.model)
        self._forget()
        self._shapes = {name: tensor.shape for name, tensor in parameters.items()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            # Of all that is trained, as other ranks may hold other parts of a replica.
            self._warn({name: tensor for name, tensor in replicas.model.items() if tensor.requires_grad} or parameters)

    def end(self) -> None:
        """Let go of what was kept."""
        self._forget()

    # -- what is sent --------------------------------------------------------------------------------------------------

    def compresses(self, name: str, value: Tensor) -> bool:
        """Whether a gradient is sent in part: not if it is small, of less than two dimensions, or exempt by name."""
        return (
            value.dim() > 1
            and value.numel() >= self._min_numel
            and value.is_floating_point()
            and not any(fnmatchcase(name, pattern) for pattern in self._exempt)
        )

    def planned_bytes(self, parameters: Mapping[str, Tensor], num_replicas: int, density: float) -> PlannedBytes:
        """What each replica would send in a step.

        An all-gather grows with the number of replicas and a ring all-reduce does not: for n replicas, g bytes an
        element of a gradient, v a value and i an index, the density d is worth it only while n < 2g / (d (v + i)).

        Args:
            parameters: Name -> parameter, or anything of its shape and type.
            num_replicas: How many replicas.
            density: Which part of each tensor is sent; 1 is a dense step.
        """
        sent = {name: self.compresses(name, tensor) for name, tensor in parameters.items()}
        return PlannedBytes.of(
            num_replicas,
            exempt=[tensor for name, tensor in parameters.items() if not sent[name]],
            compressed=[tensor for name, tensor in parameters.items() if sent[name]],
            density=density,
            value_dtype=self._value_dtype,
        )

    def _planned_densities(self) -> Iterable[float]:
        """Every density there will be."""
        raise NotImplementedError

    def _warn(self, parameters: Mapping[str, Tensor]) -> None:
        name, num_replicas = type(self).__name__, self.replicas.size
        sparse = [density for density in self._planned_densities() if density < 1]
        plans = [(density, self.planned_bytes(parameters, num_replicas, density)) for density in sparse]
        if not plans or num_replicas == 1 or not parameters:
            return
        if not plans[0][1].compressed_elements:
            largest = max((tensor.numel() for tensor in parameters.values()), default=0)
            warnings.warn(
                f"`{name}` sends everything dense: all parameters here are exempt (the largest has {largest} elements, "
                f"`min_numel={self._min_numel}`, `exempt={list(self._exempt)!r}`). Lower `min_numel`, or use "
                "`AllReduce`.",
                stacklevel=2,
            )
        losing = [(density, plan) for density, plan in plans if plan.compressed > plan.dense]
        if losing:
            listed = ", ".join(
                f"{density:.3g} ({plan.compressed / plan.dense:.1f} times the bytes)" for density, plan in losing
            )
            warnings.warn(
                f"`{name}` on {num_replicas} replicas sends more than dense gradients would at these densities: "
                f"{listed}. What is gathered grows with the replicas. Use a higher sparsity there, a smaller "
                "`value_dtype`, or fewer replicas.",
                stacklevel=2,
            )

    # -- a step --------------------------------------------------------------------------------------------------------

    def _exchange(
        self, gradients: Sequence[NamedGradient], density: float, masked: Mapping[str, Tensor] | None = None
    ) -> None:
        """Send the largest of what is in `_residuals`, take it out there, and put the sums into `value`.

        Args:
            gradients: All of them have a residual.
            density: Which part to send.
            masked: What is set to zero in the places that are sent.
        """
        targets, places, values = [], [], []
        wire = self._value_dtype
        if wire is None:
            for gradient in gradients:
                own = wide_type(gradient.value.dtype)
                wire = own if wire is None else torch.promote_types(wire, own)
        for gradient in gradients:
            residual = self._residuals[gradient.name].view(-1)
            seed = derive_seed(zlib.crc32(gradient.name.encode()), self._step, self.replicas.rank)
            chosen = largest_elements(residual, density, self._threshold, seed)
            kept = residual[chosen]
            # What clamping and rounding take away stays here, so that it is sent another time.
            sent = kept.clamp(-_LARGEST_HALF, _LARGEST_HALF) if wire == torch.float16 else kept
            sent = sent.to(wire)
            residual[chosen] = kept - sent.to(kept.dtype)
            if masked is not None and gradient.name in masked:
                masked[gradient.name].view(-1).index_fill_(0, chosen, 0.0)
            targets.append(gradient.value.view(-1).zero_() if _is_flat(gradient.value) else torch.zeros_like(residual))
            places.append(chosen)
            values.append(sent)
        add_selected(targets, places, values, self.replicas.group, self.replicas.size)
        for gradient, target in zip(gradients, targets, strict=True):
            if not _is_flat(gradient.value):
                gradient.value.copy_(target.view(gradient.value.shape))

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, and what is kept of each parameter."""
        return {"step": self._step, "residuals": dict(self._residuals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._step = int(state["step"])
        self._residuals = copied(state["residuals"], self._shapes, "residual")

    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Residuals summed over all old replicas and split evenly; those of other shapes are dropped."""
        residuals = even_share([state["residuals"] for state in states], self._shapes, self.replicas.size)
        return {"step": states[0]["step"], "residuals": residuals}


def _is_flat(value: Tensor) -> bool:
    """Whether sums can be made in the gradient itself."""
    return value.is_contiguous() and value.dtype == wide_type(value.dtype)
