import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_bigmodel.mesh import ShardedBatchSampler, ShardedSampler
from lightning_bigmodel.testing import run_ranks

_NUM_SAMPLES = [0, 1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 17]


class _Lazy:
    """A sampler without a length."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)


class _Curriculum(torch.utils.data.Sampler[int]):
    """Draws from several generators, and depends on the epoch."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.epoch = num_samples, 0

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_samples))
        random.shuffle(order)
        return iter([order[int(i)] + 100 * self.epoch for i in torch.randperm(len(order))])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class _Buckets:
    """A batch sampler with an own constructor and batches of different sizes."""

    def __init__(self, sampler: Any, sizes: list[int]) -> None:
        self.sampler, self.sizes, self.epoch = sampler, sizes, 0

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        for size in self.sizes:
            yield list(itertools.islice(indices, size))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def _batches(sampler: Any, batch_size: int, drop_last: bool) -> list[list[int]]:
    return list(BatchSampler(sampler, batch_size, drop_last))


@pytest.mark.parametrize("wrap", [range, lambda n: _Lazy(range(n))], ids=["sized", "lazy"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_samples", _NUM_SAMPLES)
def test_training_ranks_union_is_one_process(num_samples: int, num_ranks: int, drop_last: bool, wrap: Any) -> None:
    """Guards against lost or repeated samples, unequal numbers of batches, and padding nobody is told of."""
    size = 2
    one_process = _batches(range(num_samples), size * num_ranks, drop_last)
    samplers = [ShardedSampler(wrap(num_samples), num_ranks, rank, None, drop_last, size) for rank in range(num_ranks)]
    ranks = [_batches(sampler, size, drop_last) for sampler in samplers]
    assert {len(batches) for batches in ranks} == {len(one_process)}
    for index, expected in enumerate(one_process):
        parts = [part[index] for part, sampler in zip(ranks, samplers, strict=True) if not sampler.is_padding(index)]
        union = [sample for samples in itertools.zip_longest(*parts) for sample in samples if sample is not None]
        assert union == expected
    for batches, sampler in zip(ranks, samplers, strict=True):
        padding = [index for index in range(len(batches)) if sampler.is_padding(index)]
        assert padding in ([], [len(batches) - 1])
        if padding and len(batches) > 1:
            assert batches[-1] == batches[0]
        if wrap is range:
            assert len(sampler) == sum(map(len, batches))
            fresh = ShardedSampler(range(num_samples), num_ranks, sampler.rank, None, drop_last, size)
            assert [index for index in range(len(batches)) if fresh.is_padding(index)] == padding


@pytest.mark.parametrize("wrap", [range, lambda n: _Lazy(range(n))], ids=["sized", "lazy"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_samples", _NUM_SAMPLES)
def test_evaluation_sees_each_sample_once(num_samples: int, num_ranks: int, wrap: Any) -> None:
    """Guards against metrics over repeated samples, and predictions that cannot be put back in order."""
    placed: dict[int, int] = {}
    for rank in range(num_ranks):
        sampler = ShardedSampler(wrap(num_samples), num_ranks, rank, None, False, 3, pad=False)
        batches = _batches(sampler, 3, False)
        for index, batch in enumerate(batches):
            assert not sampler.is_padding(index)
            positions = sampler.positions(index)
            assert len(positions) == len(batch)
            assert not placed.keys() & set(positions)
            placed.update(zip(positions, batch, strict=True))
        assert len(sampler.positions(len(batches))) == 0
    assert placed == {index: index for index in range(num_samples)}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_batches", [1, 3, 4, 5])
@pytest.mark.parametrize("pad", [True, False])
def test_batch_sampler_is_sharded_by_batch(num_batches: int, num_ranks: int, pad: bool) -> None:
    """Guards against tearing apart batches that a user's batch sampler put together."""
    sizes = list(range(1, num_batches + 1))
    samplers = [
        ShardedBatchSampler(_Buckets(range(100), sizes), num_ranks, rank, None, pad=pad) for rank in range(num_ranks)
    ]
    ranks = [list(sampler) for sampler in samplers]
    expected = list(_Buckets(range(100), sizes))
    assert [len(sampler) for sampler in samplers] == [len(batches) for batches in ranks]
    seen = {
        position: batch
        for sampler, batches in zip(samplers, ranks, strict=True)
        for index, batch in enumerate(batches)
        if not sampler.is_padding(index)
        for position in sampler.positions(index)
    }
    assert [seen[position] for position in range(num_batches)] == expected
    if pad:
        assert {len(batches) for batches in ranks} == {-(-num_batches // num_ranks)}
    else:
        assert sum(map(len, ranks)) == num_batches


def test_orders_agree_and_equal_one_process() -> None:
    """Guards against each rank shuffling by its own, drifted random state."""
    expected = _epochs_of_one_process()
    for result in run_ranks(_epochs_of_a_rank, 3, expected):
        assert result is None


def test_different_orders_are_refused_on_every_rank() -> None:
    """Guards against a sampler seeded by rank, whose shards overlap without a word; and against a hang at its error."""
    for errors in run_ranks(_orders_that_fail, 2):
        assert "another order on rank [1] than on rank 0" in errors[0]
        assert "rank 1: ValueError('no order')" in errors[1]
        assert errors[2] == "fine"


def test_epoch_reaches_the_users_samplers() -> None:
    """Guards against an epoch that stops at the wrapper: a curriculum would stay at its start."""
    curriculum = _Curriculum(4)
    ShardedSampler(curriculum, 2, 0, None, False, 1).set_epoch(3)
    assert curriculum.epoch == 3
    buckets = _Buckets(curriculum, [2, 2])
    sharded = ShardedBatchSampler(buckets, 2, 0, None)
    sharded.set_epoch(5)
    assert (buckets.epoch, curriculum.epoch) == (5, 5)
    assert sharded.sampler is curriculum


def test_infinite_samplers_are_read_as_they_go() -> None:
    """Guards against drawing a whole order that never ends."""
    sampler = ShardedSampler(_Lazy(itertools.count()), 4, 1, None, False, 2)
    assert list(itertools.islice(sampler, 5)) == [1, 5, 9, 13, 17]
    with pytest.raises(TypeError):
        len(sampler)


def test_bad_ranks_and_sizes_are_refused() -> None:
    """Guards against a rank outside the world, which would see no sample at all."""
    with pytest.raises(ValueError, match="rank 2 of 2 ranks"):
        ShardedSampler(range(4), 2, 2, None, False, 1)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
        ShardedSampler(range(4), 2, 1, None, False, 0)


def _samplers() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "shuffle": RandomSampler(range(11)),
        "own generator": WeightedRandomSampler([1.0, 2.0, 3.0], 11, generator=generator),
        "curriculum": _Curriculum(11),
        "sequential": SequentialSampler(range(11)),
    }


def _epochs_of_one_process() -> dict[str, Any]:
    random.seed(1)
    torch.manual_seed(1)
    orders: dict[str, Any] = {name: [list(sampler), list(sampler)] for name, sampler in _samplers().items()}
    orders["after"] = (random.random(), float(torch.rand(())))
    return orders


def _epochs_of_a_rank(expected: dict[str, Any]) -> None:
    rank = dist.get_rank()
    random.seed(1 + rank)
    torch.manual_seed(1 + rank)
    own_state = torch.get_rng_state()
    for name, base in _samplers().items():
        sampler = ShardedSampler(base, 3, rank, dist.group.WORLD, True, 1)
        for epoch in range(2):
            assert list(sampler) == expected[name][epoch][:9][rank::3], name
    if rank == 0:  # its generators go on as in one process; the others' are left alone
        assert (random.random(), float(torch.rand(()))) == expected["after"]
    else:
        assert torch.equal(torch.get_rng_state(), own_state)
    sampler = ShardedSampler(RandomSampler(range(9)), 3, rank, dist.group.WORLD, True, 1)
    clone = copy.deepcopy(sampler)
    assert len(list(clone)) == 3
    assert pickle.loads(pickle.dumps(sampler)).num_ranks == 3


def _orders_that_fail() -> list[str]:
    rank = dist.get_rank()

    class Failing(_Curriculum):
        def __iter__(self) -> Iterator[int]:
            if rank == 1:
                raise ValueError("no order")
            return super().__iter__()

    seeded_by_rank = RandomSampler(range(20), generator=torch.Generator().manual_seed(rank))
    return [_error_of(base) for base in (seeded_by_rank, Failing(20), _Curriculum(20))]


def _error_of(base: Any) -> str:
    try:
        list(ShardedSampler(base, 2, dist.get_rank(), dist.group.WORLD, False, 2))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "fine"
