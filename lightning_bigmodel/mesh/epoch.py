"""One pass over a loader, the same batches on every rank of a model group."""

from __future__ import annotations

import functools
import itertools
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_bigmodel import _host
from lightning_bigmodel.mesh.broadcast import Message, broadcast_message, digest_batch, pack_batch
from lightning_bigmodel.mesh.rng import RngState, capture_rng, restore_rng
from lightning_bigmodel.mesh.workers import begin_epoch, start_workers, worker_states

__all__ = ["EpochBatches", "LoadPlan", "Loaded", "Position", "share_batch", "source_rng"]

_NUM_CHECKED_BATCHES = 3
_READY, _DRY, _FAILED = 0, 1, 2
_SAMPLERS = ("sampler", "batch_sampler", "base_sampler", "base_batch_sampler")
_RNG_NAMES = ("start_rng", "first_rng", "next_rng")
_WORKER_NAMES = ("start_workers", "workers")
_PLAIN_NAMES = ("num_batches", "loader_state", "start_generators", "generators", "was_reset", "is_cut")


@dataclass(kw_only=True)
class LoadPlan:
    """Who loads, and with whom it is agreed.

    Args:
        loader: What is iterated.
        model_group: Ranks that must see the same batch; None if this rank is alone.
        model_rank: Index within it; 0 is the source.
        model_size: Number of ranks of it.
        data_group: Ranks that load different parts; None if this rank is alone.
        agree_on_end: Ask all of `data_group` before each batch whether anyone has none left.
        agree_on_start: Ask them before the first batch whether some have one and some have none, which is an error.
        joins: A rank that has none left then goes on with a repeated batch until all are done; else all stop with it.
        replicated: Every rank iterates by itself; else only the source does.
        is_padding: Whether the batch of an index repeats an earlier one.
    """

    loader: Iterable[Any]
    model_group: dist.ProcessGroup | None
    model_rank: int
    model_size: int
    data_group: dist.ProcessGroup | None
    agree_on_end: bool
    agree_on_start: bool
    joins: bool
    replicated: bool
    is_padding: Callable[[int], bool]

    @property
    def loads(self) -> bool:
        """Whether this rank iterates the loader itself."""
        return self.replicated or self.model_rank == 0


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where one rank was in an epoch, to come to the same place in another process.

    Args:
        num_batches: Batches that were used.
        start_rng: Random state under which the epoch began; None on ranks that are sent their batches.
        first_rng: Random state under which its first batch was loaded, which hooks may have moved.
        start_generators: States that generators of the loader itself began the epoch with.
        generators: Their states now.
        was_reset: Whether workers of an earlier epoch went on.
        is_cut: Whether living workers load batches beyond those that were used.
        start_workers: Random states that these began the epoch with, by worker.
        workers: Their states now.
        next_rng: Random state under which a further batch was loaded ahead of its use, if one was.
        loader_state: What a loader that keeps its own position says.
    """

    num_batches: int
    start_rng: RngState | None = None
    next_rng: RngState | None = None
    loader_state: Any = None
    first_rng: RngState | None = None
    start_generators: tuple[torch.Tensor, ...] = ()
    generators: tuple[torch.Tensor, ...] = ()
    was_reset: bool = False
    is_cut: bool = False
    start_workers: Mapping[int, RngState] = field(default_factory=dict)
    workers: Mapping[int, RngState] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        states = {name: getattr(self, name) for name in _RNG_NAMES}
        plain = {name: None if state is None else state.plain() for name, state in states.items()}
        workers = {name: {n: s.plain() for n, s in getattr(self, name).items()} for name in _WORKER_NAMES}
        return {**{name: getattr(self, name) for name in _PLAIN_NAMES}, **plain, **workers}

    @classmethod
    def of_plain(cls, state: dict[str, Any]) -> Position:
        """What `plain` gave."""
        states = {name: state[name] for name in _RNG_NAMES}
        found: dict[str, Any] = {
            name: None if plain is None else RngState.of_plain(plain) for name, plain in states.items()
        }
        for name in _WORKER_NAMES:
            found[name] = {worker: RngState.of_plain(plain) for worker, plain in state[name].items()}
        return cls(**{name: state[name] for name in _PLAIN_NAMES}, **found)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Outcome of asking a loader for a batch: a batch, the end of the data, or an exception."""

    batch: Any = None
    is_end: bool = False
    error: Exception | None = None
    padding: bool = False

    @property
    def flag(self) -> int:
        """0 for a batch, 1 for the end, 2 for an exception."""
        return _FAILED if self.error is not None else _DRY if self.is_end else _READY


class EpochBatches(Iterator[Any]):
    """Iterator over one epoch. Every rank of a model group must ask for the same number of batches.

    Nothing is loaded or sent before it is asked for, so ranks that stop early together leave nobody waiting.

    Args:
        plan: Who loads.
        on_start: Called once, at the first batch.
        on_batch: Called with index and outcome of each batch.
        resumes_at: Go on from there: what was used is loaded once more and dropped, as workers and datasets may keep
            states of their own.
        deferred: Begin at the first `next`.
        keeps_rng: Remember the random state before each batch, where batches may be loaded ahead.
    """

    def __init__(
        self,
        plan: LoadPlan,
        on_start: Callable[[], None],
        on_batch: Callable[[int, Loaded], None],
        *,
        resumes_at: Position | None = None,
        deferred: bool = False,
        keeps_rng: bool = False,
    ) -> None:
        self._plan = plan
        self._on_start = on_start
        self._on_batch = on_batch
        self._index = 0
        self._finished = False
        self._iterator: Iterator[Any] | None = None
        self._buffered: Loaded | None = None
        self._first: Loaded | None = None  # until a second one is taken
        self._last: Any = None  # what a rank without a batch repeats
        self._start_error: Exception | None = None
        self._resumes_at, self._keeps_rng = resumes_at, keeps_rng
        self._start_rng: RngState | None = None
        self._first_rng: RngState | None = None
        self._start_generators: tuple[torch.Tensor, ...] = ()
        self._was_reset = False
        self._start_workers: dict[int, RngState] = {}
        self._rng_before: dict[int, RngState | None] = {}
        if plan.loads and not (plan.replicated and plan.model_size > 1) and resumes_at is None and not deferred:
            # Here and not at the first `next`, because one process starts workers and draws their seed here.
            self._start()

    def position(self, num_used: int) -> Position:
        """Where it is, when that many batches have been used."""
        return Position(
            num_batches=num_used,
            start_rng=self._start_rng,
            first_rng=self._first_rng,
            next_rng=self._rng_before.get(num_used),
            start_generators=self._start_generators,
            generators=_generator_states(self._plan.loader),
            was_reset=self._was_reset,
            is_cut=_host.has_batches_on_their_way(self._plan.loader),
            start_workers=self._start_workers,
            workers=worker_states(self._plan.loader),
        )

    @staticmethod
    def restore_generators(loader: Any, position: Position) -> None:
        """Between epochs: generators of the loader itself go on from where they were, and so do living workers."""
        ambient = capture_rng()
        if position.is_cut:  # what workers have drawn for batches that nobody took depends on how far they had come
            _take_again(loader, position)
        elif position.workers:
            start_workers(loader, position.workers)
        restore_rng(ambient)
        _set_generators(loader, position.generators)

    def resume_at(self, position: Position) -> None:
        """Go on from there, of an iterator that is begun and cannot be begun again."""
        self._resumes_at = Position(num_batches=position.num_batches)

    def _resume(self, position: Position) -> None:
        ambient = capture_rng()
        loader = self._plan.loader
        try:
            if position.start_rng is not None and self._plan.loads:
                _begin_again(loader, position)
                if self._iterator is None and not (self._plan.replicated and self._plan.model_size > 1):
                    self._start()
                    restore_rng(position.first_rng or position.start_rng)
            for _ in range(position.num_batches):
                next(self)
            if position.next_rng is not None and self._plan.loads:
                restore_rng(position.next_rng)
                self._rng_before[self._index] = position.next_rng
                self._buffered = self._load()
        except StopIteration:
            raise RuntimeError(
                f"The checkpoint was saved after {position.num_batches} batches of an epoch, but the loader ends before"
                " that. Give it the data it had then."
            ) from None
        finally:
            restore_rng(ambient)

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if self._resumes_at is not None:
            position, self._resumes_at = self._resumes_at, None
            self._resume(position)
        if self._index == 0:
            self._on_start()
        loaded = self._load() if self._plan.loads else None
        if loaded is not None and self._plan.agree_on_start and self._index == 0:
            loaded = _agree_on_start(loaded, self._plan)
        if loaded is not None and self._plan.agree_on_end:
            loaded = self._agree(loaded)
        if self._plan.replicated:
            assert loaded is not None
            if self._index < _NUM_CHECKED_BATCHES:
                loaded = _check_same(loaded, self._index, self._plan)
        else:
            loaded = share_batch(loaded, self._index, self._plan)
        assert loaded is not None
        if loaded.flag != _READY:
            self._finished = True
            if loaded.error is not None:
                raise loaded.error
            raise StopIteration
        self._on_batch(self._index, loaded)
        self._first = loaded if self._index == 0 else None
        self._index += 1
        return loaded.batch

    @property
    def knows_first(self) -> bool:
        """Whether `peek` can tell the first batch: none was taken, or that one alone."""
        return not self._finished and (self._index == 0 or self._first is not None)

    def peek(self) -> Loaded:
        """The first batch: loaded here and kept for `next`, or the one that was taken."""
        if self._first is not None:
            return self._first
        if self._buffered is None:
            self._buffered = self._load()
        return self._buffered

    def _agree(self, loaded: Loaded) -> Loaded:
        """What this rank goes on with, given what the other data ranks have. Communication: two numbers a batch."""
        plan = self._plan
        counts = torch.tensor([int(loaded.flag == _DRY), int(loaded.flag == _FAILED)])
        dist.all_reduce(counts, group=plan.data_group)
        num_dry, num_failed = counts.tolist()
        if num_failed:
            return _same_outcome_or_error(loaded, "", plan.data_group)
        if num_dry and (not plan.joins or num_dry == dist.get_world_size(plan.data_group)):
            return Loaded(is_end=True)
        if not plan.joins:
            return loaded
        if num_dry and self._index == 0:  # nothing to repeat: the first rank that has a batch lends it
            batches: list[Any] = [None] * dist.get_world_size(plan.data_group)
            dist.all_gather_object(batches, (loaded.is_end, None if loaded.is_end else loaded.batch), plan.data_group)
            self._last = next(batch for is_end, batch in batches if not is_end)
        if loaded.is_end:
            return Loaded(batch=self._last, padding=True)
        self._last = loaded.batch
        return loaded

    def _start(self) -> None:
        self._start_rng, self._start_generators = capture_rng(), _generator_states(self._plan.loader)
        self._was_reset = _host.has_workers(self._plan.loader)
        try:
            if self._plan.replicated:
                _use_source_worker_seeds(self._plan)
            self._iterator = begin_epoch(self._plan.loader)
            self._start_workers = worker_states(self._plan.loader) if self._was_reset else {}
        except Exception as error:
            self._start_error = error

    def _load(self) -> Loaded:
        if self._buffered is not None:
            loaded, self._buffered = self._buffered, None
            return loaded
        if not self._plan.replicated or self._plan.model_size == 1:
            if self._iterator is None and self._start_error is None:
                self._start()
            return self._ask()
        # The ranks' own random states drift apart, as their stages draw different numbers: each batch is loaded under
        # the source's present state. The source itself draws from it as one process does.
        own = capture_rng()
        restore_rng(source_rng(own, self._plan))
        try:
            if self._iterator is None and self._start_error is None:
                self._start()
            return self._ask()
        finally:
            if self._plan.model_rank != 0:
                restore_rng(own)

    def _ask(self) -> Loaded:
        if self._start_error is not None:
            return Loaded(error=self._start_error)
        assert self._iterator is not None
        if self._index == 0:
            self._first_rng = capture_rng()
        if self._keeps_rng:
            self._rng_before = {self._index - 1: self._rng_before.get(self._index - 1), self._index: capture_rng()}
        try:
            batch = next(self._iterator)
        except StopIteration:
            return Loaded(is_end=True)
        except Exception as error:
            return Loaded(error=error)
        return Loaded(batch=batch, padding=self._plan.is_padding(self._index))


def _generators(loader: Any) -> list[torch.Generator]:
    """Generators that the loader and its samplers have of their own."""
    found: dict[int, torch.Generator] = {}
    waiting, seen = [loader], set()
    while waiting:
        holder = waiting.pop(0)
        if holder is None or id(holder) in seen:
            continue
        seen.add(id(holder))
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
        waiting += [getattr(holder, name, None) for name in _SAMPLERS]
    return list(found.values())


def _generator_states(loader: Any) -> tuple[torch.Tensor, ...]:
    return tuple(generator.get_state() for generator in _generators(loader))


def _set_generators(loader: Any, states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(state)


def _begin_again(loader: Any, position: Position) -> None:
    """Bring random states and living workers to where they were when an epoch began."""
    assert position.start_rng is not None
    _host.forget_workers(loader)
    if position.was_reset:
        start_workers(loader, position.start_workers)
    _set_generators(loader, position.start_generators)
    restore_rng(position.start_rng)


def _take_again(loader: Any, position: Position) -> None:
    """What was used of an epoch is loaded once more and dropped."""
    _begin_again(loader, position)
    batches = begin_epoch(loader)
    if position.first_rng is not None:
        restore_rng(position.first_rng)
    for _ in itertools.islice(batches, position.num_batches):
        pass


def source_rng(own: RngState, plan: LoadPlan) -> RngState:
    """Return the random state of the model group's source. Collective over the model group (one broadcast, 64 KiB)."""
    if plan.model_size == 1:
        return own
    assert plan.model_group is not None
    message = Message(kind="rng", batch_index=0, body=pickle.dumps(own), tensors=[]) if plan.model_rank == 0 else None
    message = broadcast_message(message, plan.model_group)
    state: RngState = own if plan.model_rank == 0 else pickle.loads(message.body)
    return state


def share_batch(loaded: Loaded | None, batch_index: int, plan: LoadPlan) -> Loaded:
    """Hand what the source loaded to its model group. Collective over the model group.

    Args:
        loaded: On the source what its loader gave, elsewhere None.
        batch_index: Which batch of the epoch every rank of the group is asking for.
        plan: Who loads.

    Returns:
        On the source what it gave (or the exception that kept it from being sent), elsewhere the like of it; an
        exception arrives as a RuntimeError with the traceback's text.
    """
    if plan.model_size == 1:
        assert loaded is not None
        return loaded
    assert plan.model_group is not None
    if loaded is not None:
        message, loaded = _message_of(loaded, batch_index)
        broadcast_message(message, plan.model_group)
        return loaded
    message = broadcast_message(None, plan.model_group)
    if message.kind == "error":
        source = dist.get_process_group_ranks(plan.model_group)[0]
        text = message.body.decode(errors="replace")
        return Loaded(
            error=RuntimeError(f"The data loader failed on rank {source}, which loads for this rank:\n{text}")
        )
    if message.batch_index != batch_index:
        return Loaded(
            error=RuntimeError(
                f"This rank asked for batch {batch_index}, but the rank that loads for it sent batch "
                f"{message.batch_index}: all ranks of a model must take the same number of batches. Look for a `break` "
                "or an iteration that only some ranks make."
            )
        )
    if message.kind == "end":
        return Loaded(is_end=True)
    return Loaded(batch=message.batch(), padding=message.padding)


def _message_of(loaded: Loaded, batch_index: int) -> tuple[Message, Loaded]:
    if loaded.flag == _READY:
        try:
            body, tensors = pack_batch(loaded.batch)
        except TypeError as error:
            loaded = Loaded(error=error)
        else:
            message = Message(kind="batch", batch_index=batch_index, padding=loaded.padding, body=body, tensors=tensors)
            return message, loaded
    if loaded.error is not None:
        text = "".join(traceback.format_exception(loaded.error))
        return Message(kind="error", batch_index=batch_index, body=text.encode(), tensors=[]), loaded
    return Message(kind="end", batch_index=batch_index, tensors=[]), loaded


def _agree_on_start(loaded: Loaded, plan: LoadPlan) -> Loaded:
    numbers = torch.tensor(int(loaded.flag == _DRY))
    dist.all_reduce(numbers, group=plan.data_group)
    if loaded.error is not None or int(numbers) in (0, dist.get_world_size(plan.data_group)):
        return loaded
    return Loaded(
        error=ValueError(
            f"An evaluation loader without a length has no batch on {int(numbers)} of "
            f"{dist.get_world_size(plan.data_group)} data ranks: what they log could not be put together with what the "
            "others do. Give each data rank at least one batch, or each loader a length."
        )
    )


def _check_same(loaded: Loaded, batch_index: int, plan: LoadPlan) -> Loaded:
    if plan.model_size == 1:
        return loaded
    what = "the end of the data" if loaded.is_end else digest_batch(loaded.batch)
    return _same_outcome_or_error(loaded, what, plan.model_group, f"batch {batch_index} of the epoch")


def _same_outcome_or_error(loaded: Loaded, what: str, group: dist.ProcessGroup | None, name: str = "a batch") -> Loaded:
    """Compare outcomes over a group; on any exception or difference every rank gets an exception."""
    text = "".join(traceback.format_exception(loaded.error)) if loaded.error is not None else None
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (what, text), group=group)
    assert group is not None
    ranks = dist.get_process_group_ranks(group)
    failed = [f"rank {rank}:\n{text}" for rank, (_, text) in zip(ranks, outcomes, strict=True) if text is not None]
    if loaded.error is not None:
        return loaded
    if failed:
        return Loaded(error=RuntimeError("The data loader failed on " + "\n".join(failed)))
    different = [rank for rank, outcome in zip(ranks, outcomes, strict=True) if outcome != outcomes[0]]
    if different:
        return Loaded(
            error=ValueError(
                f'With `batch_source="replicated"` rank {different} loaded another {name} than rank {ranks[0]} of '
                "the same model: its stages would train on different data. Look for randomness that depends on the "
                'rank (a seed, `worker_init_fn`, the order of files), or use `batch_source="broadcast"`.'
            )
        )
    return loaded


def _use_source_worker_seeds(plan: LoadPlan) -> None:
    """Make a `worker_init_fn` that mixes in the rank (`partial(fn, rank=...)`) mix in the source's."""
    init_fn = getattr(plan.loader, "worker_init_fn", None)
    if plan.model_group is None or not isinstance(init_fn, functools.partial) or "rank" not in init_fn.keywords:
        return
    source = dist.get_process_group_ranks(plan.model_group)[0]
    keywords = {**init_fn.keywords, "rank": source}
    plan.loader.worker_init_fn = functools.partial(init_fn.func, *init_fn.args, **keywords)  # type: ignore[attr-defined]
