"""Deep Gradient Compression: send a thousandth of each gradient, and lose nothing of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_bigmodel.replicas._checks import check_flag, is_number
from lightning_bigmodel.replicas.all_reduce import BUCKET_BYTES, all_reduce_sum
from lightning_bigmodel.replicas.largest import SampledThreshold
from lightning_bigmodel.replicas.residuals import Kept, copied, even_share, kept_of, wide_type
from lightning_bigmodel.replicas.sparsified import MIN_NUMEL, SparsifiedSync
from lightning_bigmodel.replicas.sparsity import SparsitySchedule
from lightning_bigmodel.replicas.sync import NamedGradient, StepProgress

__all__ = ["DGC"]


class DGC(SparsifiedSync):
    """Each replica sends only the largest elements of its accumulated, momentum-corrected gradient; the rest waits.

    Deep Gradient Compression (https://arxiv.org/abs/1712.01887), for SGD over networks that are the wall: at the
    default each replica sends about 0.2 % of the bytes of its gradients. Not for fast links (NVLink, InfiniBand), where
    selecting costs more than sending; not for many replicas (what is gathered grows with their number; a warning says
    when it is more than dense gradients would be); not for Adam, for which there is no theory: see
    `TopKErrorFeedback`. Not among ranks that shard one model, which have no gradient of their own; between replicas
    that are sharded each rank compresses its rows.

    On replica k of N, with contribution c_k (contributions add up to the gradient of the mean loss), momentum m, weight
    decay l and weights w, for each tensor, elementwise::

        c_k <- c_k * min(1, gradient_clip_val / (sqrt(N) * norm of all c_k))    if gradient_clip_val
        c_k <- c_k + l / N * w
        u_k <- m * u_k + c_k                                                    momentum correction
        v_k <- v_k + u_k                      with Nesterov: v_k <- v_k + c_k + m * u_k
        send s_k = v_k where |v_k| is among the largest; v_k <- v_k - s_k
        u_k <- 0 where s_k was sent                                             momentum factor masking
        w <- w - learning rate * sum of s_k over replicas

    Momentum, weight decay and Nesterov are the optimizer's own settings, read at each step, so that schedulers may
    change them; the optimizer itself then steps with none of them. Dense steps (before `begin_step`, or at sparsity 0)
    are those of `torch.optim.SGD`, to the bit, and their velocity is carried on, an N-th on each replica; so
    is the momentum of a checkpoint of plain SGD. Small tensors and those of one dimension are always dense, and equal
    SGD.

    Unlike in the paper, what a smaller `value_dtype` rounds away stays in v; more elements than `upper_bound` times the
    wanted number are never sent, and zeros never; and weight decay does not share in clipping, as in Lightning.

    Communication a step, for E elements at density d: d E (v + i) bytes from each replica to each other (v bytes a
    value, i = 4 bytes an index), in two messages whatever the number of tensors; exempt tensors as dense. Memory: u and
    v, two times the parameters in at least fp32, and while it runs the largest tensor's absolute values.

    Args:
        sparsity: Part of each gradient that is not sent: 0.999 sends a thousandth. 0 is plain SGD.
        warmup_steps: Optimizer steps over which sparsity rises to that. The paper warms up for four epochs; fine-tuning
            does without.
        warmup_epochs: The same in epochs.
        warmup_sparsities: Those of the warm-up, each for an equal part of it. Default: densities fall by an equal
            factor, at each epoch or in four parts of the steps.
        begin_step: Optimizer steps with dense gradients before all that.
        momentum_masking: Whether momentum is forgotten where an element is sent.
        gradient_clip_val: Largest norm of the whole gradient. Each replica clips its contribution to this times
            N ** -0.5 before it accumulates; dense steps clip the sum. It takes the place of the Trainer's.
        threshold: `"sampled"`, `"exact"`, or a `SampledThreshold` with its settings.
        min_numel: Tensors of fewer elements are sent dense.
        exempt: Pattern or patterns of parameter names (`*`, `?`, `[...]`) to send dense, besides one dimension.
        value_dtype: Type in which values are sent: "float16" and "bfloat16" need a quarter fewer bytes than "float32".
            Default: that of the gradients, at least float32.
        bucket_bytes: Size of the messages of what is dense.

    Raises:
        ValueError: For settings out of range or without effect; by `check_optimizer` for optimizers other than SGD.

    Example:
        >>> compression = DGC(sparsity=0.999, warmup_epochs=4, gradient_clip_val=1.0)
        >>> [round(density, 4) for density in compression.densities]
        [0.2512, 0.0631, 0.0158, 0.004, 0.001]
    """

    taken_over = ("momentum", "weight_decay", "nesterov")

    def __init__(
        self,
        sparsity: float = 0.999,
        *,
        warmup_steps: int = 0,
        warmup_epochs: int = 0,
        warmup_sparsities: Sequence[float] | None = None,
        begin_step: int = 0,
        momentum_masking: bool = True,
        gradient_clip_val: float | None = None,
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
        self._schedule = SparsitySchedule(sparsity, begin_step, warmup_steps, warmup_epochs, warmup_sparsities)
        check_flag("momentum_masking", momentum_masking)
        self._masks_momentum = momentum_masking
        if gradient_clip_val is not None and not (is_number(gradient_clip_val) and gradient_clip_val > 0):
            raise ValueError(f"`gradient_clip_val={gradient_clip_val!r}` must be a number above 0, or None.")
        self.gradient_clip_val = gradient_clip_val

    def _forget(self) -> None:
        super()._forget()
        # With a residual beside it, this replica's part of the velocity; without, all of it, alike on all replicas.
        self._velocities: Kept = {}
        self._first_epoch: int | None = None

    @property
    def densities(self) -> list[float]:
        """Which part of each tensor is sent, at each stage of the warm-up and after."""
        return [round(1 - sparsity, 12) for sparsity in self._schedule.all_sparsities]

    def _planned_densities(self) -> Iterable[float]:
        return self.densities

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse what is not `torch.optim.SGD`, or what of it the formulas do not have."""
        if type(optimizer) is not SGD:
            raise ValueError(
                f"`DGC` applies momentum and weight decay itself, and there is theory for those of SGD only; got "
                f"`{type(optimizer).__name__}`. Use `torch.optim.SGD`, or `TopKErrorFeedback`, which goes with any "
                "optimizer."
            )
        for group in optimizer.param_groups:
            if group["dampening"]:
                raise ValueError(
                    f"`DGC` has no dampening; got SGD with `dampening={group['dampening']}`. Leave it out."
                )
            if group["maximize"]:
                raise ValueError("`DGC` minimises; got SGD with `maximize=True`. Turn the sign of the loss instead.")

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, gradients: Sequence[NamedGradient], progress: StepProgress) -> None:
        """Replace each `value` by what plain SGD without momentum and weight decay is to step by."""
        if self._step >= self._schedule.begin_step and self._first_epoch is None:
            self._first_epoch = progress.epoch
        sparsity = self._schedule.sparsity(self._step, progress.epoch - (self._first_epoch or 0))
        filled = [gradient for gradient in gradients if gradient.value.numel()]
        sparse = [gradient for gradient in filled if sparsity and self.compresses(gradient.name, gradient.value)]
        names = {gradient.name for gradient in sparse}
        dense = [gradient for gradient in filled if gradient.name not in names]
        if sparsity and self.gradient_clip_val is not None:
            self._clip(filled, self.gradient_clip_val * self.replicas.size**-0.5)
        self._sum_dense(dense, None if sparsity else self.gradient_clip_val)
        self._sum_sparse(sparse, round(1 - sparsity, 12))
        self._step += 1

    def _clip(self, gradients: Sequence[NamedGradient], limit: float) -> None:
        if self.replicas.norm is not None:
            norm = self.replicas.norm(gradients)
        elif gradients:
            norm = torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(g.value, dtype=wide_type(g.value.dtype)) for g in gradients])
            )
        else:
            return
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as `torch.nn.utils.clip_grad_norm_`
        for gradient in gradients:
            gradient.value.mul_(factor.to(gradient.value.device))

    def _sum_dense(self, gradients: Sequence[NamedGradient], clip_val: float | None) -> None:
        whole: list[Tensor] = [gradient.value for gradient in gradients]
        for gradient in gradients:
            if gradient.name in self._residuals:  # it was sparse: all that waits is due
                self._accumulate(gradient)
                gradient.value.copy_(self._residuals[gradient.name])
                if gradient.name in self._velocities:
                    whole.append(self._velocities[gradient.name])
        if self.replicas.size > 1:
            all_reduce_sum(whole, self.replicas.group, self._bucket_bytes)
        if clip_val is not None:
            self._clip(gradients, clip_val)
        for gradient in gradients:
            if self._residuals.pop(gradient.name, None) is not None:
                continue  # it has momentum and weight decay already
            options, value = gradient.options, gradient.value
            corrected = value.to(wide_type(value.dtype))
            if options.get("weight_decay"):  # no options at all where no optimizer steps it
                corrected.add_(gradient.parameter, alpha=options["weight_decay"])
            if options.get("momentum"):
                velocity = self._velocity(gradient, 1).mul_(options["momentum"]).add_(corrected)
                if options.get("nesterov"):
                    corrected.add_(velocity, alpha=options["momentum"])
                else:
                    corrected = velocity
            if corrected is not value:
                value.copy_(corrected)

    def _velocity(self, gradient: NamedGradient, num_parts: int) -> Tensor:
        """What is kept; at first the momentum of a run without this, of which each replica takes its part."""
        begun = gradient.state.pop("momentum_buffer", None)
        is_new = gradient.name not in self._velocities
        velocity = kept_of(self._velocities, gradient)
        if is_new and begun is not None:
            velocity.copy_(begun).div_(num_parts)
        return velocity

    def _sum_sparse(self, gradients: Sequence[NamedGradient], density: float) -> None:
        for gradient in gradients:
            if gradient.name not in self._residuals:
                kept_of(self._residuals, gradient)
                if gradient.name in self._velocities:
                    self._velocities[gradient.name].div_(self.replicas.size)
            self._accumulate(gradient)
        self._exchange(gradients, density, self._velocities if self._masks_momentum else None)

    def _accumulate(self, gradient: NamedGradient) -> None:
        """Bring this replica's velocity and residual up to date; overwrites `value`."""
        options, value = gradient.options, gradient.value
        residual = kept_of(self._residuals, gradient)
        corrected = value.to(residual.dtype)
        if options.get("weight_decay"):
            corrected.add_(gradient.parameter, alpha=options["weight_decay"] / self.replicas.size)
        if not options.get("momentum"):
            residual.add_(corrected)
            return
        velocity = self._velocity(gradient, self.replicas.size)
        torch.add(corrected, velocity, alpha=options["momentum"], out=velocity)
        if options.get("nesterov"):
            residual.add_(corrected).add_(velocity, alpha=options["momentum"])
        else:
            residual.add_(velocity)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, the epoch in which compression began, and what is kept of each parameter."""
        return {**super().state_dict(), "velocities": dict(self._velocities), "first_epoch": self._first_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        velocities = copied(state["velocities"], self._shapes, "velocity")
        super().load_state_dict(state)
        self._velocities, self._first_epoch = velocities, state["first_epoch"]

    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Residuals and their velocities summed over all old replicas and split evenly; other shapes are dropped."""
        merged = super().merged_state(states)
        assert merged is not None
        tables: list[Mapping[str, Tensor]] = [state["velocities"] for state in states]
        in_parts = {name for state in states for name in state["residuals"]}
        shared = {
            name: velocity.clone()
            for name, velocity in tables[0].items()
            if name not in in_parts and velocity.shape == self._shapes.get(name, velocity.shape)
        }
        tables = [{name: table[name] for name in table if name in merged["residuals"]} for table in tables]
        merged["velocities"] = {**shared, **even_share(tables, self._shapes, self.replicas.size)}
        merged["first_epoch"] = states[0]["first_epoch"]
        return merged
