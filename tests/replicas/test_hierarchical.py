"""All-reduce in two levels: the plain sum, whatever the sizes, and each level in its type."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel import HierarchicalAllReduce
from lightning_bigmodel.replicas import hierarchical
from lightning_bigmodel.replicas.sync import NamedGradient, Replicas, StepProgress
from lightning_bigmodel.testing import CollectiveCounter, run_ranks
from tests.replicas.sync_runs import replicas_of

# None divides by 2 or 3 with those before it; one without elements, one in other memory, one number, one large.
SHAPES: list[tuple[int, ...]] = [(7,), (3, 5), (0, 4), (2, 3, 3, 3), (), (11, 13), (1,)]


def _values(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(rank)
    values = [torch.randn(shape, dtype=torch.float64, generator=numbers).to(dtype) for shape in SHAPES]
    return [value.to(memory_format=torch.channels_last) if value.dim() == 4 else value for value in values]


def _reduce(sync: HierarchicalAllReduce, values: list[torch.Tensor]) -> list[torch.Tensor]:
    sync.reduce(
        [NamedGradient(name=str(i), value=value, parameter=value, options={}) for i, value in enumerate(values)],
        StepProgress(),
    )
    return values


def _sums(num_inside: int, bucket_bytes: list[int], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    ends = []
    replicas = replicas_of(num_inside)
    for size in bucket_bytes:
        # By default as many as share a machine.
        sync = HierarchicalAllReduce(None if size == 1 else num_inside, bucket_bytes=size)
        sync.begin(replicas, {})
        values = _values(dist.get_rank(), dtype)
        strides = [value.stride() for value in values]
        ends.append(_reduce(sync, values))
        assert [value.stride() for value in values] == strides
        assert _reduce(sync, []) == []
        sync.end()
    return ends


@pytest.mark.parametrize(("num_inside", "num_ranks"), [(2, 4), (3, 6)])
def test_equals_the_plain_sum(num_inside: int, num_ranks: int) -> None:
    """The last elements of a message that does not divide evenly, or a tensor larger than a message, left out."""
    sizes = [1, 100, 333, 1 << 20]
    for dtype, limit in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        found = run_ranks(_sums, num_ranks, num_inside, sizes, dtype)
        columns = zip(*(_values(rank, torch.float64) for rank in range(num_ranks)), strict=True)
        expected = [torch.stack(column).sum(0) for column in columns]
        for index in range(len(sizes)):
            for rank in range(num_ranks):
                for value, total, same in zip(found[rank][index], expected, found[0][index], strict=True):
                    assert value.shape == total.shape
                    torch.testing.assert_close(value.double(), total, rtol=limit, atol=limit)
                    assert torch.equal(value, same)


def _types(settings: dict[str, Any]) -> tuple[dict[str, tuple[int, int]], torch.Tensor]:
    sync = HierarchicalAllReduce(2, bucket_bytes=800, **settings)
    sync.begin(replicas_of(), {})
    # 256 + 1 has no place in bfloat16; so its sum tells where it was summed.
    values = [torch.tensor([256.0, 0.0, 1.0, 1.0][dist.get_rank()]).repeat(100) for _ in range(8)]
    with CollectiveCounter() as counter:
        _reduce(sync, values)
    assert all(torch.equal(value, values[0]) for value in values)
    return counter.as_dict(), values[0][:2]


@pytest.mark.parametrize(
    ("settings", "inside", "across", "total"),
    [
        ({}, 4, 4, 258.0),
        ({"across_dtype": "bfloat16"}, 4, 2, 258.0),
        ({"inside_dtype": "bfloat16"}, 2, 2, 258.0),
        ({"inside_dtype": "bfloat16", "across_dtype": "float32"}, 2, 4, 258.0),
        ({"across_dtype": "float16"}, 4, 2, 258.0),
    ],
)
def test_bytes_of_each_level(settings: dict[str, Any], inside: int, across: int, total: float) -> None:
    """All bytes sent across machines; a type that has no effect, or an effect on the other level."""
    for counts, value in run_ranks(_types, 4, settings):
        assert value.tolist() == [total, total]
        # 4 messages of 200 elements; each replica has half of each.
        assert counts == {
            "reduce_scatter": (4, 800 * inside),
            "all_reduce": (4, 400 * across),
            "all_gather": (4, 400 * inside),
        }


def _rounded(settings: dict[str, Any]) -> float:
    sync = HierarchicalAllReduce(2, **settings)
    sync.begin(replicas_of(), {})
    return float(_reduce(sync, [torch.tensor([[256.0, 1.0, 0.5, 0.5][dist.get_rank()]])])[0])


def test_sums_are_made_in_the_type_of_their_level() -> None:
    """Sent in one type and summed in another, so that digits are lost that were paid for."""
    # In bfloat16, 256 + 1 is 256 and 257 is 256, and 1 = 0.5 + 0.5 is exact.
    for settings, expected in (
        ({}, 258.0),
        ({"inside_dtype": "bfloat16", "across_dtype": "float32"}, 256.0),
        ({"across_dtype": "bfloat16"}, 256.0),
        ({"across_dtype": "float16"}, 258.0),
    ):
        assert run_ranks(_rounded, 4, settings) == [expected] * 4, settings


def _noted(order: list[str], name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    order.append(name.split("_")[1])
    return call(*args, **kwargs)


def _order() -> list[str]:
    replicas = replicas_of(2)
    sync = HierarchicalAllReduce(2, bucket_bytes=8)
    sync.begin(replicas, {})
    order: list[str] = []
    for place, name in ((hierarchical, "reduce_scatter_flat"), (dist, "all_reduce"), (hierarchical, "all_gather_flat")):
        setattr(place, name, functools.partial(_noted, order, name, getattr(place, name)))
    _reduce(sync, [torch.ones(2) for _ in range(3)])
    return order


def test_messages_of_both_levels_overlap() -> None:
    """A message that waits until the one before has crossed, while links inside are idle."""
    expected = ["scatter", "reduce", "scatter", "gather", "reduce", "scatter", "gather", "reduce", "gather"]
    for order in run_ranks(_order, 4):
        assert order == expected


@pytest.mark.parametrize(
    ("settings", "size", "a_machine", "words"),
    [
        ({}, 4, 1, r"\(1 replicas share a machine\) of 4 replicas leaves one level.*Use `AllReduce`"),
        ({}, 4, 4, r"\(4 replicas share a machine\) of 4 replicas leaves one level"),
        ({"ranks_inside": 8}, 4, 2, r"`ranks_inside=8` of 4 replicas leaves one level"),
        ({"ranks_inside": 4}, 6, 2, r"`ranks_inside=4` does not divide the 6 replicas.*Use one of \[2, 3\]"),
        ({}, 5, 4, r"`ranks_inside=None` \(4 replicas share a machine\) does not divide the 5 replicas"),
    ],
)
def test_one_level_is_refused(settings: dict[str, Any], size: int, a_machine: int, words: str) -> None:
    """A hierarchy without effect, or groups of unequal size, which hang."""
    replicas = Replicas(group=None, size=size, rank=0, ranks_a_machine=a_machine, levels=lambda _: (None, None))
    with pytest.raises(ValueError, match=words):
        HierarchicalAllReduce(**settings).begin(replicas, {})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ranks_inside": 1}, "`ranks_inside=1` must be a whole number of at least 2"),
        ({"inside_dtype": "int8"}, "`inside_dtype='int8'` is not known. Use None, 'float32'"),
        ({"across_dtype": "half"}, "`across_dtype='half'` is not known"),
        ({"bucket_bytes": 0}, "`bucket_bytes=0` must be a whole number of at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    """An error at the first step."""
    with pytest.raises(ValueError, match=words):
        HierarchicalAllReduce(**settings)
