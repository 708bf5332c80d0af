from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
)

from lightning_bigmodel.mesh import Layout, MeshLoader, build_rank_mesh
from lightning_bigmodel.testing import run_ranks


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


def _mesh_kwargs(num_pipe: int = 1) -> dict[str, Any]:
    mesh = build_rank_mesh(Layout.resolve(torch.distributed.get_world_size(), pipeline_parallel_size=num_pipe), "cpu")
    names = ("model_group", "model_rank", "data_group", "data_rank", "data_size")
    return {name: getattr(mesh, name) for name in names}


def test_iterables_stop_together() -> None:
    """Guards against a hang when data ranks run dry at different times, and against samples counted twice."""
    for lengths, epochs, _ in run_ranks(_uneven_iterables, 2, "stop", 3):
        assert epochs == [3, 3, 3, 3]
        assert lengths == [None, None, 3, None]


@pytest.mark.parametrize("fewest", [3, 0])
def test_iterables_join(fewest: int) -> None:
    """Batches that are lost, counted twice, or missing where a rank has none at all."""
    results = run_ranks(_uneven_iterables, 2, "join", fewest)
    for rank, (lengths, epochs, padding) in enumerate(results):
        assert epochs == [fewest + 2] * 4
        assert lengths == [None, None, fewest + 2, None]
        assert padding == [[False] * fewest + [rank == 0] * 2] * 4


def _uneven_iterables(uneven_inputs: Any, fewest: int) -> tuple[list[int | None], list[int], list[list[bool]]]:
    kwargs = {**_mesh_kwargs(), "uneven_inputs": uneven_inputs}
    num = fewest + 2 * kwargs["data_rank"]

    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter(range(num))

    loaders = [
        MeshLoader(DataLoader(_Stream(num), batch_size=1), mode="train", **kwargs),
        MeshLoader(Unsized(), mode="train", **kwargs),
        MeshLoader(list(range(num)), mode="train", **kwargs),
        # A length on one rank only: it must not end there while the others wait for it.
        MeshLoader(list(range(num)) if kwargs["data_rank"] == 0 else Unsized(), mode="train", **kwargs),
    ]
    lengths = [_length_or_none(loader) for loader in loaders]
    counts = [sum(1 for _ in loader) for loader in loaders]
    padding = [
        [loader.is_padding(index) for index in range(count)] for loader, count in zip(loaders, counts, strict=True)
    ]
    for keeps_pace, expected in ((False, num), (True, fewest + 2)):
        evaluation = MeshLoader(Unsized(), mode="eval", keeps_pace=keeps_pace, **kwargs)
        if fewest:
            assert sum(1 for _ in evaluation) == expected
        else:  # what the others log would wait for this rank's
            with pytest.raises(ValueError, match="has no batch on 1 of 2 data ranks"):
                list(evaluation)
    return lengths, counts, padding


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
