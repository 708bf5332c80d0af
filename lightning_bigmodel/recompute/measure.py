"""What the blocks of a chain take and cost, measured while they train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_bigmodel import _host
from lightning_bigmodel.recompute._arguments import tensors_of
from lightning_bigmodel.recompute._storages import is_activation, lasting_storages, storage_of
from lightning_bigmodel.recompute.frame import Contexts, run_again_in_backward
from lightning_bigmodel.recompute.outside import OutsideMeter
from lightning_bigmodel.recompute.policy import Block, Chain, Treatment

__all__ = ["BlockNumbers", "ChainMeter", "Metered", "operator_name"]


@dataclass
class BlockNumbers:
    """What was measured of one block: the largest of all passes, and the least time.

    Attributes:
        kind: Equal for blocks that are the same but for their weights.
        input_bytes: Of inputs that no block before it has too.
        saved_bytes: Of what autograd saves, inputs included; results that the next block has as inputs left out.
        kept_bytes: Of results that were kept (selective recomputation), and inputs.
        working_bytes: Of all that, and what was computed again.
        flops_of: Operator -> operations of the first run.
        seconds: Of the second run, the shortest.
        num_runs: Second runs.
        num_passes: Passes at a time whose backward had not come.
    """

    kind: str = ""
    input_bytes: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    working_bytes: int = 0
    flops_of: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    num_runs: int = 0
    num_passes: int = 0

    @property
    def flops(self) -> int:
        """Of the first run."""
        return sum(self.flops_of.values())

    def add(self, other: BlockNumbers) -> None:
        """Of another rank: the larger of each, so that ranks that have the same blocks come to the same plan."""
        for name in ("input_bytes", "saved_bytes", "kept_bytes", "working_bytes", "seconds", "num_runs", "num_passes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        if other.flops > self.flops:
            self.flops_of = other.flops_of


class ChainMeter:
    """Measures blocks that are run again.

    Args:
        chain: The blocks.
        counts_flops: Whether operators are counted, which takes some microseconds for each.
        outside: Told of what blocks keep.
    """

    def __init__(self, chain: Chain, *, counts_flops: bool, outside: OutsideMeter | None = None) -> None:
        self._outside = outside
        self.numbers = {block.name: BlockNumbers(_kind(block)) for block in chain.blocks}
        self._counts_flops = counts_flops
        self._under_way = dict.fromkeys(self.numbers, 0)
        self._clocks: list[tuple[BlockNumbers, Any, Any]] = []
        self._seen: dict[Any, int] = {}  # inputs of the pass in progress, by the block that had them first
        self._last_index = -1

    def call(
        self,
        chain: Chain,
        block: Block,
        contexts: Contexts | None,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one block, to be run again."""
        numbers = self.numbers[block.name]
        if block.index <= self._last_index:
            self._seen.clear()
        self._last_index = block.index
        self._under_way[block.name] += 1
        numbers.num_passes = max(numbers.num_passes, self._under_way[block.name])
        lasting = lasting_storages(block.module)
        found: dict[str, dict[Any, int]] = {"input": {}, "saved": {}, "kept": {}, "again": {}}

        def watch(what: str, tensor: Tensor) -> None:
            if what == "input" and self._outside is not None:
                self._outside.belongs_to_block(tensor)
            if is_activation(tensor, lasting):
                reference, size = storage_of(tensor)
                if self._seen.get(reference, block.index) == block.index:
                    found[what][reference] = size
                    if what == "input":
                        self._seen[reference] = block.index

        first, second = (nullcontext(), nullcontext()) if contexts is None else contexts()
        is_cuda = any(tensor.is_cuda for tensor in tensors_of((args, kwargs)))
        counter = _Counter(display=False) if self._counts_flops else nullcontext()

        def metered() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return _together(_kept(watch), counter, first), self._second(numbers, block, second, found, is_cuda)

        output = run_again_in_backward(
            block.name, block.own, function, args, kwargs, keepers=chain.keepers, contexts=metered, watch=watch
        )
        given_on = {storage_of(tensor)[0] for tensor in tensors_of(output)} if block is not chain.blocks[-1] else set()
        inputs = sum(found["input"].values())
        kept = {key: size for key, size in found["kept"].items() if key not in found["input"]}
        saved = {key: n for key, n in {**found["input"], **found["saved"]}.items() if key not in given_on}
        numbers.input_bytes = max(numbers.input_bytes, inputs)
        numbers.kept_bytes = max(numbers.kept_bytes, inputs + sum(kept.values()))
        numbers.saved_bytes = max(numbers.saved_bytes, sum(saved.values()))
        flops_of = _flops_of(counter)
        if sum(flops_of.values()) > numbers.flops:
            numbers.flops_of = flops_of
        return output

    @contextmanager
    def _second(
        self,
        numbers: BlockNumbers,
        block: Block,
        inner: AbstractContextManager[Any],
        found: Mapping[str, dict[Any, int]],
        is_cuda: bool,
    ) -> Iterator[None]:
        self._under_way[block.name] -= 1
        began = _now(is_cuda)
        try:
            with inner:
                yield
        finally:
            self._clocks.append((numbers, began, _now(is_cuda)))
            together = {**found["input"], **found["kept"], **found["again"]}
            numbers.working_bytes = max(numbers.working_bytes, sum(together.values()))

    def read(self) -> dict[str, BlockNumbers]:
        """All numbers; waits for the device."""
        for numbers, began, ended in self._clocks:
            seconds = ended - began if isinstance(began, float) else _elapsed(began, ended)
            numbers.seconds = min(numbers.seconds, seconds) if numbers.num_runs else seconds
            numbers.num_runs += 1
        self._clocks.clear()
        return self.numbers


class Metered(Treatment):
    """Run a block again in backward, and measure it.

    Args:
        meter: Of its chain.
        contexts: See `run_again_in_backward`.
    """

    def __init__(self, meter: ChainMeter, contexts: Contexts | None = None) -> None:
        self._meter, self._contexts = meter, contexts

    def call(
        self, chain: Chain, block: Block, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the forward."""
        if any(_host.is_fake(tensor) for tensor in tensors_of((args, kwargs))):
            return function(*args, **kwargs)
        return self._meter.call(chain, block, self._contexts, function, args, kwargs)


def _kind(block: Block) -> str:
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in block.module.named_parameters()]
    return repr((type(block.module).__qualname__, shapes))


@contextmanager
def _kept(watch: Callable[[str, Tensor], None]) -> Iterator[None]:
    """What autograd is given to keep beside what the block saves: results of operators, at the end of the first run."""

    def pack(tensor: Tensor) -> Tensor:
        watch("kept", tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


class _NoModules:
    """For operations that are not dealt out to modules."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _Counter(FlopCounterMode):
    """Without hooks on all modules, which no gradient may be taken under."""

    def __init__(self, *, display: bool) -> None:
        super().__init__(display=display)
        self.mod_tracker: Any = _NoModules()


@contextmanager
def _together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _flops_of(counter: Any) -> dict[str, int]:
    if not isinstance(counter, FlopCounterMode):
        return {}
    return {str(op): int(flops) for op, flops in counter.get_flop_counts().get("Global", {}).items()}


def operator_name(operator: Any) -> str:
    """As `flops_of` has it: without the overload."""
    return str(operator.overloadpacket)


def _now(is_cuda: bool) -> Any:
    """A time of the host, or one of the device's."""
    if is_cuda:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _elapsed(began: Any, ended: Any) -> float:
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000
