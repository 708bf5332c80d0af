import functools
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_bigmodel.mesh import Layout, MeshLoader, build_rank_mesh
from lightning_bigmodel.testing import run_ranks


class _Augmented(Dataset[Any]):
    """Adds noise from each generator; counts the samples it gave in this process."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_given = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_given += 1
        noise = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])
        return {"index": index, "noise": noise, "text": f"sample {index}"}


class _NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(7):
            yield index + random.random()


class _Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise OSError("file 3 is broken")
        return index


def _kwargs(num_pipe: int) -> dict[str, Any]:
    mesh = build_rank_mesh(Layout.resolve(dist.get_world_size(), pipeline_parallel_size=num_pipe), "cpu")
    # As in training: each rank's generators are somewhere else.
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(10 + mesh.rank)
    names = ("model_group", "model_rank", "data_group", "data_rank", "data_size")
    return {name: getattr(mesh, name) for name in names}


def _plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _plain(value) for key, value in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def _init_with_rank(worker_id: int, rank: int) -> None:
    """Seeds a worker by rank as well, as Lightning's own function does."""
    seed = torch.initial_seed() + 1000 * rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_source", ["broadcast", "replicated"])
def test_ranks_of_a_model_see_the_same_batches(batch_source: str, num_workers: int) -> None:
    """Guards against inputs on the first stage and labels on the last from different crops, masks or orders."""
    results = run_ranks(_epochs, 4, batch_source, num_workers)
    assert results[0] == results[2]  # ranks by (pipe, data): 0 and 2, 1 and 3 are one model each
    assert results[1] == results[3]
    for epoch in range(2):
        seen = [index for rank in (0, 1) for batch in results[rank][epoch] for index in batch["index"]]
        assert sorted(seen) == list(range(13))
    noise = [[batch["noise"] for batch in epoch] for epoch in results[0]]
    assert noise[0] != noise[1]
    assert noise != [[batch["noise"] for batch in epoch] for epoch in results[1]]


def _epochs(batch_source: Any, num_workers: int) -> Any:
    kwargs = _kwargs(2)
    inner = DataLoader(_Augmented(13), batch_size=2, shuffle=True, num_workers=num_workers)
    loader = MeshLoader(inner, mode="train", batch_source=batch_source, **kwargs)
    # A host may set this on what it is given, with each rank's own number.
    loader.worker_init_fn = functools.partial(_init_with_rank, rank=dist.get_rank())
    epochs = []
    for _ in range(2):
        batches = []
        for index, batch in enumerate(loader):
            torch.rand(3 + dist.get_rank())  # dropout: each stage draws another number of times
            if not loader.is_padding(index):
                batches.append(_plain(batch))
        epochs.append(batches)
    return epochs


def test_source_draws_as_one_process() -> None:
    """Guards against an order or augmentation that differs from one process with the source's seed."""
    expected = _one_process()
    for batch_source in ("broadcast", "replicated"):
        for result in run_ranks(_one_model, 2, batch_source):
            assert result == expected


def _one_process() -> Any:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(10)
    batches = []
    for _ in range(2):
        for batch in DataLoader(_Augmented(9), batch_size=2, shuffle=True):
            torch.rand(3)
            batches.append(_plain(batch))
    return batches


def _one_model(batch_source: Any) -> Any:
    kwargs = _kwargs(2)
    loader = MeshLoader(DataLoader(_Augmented(9), 2, shuffle=True), mode="train", batch_source=batch_source, **kwargs)
    batches = []
    for _ in range(2):
        for batch in loader:
            torch.rand(3)
            batches.append(_plain(batch))
    return batches


def test_only_the_source_loads_and_nothing_ahead() -> None:
    """Guards against every rank doing the loading, and against batches fetched past an early exit."""
    assert run_ranks(_early_exit, 2) == [(6, [0, 2, 0, 2, 4]), (0, [0, 2, 0, 2, 4])]


def _early_exit() -> tuple[int, list[int]]:
    dataset = _Augmented(20)
    loader = MeshLoader(DataLoader(dataset, batch_size=2), mode="train", **_kwargs(2))
    seen = []
    for batch in loader:
        seen.append(int(batch["index"][0]))
        if len(seen) == 2:
            break
    given = dataset.num_given
    iterator = iter(loader)
    seen += [int(next(iterator)["index"][0]) for _ in range(3)]
    assert dataset.num_given == (4 + 6 if given else 0)
    return dataset.num_given - given, seen


@pytest.mark.parametrize("num_workers", [0, 1])
def test_exception_in_the_source_reaches_all(num_workers: int) -> None:
    """Guards against ranks that wait for a batch that never comes."""
    start = time.monotonic()
    for rank, (kind, text, count) in enumerate(run_ranks(_broken, 3, num_workers)):
        assert kind == ("OSError" if rank == 0 else "RuntimeError")
        assert "file 3 is broken" in text
        assert count == 1
        if rank:
            assert "failed on rank 0" in text
            assert "Traceback" in text
    assert time.monotonic() - start < 60


def _broken(num_workers: int) -> tuple[str, str, int]:
    loader = MeshLoader(DataLoader(_Broken(), 2, num_workers=num_workers), mode="train", **_kwargs(3))
    count = 0
    try:
        for _ in loader:
            count += 1
    except Exception as error:
        return type(error).__name__, str(error), count
    raise AssertionError("no exception")


def test_what_cannot_start_or_be_sent_is_an_error_on_all() -> None:
    """Guards against a hang when the source cannot even begin, or cannot send what it has."""
    for rank, texts in enumerate(run_ranks(_cannot_start, 2)):
        assert "no such folder" in texts[0], rank
        assert "cannot be pickled" in texts[1], rank


def _cannot_start() -> list[str]:
    kwargs = _kwargs(2)

    class Unstartable:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no such folder")

    texts = []
    for inner in (Unstartable(), [lambda: None]):
        loader = MeshLoader(inner, mode="eval", **kwargs)
        with pytest.raises((OSError, TypeError, RuntimeError)) as caught:
            next(iter(loader))
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("batch_source", ["broadcast", "replicated"])
def test_iterables_stop_or_join_across_models(batch_source: str) -> None:
    """Guards against one model running on, or hanging, when the other model's data ends."""
    stopped = [([0, 1, 2], [False] * 3), ([100, 101, 102], [False] * 3)]
    assert run_ranks(_uneven, 4, batch_source, "stop") == stopped * 2
    joined = [([0, 1, 2, 2], [False] * 3 + [True]), ([100, 101, 102, 103], [False] * 4)]
    assert run_ranks(_uneven, 4, batch_source, "join") == joined * 2


def _uneven(batch_source: Any, uneven_inputs: Any) -> tuple[list[int], list[bool]]:
    kwargs = _kwargs(2)
    data_rank = kwargs["data_rank"]

    class Uneven:
        def __iter__(self) -> Iterator[int]:
            return iter(range(100 * data_rank, 100 * data_rank + 3 + data_rank))

    loader = MeshLoader(Uneven(), mode="train", batch_source=batch_source, uneven_inputs=uneven_inputs, **kwargs)
    batches = list(loader)
    return batches, [loader.is_padding(index) for index in range(len(batches))]


def test_replicated_loaders_that_differ_are_named() -> None:
    """Guards against stages trained on different data because a loader depends on the rank."""
    for messages in run_ranks(_differing, 3):
        assert "rank [2] loaded another batch 1 of the epoch than rank 0" in messages[0]
        assert "rank [1] loaded another batch 2 of the epoch" in messages[1]
        assert "file 3 is broken" in messages[2]


def _differing() -> list[str]:
    kwargs = _kwargs(3)
    rank = dist.get_rank()
    messages = []
    failing = _Broken() if rank == 1 else range(6)
    differing = [torch.tensor([0, 1 + (rank == 2), 2])[:, None], range(2 + (rank != 1)), DataLoader(failing, 2)]
    for inner in differing:
        loader = MeshLoader(inner, mode="eval", batch_source="replicated", **kwargs)
        with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
            list(loader)
        messages.append(str(caught.value))
    return messages


def test_ranks_out_of_step_are_told() -> None:
    """Guards against a rank that silently trains on the batch after the one it asked for."""
    source, receiver = run_ranks(_out_of_step, 2)
    assert source == "fine"
    assert "asked for batch 0, but the rank that loads for it sent batch 1" in receiver


def _out_of_step() -> str:
    loader = MeshLoader([1, 2, 3], mode="eval", **_kwargs(2))
    if dist.get_rank() == 0:
        return "fine" if list(loader) == [1, 2, 3] else "wrong"
    assert next(iter(loader)) == 1
    texts = []
    for _ in range(3):  # begins again and again, while the source goes on to its end
        with pytest.raises(RuntimeError) as caught:
            next(iter(loader))
        texts.append(str(caught.value))
    return texts[0]


@pytest.mark.parametrize("batch_source", ["broadcast", "replicated"])
def test_one_shot_iterators_and_streams(batch_source: str) -> None:
    """Guards the loaders that are no DataLoader of a data set with indices."""
    results = run_ranks(_streams, 2, batch_source)
    assert results[0] == results[1]
    assert [int(value) for value in results[0][0]] == list(range(7))
    assert results[0][1] == ["a", "b"]


def _streams(batch_source: Any) -> list[list[Any]]:
    kwargs = _kwargs(2)
    inner = [DataLoader(_NoisyStream(), batch_size=None, num_workers=1), iter(["a", "b"])]
    return [list(MeshLoader(loader, mode="train", batch_source=batch_source, **kwargs)) for loader in inner]


def test_lazy_padding_is_told_to_receivers() -> None:
    """Guards against a rank that does not load and so gives a padded batch full weight."""
    assert run_ranks(_lazy_padding, 4) == [[False, False], [False, True], [False, False], [False, True]]


def _lazy_padding() -> list[bool]:
    class Lazy:
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    loader = MeshLoader(DataLoader(_Augmented(5), 2, sampler=Lazy()), mode="train", **_kwargs(2))
    return [loader.is_padding(index) for index, _ in enumerate(loader)]
