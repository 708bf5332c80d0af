"""DiLoCo: replicas step alone, and an outer optimizer steps the weights they have in common by what they changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bigmodel.replicas._checks import check_count, is_number
from lightning_bigmodel.replicas.fragments import fragments_of
from lightning_bigmodel.replicas.outer_exchange import QUANTIZED, DenseMean, MeanUnderWay, QuantizedMean
from lightning_bigmodel.replicas.outer_optimizer import outer_optimizer_maker
from lightning_bigmodel.replicas.sync import ParameterSync, Replicas, StepProgress, mean_of, refuse_unknown

__all__ = ["DiLoCo"]


class DiLoCo(ParameterSync):
    """Let replicas step alone for `period` steps, then step their common weights by the mean of their changes.

    Douillard et al. 2023 (arXiv 2311.08105): with common weights theta and the weights w_k of replica k after `period`
    steps of its own optimizer,

        delta = theta - sum_k n_k w_k / sum_k n_k      the outer gradient
        theta <- OuterOptimizer(theta, delta)          by default SGD, Nesterov momentum 0.9, learning rate 0.7
        w_k   <- theta

    where n_k is what the batches of replica k weighed. Inner optimizer states stay where they are. Streaming DiLoCo
    (Douillard et al. 2025, arXiv 2501.18512) adds: `num_fragments` parts of the model, consecutive and of about equal
    bytes, that take turns, so that less is sent at once; `fragment_delay` (the paper's tau), steps that training goes
    on while a part is sent; `mixing`, how much of the new common weights a replica takes: w_k <- w_k + mixing (theta -
    w_k), 1 minus the paper's alpha, so that what it learned during the delay is not lost; `quantize`, outer gradients
    in a byte an element. Here each part's outer gradient is quantised in blocks of 256 with a scale, and the mean once
    more; the paper sends 4 bits.

    Do not use it where the network is fast: per sample it learns less than `AllReduce`. With `period=1`, an outer SGD
    with learning rate 1 and no momentum, and plain SGD inside, it is data-parallel training.

    Communication: bytes of all weights in fp32 once in `period` steps, 1/4 of it with `quantize`; nothing else but one
    number a part. Memory: a copy of the weights in at least fp32 and the outer optimizer's states (one copy more by
    default) on `snapshot_device`; during an exchange one part in fp32.

    Args:
        period: Optimizer steps from one outer step of a parameter to the next.
        outer_optimizer: Class path or callable that makes it of a list of parameters. Default: SGD as above.
        outer_options: Its keyword arguments; for the default one those that differ.
        num_fragments: Parts that take turns; divides `period`.
        fragment_delay: Steps from when a part is sent until it is used; below `period / num_fragments`.
        mixing: Share of the new common weights in a replica's, above 0 and at most 1.
        quantize: None, "int8" or "float8" (e4m3).
        snapshot_device: "cpu" keeps common weights and outer states on the host, pinned where the model is on a CUDA
            device; None where the parameters are.

    Attributes:
        num_steps: Optimizer steps taken in the run.

    Raises:
        ValueError: For settings out of range; for an outer optimizer that cannot be made, or needs a closure; at the
            start of a run with fewer parameters than fragments.

    Example:
        >>> streaming = DiLoCo(period=48, num_fragments=4, fragment_delay=2, mixing=0.5)
        >>> adam = DiLoCo(outer_optimizer="torch.optim.Adam", outer_options={"lr": 0.1})
    """

    def __init__(
        self,
        period: int = 50,
        outer_optimizer: str | Callable[..., Any] | None = None,
        outer_options: dict[str, Any] | None = None,
        num_fragments: int = 1,
        fragment_delay: int = 0,
        mixing: float = 1.0,
        quantize: str | None = None,
        snapshot_device: str | None = "cpu",
    ) -> None:
        check_count("period", period, 1)
        check_count("num_fragments", num_fragments, 1)
        check_count("fragment_delay", fragment_delay, 0)
        if period % num_fragments:
            raise ValueError(
                f"`num_fragments={num_fragments}` must divide `period={period}`: the parts take turns, {period} / "
                f"{num_fragments} steps each."
            )
        if fragment_delay >= period // num_fragments:
            raise ValueError(
                f"`fragment_delay={fragment_delay}` must be below `period / num_fragments`, here {period} / "
                f"{num_fragments} = {period // num_fragments}: one part is under way at a time."
            )
        if not (is_number(mixing) and 0 < mixing <= 1):
            raise ValueError(f"`mixing={mixing!r}` must be a number above 0 and at most 1.")
        refuse_unknown("quantize", quantize, (None, *QUANTIZED))
        refuse_unknown("snapshot_device", snapshot_device, (None, "cpu"))
        self._make_outer = outer_optimizer_maker(outer_optimizer, outer_options)
        self.period, self.num_fragments, self.fragment_delay = period, num_fragments, fragment_delay
        self.mixing, self.quantize, self.snapshot_device = mixing, quantize, snapshot_device
        self._device = torch.device("cpu")
        self._forget()

    def _forget(self) -> None:
        self.num_steps = 0
        self.pending_weight = 0.0
        self._weights = [0.0] * self.num_fragments  # since each part was last sent; what is under way counts until used
        self._common: dict[str, nn.Parameter] = {}
        self._outer: Optimizer | None = None
        self._fragments: dict[str, int] = {}
        self._present: dict[str, Tensor] = {}  # what has stepped since it was agreed on, also if not trained any more
        self._under_way: _UnderWay | None = None

    @override
    def begin(self, replicas: Replicas, parameters: Mapping[str, Tensor]) -> None:
        super().begin(replicas, parameters)
        if len(parameters) < self.num_fragments:
            raise ValueError(
                f"`num_fragments={self.num_fragments}` must be at most the number of parameters, "
                f"here {len(parameters)}."
            )
        complex_names = [name for name, value in parameters.items() if value.is_complex()]
        if self.quantize is not None and complex_names:
            raise ValueError(
                f"`quantize={self.quantize!r}` has no codes for complex numbers, such as `{complex_names[0]}` has. "
                "Leave it out."
            )
        self._device = next((value.device for value in parameters.values()), torch.device("cpu"))
        self._forget()

    @property
    @override
    def apart(self) -> Mapping[str, Tensor]:
        return self._present

    @override
    def before_step(self, held: Mapping[str, Tensor]) -> None:
        new = {name: value for name, value in held.items() if name not in self._common}
        if new:
            self._place(new)
            for name, value in new.items():
                self._add_common(name, value)
        self._present.update(held)

    def _place(self, new: Mapping[str, Tensor]) -> None:
        sizes = {name: value.numel() * value.element_size() for name, value in new.items()}
        if not self._fragments:
            self._fragments = dict(zip(new, fragments_of(list(sizes.values()), self.num_fragments), strict=True))
            return
        num_bytes = [0] * self.num_fragments
        for name, fragment in self._fragments.items():
            num_bytes[fragment] += self._common[name].numel() * self._common[name].element_size()
        for name in new:
            lightest = num_bytes.index(min(num_bytes))
            self._fragments[name] = lightest
            num_bytes[lightest] += sizes[name]

    def _add_common(self, name: str, value: Tensor) -> None:
        device = torch.device(self.snapshot_device or self._device)
        common = torch.empty(
            value.shape,
            dtype=torch.promote_types(value.dtype, torch.float32),
            device=device,
            pin_memory=self._device.type == "cuda" and device.type == "cpu",
        )
        self._common[name] = parameter = nn.Parameter(common.copy_(value.detach()))
        if self._outer is None:
            self._outer = self._make_outer([parameter])
        else:
            self._outer.add_param_group({"params": [parameter]})

    @override
    @torch.no_grad()
    def after_step(self, held: Mapping[str, Tensor], progress: StepProgress) -> bool:
        self.num_steps += 1
        self._weights = [weight + progress.weight for weight in self._weights]
        turn, place = divmod(self.num_steps, self.period // self.num_fragments)
        if place == 0:
            self._start((turn - 1) % self.num_fragments)
        elif self._under_way is not None and place < self.fragment_delay:
            self._under_way.mean.advance()
        uses = self._under_way is not None and place == self.fragment_delay
        if uses:
            self._use(held)
        self.pending_weight = max(self._weights)
        return uses

    def _start(self, fragment: int) -> None:
        names = [name for name in self._common if name in self._present and self._fragments[name] == fragment]
        if not names:
            return
        changes = []
        for name in names:
            value = self._present[name].detach()
            common = self._common[name].detach().to(value.device, non_blocking=True)
            # From the common weights as replicas got them, in their type: rounding is no step of theirs.
            changes.append(common.to(value.dtype).to(common.dtype) - value)
        weight = self._weights[fragment]
        self._under_way = _UnderWay(fragment, names, weight, self.quantize, self._new_mean(self.quantize))
        self._under_way.mean.start(changes, weight)

    def _new_mean(self, kind: str | None) -> MeanUnderWay:
        group, size = self.replicas.group, self.replicas.size
        return DenseMean(group, size) if kind is None else QuantizedMean(group, size, kind)

    def _use(self, held: Mapping[str, Tensor]) -> None:
        assert self._under_way is not None
        assert self._outer is not None
        under_way, self._under_way = self._under_way, None
        for name, mean in zip(under_way.names, under_way.mean.result(), strict=True):
            common = self._common[name]
            common.grad = mean.to(common.device, common.dtype)
        self._outer.step()
        self._outer.zero_grad()
        for name in under_way.names:
            if name not in self._present:  # not trained any more when the run was resumed
                continue
            value = self._present[name] if name in held else self._present.pop(name)
            new = self._common[name].detach().to(value.device, non_blocking=True)
            # What is not trained any more is agreed on for the last time.
            if self.mixing < 1 and name in held:
                new = torch.lerp(value.detach().to(new.dtype), new, self.mixing)
            value.detach().copy_(new)
        self._weights[under_way.fragment] -= under_way.weight

    @override
    def agreed(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        means: dict[str, Tensor] = {}
        for fragment, weight in enumerate(self._weights):
            part = {name: value for name, value in held.items() if self._fragments.get(name, 0) == fragment}
            if part:
                means |= mean_of(part, self.replicas.group, weight)
        return {name: means[name] for name in held}

    @property
    def _schedule(self) -> list[int]:
        return [self.period, self.num_fragments, self.fragment_delay]

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counters, common weights and outer states by name, and the part under way, which is waited for."""
        outer = {} if self._outer is None else self._outer.state
        return {
            "num_steps": self.num_steps,
            "schedule": self._schedule,
            "weights": list(self._weights),
            "fragments": dict(self._fragments),
            "common": {name: value.detach() for name, value in self._common.items()},
            "outer": {name: dict(outer[value]) for name, value in self._common.items() if value in outer},
            "under_way": None if self._under_way is None else self._under_way.state(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forget()
        self.num_steps = state["num_steps"]
        for name, value in state["common"].items():
            self._add_common(name, value)
        if self._outer is not None:
            packed = self._outer.state_dict()
            outer = {place: state["outer"].get(name) for place, name in enumerate(self._common)}
            packed["state"] = {place: copy.deepcopy(value) for place, value in outer.items() if value is not None}
            self._outer.load_state_dict(packed)
        if len(state["weights"]) == self.num_fragments:
            self._weights, self._fragments = list(state["weights"]), dict(state["fragments"])
        else:
            self._place(self._common)
        self.pending_weight = max(self._weights)
        if state["under_way"] is not None and state["schedule"] == self._schedule:
            self._under_way = self._restored(**state["under_way"])

    def _restored(self, mean: Mapping[str, Any], **others: Any) -> _UnderWay:
        under_way = _UnderWay(**others, mean=self._new_mean(others["quantize"]))
        under_way.mean.restore(mean, self._device)
        return under_way

    @override
    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        # Weights and what is under way are of old replicas; the common weights are the same on all of them.
        return {**states[0], "weights": [0.0] * len(states[0]["weights"]), "under_way": None}


@dataclass
class _UnderWay:
    """A part of the model whose changes are being exchanged."""

    fragment: int
    names: list[str]
    weight: float
    quantize: str | None
    mean: MeanUnderWay

    def state(self) -> dict[str, Any]:
        """All there is to go on from."""
        return {**vars(self), "names": list(self.names), "mean": self.mean.state()}
