"""The user's DataLoader on a mesh: each data rank its part, each rank of a model the same batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_bigmodel.mesh.epoch import EpochBatches, Loaded, LoadPlan, Position, share_batch, source_rng
from lightning_bigmodel.mesh.peek import EMPTY, peek_first_batch
from lightning_bigmodel.mesh.rebuild import distributed_sampler_of, shard_dataloader
from lightning_bigmodel.mesh.rng import capture_rng, restore_rng
from lightning_bigmodel.mesh.samplers import ShardedBatchSampler, ShardedSampler

__all__ = ["MeshLoader"]

_MODES = ("train", "eval", "predict")
_BATCH_SOURCES = ("broadcast", "replicated")
_UNEVEN_INPUTS = ("join", "stop")


class MeshLoader:
    """Wraps a DataLoader, or any iterable of batches, for one rank of a mesh. Every rank must build its own.

    Over the data ranks: a map-style DataLoader is rebuilt to load every `data_size`-th sample (the user's own batch
    sampler: every `data_size`-th batch), so that the ranks together see what one process with a `data_size` times
    larger batch would. In mode `"train"` all ranks give equally many batches, where need be by repeating one
    (`is_padding`); in the other modes every sample comes exactly once. With one data rank the loader is used as it is.
    A loader that has a torch `DistributedSampler`, a loader of an `IterableDataset` and other iterables are never
    sharded: the user sees to that. When training on these, data ranks may run dry at different times. With `"join"`
    those that do repeat their last batch, marked as padding, until all are done; with `"stop"` all stop as soon as one
    does. For this they exchange two numbers before each batch (not for map-style loaders of equal length).

    Over the ranks of a model: with `"broadcast"` the first rank loads and sends each batch when it is asked for; an
    exception of its loader is raised on all of them. With `"replicated"` each rank loads by itself, each batch under
    the first rank's random state and worker seeds, and the first 3 batches of each epoch are compared; use it where a
    batch is larger than the network likes. An exception after these 3 batches is raised where it happens only.

    All ranks of a model must ask for the same number of batches; they may stop at any point together.

    Attributes of the wrapped loader (`dataset`, `batch_size`, `num_workers`, ...) read and write through.

    Communication within the model group: 64 KiB a batch, with `"broadcast"` the batch besides. Memory: one batch.

    Args:
        loader: The user's loader.
        model_group: Ranks that must see the same batch; must carry CPU tensors. None if this rank is alone.
        model_rank: Index within `model_group`; 0 loads.
        data_group: Ranks that load different parts; must carry CPU tensors. None if this rank is alone.
        data_rank: Index within `data_group`.
        data_size: Number of data ranks.
        mode: What the batches are for.
        uneven_inputs: What happens where data ranks run dry at different times.
        keeps_pace: In evaluation too, all data ranks must take equally many batches (of loaders without a length).
        batch_source: How the ranks of a model come to the same batch.
        shard: False leaves the loader unsharded (`use_distributed_sampler=False`).
        init_arguments: Constructor arguments, by name, that a DataLoader subclass does not keep as attributes.

    Raises:
        TypeError: If the loader is no iterable, or a subclass that cannot be rebuilt.
        ValueError: If a setting is unknown, or the loader's `DistributedSampler` is for another number of ranks.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> alone = dict(model_group=None, model_rank=0, data_group=None, data_rank=0, data_size=1)
        >>> loader = MeshLoader(DataLoader([1, 2, 3], batch_size=2), mode="train", **alone)
        >>> [batch.tolist() for batch in loader]
        [[1, 2], [3]]
    """

    def __new__(cls, loader: object = None, **_: Any) -> MeshLoader:
        """Choose the class with `state_dict` where the loader has one: others look for the methods on the class."""
        stateful = cls is MeshLoader and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return object.__new__(_StatefulMeshLoader if stateful else cls)

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        model_group: dist.ProcessGroup | None,
        model_rank: int,
        data_group: dist.ProcessGroup | None,
        data_rank: int,
        data_size: int,
        mode: Literal["train", "eval", "predict"],
        batch_source: Literal["broadcast", "replicated"] = "broadcast",
        shard: bool = True,
        uneven_inputs: Literal["join", "stop"] = "join",
        keeps_pace: bool = False,
        init_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        _check_choices(loader, mode, batch_source, uneven_inputs)
        own_sampler = distributed_sampler_of(loader)
        if own_sampler is not None and own_sampler.num_replicas != data_size:
            raise ValueError(
                f"The loader's `DistributedSampler` is for {own_sampler.num_replicas} replicas, but there are "
                f"{data_size} data ranks: part of the data would never be seen, or seen twice. Leave the sampler out, "
                f"or set `num_replicas={data_size}` and `rank` to the data rank (here {data_rank})."
            )
        # Everything set before `_loader` is there is this object's own; see `__setattr__`.
        self._is_detached = False
        self._pending: EpochBatches | None = None
        self._current: EpochBatches | None = None
        self._resumes_at: Position | None = None
        self._defers_start = False
        self._padding_seen: set[int] = set()
        self._epoch = 0
        self._sharded: ShardedSampler | ShardedBatchSampler | None = None
        self._num_agreed: int | None = None
        self._hides_length = False
        self._data_size = data_size
        joins, agree_on_end = uneven_inputs == "join" or mode != "train", False
        is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if data_size > 1 and own_sampler is None:
            if shard and is_map_style:
                loader, self._sharded = shard_dataloader(
                    loader,  # type: ignore[arg-type]
                    data_size,
                    data_rank,
                    data_group,
                    pad=mode == "train",
                    init_arguments=init_arguments,
                )
            elif mode == "train" or keeps_pace:
                may_trust_length = is_map_style or isinstance(loader, Sequence)
                lengths = _all_lengths(loader, data_size, data_group)
                self._hides_length = None in lengths
                if mode == "train" and not self._hides_length:
                    self._num_agreed = (max if joins else min)(length or 0 for length in lengths)
                    agree_on_end = not may_trust_length or len(set(lengths)) > 1
                else:
                    agree_on_end = self._hides_length
        self._is_map_style = is_map_style
        self._plan = LoadPlan(
            loader=loader,
            model_group=model_group,
            model_rank=model_rank,
            model_size=1 if model_group is None else dist.get_world_size(model_group),
            data_group=data_group,
            agree_on_end=agree_on_end,
            agree_on_start=mode == "eval" and data_size > 1 and own_sampler is None and _has_no_length(loader),
            joins=joins,
            replicated=batch_source == "replicated",
            is_padding=self._is_padding_here,
        )
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. Collective over the ranks that share or shard the data, batch by batch."""
        self._check_attached()
        # Lightning calls `iter` once only to see whether it works: what was peeked stays until a batch is taken.
        self._current = self._pending or self._begin()
        self._resumes_at, self._defers_start = None, False
        return self._current

    def _begin(self) -> EpochBatches:
        return EpochBatches(
            self._plan,
            self._epoch_started,
            self._batch_taken,
            resumes_at=self._resumes_at,
            deferred=self._defers_start,
            keeps_rng=_has_no_length(self._loader),  # which are loaded one batch ahead
        )

    def position(self, num_used: int) -> Position:
        """Where this rank is in the present epoch, given how many of its batches have been used. Picklable."""
        if isinstance(self, _StatefulMeshLoader):
            return Position(num_batches=num_used, loader_state=self.state_dict())
        return Position(num_batches=num_used) if self._current is None else self._current.position(num_used)

    def resume(self, position: Position, *, within_epoch: bool) -> None:
        """Let the next `iter` go on at a position, or begin the next epoch, under the random state of its first batch.

        Every rank must do so. Time: that of loading again what was used, but for loaders that keep their own position.
        """
        if isinstance(self, _StatefulMeshLoader):
            if within_epoch and position.loader_state is not None:
                self.load_state_dict(position.loader_state)
            return
        if not isinstance(self._loader, Iterator):  # one that cannot be begun again has given its first batch at most
            self._pending = None
        elif self._pending is not None and within_epoch:
            self._pending.resume_at(position)
            return
        if not within_epoch:
            EpochBatches.restore_generators(self._loader, position)
        self._resumes_at, self._defers_start = position if within_epoch else None, True

    def __len__(self) -> int:
        """Return this rank's number of batches; a TypeError where the wrapped loader has no length."""
        if self._hides_length:
            raise TypeError("On some data rank the loader has no length; all go on until all are done.")
        return self._num_agreed if self._num_agreed is not None else len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_loader" not in self.__dict__ or name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __getstate__(self) -> dict[str, Any]:
        plan = copy.copy(self._plan)
        plan.model_group = plan.data_group = None
        return {**self.__dict__, "_plan": plan, "_pending": None, "_current": None, "_is_detached": True}

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshLoader:
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        # Neither process groups nor a started iterator can be copied: the copy talks over the same groups.
        memo.update({id(group): group for group in (self._plan.model_group, self._plan.data_group)})
        state = {**self.__dict__, "_pending": None, "_current": None}
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in state.items()})
        return clone

    def is_padding(self, batch_index: int) -> bool:
        """Tell whether this rank's batch only repeats an earlier one, so that it must get weight zero.

        Args:
            batch_index: Index within the epoch. Known beforehand where the user's sampler has a length.
        """
        return batch_index in self._padding_seen or self._is_padding_here(batch_index)

    def positions(self, batch_index: int) -> range | None:
        """Where this rank's batch belongs in the order of one process: to put predictions back in order.

        Returns:
            Places of the batch's samples; with a batch sampler of the user's own, place of the batch among all batches.
            None if the loader was not sharded.
        """
        return None if self._sharded is None else self._sharded.positions(batch_index)

    def refuse_empty_ranks(self) -> None:
        """Refuse an evaluation in which some data ranks have no batch.

        Those would log nothing and keep nothing for the end of the epoch, where all ranks put that together.

        Raises:
            ValueError: On every rank alike.
        """
        num = None if self._sharded is None else self._sharded.num_too_few
        if num is not None:
            what, many = ("sample", "s") if isinstance(self._sharded, ShardedSampler) else ("batch", "es")
            plural = "" if num == 1 else many
            raise ValueError(
                f"A loader for evaluation or prediction has {num} {what}{plural} for {self._data_size} data ranks, so "
                f"that some have none. Give it at least {self._data_size}, or run it on fewer data ranks."
            )

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to the loader, its sampler and its batch sampler, where they take one."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        targets = [self._loader, getattr(self._loader, "sampler", None), batch_sampler]
        if not isinstance(batch_sampler, ShardedBatchSampler):  # that one reaches the sampler inside by itself
            targets.append(getattr(batch_sampler, "sampler", None))
        methods = [getattr(target, "set_epoch", None) for target in {id(target): target for target in targets}.values()]
        for method in filter(callable, methods):
            method(epoch)
            if epoch != self._epoch and not isinstance(self._loader, Iterator):
                self._pending = None  # it was started for another epoch
        self._epoch = epoch

    def peek(self) -> Any:
        """Return the next epoch's first batch without taking it. Collective, as taking a batch is.

        Of a map-style DataLoader the samples are fetched in this process, past the workers, and random states and
        samplers are left as they were. Any other loader is started and kept: the next epoch begins with this batch (the
        caller gets a copy of it).

        Returns:
            The batch; None if there is none.
        """
        self._check_attached()
        loaded = self._peek_here() if self._plan.loads else None
        if not self._plan.replicated:
            loaded = share_batch(loaded, 0, self._plan)
        assert loaded is not None
        if loaded.error is not None:
            raise loaded.error
        return None if loaded.is_end else loaded.batch

    def _peek_here(self) -> Loaded:
        if not self._is_map_style:
            # The host may have begun an epoch already, and taken a batch ahead.
            begun = self._current if self._current is not None and self._current.knows_first else None
            if begun is None:
                begun = self._pending = self._pending or self._begin()
            loaded = begun.peek()
            try:
                return Loaded(batch=copy.deepcopy(loaded.batch), is_end=loaded.is_end, error=loaded.error)
            except Exception:  # whatever the batch's class raises on a copy: then the batch itself has to do
                return loaded
        own = capture_rng()
        try:
            if self._plan.replicated:
                restore_rng(source_rng(own, self._plan))
            batch = peek_first_batch(self._loader)  # type: ignore[arg-type]
        except Exception as error:
            return Loaded(error=error)
        finally:
            restore_rng(own)
        return Loaded(is_end=True) if batch is EMPTY else Loaded(batch=batch)

    def _is_padding_here(self, batch_index: int) -> bool:
        return self._sharded is not None and self._sharded.is_padding(batch_index)

    def _epoch_started(self) -> None:
        self._pending = None
        self._padding_seen.clear()

    def _batch_taken(self, batch_index: int, loaded: Loaded) -> None:
        if loaded.padding:
            self._padding_seen.add(batch_index)

    def _check_attached(self) -> None:
        if self._is_detached and (self._plan.model_size > 1 or self._data_size > 1):
            raise RuntimeError(
                "This loader came out of a pickle and has lost its process groups: it can be looked at, not iterated. "
                "Build a new `MeshLoader` around the loader."
            )


class _StatefulMeshLoader(MeshLoader):
    def state_dict(self) -> Any:
        return self._loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self._pending = None  # it was started before this state
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]


def _check_choices(loader: object, mode: str, batch_source: str, uneven_inputs: str) -> None:
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(
            f"The loader must be an iterable of batches, such as a DataLoader; got {type(loader).__name__}."
        )
    if mode not in _MODES:
        raise ValueError(f"`mode` must be one of {_MODES}, got {mode!r}.")
    if batch_source not in _BATCH_SOURCES:
        raise ValueError(f"`batch_source` must be one of {_BATCH_SOURCES}, got {batch_source!r}.")
    if uneven_inputs not in _UNEVEN_INPUTS:
        raise ValueError(f"`uneven_inputs` must be one of {_UNEVEN_INPUTS}, got {uneven_inputs!r}.")


def _has_no_length(loader: object) -> bool:
    """Whether this is a loader of a kind that need not have a length; alike on all ranks."""
    return not isinstance(loader, Sequence) and not (
        isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    )


def _all_lengths(loader: object, data_size: int, data_group: dist.ProcessGroup | None) -> list[int | None]:
    """The loader's length on each data rank, None where it has none. Collective."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        length = None
    lengths: list[int | None] = [None] * data_size
    dist.all_gather_object(lengths, length, group=data_group)
    return lengths
