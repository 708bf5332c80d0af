import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_bigmodel.mesh import Layout, MeshLoader, build_rank_mesh, capture_rng
from lightning_bigmodel.testing import run_ranks

_ALONE: dict[str, Any] = {"model_group": None, "model_rank": 0, "data_group": None, "data_rank": 0, "data_size": 1}


class _Noisy(Dataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(torch.rand(()))])

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a data set must not be copied")


class _Remembering:
    """A sampler that goes on where it stopped."""

    def __init__(self, dataset: Any, copies: bool = True) -> None:
        self.data_source, self.position, self.copies = dataset, 0, copies

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        for _ in range(4):
            self.position += 1
            yield (self.position - 1) % 8

    def __deepcopy__(self, memo: Any) -> Any:
        if not self.copies:
            raise TypeError("no copies")
        clone = _Remembering(self.data_source)
        clone.position = self.position
        return clone


class _Stream(IterableDataset[Any]):
    starts = 0

    def __iter__(self) -> Iterator[Any]:
        self.starts += 1
        return (torch.tensor([float(index)]) for index in range(4))


def _state() -> str:
    state = capture_rng()
    return repr((state.python, state.torch_cpu.tolist(), state.numpy))


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("size", [2, None])
def test_peek_is_the_next_first_batch_and_leaves_no_trace(size: int | None, own_generator: bool) -> None:
    """Guards against a trace of another batch than the first, and against a run whose data a peek has changed."""
    torch.manual_seed(4)
    generator = torch.Generator().manual_seed(8) if own_generator else None
    loader = MeshLoader(DataLoader(_Noisy(9), size, shuffle=True, generator=generator), mode="train", **_ALONE)
    before = _state()
    peeked = loader.peek()
    assert torch.equal(loader.peek(), peeked)
    assert _state() == before
    assert torch.equal(next(iter(loader)), peeked)


def test_peek_does_not_advance_a_sampler_with_state() -> None:
    """Guards against samples skipped because a look at the first batch moved a curriculum on."""
    dataset = _Noisy(8)
    sampler = _Remembering(dataset)
    loader = MeshLoader(DataLoader(dataset, 2, sampler=sampler), mode="train", **_ALONE)
    assert loader.peek()[:, 0].tolist() == [0, 1]
    assert sampler.position == 0
    sharded = MeshLoader(DataLoader(dataset, 2, sampler=sampler), mode="train", **{**_ALONE, "data_size": 2})
    assert sharded.peek()[:, 0].tolist() == [0, 2]
    assert sampler.position == 0
    stubborn = MeshLoader(DataLoader(dataset, 2, sampler=_Remembering(dataset, False)), mode="train", **_ALONE)
    assert stubborn.peek()[:, 0].tolist() == [0, 1]


def test_peek_of_an_iterable_hands_the_batch_out_again() -> None:
    """Guards against a first batch lost, a stream started twice, or a batch spoilt by who looked at it."""
    dataset = _Stream()
    one_shot = iter([torch.ones(1), torch.ones(1) * 2])
    for inner, expected in ((DataLoader(dataset, batch_size=None), [0, 1, 2, 3]), (one_shot, [1, 2])):
        loader = MeshLoader(inner, mode="train", **_ALONE)
        loader.peek().fill_(-1)
        assert float(loader.peek()) == expected[0]
        iter(loader)  # a host's check that it can be iterated
        assert [float(batch) for batch in loader] == expected
    assert dataset.starts == 1
    assert len(list(MeshLoader(DataLoader(_Stream(), batch_size=None), mode="train", **_ALONE))) == 4


def test_a_new_epoch_drops_what_was_peeked_of_another() -> None:
    """Guards a resumed run against beginning with a batch of epoch 0."""

    class ByEpoch:
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch, 7])

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    loader = MeshLoader(ByEpoch(), mode="train", **_ALONE)
    assert loader.peek() == 0
    loader.set_epoch(0)
    assert loader.peek() == 0
    loader.set_epoch(5)
    assert list(loader) == [5, 7]


def test_empty_loaders_give_none() -> None:
    """Guards against a StopIteration that ends a loop of the caller's."""
    for inner in (DataLoader(_Noisy(0), 2), DataLoader(_Noisy(0), None), [], iter([])):
        loader = MeshLoader(inner, mode="eval", **_ALONE)
        assert loader.peek() is None
        assert list(loader) == []


def test_peek_raises_what_the_loader_raises() -> None:
    """Guards against an error of the data taken for an empty loader."""
    with pytest.raises(TypeError):
        MeshLoader(DataLoader([1, "two"], 2), mode="eval", **_ALONE).peek()


@pytest.mark.parametrize("batch_source", ["broadcast", "replicated"])
def test_peek_is_the_same_on_all_ranks_of_a_model(batch_source: str) -> None:
    """Guards against stages traced with different batches, a hang, and a peek that moves the ranks' generators."""
    results = run_ranks(_peek_on_ranks, 4, batch_source)
    for map_style, stream, empty, error in results:
        assert stream == [0.0] * 2
        assert empty is None
        assert "invalid data type 'str'" in error
        assert map_style[0] == map_style[1]
    assert [result[0] for result in results[:2]] == [result[0] for result in results[2:]]
    first, second = results[0][0][0], results[1][0][0]
    assert {row[0] for row in first}.isdisjoint({row[0] for row in second})


def _peek_on_ranks(batch_source: Any) -> Any:
    mesh = build_rank_mesh(Layout.resolve(4, pipeline_parallel_size=2), "cpu")
    names = ("model_group", "model_rank", "data_group", "data_rank", "data_size")
    kwargs = {name: getattr(mesh, name) for name in names}
    kwargs.update(mode="train", batch_source=batch_source)
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    loader = MeshLoader(DataLoader(_Noisy(9), 2, shuffle=True), **kwargs)
    before = _state()
    peeked = loader.peek().tolist()
    assert _state() == before
    map_style = (peeked, next(iter(loader)).tolist())
    stream = MeshLoader(DataLoader(_Stream(), batch_size=None), **kwargs)
    values = [float(stream.peek()), float(next(iter(stream)))]
    empty = MeshLoader(DataLoader(_Noisy(0), 2), **kwargs).peek()
    with pytest.raises((TypeError, RuntimeError)) as caught:
        MeshLoader(DataLoader([1, 1, 1, 1, "two", "two"], 6), **{**kwargs, "data_size": 1, "data_group": None}).peek()
    return map_style, values, empty, str(caught.value)


def test_a_peek_after_the_first_batch_was_taken_ahead_begins_nothing() -> None:
    """A second iterator that waits for the next epoch with a batch of this one, or that robs a generator of one."""
    loader = MeshLoader((number for number in range(4)), mode="train", **_ALONE)
    iterator = iter(loader)
    ahead = next(iterator)
    assert loader.peek() == ahead == 0
    assert list(iterator) == [1, 2, 3]
    sized = MeshLoader([[0], [1]], mode="train", **_ALONE)
    iterator = iter(sized)
    assert sized.peek() == [0]
    assert list(iterator) == [[0], [1]]
    assert sized._pending is None
