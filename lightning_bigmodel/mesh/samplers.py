"""Sharding by index: D data ranks see together what one process with a D times larger batch would see, in its order."""

from __future__ import annotations

import copy
import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from lightning_bigmodel.mesh.rng import capture_rng, restore_rng

__all__ = ["ShardedBatchSampler", "ShardedSampler", "draw_order"]


class _Sharded(Sampler[Any]):
    """What both samplers share: rounds of `num_ranks * per_round` elements, of which a rank takes every D-th.

    One round is one batch of every rank. The base sampler is the user's own object: never rebuilt, never reshuffled.
    """

    def __init__(
        self,
        base: Iterable[Any],
        num_ranks: int,
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        per_round: int,
        drop_last: bool,
        pad: bool,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"`rank` must be in 0..num_ranks-1, got rank {rank} of {num_ranks} ranks.")
        if per_round < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {per_round}.")
        self.num_ranks = num_ranks
        self.rank = rank
        self.pad = pad
        self._base = base
        self._group = group
        self._per_round = per_round
        self._drop_last = drop_last
        self._padding_batch: int | None = None
        self._num_read = 0

    def __len__(self) -> int:
        return self._num_local(len(self._base))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # A generator, so the order is drawn at the first `next`: a DataLoader draws its workers' seed before that, and
        # one process draws in this order too.
        self._padding_batch = None
        self._num_read = 0
        order: Iterable[Any] = draw_order(self._base, self._group) if _is_sized(self._base) else self._base
        elements = iter(order)
        first: list[Any] = []
        for batch_index in itertools.count():
            part = list(itertools.islice(elements, self._per_round * self.num_ranks))
            self._num_read += len(part)
            whole = len(part) == self._per_round * self.num_ranks
            if not part or (self._drop_last and not whole):
                return
            mine = part[self.rank :: self.num_ranks]
            # A round too short for this rank in the very first round leaves it nothing of its own to repeat.
            first = first or mine or part[: self._per_round]
            if not mine:
                if not self.pad:
                    return
                self._padding_batch = batch_index
                mine = first
            yield from mine
            if not whole:
                return

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sharded:
        # Groups cannot be copied; a copy talks over the same one.
        memo[id(self._group)] = self._group
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return clone

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_group": None}

    def is_padding(self, batch_index: int) -> bool:
        """Tell whether this rank's batch repeats an earlier one because no element was left for it.

        Known beforehand where the base sampler has a length, else once the batch was drawn.
        """
        if self._padding_batch is not None or not _is_sized(self._base):
            return batch_index == self._padding_batch
        size = self._per_round * self.num_ranks
        num_rounds, rest = divmod(len(self._base), size)  # type: ignore[arg-type]
        return self.pad and not self._drop_last and 0 < rest <= self.rank and batch_index == num_rounds

    def positions(self, batch_index: int) -> range:
        """Places in the base sampler's order of what this rank's batch holds; empty past the end and for padding.

        Without a length of the base sampler, known once the batch was drawn.
        """
        end = len(self._base) if _is_sized(self._base) else self._num_read  # type: ignore[arg-type]
        size = self._per_round * self.num_ranks
        start = batch_index * size + self.rank
        return range(start, min((batch_index + 1) * size, end), self.num_ranks)

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to the base sampler, and to the sampler inside it, where they take one."""
        for sampler in (self._base, getattr(self._base, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    @property
    def num_too_few(self) -> int | None:
        """How many elements there are where they do not suffice for all ranks but for some; else None."""
        num = len(self._base) if _is_sized(self._base) and not self._drop_last else 0  # type: ignore[arg-type]
        return num if 0 < num < self.num_ranks else None

    def _num_local(self, num_elements: int) -> int:
        size = self._per_round * self.num_ranks
        num_rounds, rest = divmod(num_elements, size)
        whole = num_rounds * self._per_round
        if self._drop_last or rest == 0:
            return whole
        mine = len(range(self.rank, rest, self.num_ranks))
        if mine or not self.pad:
            return whole + mine
        return whole + (self._per_round if num_rounds else min(self._per_round, rest))


class ShardedSampler(_Sharded):
    """This rank's samples of a base sampler: every `num_ranks`-th of its order.

    Rank r's batch k together with the other ranks' batches k are the samples of batch k of one process with batch size
    `num_ranks * batch_size`. At the start of an epoch a base sampler with a length is drawn whole, under rank 0's
    random state; rank 0's generators advance as in one process and the other ranks keep theirs. A base sampler
    without a length is read as the epoch goes on, and must give the same order on every rank by itself.

    Uneven ends: with `pad=True` every rank gives the same number of batches, `ceil(n / (batch_size * num_ranks))`; a
    rank with no sample left repeats its first indices, and `is_padding` tells of it. With `pad=False` every sample
    comes exactly once and ranks may differ in their number of batches. With `drop_last` all have
    `floor(n / (batch_size * num_ranks))`.

    Memory: the whole order, 8 bytes and an int object a sample, as torch's `RandomSampler` needs itself. Communication:
    the random state (12 KiB) and a 16-byte digest of the order, once an epoch.

    Args:
        base_sampler: The user's sampler, kept as it is.
        num_ranks: Number of ranks that load.
        rank: This rank among them.
        group: The ranks that load, rank 0 first; None if the order needs no agreement.
        drop_last: Leave out the last incomplete round.
        batch_size: Samples of one rank's batch.
        pad: Whether ranks are padded to equal numbers of batches (training).

    Raises:
        ValueError: If `rank` or `batch_size` is out of range; while iterating, on every rank alike, if the base
            sampler gave different orders.
        RuntimeError: While iterating, on every rank alike, if the base sampler failed on one.

    Example:
        >>> list(ShardedSampler(range(5), num_ranks=2, rank=1, group=None, drop_last=False, batch_size=2))
        [1, 3, 1, 3]
    """

    def __init__(
        self,
        base_sampler: Iterable[Any],
        num_ranks: int,
        rank: int,
        group: dist.ProcessGroup | None,
        drop_last: bool,
        batch_size: int,
        pad: bool = True,
    ) -> None:
        super().__init__(base_sampler, num_ranks, rank, group, per_round=batch_size, drop_last=drop_last, pad=pad)
        self.base_sampler = base_sampler


class ShardedBatchSampler(_Sharded):
    """This rank's batches of the user's own batch sampler: every `num_ranks`-th of its batches.

    The batch sampler alone knows what belongs together, so its batches stay whole: `num_ranks` ranks see together what
    one process sees in `num_ranks` batches. Order, uneven ends and cost are as for `ShardedSampler` with whole batches
    in the place of samples.

    Args:
        base_batch_sampler: Yields lists of indices; kept as it is.
        num_ranks: Number of ranks that load.
        rank: This rank among them.
        group: The ranks that load, rank 0 first; None if the order needs no agreement.
        pad: Whether ranks are padded to equal numbers of batches (training).

    Raises:
        ValueError: As `ShardedSampler`.
        RuntimeError: As `ShardedSampler`.

    Example:
        >>> list(ShardedBatchSampler([[0, 1], [2], [3, 4]], num_ranks=2, rank=1, group=None))
        [[2], [2]]
    """

    def __init__(
        self,
        base_batch_sampler: Iterable[Any],
        num_ranks: int,
        rank: int,
        group: dist.ProcessGroup | None,
        pad: bool = True,
    ) -> None:
        super().__init__(base_batch_sampler, num_ranks, rank, group, per_round=1, drop_last=False, pad=pad)
        self.base_batch_sampler = base_batch_sampler
        for name in ("sampler", "batch_size", "drop_last"):  # what others look for on a batch sampler
            if hasattr(base_batch_sampler, name):
                setattr(self, name, getattr(base_batch_sampler, name))


def draw_order(sampler: Iterable[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Draw a sampler's whole order under the random state of the group's first rank. Collective over `group`.

    Args:
        sampler: What to draw.
        group: Ranks that must agree; None or a group of one rank draws locally.

    Returns:
        The order, the same on every rank of the group.

    Raises:
        ValueError: On every rank, if the orders differ: the sampler has state of its own that differs by rank.
        RuntimeError: On every rank, if the sampler raised on one of them.
    """
    if group is None or dist.get_world_size(group) == 1:
        return list(sampler)
    is_first = dist.get_rank(group) == 0
    own = capture_rng()
    states = [own if is_first else None]
    dist.broadcast_object_list(states, group=group, group_src=0)
    order: list[Any] = []
    error: Exception | None = None
    try:
        if not is_first:
            assert states[0] is not None
            restore_rng(states[0])
        order = list(sampler)
    except Exception as raised:
        error = raised
    finally:
        if not is_first:
            restore_rng(own)
    _check_agreement(type(sampler).__name__, order, error, group)
    return order


def _check_agreement(name: str, order: list[Any], error: Exception | None, group: dist.ProcessGroup) -> None:
    mine = repr(error) if error else _digest(order)
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, (error is not None, mine), group=group)
    ranks = dist.get_process_group_ranks(group)
    failed = [f"rank {rank}: {text}" for rank, (bad, text) in zip(ranks, reports, strict=True) if bad]
    if failed:
        raise RuntimeError(f"Drawing the order of `{name}` failed on " + "; ".join(failed)) from error
    different = [rank for rank, report in zip(ranks, reports, strict=True) if report != reports[0]]
    if different:
        raise ValueError(
            f"`{name}` gave another order on rank {different} than on rank {ranks[0]}, so samples would be seen twice "
            "or never. Give its own random generator the same seed on every rank, or pass "
            "`use_distributed_sampler=False` and shard the data yourself."
        )


def _digest(order: list[Any]) -> bytes:
    try:
        content = array("q", order).tobytes()  # plain indices: a million in some 20 ms
    except (TypeError, OverflowError):
        # An object without a repr of its own shows its address, which differs by process: its type has to do.
        texts = (type(key).__name__ if " at 0x" in (text := repr(key)) else text for key in order)
        content = "\0".join(texts).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def _is_sized(sampler: object) -> bool:
    try:
        len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, OverflowError):
        return False
    return True
