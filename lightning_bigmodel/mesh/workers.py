"""Random states of workers that live on between epochs (`persistent_workers=True`).

Such workers are seeded once, and what they draw in an epoch depends on all epochs before. Each batch brings along the
state its worker has then; workers of a resumed run begin with the states that those of the saved run had.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, get_worker_info

from lightning_bigmodel import _host
from lightning_bigmodel.mesh.rng import RngState, capture_rng, restore_rng

__all__ = ["begin_epoch", "start_workers", "worker_states"]

_STATES: WeakKeyDictionary[Any, dict[int, bytes]] = WeakKeyDictionary()


def begin_epoch(loader: Any) -> Iterator[Any]:
    """`iter(loader)`, whose workers from now on bring their random states along if they live on between epochs.

    Cost: 12 KiB a batch between processes, for such workers only.
    """
    if not (isinstance(loader, DataLoader) and loader.persistent_workers) or _host.has_workers(loader):
        return iter(loader)
    collate = loader.collate_fn
    loader.collate_fn = _Carrying(collate)
    try:
        iterator = iter(loader)
    finally:
        loader.collate_fn = collate  # the loader stays as it was; the iterator takes off what is carried
    states: dict[int, bytes] = {}
    _STATES[iterator] = states

    def take(result: Any) -> Any:
        if not isinstance(result, _Carried):
            return result
        states[result.worker] = result.state
        return result.batch

    _host.change_results(iterator, take)
    return iterator


def worker_states(loader: Any) -> dict[int, RngState]:
    """Worker -> its random state after the last batch that came from it; empty where workers do not live on."""
    iterator = _host.living_iterator(loader)
    found = {} if iterator is None else _STATES.get(iterator, {})
    return {worker: pickle.loads(state) for worker, state in found.items()}


def start_workers(loader: Any, states: Mapping[int, RngState]) -> None:
    """Start new workers that live on, with these random states; none fetches anything before the next epoch begins."""
    _host.forget_workers(loader)
    init = loader.worker_init_fn
    loader.worker_init_fn = _Restoring(init, dict(states))
    try:
        with _host.without_samples(loader):
            iterator = begin_epoch(loader)
        _host.take_sampler_again(iterator, loader)
    finally:
        loader.worker_init_fn = init
    _STATES[iterator].update((worker, pickle.dumps(state)) for worker, state in states.items())


class _Carried(NamedTuple):  # which torch's pinning of memory goes into
    batch: Any
    worker: int
    state: bytes


class _Carrying:
    """In a worker: what `collate` gives, and the worker's random state."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        batch, worker = self._collate(samples), get_worker_info()
        return batch if worker is None else _Carried(batch, worker.id, pickle.dumps(capture_rng()))


class _Restoring:
    """In a worker: what `init` does, and then the random state of its like."""

    def __init__(self, init: Callable[[int], Any] | None, states: dict[int, RngState]) -> None:
        self._init, self._states = init, states

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        if worker in self._states:
            restore_rng(self._states[worker])
