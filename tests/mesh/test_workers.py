"""Workers that live on between epochs draw in another process what they would have drawn."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_bigmodel.mesh.workers import begin_epoch, start_workers, worker_states

_LIVING: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}


class _Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(2), "index": index}


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(1) for _ in range(4))


def _init(worker: int) -> None:
    torch.manual_seed(worker)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(_Noise(), batch_size=2, num_workers=2, shuffle=True, worker_init_fn=_init, **_LIVING),
        lambda: DataLoader(_Noise(), batch_sampler=[[0, 1], [5, 3, 2]], num_workers=1, **_LIVING),
        lambda: DataLoader(_Stream(), batch_size=None, num_workers=2, **_LIVING),
    ],
    ids=["shuffled", "batch sampler", "stream"],
)
def test_another_process_goes_on_with_their_states(make: Callable[[], DataLoader[Any]]) -> None:
    """Noise that begins anew, batches of a thrown-away epoch, or a loader that keeps what was lent to it."""
    torch.manual_seed(0)
    first, second = make(), make()
    collate, init = first.collate_fn, first.worker_init_fn
    list(begin_epoch(first))
    states = worker_states(first)
    assert set(states) == set(range(first.num_workers))
    torch.manual_seed(1)
    expected = list(begin_epoch(first))
    start_workers(second, states)
    torch.manual_seed(1)
    found = list(begin_epoch(second))
    assert str(found) == str(expected)
    for loader in (second, first):  # iterated by somebody else, they give plain batches too
        torch.manual_seed(2)
        found.append(str(list(loader)))
    assert found[-1] == found[-2]
    for loader in (first, second):
        assert loader.collate_fn is collate
        assert loader.worker_init_fn is init


def test_an_iterator_that_is_dropped_ends_its_workers() -> None:
    """A cycle that keeps processes until the collector comes by."""
    loader = DataLoader(_Noise(), num_workers=1, **_LIVING)
    begin_epoch(loader)
    dropped = weakref.ref(loader._iterator)
    (process,) = loader._iterator._workers
    del loader
    assert dropped() is None
    assert not process.is_alive()


def test_other_loaders_are_iterated_as_they_are() -> None:
    """12 KiB a batch for states that nobody needs."""
    loader = DataLoader(_Noise(), num_workers=1, multiprocessing_context="fork")
    assert [batch["index"].item() for batch in begin_epoch(loader)] == list(range(8))
    assert worker_states(loader) == {}
    assert list(begin_epoch([1, 2])) == [1, 2]
