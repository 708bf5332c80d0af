"""The passes of a stage over its micro-batches under ZeRO stage 3, message by message.

Each pass issues one sequence of messages that all ranks agree on. A rank that needs a unit first goes through the
messages before it, and at the end of the pass through those that are left; so ranks that take different branches, or
have no micro-batch at all, still issue the same ones.

A rank that needs a unit again, after it was given up, asks for it: it goes through all messages that are left and then
meets the other ranks at the end of their pass, where all send that unit once more. From then on the unit stays for
whole passes of that kind (training, or evaluation) on every rank, so that nobody has to ask for it a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel import _host
from lightning_bigmodel.sharding.gather import ParameterShards, Unit
from lightning_bigmodel.sharding.reduce import BucketReducer

__all__ = ["GatherPasses"]

_NONE: Any = object()


class GatherPasses:
    """Forward and backward passes of one pipeline stage over its micro-batches.

    Args:
        shards: All units of this rank.
        units: Those of the stage.
        reduce_every_microbatch: Whether gradients become rows after each micro-batch, or once at `reduce_rest`.
    """

    def __init__(self, shards: ParameterShards, units: Sequence[Unit], *, reduce_every_microbatch: bool = True) -> None:
        self.units = dict.fromkeys(units)
        self._shards = shards
        self._forward_order = list(units)
        self._backward_order = list(reversed(self._forward_order))
        self._sequence: list[tuple[Unit, int | None]] = []  # a unit to gather, or the index of a bucket to reduce
        self._next = 0
        self._uses: list[Unit] = []
        self._is_learned = False
        self._microbatch: Any = None
        self._forward_in_progress: Any = _NONE
        self._calls: dict[Any, Counter[Unit]] = {}
        self._done: set[Unit] = set()  # backward has gone through all their calls
        self._pins: set[Unit] = set()  # stay to the end of this pass
        # Stay for whole passes of evaluation, and of training: used several times, or without a call of their modules.
        self._kept = tuple({unit for unit in units if unit.stays} for _ in range(2))
        self._trains = self._is_backward = False
        self._reduces = reduce_every_microbatch
        self.reducer = BucketReducer(
            shards,
            [parameter for unit in units for parameter in unit.parameters],
            while_backward=reduce_every_microbatch,
            divide=self._buckets,
            advance=self._reduce_complete,
        )

    def _buckets(self, trained: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        wanted = {id(parameter) for parameter in trained}
        # Units that stay for whole passes get gradients until the end.
        return [
            bucket
            for unit in sorted(self._backward_order, key=lambda unit: unit in self._kept[True])
            for parameters, _, _ in unit.messages
            if (bucket := [parameter for parameter in parameters if id(parameter) in wanted])
        ]

    # -- passes --------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, microbatch: Any) -> Iterator[None]:
        """One forward; `microbatch` tells it from others whose backward has not come yet. Collective."""
        self._trains = trains = torch.is_grad_enabled()
        self._uses = []
        self._forward_in_progress = microbatch
        try:
            self._begin_forward(microbatch)
            yield
        except BaseException:
            self.abandon()
            raise
        self._end_forward()
        self._forward_in_progress = _NONE
        if not trains:
            del self._calls[microbatch]
        elif not self._is_learned:
            self._learn()

    def _begin_forward(self, microbatch: Any) -> None:
        self._calls[microbatch] = Counter()
        self._is_backward = False
        self._begin(self._forward_order, microbatch)

    def _end_forward(self) -> None:
        self._finish_sequence()
        while self._settle():
            pass
        self._end()

    def begin_backward(self, microbatch: Any) -> None:
        """A backward begins. Collective."""
        if self._forward_in_progress is not _NONE:
            self._end_forward()  # manual optimization: backward within the step, which goes on afterwards
        self._trains = self._is_backward = True
        if self._reduces:
            self.reducer.open()
        self._begin(self._backward_order, microbatch, reduces=self._reduces)

    def pause_backward(self) -> None:
        """The first half of a split backward is over; parameters stay (`keep_gathered`) for the second."""
        self._end()

    def end_backward(self, microbatch: Any) -> None:
        """It is over. Collective."""
        self._end()
        if self._reduces:
            self.reducer.flush()
        self._calls.pop(microbatch, None)
        if self._forward_in_progress is not _NONE:
            self._begin_forward(self._forward_in_progress)

    def abandon(self) -> None:
        """Forget passes that failed, and give their memory up. No communication."""
        self._shards.active, self._forward_in_progress = None, _NONE
        self._calls.clear()
        self.reducer.abandon()
        self._shards.drop_all()

    def _begin(self, order: list[Unit], microbatch: Any, *, reduces: bool = False) -> None:
        self._shards.active, self._microbatch = self, microbatch
        self._next = 0
        self._pins, self._done = set(), set()
        kept = self._kept[self._trains]
        gathers: list[tuple[Unit, int | None]] = [(unit, None) for unit in order if unit not in kept]
        self._sequence = [(unit, None) for unit in order if unit in kept]
        if reduces:
            unit_of = self._shards.unit_of
            reductions = [(unit_of[id(b[0])], index) for index, (b, _) in enumerate(self.reducer.buckets)]
            # A unit's gradients go while the next unit computes, whose successor is gathered after that.
            for at, item in enumerate(gathers):
                self._sequence.append(item)
                self._sequence += [r for r in reductions if at and r[0] is gathers[at - 1][0]]
            ended = {id(unit) for unit, _ in gathers[:-1]}
            self._sequence += [r for r in reductions if id(r[0]) not in ended]
        else:
            self._sequence += gathers
        for unit in order:
            if unit in kept:
                self.need(unit)

    def _finish_sequence(self) -> None:
        while self._next < len(self._sequence):
            self._issue()

    def _end(self) -> None:
        shards = self._shards
        self._finish_sequence()
        shards.active = None
        for unit in self.units:
            if not shards.keep_gathered:
                shards.drop(unit)
            elif unit.waiting:
                shards.finish_gather(unit)

    def _settle(self, wanted: Unit | None = None) -> bool:
        """Send units that ranks ask for out of the sequence; whether there were any. Collective: a byte or two a unit.

        Args:
            wanted: What this rank asks for.
        """
        order, kept = list(self.units), self._kept[self._trains]
        flags = [unit in self._pins for unit in order] + [unit is wanted for unit in order]
        numbers = torch.tensor(flags, dtype=torch.uint8)  # of the host: what to do next must not wait for the device
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._shards.group)
        flags = [bool(flag) for flag in numbers.tolist()]
        new = {unit for unit, flag in zip(order, flags, strict=False) if flag} - kept
        if new:
            kept |= new
            self.reducer.divide_again()
        asked = [unit for unit, flag in zip(order, flags[len(order) :], strict=True) if flag]
        for unit in asked:
            self._shards.gather_again(unit, keep=unit is wanted)
        return bool(asked)

    def _learn(self) -> None:
        """Take the order in which the first rank used its units; all ranks must have one."""
        order, group = list(self.units), self._shards.group
        uses = self._uses
        first, last = dict.fromkeys(uses), dict.fromkeys(reversed(uses))
        indices = [order.index(unit) for chosen in (first, last) for unit in dict.fromkeys([*chosen, *order])]
        device = self._shards.device
        numbers = torch.tensor(indices, dtype=torch.int64, device=device)
        dist.broadcast(numbers, group=group, group_src=0)
        chosen = [order[index] for index in numbers.tolist()]
        self._forward_order, self._backward_order = chosen[: len(order)], chosen[len(order) :]
        self.reducer.divide_again()
        self._is_learned = True

    # -- units ---------------------------------------------------------------------------------------------------------

    def _issue(self) -> None:
        """The next message."""
        unit, bucket = self._sequence[self._next]
        self._next += 1
        if bucket is None:
            self._shards.start_gather(unit)
        else:
            self.reducer.launch(bucket)

    def _reduce_complete(self) -> None:
        """Go on with the sequence as far as gradients are there."""
        while self._next < len(self._sequence):
            bucket = self._sequence[self._next][1]
            if bucket is None or not self.reducer.is_complete(bucket):
                return
            self._issue()

    def need(self, unit: Unit) -> None:
        """Make a unit whole, after the messages that come before it, and send for the next one."""
        shards = self._shards
        if not unit.is_present and not unit.waiting:
            waiting_for = (unit, None)
            if waiting_for in self._sequence[self._next :]:
                while not unit.waiting:
                    self._issue()
            else:
                self._ask_for(unit)
        self._uses.append(unit)
        shards.finish_gather(unit)
        self._reduce_complete()
        if self._next < len(self._sequence) and self._sequence[self._next][1] is None:
            self._issue()

    def _ask_for(self, unit: Unit) -> None:
        """A unit is needed after its message: it was given up, or passed over for another one that was."""
        if self._is_backward:
            raise RuntimeError(
                f"Backward needs the parameters of `{unit.name}` after they were given up: something other than the "
                "calls of its modules uses them there, such as an autograd function that reads a weight in its "
                "backward. With `zero_stage=3` give `keep_gathered=True`, which keeps parameters for the whole step, "
                "or use `zero_stage=2`."
            )
        if unit in self._uses:
            self._pins.add(unit)
        while self._next < len(self._sequence):
            passed, _ = self._sequence[self._next]
            self._issue()
            self._shards.drop(passed)  # one at a time: what is used later is asked for too
        while not unit.is_present:
            self._settle(unit)

    def pin(self, unit: Unit) -> None:
        """Make a unit whole for the rest of the pass, and for its backward: no call announces its use."""
        self._pins.add(unit)
        self.need(unit)

    def note_call(self, units: Sequence[Unit], inputs: Sequence[Tensor]) -> None:
        """A call whose backward will come; after the gradients of its inputs the units are not needed any more."""
        self._calls[self._microbatch].update(units)
        # The gradient of a leaf may be ready before other parts of the backward: such units wait for the pass's end.
        if inputs and all(tensor.grad_fn is not None for tensor in inputs):
            microbatch, num_inputs = self._microbatch, len(inputs)
            missing = num_inputs

            # Not torch's hook for several tensors: it refers to the nodes it hangs on, and graphs would stay until
            # Python has looked for such cycles once for each block.
            def arrived(_: Tensor) -> None:
                nonlocal missing
                missing -= 1
                if not missing:
                    missing = num_inputs  # of another backward through the same graph
                    for unit in units:
                        self._call_done(unit, microbatch)

            for tensor in inputs:
                tensor.register_hook(arrived)

    def after_call(self, unit: Unit) -> None:
        """The forward of a unit is over."""
        if not self._is_kept(unit):
            self._shards.drop(unit)

    def _is_kept(self, unit: Unit) -> bool:
        return unit in self._kept[self._trains] or self._shards.keep_gathered or unit in self._pins

    def before_backward(self, units: Sequence[Unit]) -> Any:
        """A hook for what the units put out."""
        microbatch = self._microbatch

        def need(_: Tensor) -> None:
            if self._shards.active is not self:  # a backward nobody announced
                self.begin_backward(microbatch)
                _host.queue_after_backward(lambda: self.end_backward(microbatch))
            for unit in units:
                # An output that is an input handed on has its gradient only after the unit's own backward.
                if unit not in self._done:
                    self.need(unit)

        return need

    def _call_done(self, unit: Unit, microbatch: Any) -> None:
        calls = self._calls.get(microbatch)
        if calls is None or self._shards.active is not self or self._microbatch != microbatch:
            return
        calls[unit] -= 1
        if calls[unit] <= 0 and not self._is_kept(unit):
            self._done.add(unit)
            self._shards.drop(unit)
