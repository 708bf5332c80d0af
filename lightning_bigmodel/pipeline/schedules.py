"""The pipeline schedules: which there are, what they ask for, and how stages are dealt out to ranks.

All are torch's (`torch.distributed.pipelining.schedules`): GPipe (arXiv 1811.06965), 1F1B (arXiv 2006.09503),
Interleaved1F1B (arXiv 2104.04473), InterleavedZeroBubble and ZBVZeroBubble (arXiv 2401.10241), DualPipeV (arXiv
2412.19437).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_bigmodel import _host

__all__ = [
    "SCHEDULES",
    "ScheduleSpec",
    "build_schedule",
    "check_schedule",
    "rank_of_stage",
    "run_forwards",
    "run_schedule",
    "stages_of_rank",
]


@dataclass(frozen=True)
class ScheduleSpec:
    """What a schedule is like.

    Attributes:
        stages_per_rank: Stages each rank holds.
        is_v: Whether a rank's two stages mirror each other (first and last on rank 0) instead of being dealt in turn.
        min_microbatches_per_stage: 1 where there must be as many micro-batches as stages in all.
        whole_rounds: Whether the number of micro-batches must be a multiple of the number of rounds.
        splits_backward: Whether gradients of weights are computed apart from those of inputs.
    """

    stages_per_rank: int
    is_v: bool = False
    min_microbatches_per_stage: int = 0
    whole_rounds: bool = False
    splits_backward: bool = False


SCHEDULES: dict[str, ScheduleSpec] = {
    "GPipe": ScheduleSpec(1),
    "1F1B": ScheduleSpec(1, min_microbatches_per_stage=1),
    "Interleaved1F1B": ScheduleSpec(2, whole_rounds=True),
    "InterleavedZeroBubble": ScheduleSpec(2, whole_rounds=True, splits_backward=True),
    "ZBVZeroBubble": ScheduleSpec(2, is_v=True, splits_backward=True),
    "DualPipeV": ScheduleSpec(2, is_v=True, min_microbatches_per_stage=1, splits_backward=True),
}


def check_schedule(name: str, pipeline_size: int, num_microbatches: int) -> ScheduleSpec:
    """The spec of a schedule, after checking that it can take the given numbers.

    Raises:
        ValueError: For an unknown name, or a number of micro-batches the schedule cannot run, with the nearest legal
            one.
    """
    spec = SCHEDULES.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.3)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`schedule={name!r}` is not known. Use one of {', '.join(map(repr, SCHEDULES))}.{hint}")
    num_stages = pipeline_size * spec.stages_per_rank
    least = num_stages * spec.min_microbatches_per_stage
    if num_microbatches < least:
        raise ValueError(
            f"`schedule={name!r}` on {pipeline_size} pipeline ranks has {num_stages} stages and needs at least {least} "
            f"micro-batches, but `num_microbatches={num_microbatches}`. Set `num_microbatches={least}` or more, or use "
            "`schedule='GPipe'`, which takes any number."
        )
    rounds = max(1, num_microbatches // pipeline_size)
    if spec.whole_rounds and num_microbatches % rounds:
        legal = [n for n in range(1, 4 * pipeline_size + num_microbatches) if n % max(1, n // pipeline_size) == 0]
        nearest = min(legal, key=lambda n: (abs(n - num_microbatches), -n))
        raise ValueError(
            f"`schedule={name!r}` on {pipeline_size} pipeline ranks runs micro-batches in {rounds} rounds of equal "
            f"size, which `num_microbatches={num_microbatches}` cannot fill. Set `num_microbatches={nearest}` "
            f"(multiples of `pipeline_parallel_size={pipeline_size}` always work)."
        )
    return spec


def next_legal(name: str, pipeline_size: int, num_microbatches: int) -> int:
    """The smallest number of micro-batches from `num_microbatches` on that a schedule can take."""
    if pipeline_size == 1:
        return num_microbatches
    spec = SCHEDULES[name]
    number = max(num_microbatches, pipeline_size * spec.stages_per_rank * spec.min_microbatches_per_stage)
    while spec.whole_rounds and number % max(1, number // pipeline_size):
        number += 1
    return number


def stages_of_rank(name: str, pipeline_size: int, pipe_rank: int) -> list[int]:
    """Indices of the stages a rank holds, ascending."""
    spec = SCHEDULES[name]
    if spec.is_v:
        return [pipe_rank, 2 * pipeline_size - 1 - pipe_rank]
    return [pipe_rank + pipeline_size * turn for turn in range(spec.stages_per_rank)]


def rank_of_stage(name: str, pipeline_size: int, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    if SCHEDULES[name].is_v and stage >= pipeline_size:
        return 2 * pipeline_size - 1 - stage
    return stage % pipeline_size


def _first(output: Tensor, target: Tensor) -> Tensor:
    return output


def build_schedule(name: str, stages: Sequence[Any], num_microbatches: int) -> Any:
    """Torch's schedule object over this rank's stages. One object serves every batch shape."""
    schedule_class = get_schedule_class(name)
    single = SCHEDULES[name].stages_per_rank == 1
    # Losses are weighted by our stages; `scale_grads=True` would divide accumulated gradients again at every call.
    schedule = schedule_class(
        stages[0] if single else list(stages), num_microbatches, loss_fn=_first, scale_grads=False
    )
    _host.mark_schedule_initialized(schedule)
    return schedule


def run_schedule(schedule: Any, num_microbatches: int, device: torch.device) -> None:
    """Run one step of a schedule: forwards, backwards and all communication between stages."""
    # The stages take inputs and losses from their tasks; torch only wants a target to split over the micro-batches.
    schedule.step(target=torch.zeros(num_microbatches, device=device), return_outputs=False)


def run_forwards(stages: Sequence[Any], num_microbatches: int) -> None:
    """Forward only, for evaluation: each stage takes all micro-batches in turn."""
    import torch.distributed as dist

    sends: list[Any] = []
    held = {stage.stage_index: stage for stage in stages}
    for stage in stages:
        stage.has_backward = False
        stage.clear_runtime_states()
    for stage in sorted(stages, key=lambda stage: stage.stage_index):
        for index in range(num_microbatches):
            if stage.stage_index - 1 not in held:
                for operation in stage.get_fwd_recv_ops(index):
                    dist.recv(operation.tensor, src=operation.peer, group=operation.group)
            output = stage.forward_one_chunk(index)
            if stage.stage_index + 1 in held:
                held[stage.stage_index + 1].set_local_fwd_input(output, index)
            else:
                sends.extend(
                    dist.isend(operation.tensor, dst=operation.peer, group=operation.group)
                    for operation in stage.get_fwd_send_ops(index)
                )
    for send in sends:
        send.wait()
