import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
)

from lightning_bigmodel.mesh import Layout, MeshLoader, build_rank_mesh
from lightning_bigmodel.testing import run_ranks

_ALONE: dict[str, Any] = {"model_group": None, "model_rank": 0, "data_group": None, "data_rank": 0, "data_size": 1}


class _Numbers(Dataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor(float(index)), "name": str(index)}


class _Stream(IterableDataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.num_samples))


class _Pairs(BatchSampler):
    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, extra: str) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.extra = extra


def _worker_init(worker_id: int) -> None:
    torch.manual_seed(worker_id)


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.stack([sample["x"] for sample in samples]), "names": [sample["name"] for sample in samples]}


def _mesh_kwargs(num_pipe: int = 1) -> dict[str, Any]:
    mesh = build_rank_mesh(Layout.resolve(torch.distributed.get_world_size(), pipeline_parallel_size=num_pipe), "cpu")
    names = ("model_group", "model_rank", "data_group", "data_rank", "data_size")
    return {name: getattr(mesh, name) for name in names}


def _shape(num_ranks: int, rank: int) -> dict[str, Any]:
    """Keyword arguments of one of several data ranks that need no agreement."""
    return {**_ALONE, "data_size": num_ranks, "data_rank": rank}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [1, 3, 8, 11, 13])
def test_shuffled_training_union_is_one_process(num_ranks: int, num_samples: int) -> None:
    """Guards against any change of the data by the number of ranks: order, batches, uneven end."""
    size = 2
    random.seed(0)
    torch.manual_seed(0)
    one = DataLoader(_Numbers(num_samples), batch_size=size * num_ranks, shuffle=True, collate_fn=_collate)
    expected = [[batch["names"] for batch in one] for _ in range(2)]
    ranks = run_ranks(_two_epochs, num_ranks, num_samples, size)
    for epoch in range(2):
        assert {len(rank[epoch]) for rank in ranks} == {len(expected[epoch])}
        for index, names in enumerate(expected[epoch]):
            parts = [rank[epoch][index][0] for rank in ranks if not rank[epoch][index][1]]
            union = [name for column in itertools.zip_longest(*parts) for name in column if name is not None]
            assert union == names


def _two_epochs(num_samples: int, batch_size: int) -> list[list[tuple[list[str], bool]]]:
    kwargs = _mesh_kwargs()
    random.seed(kwargs["data_rank"])
    torch.manual_seed(kwargs["data_rank"])  # rank 0's seed is that of the one process
    inner = DataLoader(_Numbers(num_samples), batch_size=batch_size, shuffle=True, collate_fn=_collate)
    loader = MeshLoader(inner, mode="train", **kwargs)
    return [[(batch["names"], loader.is_padding(index)) for index, batch in enumerate(loader)] for _ in range(2)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("mode", ["eval", "predict"])
@pytest.mark.parametrize("num_samples", [0, 1, 3, 8, 13])
def test_evaluation_sees_each_sample_once(num_samples: int, num_ranks: int, mode: Any) -> None:
    """Guards against samples counted twice in a metric, and predictions that cannot be put back in order."""
    placed: dict[int, str] = {}
    for rank in range(num_ranks):
        inner = DataLoader(_Numbers(num_samples), batch_size=2, collate_fn=_collate)
        loader = MeshLoader(inner, mode=mode, **_shape(num_ranks, rank))
        batches = list(loader)
        assert len(loader) == len(batches)
        for index, batch in enumerate(batches):
            assert not loader.is_padding(index)
            if num_ranks == 1:
                assert loader.positions(index) is None
            positions = loader.positions(index) or range(2 * index, 2 * index + len(batch["names"]))
            placed.update(zip(positions, batch["names"], strict=True))
        if num_ranks > 1:
            assert sum(len(batch["names"]) for batch in batches) == len(range(rank, num_samples, num_ranks))
    assert placed == {index: str(index) for index in range(num_samples)}


def test_one_data_rank_leaves_the_loader_alone() -> None:
    """Guards against a rebuilt loader where nothing had to be sharded."""
    inner = DataLoader(_Numbers(4), batch_size=2)
    loader = MeshLoader(inner, mode="train", **_ALONE)
    assert loader._loader is inner
    state = torch.get_rng_state()
    numbers = [torch.rand(3) for _ in inner]
    torch.set_rng_state(state)
    for expected, _ in zip(numbers, loader, strict=True):
        torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_lengths_and_attributes() -> None:
    """Guards `len` where there is none (a progress bar that never fills), and attributes hosts read and write."""
    sized = MeshLoader(DataLoader(_Numbers(7), 2), mode="train", **_ALONE)
    assert (len(sized), sized.batch_size, sized.num_workers, len(sized.dataset)) == (4, 2, 0, 7)
    assert not hasattr(sized, "nothing_like_this")
    sized.worker_init_fn = _worker_init
    assert sized._loader.worker_init_fn is _worker_init
    for endless in (MeshLoader(DataLoader(_Stream(5), 2), mode="train", **_ALONE),):
        with pytest.raises(TypeError):
            len(endless)
        assert [batch.tolist() for batch in endless] == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="got int"):
        MeshLoader(3, mode="train", **_ALONE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`mode` must be one of"):
        MeshLoader([], mode="fit", **_ALONE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`batch_source` must be one of"):
        MeshLoader([], mode="train", batch_source="copy", **_ALONE)  # type: ignore[arg-type]


def test_loader_state_passes_through() -> None:
    """Guards the resume of loaders that keep their position, and against one that has none claiming it has."""

    class Stateful(list[int]):
        position = 0

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    loader = MeshLoader(Stateful([1, 2]), mode="train", **_ALONE)
    loader.load_state_dict({"position": 5})
    assert loader.state_dict() == {"position": 5}
    assert isinstance(loader, MeshLoader)
    assert not hasattr(MeshLoader([1], mode="train", **_ALONE), "state_dict")


def test_epoch_reaches_samplers_once() -> None:
    """Guards against a shuffle by epoch that never changes, or is moved twice."""
    calls: list[tuple[str, int]] = []

    class Told(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("sampler", epoch))

    class ToldBatches(_Pairs):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("batch sampler", epoch))

    for num_ranks in (1, 2):
        calls.clear()
        MeshLoader(DataLoader(_Numbers(4), 2, sampler=Told(range(4))), mode="train", **_shape(num_ranks, 0)).set_epoch(
            3
        )
        assert calls == [("sampler", 3)]
        calls.clear()
        batches = ToldBatches(Told(range(4)), 2, False, "x")
        MeshLoader(DataLoader(_Numbers(4), batch_sampler=batches), mode="train", **_shape(num_ranks, 0)).set_epoch(4)
        assert sorted(calls) == [("batch sampler", 4), ("sampler", 4)]


def test_lazy_sampler_tells_of_padding_once_drawn() -> None:
    """Guards against a padded batch that gets full weight because its sampler has no length."""

    class Lazy:
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    loader = MeshLoader(DataLoader(_Numbers(5), 2, sampler=Lazy(), collate_fn=_collate), mode="train", **_shape(2, 1))
    assert [(batch["names"], loader.is_padding(index)) for index, batch in enumerate(loader)] == [
        (["1", "3"], False),
        (["1", "3"], True),
    ]


def test_copies_and_pickles() -> None:
    """Guards against a copy that recurses for ever, or an unpickled loader that loads alone without a word."""
    loader = MeshLoader(DataLoader(_Numbers(4), 2, shuffle=True), mode="train", **_ALONE)
    clone = pickle.loads(pickle.dumps(loader))
    assert len(list(clone)) == len(list(copy.deepcopy(loader))) == 2
    assert clone.dataset is not loader.dataset
    assert copy.deepcopy(loader)._plan.is_padding.__self__ is not loader
    sharded = MeshLoader(DataLoader(_Numbers(4), 2), mode="train", **_shape(2, 1))
    with pytest.raises(RuntimeError, match="came out of a pickle"):
        iter(pickle.loads(pickle.dumps(sharded)))
    assert len(list(copy.deepcopy(sharded))) == 1
