from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_bigmodel.mesh import MeshLoader

_ALONE: dict[str, Any] = {"model_group": None, "model_rank": 0, "data_group": None, "data_rank": 0, "data_size": 1}


class _Numbers(Dataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor(float(index)), "name": str(index)}


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


def _shape(num_ranks: int, rank: int) -> dict[str, Any]:
    """Keyword arguments of one of several data ranks that need no agreement."""
    return {**_ALONE, "data_size": num_ranks, "data_rank": rank}


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


def test_unordered_workers_are_put_in_order() -> None:
    """Guards against padding and positions told for the wrong batch."""
    inner = DataLoader(_Numbers(4), 2, num_workers=1, in_order=False)
    with pytest.warns(UserWarning, match="`in_order=False` is set to True"):
        loader = MeshLoader(inner, mode="train", **_shape(2, 0))
    assert loader.in_order is True


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
