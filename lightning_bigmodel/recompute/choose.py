"""Which block is kept, computed again or moved, so that a pass fits a budget and pays least time.

A chain of blocks 1..n goes forward and then backward. Block i under choice c keeps `kept(i, c)` bytes from its forward
to its backward, takes `working(i, c)` while its backward runs, and pays `seconds(i, c)`. A pass holds most in the
backward of some block i: what blocks before it keep, and what it takes itself. Dynamic programming over the chain, as
arXiv 1911.13214 does it for keeping and computing again; here results of operators may be kept too, and blocks moved
over a link, but no block is computed more than twice.

    best(i, used) = min over c of best(i - 1, used - kept(i, c)) + seconds(i, c),  used + working(i, c) <= budget

States of equal use and more time are dropped, so that chains of equal blocks have few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["BlockCost", "BudgetError", "Choice", "Option", "choose", "least_bytes", "options_of", "peak_bytes"]

Choice = Literal["save", "selective", "recompute", "offload"]

# Of many blocks of many kinds; a plan is then at most a few thousandths of the budget away from the best.
_MAX_STATES = 2048
_MAX_CASES = 8
_NUM_SHARES = 8


class BudgetError(ValueError):
    """A budget below what the blocks need at least."""


@dataclass(frozen=True)
class BlockCost:
    """What was measured of one block, in one pass.

    Attributes:
        name: Its module name.
        input_bytes: Of its inputs, as far as no block before it keeps them too.
        saved_bytes: What autograd saves of it, inputs included.
        forward_seconds: Its forward.
        flops: Of its forward.
        selective_bytes: Its inputs and the results that selective recomputation keeps; None: it cannot.
        selective_seconds: Of its second run then.
        selective_flops: Of its second run then.
        selective_working_bytes: In its backward then; at least `saved_bytes`.
    """

    name: str
    input_bytes: int
    saved_bytes: int
    forward_seconds: float
    flops: int = 0
    selective_bytes: int | None = None
    selective_seconds: float = 0.0
    selective_flops: int = 0
    selective_working_bytes: int = 0


@dataclass(frozen=True)
class Option:
    """One choice for one block; see the module."""

    choice: Choice
    kept: int
    working: int
    seconds: float
    flops: int = 0


def options_of(block: BlockCost, bandwidth: float = 0.0) -> dict[Choice, Option]:
    """What can be done with a block.

    Args:
        block: What was measured.
        bandwidth: Of the link, bytes a second each way; 0: there is none. A copy runs beside one block's forward, or
            its backward of twice the time; what it takes longer is paid.
    """
    saved = max(block.saved_bytes, block.input_bytes)
    found: dict[Choice, Option] = {
        "save": Option("save", saved, saved, 0.0),
        "recompute": Option("recompute", block.input_bytes, saved, block.forward_seconds, block.flops),
    }
    if block.selective_bytes is not None and block.selective_bytes < saved:
        working = max(block.selective_working_bytes, saved)
        found["selective"] = Option(
            "selective", block.selective_bytes, working, block.selective_seconds, block.selective_flops
        )
    if bandwidth > 0:
        copying, forward = saved / bandwidth, block.forward_seconds
        found["offload"] = Option("offload", 0, 0, max(0.0, copying - forward) + max(0.0, copying - 2 * forward))
    return found


def choose(
    blocks: Sequence[BlockCost], budget: int, *, bandwidth: float = 0.0, prefetch: int = 1, num_passes: int = 1
) -> list[Option]:
    """The choices that pay least among those that fit.

    Args:
        blocks: The chain.
        budget: Bytes that saved tensors of the blocks may take on the device.
        bandwidth: Of the link; 0: nothing is moved.
        prefetch: Moved blocks on the device beside the one at work.
        num_passes: Passes whose backward has not come yet, as in a pipeline: all but one keep what they keep in full.

    Raises:
        BudgetError: Where nothing fits; with the least budget that would do, and the block that needs most.
    """
    found = _best(blocks, budget, bandwidth, prefetch, num_passes)
    if found is not None:
        return found
    least = least_bytes(blocks, bandwidth=bandwidth, prefetch=prefetch, num_passes=num_passes)
    largest = max(blocks, key=lambda block: block.saved_bytes)
    raise BudgetError(
        f"`budget={budget}` bytes do not hold what the blocks need at least: `{largest.name}` alone takes "
        f"{largest.saved_bytes} bytes in its backward, beside the inputs that are kept of {len(blocks)} blocks in "
        f"{num_passes} passes at a time. The least that would do is {least} bytes. Raise `budget`, or make "
        "micro-batches smaller."
    )


def least_bytes(blocks: Sequence[BlockCost], *, bandwidth: float = 0.0, prefetch: int = 1, num_passes: int = 1) -> int:
    """The least budget that would do, with the arguments of `choose`."""
    cases = _cases(blocks, bandwidth, prefetch)
    return min(peak_bytes(_smallest(options), num_passes, reserve) for options, reserve in cases)


def peak_bytes(options: Sequence[Option], num_passes: int = 1, reserve: int = 0) -> int:
    """Most that saved tensors take on the device under these choices.

    Args:
        options: One for each block.
        num_passes: See `choose`.
        reserve: For moved blocks on the device.
    """
    used = peak = 0
    for option in options:
        peak = max(peak, used + option.working)
        used += option.kept
    return max(peak, used) + (num_passes - 1) * used + reserve


def _cases(
    blocks: Sequence[BlockCost], bandwidth: float, prefetch: int
) -> Iterator[tuple[list[dict[Choice, Option]], int]]:
    """Which blocks may be moved, and the room on the device that those take around their use."""
    sizes = sorted({block.saved_bytes for block in blocks}) if bandwidth > 0 else []
    for largest in (0, *sizes[:: max(1, len(sizes) // _MAX_CASES)], *sizes[-1:]):
        options = [options_of(block, bandwidth if 0 < block.saved_bytes <= largest else 0.0) for block in blocks]
        yield options, (prefetch + 1) * largest


def _smallest(options: Sequence[Mapping[Choice, Option]]) -> list[Option]:
    """What keeps least; no other choice takes less while a block is worked on."""
    return [min(of_block.values(), key=lambda option: (option.kept, option.working)) for of_block in options]


def _best(
    blocks: Sequence[BlockCost], budget: int, bandwidth: float, prefetch: int, num_passes: int
) -> list[Option] | None:
    best: tuple[float, list[Option]] | None = None
    for options, reserve in _cases(blocks, bandwidth, prefetch):
        room = budget - reserve
        # Other passes keep their part: how much that may be is tried out.
        least = sum(option.kept for option in _smallest(options))
        shares = [room * share // (_NUM_SHARES * num_passes) for share in range(1, _NUM_SHARES * num_passes)]
        for share in [least, *shares] if num_passes > 1 else [room]:
            own = room - (num_passes - 1) * share
            found = None if own < 0 or share < least else _dynamic(options, own, share)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
    return None if best is None else best[1]


@dataclass
class _State:
    """Choices up to a block, as a list from the last one back."""

    seconds: float
    option: Option | None = None
    before: _State | None = None

    def options(self) -> list[Option]:
        """In order."""
        found: list[Option] = []
        state: _State | None = self
        while state is not None and state.option is not None:
            found.append(state.option)
            state = state.before
        return found[::-1]


def _dynamic(
    options: Sequence[Mapping[Choice, Option]], budget: int, kept_limit: int
) -> tuple[float, list[Option]] | None:
    """Least time within a budget; what is kept in all within a limit of its own."""
    states: dict[int, _State] = {0: _State(0.0)}
    for of_block in options:
        following: dict[int, _State] = {}
        for used, state in states.items():
            for option in of_block.values():
                after = used + option.kept
                if used + option.working > budget or after > kept_limit:
                    continue
                seconds = state.seconds + option.seconds
                known = following.get(after)
                if known is None or seconds < known.seconds:
                    following[after] = _State(seconds, option, state)
        states = _pruned(following, kept_limit)
    if not states:
        return None
    best = min(states.values(), key=lambda state: state.seconds)
    return best.seconds, best.options()


def _pruned(states: dict[int, _State], limit: int) -> dict[int, _State]:
    """Without states that use more and pay no less; with very many, the least use of each small range."""
    kept: dict[int, _State] = {}
    least = float("inf")
    for used in sorted(states):
        if states[used].seconds < least:
            least = states[used].seconds
            kept[used] = states[used]
    if len(kept) <= _MAX_STATES:
        return kept
    width = limit / _MAX_STATES
    coarse: dict[int, int] = {}
    for used in kept:
        coarse.setdefault(int(used / width), used)
    return {used: kept[used] for used in coarse.values()}
