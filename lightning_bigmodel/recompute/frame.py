"""One call of a block whose activations are given up after its forward and computed again in backward.

    forward:    keep the inputs; for each tensor that autograd wants to save, a `_Slot` in its place
    backward:   the first slot that is read runs the block again and fills all slots; a slot lives as long as its node

Gradient checkpointing as of arXiv 1604.06174, by hooks on saved tensors, as torch's own with `use_reentrant=False` does
it. torch computes again in each call of the autograd engine. A schedule with split backwards (zero bubble) makes many
calls for one micro-batch; here a value stays until autograd gives its node up, so the block runs twice in all, with
`retain_graph=True` too. Besides, a frame may take its input from the frame before it, so that a segment of blocks keeps
one input.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_bigmodel.recompute._arguments import Position, map_tensors, tensors_of, with_caches_of_their_own
from lightning_bigmodel.recompute._generators import GeneratorStates
from lightning_bigmodel.recompute.ambient import Ambient, Keeper, OwnState
from lightning_bigmodel.recompute.noting import note_second_run

__all__ = [
    "Contexts",
    "Frame",
    "Link",
    "RecomputeError",
    "kept_by_autograd",
    "run_again_in_backward",
]


# Makes what the first run of a block happens within, and what its second does.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class RecomputeError(RuntimeError):
    """A block did not do in its second run what it did in its first."""


class _Stop(BaseException):
    """Leaves the second run as soon as all is there that backward needs. A `BaseException`: no user code catches it."""


class _Keep(torch.autograd.Function):
    """Autograd keeps the inputs: outer hooks on saved tensors see them, and in-place changes are detected."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing is computed from the anchor")


def kept_by_autograd(tensors: Sequence[Tensor]) -> Callable[[int], Tensor]:
    """Let autograd keep tensors as it keeps those of operators, for as long as what is returned is there.

    Args:
        tensors: None of them with a graph, which would be kept too.

    Returns:
        Gives one of them by its place; raises as in backward where it was changed in place since.
    """
    node = _Keep.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn  # type: ignore[no-untyped-call]
    read: list[Tensor] = []

    def tensor(index: int) -> Tensor:
        if not read:
            read.extend(node.saved_tensors)
        return read[index]

    return tensor


class _Slot:
    """What autograd holds in the place of a saved tensor."""

    __slots__ = ("__weakref__", "frame", "value")

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame
        self.value: Tensor | None = None


class Link:
    """Connects frames of blocks that follow one another, for segments that keep the input of their first block only."""

    def __init__(self) -> None:
        self._outputs: list[tuple[weakref.ref[Tensor], int, weakref.ref[Frame], int]] = []

    def offer(self, frame: Frame, output: Any) -> None:
        """The next block may ask `frame` for these outputs instead of keeping them."""
        maker = weakref.ref(frame)
        self._outputs = [
            (weakref.ref(tensor), tensor._version, maker, index) for index, tensor in enumerate(tensors_of(output))
        ]

    def source(self, tensor: Tensor) -> tuple[Frame, int] | None:
        """The frame before, if it made `tensor` and nobody has changed it since."""
        for reference, version, maker, index in self._outputs:
            frame = maker()
            if frame is not None and reference() is tensor and tensor._version == version:
                return frame, index
        return None

    def clear(self) -> None:
        """A new segment begins."""
        self._outputs = []


class Frame:
    """One call; see the module.

    Args:
        name: The block's, for messages.
        function: Its forward.
        args: Of the call.
        kwargs: Of the call.
        ambient: The state around the call.
        link: Where inputs may come from the frame before.
        watch: Told of each tensor that is kept ("input", "saved") or computed again ("again").
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        ambient: Ambient,
        link: Link | None,
        watch: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        self.name = name
        self._watch = watch
        self.num_runs = 1
        self.generators: GeneratorStates | None = None
        self.stops_early = True  # in its second run, as soon as all is there
        self.own: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.second_context: AbstractContextManager[Any] = nullcontext()
        self._function, self._ambient = function, ambient
        self._slots: list[weakref.ref[_Slot]] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._next = 0
        self._is_over = False  # the forward
        self._promised: set[int] = set()
        self._outputs: dict[int, Tensor] = {}
        self._sources: list[tuple[Frame, int] | None] = []
        given = tensors_of((args, kwargs))
        self._versions = [(tensor, tensor._version) for tensor in given]
        kept: list[Tensor] = []
        for tensor in given:
            source = None if link is None else link.source(tensor)
            if source is not None:
                source[0]._promised.add(source[1])
            else:
                if watch is not None:
                    watch("input", tensor)
                kept.append(tensor if tensor.is_leaf else tensor.detach())
            self._sources.append(source)
        self._wants_gradient = [tensor.requires_grad for tensor in given]
        positions = iter(range(len(given)))
        self._arguments: Any = map_tensors(lambda _: Position(next(positions)), (tuple(args), dict(kwargs)))
        self._kept: Callable[[int], Tensor] | None = kept_by_autograd(kept)

    # -- first run -----------------------------------------------------------------------------------------------------

    def recording(self) -> saved_tensors_hooks:
        """The hooks of the first run."""

        def pack(tensor: Tensor) -> _Slot:
            if self._watch is not None:
                self._watch("saved", tensor)
            slot = _Slot(self)
            # Until the run is over: it may take gradients within itself.
            slot.value = tensor.detach() if tensor.requires_grad else tensor
            self._slots.append(weakref.ref(slot))
            self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
            return slot

        return saved_tensors_hooks(pack, _read)

    def end_forward(self) -> None:
        """The first run is over.

        Raises:
            RecomputeError: If it has changed its own inputs in place: the second run would start from other values.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RecomputeError(
                    f"`{self.name}` changes an input of shape {tuple(tensor.shape)} in place, so that it cannot be "
                    "computed again from it. Write `x = x + y` in place of `x += y`, or leave the block out of "
                    "`Recompute(blocks=[...])`."
                )
        self._versions, self._is_over = [], True
        for reference in self._slots:
            slot = reference()
            if slot is not None:
                slot.value = None

    # -- second run ----------------------------------------------------------------------------------------------------

    def _inputs(self) -> list[Tensor]:
        assert self._kept is not None
        inputs: list[Tensor] = []
        num_kept = 0
        for source, wants in zip(self._sources, self._wants_gradient, strict=True):
            if source is None:
                tensor = self._kept(num_kept)
                num_kept += 1
            else:
                tensor = source[0].output(source[1])
            inputs.append(tensor.detach().requires_grad_(wants))
        return inputs

    def output(self, index: int) -> Tensor:
        """A leaf of the output, for the frame after this one, which asks once."""
        if index not in self._outputs:
            self.run_again()
        self._promised.discard(index)
        return self._outputs.pop(index)

    def run_again(self) -> None:
        """Run the block and fill its slots."""
        if self._arguments is None:
            raise RecomputeError(f"`{self.name}` has been computed again already, and what it had saved is gone.")
        inputs = self._inputs()
        args, kwargs = map_tensors(lambda position: inputs[position.index], self._arguments, Position)
        args, kwargs = with_caches_of_their_own(args, kwargs)
        self.num_runs += 1
        self._next = 0
        complete = False
        hooks = saved_tensors_hooks(self._fill, lambda tensor: tensor)
        generators = nullcontext() if self.generators is None else self.generators.again()
        with self._ambient.restored(), self.own(), generators, hooks, self.second_context:
            try:
                output = self._function(*args, **kwargs)
                complete = True
            except _Stop:
                output = None
        if complete and self._next < len(self._slots):
            raise RecomputeError(
                f"`{self.name}` saved {len(self._slots)} tensors for backward in its first run and {self._next} in its "
                f"second. {_WHY}"
            )
        if self._promised:
            made = tensors_of(output)
            self._outputs = {index: made[index].detach() for index in self._promised}
        if self._is_over:
            # All is in the slots now; a frame that other code holds on to must not hold activations.
            self._arguments = self._kept = None
            self._sources, self.own, self.second_context = [], nullcontext, nullcontext()

    def _fill(self, tensor: Tensor) -> Tensor:
        index, self._next = self._next, self._next + 1
        if index >= len(self._slots):  # after the last one that is needed, where outputs are needed too
            return tensor
        kind = (tensor.shape, tensor.dtype, tensor.device)
        if kind != self._kinds[index]:
            raise RecomputeError(
                f"Tensor {index} that `{self.name}` saves for backward was {_said(self._kinds[index])} in its first "
                f"run and is {_said(kind)} in its second. {_WHY}"
            )
        slot = self._slots[index]()
        if self._watch is not None:
            self._watch("again", tensor)
        value = tensor.detach() if tensor.requires_grad else tensor
        if slot is not None and slot.value is None:
            slot.value, slot.frame = value, None
            note_second_run(slot, tensor)
        if self.stops_early and self._is_over and self._next == len(self._slots) and not self._promised:
            raise _Stop
        return value


def run_again_in_backward(
    name: str,
    own: OwnState,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    keepers: Sequence[Keeper] = (),
    link: Link | None = None,
    contexts: Contexts | None = None,
    watch: Callable[[str, Tensor], None] | None = None,
) -> Any:
    """Call `function`, keep its inputs only, and call it again when backward needs what it computed.

    Args:
        name: The block's, for messages.
        own: What the function may write into its block.
        function: The forward of a block.
        args: Of the call.
        kwargs: Of the call.
        keepers: See `Ambient`.
        link: Where inputs may come from the frame before, and outputs go to the next; None: all inputs are kept.
        contexts: Makes what the first and the second run happen within, for selective recomputation.
        watch: See `Frame`.

    Returns:
        What the function returned.

    Memory: the inputs of the block, and its activations from the moment that backward reaches it.
    """
    # The frame's are never filled.
    frame = Frame(name, function, *with_caches_of_their_own(args, kwargs), Ambient(keepers), link, watch)
    first: AbstractContextManager[Any] = nullcontext()
    if contexts is not None:
        first, frame.second_context = contexts()
    before = own.before()
    args, kwargs = with_caches_of_their_own(args, kwargs)
    if not own.is_compiled:  # which cannot always be traced within a mode
        frame.generators = GeneratorStates()
    with (
        frame.generators or nullcontext(),
        first,
        frame.recording(),
    ):  # what `first` hands to autograd at its end is no part of it
        output = function(*args, **kwargs)
    changed = own.changed(before)
    frame.stops_early = not own.has_hooks_on_both_ends()
    frame.own = lambda: own.restored(changed)
    frame.end_forward()
    if link is not None:
        link.offer(frame, output)
    return output


_WHY = (
    "It must do the same when it is given the same: look for branches on values that change between calls, for state "
    "outside of the module, and for random numbers that neither torch, numpy nor `random` drew."
)


def _said(kind: tuple[Any, ...]) -> str:
    return f"{tuple(kind[0])} {kind[1]} on {kind[2]}"


def _read(slot: _Slot) -> Tensor:
    if slot.value is None:
        assert slot.frame is not None
        frame = slot.frame
        frame.run_again()
        if slot.value is None:
            raise RecomputeError(f"`{frame.name}` did not save in its second run what backward needs. {_WHY}")
    return slot.value
