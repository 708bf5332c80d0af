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
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
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


class _Prefixed(DataLoader[Any]):
    """A subclass with a constructor argument of its own, kept as an attribute."""

    def __init__(self, prefix: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefix = prefix

    def __iter__(self) -> Any:
        return ((self.prefix, batch) for batch in super().__iter__())


class _Forgetful(DataLoader[Any]):
    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(_Numbers(len(path)), **kwargs)


class _Secretive(DataLoader[Any]):
    def __init__(self, tag: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden = tag


class _Closed(DataLoader[Any]):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=2)


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


def test_rebuilt_loader_keeps_every_setting() -> None:
    """Guards against a setting lost on the way: the collate function, the workers, the generator."""
    generator = torch.Generator()
    dataset = _Numbers(12)
    inner = DataLoader(
        dataset,
        batch_size=3,
        drop_last=True,
        collate_fn=_collate,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        worker_init_fn=_worker_init,
        multiprocessing_context="fork",
        generator=generator,
        timeout=60,
    )
    loader = MeshLoader(inner, mode="train", **_shape(2, 1))
    changed = {"sampler", "batch_sampler", "_DataLoader__multiprocessing_context"}
    for name, value in vars(inner).items():
        if name not in changed:
            assert vars(loader._loader)[name] is value or vars(loader._loader)[name] == value, name
    assert loader.multiprocessing_context.get_start_method() == "fork"
    for epoch in range(2):
        assert [batch["names"] for batch in loader] == [["1", "3", "5"], ["7", "9", "11"]], epoch
    loader._loader._iterator._shutdown_workers()


def test_users_samplers_are_kept() -> None:
    """Guards against a sampler of the user's own being dropped for plain shuffling."""
    weighted = WeightedRandomSampler([0.0, 1.0, 0.0, 2.0], 8, generator=torch.Generator().manual_seed(1))
    expected = list(WeightedRandomSampler([0.0, 1.0, 0.0, 2.0], 8, generator=torch.Generator().manual_seed(1)))
    loader = MeshLoader(DataLoader(_Numbers(4), 2, sampler=weighted, collate_fn=_collate), mode="train", **_shape(2, 1))
    assert [int(name) for batch in loader for name in batch["names"]] == expected[1::2]
    assert loader.sampler.base_sampler is weighted
    pairs = _Pairs(SequentialSampler(range(10)), 2, False, extra="needed")
    loader = MeshLoader(
        DataLoader(_Numbers(10), batch_sampler=pairs, collate_fn=_collate), mode="train", **_shape(2, 1)
    )
    assert [batch["names"] for batch in loader] == [["2", "3"], ["6", "7"], ["2", "3"]]
    assert [loader.is_padding(index) for index in range(3)] == [False, False, True]
    assert loader.batch_sampler.base_batch_sampler is pairs
    plain = BatchSampler(SequentialSampler(range(10)), 2, False)
    loader = MeshLoader(
        DataLoader(_Numbers(10), batch_sampler=plain, collate_fn=_collate), mode="train", **_shape(2, 1)
    )
    assert [batch["names"] for batch in loader] == [["1", "3"], ["5", "7"], ["9"]]
    unbatched = MeshLoader(DataLoader(_Numbers(3), batch_size=None), mode="train", **_shape(2, 1))
    assert [sample["name"] for sample in unbatched] == ["1", "1"]
    assert unbatched.is_padding(1)


def test_subclasses_are_rebuilt_or_refused() -> None:
    """Guards against a subclass silently replaced by a plain DataLoader, or left unsharded."""
    inner = _Prefixed("p", _Numbers(4), batch_size=2, collate_fn=_collate)
    inner.hung_on_later = "kept"
    loader = MeshLoader(inner, mode="train", **_shape(2, 1))
    assert [(prefix, batch["names"]) for prefix, batch in loader] == [("p", ["1", "3"])]
    assert loader.hung_on_later == "kept"
    forgetful = _Forgetful("abcd", batch_size=2, collate_fn=_collate)
    with pytest.raises(TypeError, match=r"\['path'\].*`use_distributed_sampler=False`"):
        MeshLoader(forgetful, mode="train", **_shape(2, 1))
    with pytest.raises(TypeError, match=r"does not take \['sampler', .*`use_distributed_sampler=False`"):
        MeshLoader(_Closed(_Numbers(4)), mode="train", **_shape(2, 1))
    assert len(list(MeshLoader(forgetful, mode="eval", shard=False, **_shape(2, 1)))) == 2


def test_constructor_arguments_can_be_told() -> None:
    """Guards a subclass that hides an argument but whose caller knows it."""
    inner = _Secretive("tag", _Numbers(4), batch_size=2, collate_fn=_collate)
    with pytest.raises(TypeError, match=r"\['tag'\]"):
        MeshLoader(inner, mode="train", **_shape(2, 1))
    loader = MeshLoader(inner, mode="train", init_arguments={"tag": "tag"}, **_shape(2, 1))
    assert loader.hidden == "tag"
    assert [batch["names"] for batch in loader] == [["1", "3"]]


def test_distributed_sampler_of_the_user() -> None:
    """Guards against sharding what is sharded already, and against one made for all ranks of a pipeline."""
    mine = DistributedSampler(_Numbers(8), num_replicas=2, rank=1, shuffle=False)
    loader = MeshLoader(DataLoader(_Numbers(8), 2, sampler=mine, collate_fn=_collate), mode="train", **_shape(2, 1))
    assert loader.sampler is mine
    assert [batch["names"] for batch in loader] == [["1", "3"], ["5", "7"]]
    for num_ranks in (1, 4):
        with pytest.raises(ValueError, match=rf"for 2 replicas, but there are {num_ranks} data ranks"):
            MeshLoader(DataLoader(_Numbers(8), 2, sampler=mine), mode="train", **_shape(num_ranks, 0))


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


def test_unordered_workers_are_put_in_order() -> None:
    """Guards against padding and positions told for the wrong batch."""
    inner = DataLoader(_Numbers(4), 2, num_workers=1, in_order=False)
    with pytest.warns(UserWarning, match="`in_order=False` is set to True"):
        loader = MeshLoader(inner, mode="train", **_shape(2, 0))
    assert loader.in_order is True


def test_iterables_stop_together() -> None:
    """Guards against a hang when data ranks run dry at different times, and against samples counted twice."""
    for lengths, epochs in run_ranks(_uneven_iterables, 2):
        assert epochs == [3, 3, 3]
        assert lengths == [None, None, 3]


def _uneven_iterables() -> tuple[list[int | None], list[int]]:
    kwargs = _mesh_kwargs()
    num = 3 + 2 * kwargs["data_rank"]

    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter(range(num))

    loaders = [
        MeshLoader(DataLoader(_Stream(num), batch_size=1), mode="train", **kwargs),
        MeshLoader(Unsized(), mode="train", **kwargs),
        MeshLoader(list(range(num)), mode="train", **kwargs),
    ]
    lengths = [_length_or_none(loader) for loader in loaders]
    counts = [sum(1 for _ in loader) for loader in loaders]
    assert sum(1 for _ in MeshLoader(Unsized(), mode="eval", **kwargs)) == num
    return lengths, counts


def _length_or_none(loader: MeshLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def test_no_agreement_where_lengths_are_equal() -> None:
    """Guards against an exchange before each batch of a plain sharded loader, which would cost each step."""
    assert run_ranks(_count_collectives, 2) == [0, 0]


def _count_collectives() -> int:
    kwargs = _mesh_kwargs()
    loaders = [
        MeshLoader(DataLoader(_Numbers(8), 2), mode="train", **kwargs),
        MeshLoader(DataLoader(_Numbers(8), 2), mode="train", shard=False, **kwargs),
    ]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    calls = []
    for name in ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list"):
        setattr(torch.distributed, name, lambda *args, name=name, **rest: calls.append(name))
    for iterator in iterators:
        assert len(list(iterator)) in (1, 3)
    return len(calls)


def test_failing_iterable_fails_on_every_data_rank() -> None:
    """Guards against data ranks that wait for one whose loader raised."""
    messages = run_ranks(_one_rank_raises, 2)
    assert "bad file" in messages[0]
    assert messages[1] == "bad file"


def _one_rank_raises() -> str:
    kwargs = _mesh_kwargs()

    def batches() -> Iterator[int]:
        yield 1
        if kwargs["data_rank"] == 1:
            raise OSError("bad file")
        yield 2
        yield 3

    iterator = iter(MeshLoader(batches(), mode="train", **kwargs))
    assert next(iterator) == 1
    with pytest.raises((OSError, RuntimeError)) as caught:
        next(iterator)
    return str(caught.value)


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


def test_generator_of_the_loader_is_used_on_every_rank() -> None:
    """Guards against `DataLoader(generator=...)` shuffling differently than in one process."""

    def shuffled(**shape: Any) -> Any:
        generator = torch.Generator().manual_seed(9)
        return DataLoader(_Numbers(8), shape.pop("size"), shuffle=True, generator=generator, collate_fn=_collate)

    one = [name for batch in shuffled(size=4) for name in batch["names"]]
    for rank in range(2):
        loader = MeshLoader(shuffled(size=2), mode="train", **_shape(2, rank))
        assert isinstance(loader.sampler.base_sampler, RandomSampler)
        assert [name for batch in loader for name in batch["names"]] == one[rank::2]
