"""The choice for each block that pays least time within a budget of bytes, measured and found while training begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning_bigmodel.recompute._arguments import tensors_of
from lightning_bigmodel.recompute._bytes import check_bytes
from lightning_bigmodel.recompute.choose import BlockCost, BudgetError, Option, choose, least_bytes, peak_bytes
from lightning_bigmodel.recompute.link import link_of, measured_bandwidth
from lightning_bigmodel.recompute.measure import BlockNumbers, ChainMeter, Metered, operator_name
from lightning_bigmodel.recompute.offload import Moved, Mover, Offload
from lightning_bigmodel.recompute.outside import OutsideMeter
from lightning_bigmodel.recompute.policy import Again, Chain, RecomputePolicy, Treatment
from lightning_bigmodel.recompute.selective import Selective

__all__ = ["Optimal", "Plan"]

Numbers = dict[str, BlockNumbers]


@dataclass(frozen=True)
class Plan:
    """What one rank does.

    Attributes:
        names: Of its blocks.
        options: The choice for each.
        saved_bytes: What each would keep if nothing were done.
        peak_bytes: Most that saved tensors of blocks take.
        budget: What they may take.
        bandwidth: Of the link, bytes a second; 0: nothing is moved.
        least_bytes: The least budget that would have done.
        outside_bytes: What the step saves outside of blocks, on top of the budget; None: other hooks on saved tensors
            have hidden it.
    """

    names: tuple[str, ...]
    options: tuple[Option, ...]
    saved_bytes: tuple[int, ...]
    peak_bytes: int
    budget: int
    bandwidth: float
    least_bytes: int
    outside_bytes: int | None


class Optimal(RecomputePolicy):
    """Save, save in part, compute again or move: for each block what pays least time within a budget of bytes.

    The first training batch runs with every block computed again, the most modest policy, and measures bytes,
    operations and seconds of each; the second, results of operators kept on one block of each kind. Then the choice is
    made by dynamic programming over the chain (arXiv 1911.13214, extended; see `recompute.choose`), on all ranks by
    the largest numbers of any, and printed as a table. The budget is for what blocks save. Weights, gradients and
    optimizer states come on top, and so does what the step saves outside of blocks (embeddings, head, loss), which is
    measured and has a line of its own in the table, with a word where it does not fit the budget too. Do not use it
    where shapes grow after the first two batches: the plan is that of those.

    Memory of the device: the budget, for what blocks save. Compute: what the table says. Communication: two small
    messages of every rank, at the beginning.

    Args:
        budget: Bytes of a rank that blocks may save, or such as `"24GiB"`.
        keep: Operators whose results may be kept, see `Selective`.
        prefetch: For moved blocks, see `Offload`.

    Attributes:
        plan: What this rank does, once it is found.

    Raises:
        ValueError: For settings out of range.
        BudgetError: On every rank after the second batch, where a budget is less than some rank needs, with the least
            that would do.

    Example:
        >>> from lightning_bigmodel import Optimal, Recompute
        >>> callback = Recompute(policy=Optimal("24GiB", prefetch=2))  # or Recompute(budget="24GiB")
    """

    def __init__(self, budget: int | str, keep: Sequence[str] = ("matmul", "attention"), prefetch: int = 1) -> None:
        self.budget = check_bytes("budget", budget)
        self.keep, self.prefetch = tuple(keep) if isinstance(keep, (list, tuple)) else keep, prefetch
        Selective(keep)
        Offload(prefetch=prefetch)
        self.plan: Plan | None = None
        self.plans: list[Plan] = []
        self._meters: list[ChainMeter] = []
        self._chosen: set[str] = set()
        self._outside = OutsideMeter()

    def bandwidth(self, chain: Chain) -> float:
        """Bytes a second of the link; 0 where there is none to move over, as on a CPU."""
        device = next((t.device for b in chain.blocks for t in tensors_of(list(b.module.parameters()))), None)
        if device is None or device.type != "cuda":
            return 0.0
        return measured_bandwidth(link_of(device), device)

    def treatments(self, chain: Chain) -> Sequence[Treatment | None]:
        """Everything is computed again, and measured."""
        self.plan, self.plans = None, []
        self._outside = OutsideMeter()
        self._meters = [ChainMeter(chain, counts_flops=not chain.is_compiled, outside=self._outside)]
        return [Metered(self._meters[0]) for _ in chain.blocks]

    def around_batch(self) -> AbstractContextManager[None]:
        """While all blocks are measured, what lies outside of them is too."""
        return self._outside.watching() if len(self._meters) == 1 else nullcontext()

    def revised(self, chain: Chain, gather: Callable[[Any], list[Any]]) -> Sequence[Treatment | None] | None:
        """After the first batch, operators' results are kept on some blocks; after the second, the choice is made."""
        if self.plan is not None:
            return None
        own = self._meters[-1].read()
        if len(self._meters) == 1:
            numbers = _merged(gather(own))
            if not any(each.num_runs for each in numbers.values()):
                return None  # a batch without a loss
            self._full = numbers
            if not chain.is_compiled:
                return self._try_selective(chain)
            self._selective: Numbers = {}
        else:
            tried = {name: each for name, each in own.items() if name in self._chosen}
            self._selective = _merged(gather(tried))
            if not any(each.num_runs for each in self._selective.values()):
                return None
        return self._decide(chain, gather)

    def _try_selective(self, chain: Chain) -> Sequence[Treatment | None]:
        meter = ChainMeter(chain, counts_flops=False)
        self._meters.append(meter)
        contexts, kinds = Selective(self.keep).contexts(), set()
        self._chosen = set()
        treatments: list[Treatment | None] = []
        for block in chain.blocks:
            kind = _kind(self._full[block.name])
            if kind in kinds:
                treatments.append(Again())
            else:
                kinds.add(kind)
                self._chosen.add(block.name)
                treatments.append(Metered(meter, contexts))
        return treatments

    def _decide(self, chain: Chain, gather: Callable[[Any], list[Any]]) -> Sequence[Treatment | None]:
        names = tuple(block.name for block in chain.blocks)
        told = gather((self.bandwidth(chain), names, self._outside.num_bytes))
        bandwidth = min(each[0] for each in told)
        # Ranks of the same blocks have the same plan.
        outside = max((n for _, theirs, n in told if theirs == names and n is not None), default=None)
        kept = {operator_name(op) for op in Selective(self.keep).operators()}
        costs = _costs(names, self._full, self._selective, kept)
        num_passes = max((self._full[block.name].num_passes for block in chain.blocks), default=1)
        found: Plan | str
        try:
            options = choose(costs, self.budget, bandwidth=bandwidth, prefetch=self.prefetch, num_passes=num_passes)
            moved = max(
                (c.saved_bytes for c, o in zip(costs, options, strict=True) if o.choice == "offload"), default=0
            )
            found = Plan(
                names,
                tuple(options),
                tuple(cost.saved_bytes for cost in costs),
                peak_bytes(options, num_passes, (self.prefetch + 1) * moved),
                self.budget,
                bandwidth,
                least_bytes(costs, bandwidth=bandwidth, prefetch=self.prefetch, num_passes=num_passes),
                outside,
            )
        except BudgetError as error:
            found = str(error)
            if outside:
                found += f" What the step saves outside of blocks, {outside} bytes, comes on top of it."
        everyone = gather(found)
        for rank, theirs in enumerate(everyone):
            if isinstance(theirs, str):
                raise BudgetError(theirs if len(everyone) == 1 else f"Rank {rank}: {theirs}")
        assert isinstance(found, Plan)
        self.plan, self.plans = found, everyone
        self._meters = []
        return self._treatments_of(found)

    def _treatments_of(self, plan: Plan) -> Sequence[Treatment | None]:
        # All of it: the plan counts on that.
        mover, selective = Mover(Offload(prefetch=self.prefetch, min_bytes=0)), Selective(self.keep)
        make: dict[str, Callable[[], Treatment | None]] = {
            "save": lambda: None,
            "selective": selective.treatment,
            "recompute": Again,
            "offload": lambda: Moved(mover, runs_again=False),
        }
        return [make[option.choice]() for option in plan.options]


def _merged(of_ranks: Sequence[Numbers]) -> Numbers:
    """The largest of all ranks that have a block: ranks that compute the same blocks must do the same with them."""
    merged: Numbers = {}
    for numbers in of_ranks:
        for name, each in numbers.items():
            if name in merged:
                merged[name].add(each)
            else:
                merged[name] = each
    return merged


def _kind(numbers: BlockNumbers) -> tuple[Any, ...]:
    return (numbers.kind, numbers.input_bytes, numbers.saved_bytes, numbers.flops)


def _costs(
    names: Sequence[str], full: Mapping[str, BlockNumbers], selective: Numbers, kept_ops: Collection[str]
) -> list[BlockCost]:
    """Blocks of one kind cost the same: the mean over them, so that noise does not make their choices differ."""
    seconds: dict[tuple[Any, ...], list[float]] = {}
    for each in full.values():
        seconds.setdefault(_kind(each)[:1], []).append(each.seconds)
    tried = {_kind(full[name]): (full[name], numbers) for name, numbers in selective.items() if name in full}
    costs = []
    for name in names:
        each = full[name]
        times = seconds[_kind(each)[:1]]
        cost = BlockCost(name, each.input_bytes, each.saved_bytes, sum(times) / len(times), each.flops)
        of_kind = tried.get(_kind(each))
        if of_kind is not None:
            numbers = of_kind[1]
            cost = BlockCost(
                name,
                each.input_bytes,
                each.saved_bytes,
                max(cost.forward_seconds, numbers.seconds),
                each.flops,
                numbers.kept_bytes,
                numbers.seconds,
                sum(flops for op, flops in each.flops_of.items() if op not in kept_ops),
                max(each.saved_bytes, numbers.working_bytes),
            )
        costs.append(cost)
    return costs
