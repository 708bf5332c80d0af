from typing import Any

import pytest

from lightning_bigmodel.mesh import Layout


def _shape(world_size: int, **sizes: Any) -> tuple[int, ...]:
    return Layout.resolve(world_size, **sizes).shape


def test_remaining_ranks_are_data_parallel() -> None:
    """Guards against ranks left idle, or counted twice, when only some sizes are given."""
    assert _shape(1) == (1, 1, 1, 1)
    assert _shape(8) == (1, 8, 1, 1)
    assert _shape(8, pipeline_parallel_size=2) == (2, 4, 1, 1)
    assert _shape(24, pipeline_parallel_size=3, tensor_parallel_size=2) == (3, 4, 1, 2)
    assert _shape(8, zero_stage=3) == (1, 1, 8, 1)
    assert _shape(16, zero_stage=2, data_replicate_size=2, pipeline_parallel_size=2) == (2, 2, 4, 1)
    assert _shape(8, data_replicate_size=8) == (1, 8, 1, 1)


def test_expert_is_a_view() -> None:
    """Guards against the expert size multiplying the world, which would leave dense layers replicated over it."""
    layout = Layout.resolve(8, expert_parallel_size=4, zero_stage=1)
    assert (layout.expert, layout.world_size, layout.data_size) == (4, 8, 8)
    with pytest.raises(ValueError, match=r"`expert_parallel_size=3`.*4 data-parallel.*\[1, 2, 4\]"):
        Layout.resolve(8, expert_parallel_size=3, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("world_size", "sizes", "parts"),
    [
        (
            6,
            {"pipeline_parallel_size": 4},
            ["6 ranks", "`pipeline_parallel_size=4`", "4 or 8 ranks", "1 or 2 or 3 or 6"],
        ),
        (2, {"pipeline_parallel_size": 4}, ["2 ranks", "4 ranks", "`pipeline_parallel_size` of 1 or 2"]),
        (8, {"tensor_parallel_size": 3}, ["`tensor_parallel_size=3`", "6 or 9 ranks", "of 1 or 2 or 4 or 8"]),
        (8, {"zero_stage": 1, "data_replicate_size": 3}, ["`data_replicate_size=3`", "8 data", "[1, 2, 4, 8]"]),
        (8, {"data_replicate_size": 2}, ["`data_replicate_size=2`", "`zero_stage=0`", "8 data"]),
        (8, {"zero_stage": 4}, ["`zero_stage`", "got 4"]),
        (8, {"pipeline_parallel_size": 0}, ["`pipeline_parallel_size`", "at least 1", "got 0"]),
        (0, {}, ["`world_size`", "got 0"]),
    ],
)
def test_impossible_sizes_are_refused(world_size: int, sizes: dict[str, int], parts: list[str]) -> None:
    """Guards against a message that names no number, no setting, or no way out."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each part of the message is looked for below
        Layout.resolve(world_size, **sizes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [True, "2", 2.0, None])
def test_wrong_types_are_refused(value: Any) -> None:
    """Guards against `True` counting as 1 rank, and a quoted YAML number failing far away."""
    with pytest.raises(TypeError, match="`tensor_parallel_size` must be an int"):
        Layout.resolve(8, tensor_parallel_size=value)
    if value is not None:
        with pytest.raises(TypeError, match="`data_replicate_size` must be an int"):
            Layout.resolve(8, data_replicate_size=value, zero_stage=1)
    with pytest.raises(TypeError, match="`pipe` must be an int"):
        Layout(pipe=value, data_replicate=1, data_shard=1, tensor=1)
