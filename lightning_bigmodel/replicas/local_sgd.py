"""Local SGD: replicas step alone and average their weights now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_bigmodel.replicas._checks import check_count
from lightning_bigmodel.replicas.averaging import average_in_place, share_of, sum_numbers
from lightning_bigmodel.replicas.sync import ParameterSync, Replicas, StepProgress, refuse_unknown

__all__ = ["LocalSGD"]


class LocalSGD(ParameterSync):
    """Let replicas step by their own gradients, and average their weights every `period` optimizer steps.

    Stich 2018 (arXiv 1805.09767): with K replicas and step size eta,

        w_k <- w_k - eta g_k                        at each step, without a message
        w_k <- sum_j n_j w_j / sum_j n_j            at each `period`-th step

    where n_j is what the batches of replica j weighed since the last average (samples, tokens): the plain mean where
    loaders are even, and a replica that had no batch takes the mean of the others. `warmup_steps` gives post-local SGD
    (Lin et al. 2018, arXiv 1808.07217), which generalises better than local steps from the start. With
    `inside_period`, neighbouring replicas, such as those of a machine, average more often among themselves
    (hierarchical local SGD, section 5 of the same paper); a replica then takes an equal share of what its neighbours
    weighed into the next average over all.

    Do not use it where the network is fast: longer periods cost accuracy (ResNet-50 on 32 GPUs lost 1.5 points of 75.8
    at a period of 16, by PaddleFleet's measurement), and `AllReduce` costs none. With `period=1` and plain SGD it is
    data-parallel training; with momentum it is so only if states are averaged too. Batch statistics are not averaged
    here. Clipping and noise scales see one replica's gradient.

    Communication: bytes of all weights (in at least fp32) and one small message each time, nothing in between; bytes
    of the optimizer's states on top with `optimizer_state="average"`. Memory: two messages.

    Args:
        period: Optimizer steps from one average over all replicas to the next.
        warmup_steps: First steps of the run after each of which all replicas average.
        ranks_inside: How many neighbouring replicas average every `inside_period` steps; must divide the number of
            replicas. Default: those of a machine.
        inside_period: Steps between their averages; divides `period`. None: only all replicas average.
        optimizer_state: "keep" leaves momentum and the like with each replica, "average" averages it like weights,
            which came nearer to dense training in every run measured (examples/slow_networks).

    Attributes:
        num_steps: Optimizer steps taken in the run.
        pending_weight: What the batches of this replica weighed since the last average.

    Raises:
        ValueError: For settings out of range or without effect; at the start of a run of one replica, or whose number
            of replicas is no multiple of `ranks_inside`.

    Example:
        >>> LocalSGD(period=16, warmup_steps=100).period
        16
    """

    def __init__(
        self,
        period: int = 16,
        warmup_steps: int = 0,
        ranks_inside: int | None = None,
        inside_period: int | None = None,
        optimizer_state: str = "keep",
    ) -> None:
        check_count("period", period, 1)
        check_count("warmup_steps", warmup_steps, 0)
        if inside_period is not None:
            check_count("inside_period", inside_period, 1, " Leave it out for one level.")
            if inside_period >= period or period % inside_period:
                raise ValueError(
                    f"`inside_period={inside_period}` must divide `period={period}` and be smaller: neighbours average "
                    "between two averages over all replicas."
                )
        if ranks_inside is not None:
            check_count("ranks_inside", ranks_inside, 2, " Leave it out for the replicas of a machine.")
            if inside_period is None:
                raise ValueError(
                    f"`ranks_inside={ranks_inside}` needs `inside_period`, the steps between averages of neighbours."
                )
        refuse_unknown("optimizer_state", optimizer_state, ("keep", "average"))
        self.period, self.warmup_steps = period, warmup_steps
        self.ranks_inside, self.inside_period = ranks_inside, inside_period
        self.optimizer_state = optimizer_state
        self.averages_optimizer_state = optimizer_state == "average"
        self.num_steps = 0
        self.pending_weight = 0.0
        self._steps_apart = 0  # since the last average over all
        self._inside: dist.ProcessGroup | None = None
        self._last: tuple[dist.ProcessGroup | None, float] | None = None
        self._apart: dict[str, Tensor] = {}  # what has stepped since then, also if it is not trained any more
        self._device = torch.device("cpu")

    @override
    def begin(self, replicas: Replicas, parameters: Mapping[str, Tensor]) -> None:
        super().begin(replicas, parameters)
        if replicas.size < 2:
            raise ValueError(
                f"`{type(self).__name__}` needs at least 2 replicas to average, and this run has {replicas.size}. "
                "Leave it out, or give the run more data-parallel ranks."
            )
        self.num_steps = self._steps_apart = 0
        self.pending_weight = 0.0
        self._apart, self._last = {}, None
        self._device = next((value.device for value in parameters.values()), torch.device("cpu"))
        if self.inside_period is not None:
            num_inside = self.ranks_inside or replicas.ranks_a_machine
            if not 1 < num_inside < replicas.size or replicas.size % num_inside:
                raise ValueError(
                    f"`ranks_inside={self.ranks_inside}` is {num_inside} neighbours here, but must be more than 1, "
                    f"fewer than the {replicas.size} replicas, and divide them. Or leave out `inside_period`."
                )
            self._inside, _ = replicas.levels(num_inside)

    @property
    @override
    def apart(self) -> Mapping[str, Tensor]:
        return self._apart

    @override
    def before_step(self, held: Mapping[str, Tensor]) -> None:
        self._apart.update(held)

    @override
    def after_step(self, held: Mapping[str, Tensor], progress: StepProgress) -> bool:
        self.num_steps += 1
        self._steps_apart += 1
        self.pending_weight += progress.weight
        if self.num_steps <= self.warmup_steps or self._steps_apart >= self.period:
            self._average(held, self.replicas.group, progress)
            self.pending_weight, self._steps_apart = 0.0, 0
            self._apart.clear()
        elif self.inside_period is not None and self._steps_apart % self.inside_period == 0:
            self.pending_weight = self._average(held, self._inside, None)
        else:
            return False
        return True

    def _average(
        self, held: Mapping[str, Tensor], group: dist.ProcessGroup | None, progress: StepProgress | None
    ) -> float:
        """Average over `group`; what its ranks weigh, in equal shares."""
        told = [] if progress is None else self._tell(progress)
        total, count, *heard = sum_numbers([self.pending_weight, 1.0, *told], group, self._device)
        share = share_of(self.pending_weight, total, count)
        # Names that left since the last average differ between replicas, and would for good.
        average_in_place(list({**self._apart, **held}.values()), group, share)
        self._last = group, share
        if progress is not None:
            self._hear(heard, progress)
        return total / count

    def _tell(self, progress: StepProgress) -> list[float]:
        """Numbers that are summed along with the weights of an average over all."""
        return []

    def _hear(self, sums: list[float], progress: StepProgress) -> None:
        """Those sums."""

    def average_alike(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors as weights were when `after_step` last returned True: over those replicas, by those shares.

        In place. Collective over those replicas, before the next step: for optimizer state.
        """
        assert self._last is not None, "nothing was averaged yet"
        average_in_place(tensors, *self._last)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "steps_apart": self._steps_apart,
            "pending_weight": self.pending_weight,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps, self._steps_apart = state["num_steps"], state["steps_apart"]
        self.pending_weight = state["pending_weight"]

    @override
    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        # Other replicas start from weights that were agreed on: nothing is pending.
        return {**states[0], "pending_weight": 0.0}
