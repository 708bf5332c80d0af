"""What schedules ask for, and how stages are dealt out; `tests/conformance/test_schedules.py` trains with them."""

from __future__ import annotations

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from lightning_bigmodel.pipeline.schedules import SCHEDULES, check_schedule, rank_of_stage, stages_of_rank


def test_interleaved_stages_are_dealt_in_turn_and_v_stages_mirrored() -> None:
    """A V schedule whose last stage is not beside its first, or stages dealt in runs, send everything twice."""
    assert [stages_of_rank("1F1B", 4, rank) for rank in range(4)] == [[0], [1], [2], [3]]
    assert [stages_of_rank("Interleaved1F1B", 2, rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [stages_of_rank("DualPipeV", 3, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [rank_of_stage("ZBVZeroBubble", 2, stage) for stage in range(4)] == [0, 1, 1, 0]
    assert [rank_of_stage("InterleavedZeroBubble", 2, stage) for stage in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_a_rank_are_those_torch_expects(name: str) -> None:
    """A schedule of several stages that is given one, or the other way round, fails in torch's constructor."""
    kind = torch_schedules.get_schedule_class(name)
    assert issubclass(kind, torch_schedules.PipelineScheduleMulti) == (SCHEDULES[name].stages_per_rank > 1)


@pytest.mark.parametrize(
    ("name", "size", "number", "parts"),
    [
        ("1F1B", 4, 3, ["4 pipeline ranks has 4 stages", "`num_microbatches=3`", "Set `num_microbatches=4` or more"]),
        ("DualPipeV", 2, 3, ["has 4 stages", "Set `num_microbatches=4` or more", "`schedule='GPipe'`"]),
        ("Interleaved1F1B", 4, 9, ["2 rounds", "`num_microbatches=9`", "Set `num_microbatches="]),
        ("1F1BB", 2, 4, ["`schedule='1F1BB'` is not known", "'ZBVZeroBubble'", "Did you mean '1F1B'?"]),
    ],
)
def test_what_a_schedule_cannot_take_is_refused(name: str, size: int, number: int, parts: list[str]) -> None:
    """An assertion of torch in the middle of the first step, on some ranks."""
    with pytest.raises(ValueError, match="`schedule=") as caught:
        check_schedule(name, size, number)
    for part in parts:
        assert part in str(caught.value)
