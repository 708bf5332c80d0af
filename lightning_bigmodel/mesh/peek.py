"""The first batch of a map-style DataLoader, fetched in this process without moving its samplers on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_bigmodel.mesh.samplers import ShardedBatchSampler, ShardedSampler

__all__ = ["EMPTY", "peek_first_batch"]

EMPTY = object()
"""What `peek_first_batch` returns for a loader without batches; a batch may itself be None."""

# Their only changing state is a generator, which is put back; copying them would copy the data set they may hold.
_STATELESS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    ShardedBatchSampler,
    ShardedSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def peek_first_batch(loader: DataLoader[Any]) -> Any:
    """Fetch the batch the loader's next epoch will begin with.

    The loader's and the samplers' own generators are put back as they were (the global ones are the caller's to put
    back); a sampler of the user's own is deep-copied first, without the data set, and used itself only if it cannot be
    copied. A random augmentation inside worker processes will give other numbers than here.

    Args:
        loader: A map-style DataLoader. A sharded one makes this call collective over its group.

    Returns:
        The batch, or `EMPTY`.
    """
    with _kept_generators(loader):
        # One process draws the workers' seed first, then the order; without this the order would be another one.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        batches = loader.batch_sampler
        if batches is None:
            for index in _disposable(loader.sampler, loader):
                return loader.collate_fn(loader.dataset[index])
            return EMPTY
        for indices in _disposable(batches, loader):
            fetch_many = getattr(loader.dataset, "__getitems__", None)
            samples = fetch_many(indices) if callable(fetch_many) else [loader.dataset[index] for index in indices]
            return loader.collate_fn(samples)
        return EMPTY


def _chain(sampler: Any) -> list[Any]:
    """A sampler and the samplers inside it."""
    chain: list[Any] = []
    while sampler is not None and all(sampler is not known for known in chain):
        chain.append(sampler)
        inner = (getattr(sampler, name, None) for name in ("base_sampler", "base_batch_sampler", "sampler"))
        sampler = next((candidate for candidate in inner if candidate is not None), None)
    return chain


def _disposable(sampler: Any, loader: DataLoader[Any]) -> Any:
    if all(type(link) in _STATELESS for link in _chain(sampler)):
        return sampler
    kept = [loader.dataset, *(link.data_source for link in _chain(sampler) if hasattr(link, "data_source"))]
    try:
        return copy.deepcopy(sampler, {id(thing): thing for thing in kept})
    except Exception:  # whatever the user's class raises on a copy
        return sampler


@contextmanager
def _kept_generators(loader: DataLoader[Any]) -> Iterator[None]:
    owners = [loader, *_chain(loader.sampler), *_chain(loader.batch_sampler)]
    generators = [owner.generator for owner in owners if isinstance(getattr(owner, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
