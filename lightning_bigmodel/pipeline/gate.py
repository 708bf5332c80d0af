"""Let one rank run a user's whole step while only its own units compute.

Each unit module gets a dynamic subclass that overrides `__call__`; nothing in the module tree is replaced, so names,
types and state-dict keys stay. During a stage's forward a unit of an earlier stage hands on what was received (or a
stand-in), a unit of this stage computes, and after this stage's last unit `StageBoundary` leaves the user's code with
what must be sent. Outside of a stage's forward (and in backward, when recomputation calls a block again) a gated module
is an ordinary one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_bigmodel import _host
from lightning_bigmodel.mesh.value_free import VALUE_FREE
from lightning_bigmodel.pipeline.trace import LeafSpec, StepTrace
from lightning_bigmodel.pipeline.tree import leaves, map_leaves, map_tensors, tensor_leaves

__all__ = ["StageBoundary", "StagePlan", "StageRun", "active", "current_run", "gate", "is_gated", "ungate"]


class StageBoundary(BaseException):
    """Leaves the user's step at the end of a stage. A `BaseException`, so that `except Exception` does not stop it."""


@dataclass(frozen=True)
class StagePlan:
    """What one stage does in one kind of step at one micro-batch shape.

    Attributes:
        trace: The traced step.
        first: Position of the stage's first unit.
        stop: Position after its last unit.
        received: (unit, leaf) of each tensor that arrives, in order.
        sent: (unit, leaf) of each tensor that leaves, in order.
        position_of: (module, nth call) -> position.
        touched: Positions whose outputs code between units edits in place: each stage needs copies of its own.
    """

    trace: StepTrace
    first: int
    stop: int
    received: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, int], ...]
    position_of: Mapping[tuple[nn.Module, int], int]
    touched: frozenset[int]

    @classmethod
    def build(cls, trace: StepTrace, first: int, stop: int) -> StagePlan:
        """The plan of the stage that owns positions `first` to `stop - 1`."""
        touched = frozenset(tag[1] for tag in trace.flow.edited_in_place if tag[0] == "out")
        return cls(
            trace,
            first,
            stop,
            tuple(trace.carried(first)),
            tuple(trace.carried(stop)) if stop < trace.end else (),
            {(call.module, call.nth): position for position, call in enumerate(trace.units)},
            touched,
        )

    @property
    def is_last(self) -> bool:
        """Whether the step ends on this stage."""
        return self.stop == self.trace.end

    def spec(self, key: tuple[int, int]) -> LeafSpec:
        """Shape and dtype of a travelling tensor."""
        return self.trace.units[key[0]].leaf_specs[key[1]]


class _Identity(torch.autograd.Function):
    """The same values, not as a leaf: user code may edit them in place as it could edit a block's output."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


def as_output(tensor: Tensor, *, own_memory: bool) -> Tensor:
    """A received leaf as if a block of this rank had just returned it."""
    if own_memory:
        return tensor.clone()
    if not tensor.requires_grad:
        return tensor
    result: Tensor = _Identity.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class StandIn(Tensor):
    """The output of a unit of another stage: right in shape, dtype and device, not to be read by this stage's own code.

    Code that the stage only passes through may compute with it; what it computes is a stand-in again. Code whose
    results count must not: it raises, with the unit's name, whatever the dtype. (NaN alone gets lost in a comparison.)
    """

    unit_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run on plain tensors; see the class."""
        operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        with torch._C.DisableTorchFunctionSubclass():
            if func in VALUE_FREE:
                return func(*args, **(kwargs or {}))
            run = _Active.run
            if run is not None and run.is_live:
                raise RuntimeError(_read_message(operands[0]))
            result = func(*args, **(kwargs or {}))
        return map_tensors(lambda tensor: _marked(tensor, operands[0].unit_name) if operands else tensor, result)


def _marked(tensor: Tensor, unit_name: str) -> Tensor:
    marked = tensor.as_subclass(StandIn)
    marked.unit_name = unit_name
    return marked


def _read_message(tensor: StandIn) -> str:
    return (
        f"The step reads the output of `{tensor.unit_name}`, which is computed on an earlier pipeline stage and is not "
        "sent to this one: the step did not read it here when it was traced (at the first batch). A pipelined step "
        "must use the same values for every batch; values that are needed only at times have to be read in every "
        "step (for example multiplied by zero)."
    )


def stand_in(spec: LeafSpec, device: torch.device, unit_name: str, *, own_memory: bool) -> Tensor:
    """A stand-in for one tensor a unit of another stage returns; one element of memory unless it is to be edited."""
    fill = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
    value = torch.full((), fill, dtype=spec.dtype, device=device).expand(spec.shape)
    return _marked(value.clone(memory_format=torch.contiguous_format) if own_memory else value, unit_name)


@dataclass
class StageRun:
    """One forward of one stage on one micro-batch.

    Args:
        plan: What to do.
        inputs: Received tensors, in the order of `plan.received`.
        device: Where stand-ins are made.
        computing: Entered around each unit that computes.
    """

    plan: StagePlan
    inputs: Sequence[Tensor]
    device: torch.device
    computing: Callable[[], AbstractContextManager[None]]
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    is_live: bool = False
    reached_end: bool = False
    _inside: bool = False
    _counts: Counter[nn.Module] = field(default_factory=Counter)
    _arrived: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What code between units edits in place travels as it was before: every stage repeats the edit on a copy.
        self._arrived = {
            key: as_output(tensor, own_memory=key[0] in self.plan.touched)
            for key, tensor in zip(self.plan.received, self.inputs, strict=True)
        }
        for tensor in self._arrived.values():
            if tensor.requires_grad:
                tensor.register_hook = _no_hook  # type: ignore[method-assign]
        # Code before the first block belongs to the first stage; code between two blocks to the stage of the later one.
        self.is_live = self.plan.first == 0

    def call(self, module: nn.Module, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a gated module does instead of its `__call__`."""
        if self._inside:
            return compute(*args, **kwargs)
        nth = self._counts[module]
        position = self.plan.position_of.get((module, nth))
        if position is None:
            if not any(key[0] is module for key in self.plan.position_of):
                return compute(*args, **kwargs)  # not a unit in this kind of step: every stage computes it itself
            raise RuntimeError(
                f"{type(module).__name__} is called {nth + 1} times in this step, more often than when the step was "
                "traced. A pipelined step must call its blocks in the same way for every micro-batch."
            )
        self._counts[module] += 1
        if self.reached_end:
            raise RuntimeError(
                f"The pipeline stage ended after `{self.plan.trace.units[self.plan.stop - 1].name}`, but the step went "
                "on: a bare `except:` or a `finally: return` swallowed the signal. Catch `Exception` instead."
            )
        if position < self.plan.first:
            return self._hand_on(module, position, args, kwargs)
        unread = next((leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, StandIn)), None)
        if unread is not None:
            raise RuntimeError(_read_message(unread))
        self._inside = True
        try:
            with self.computing():
                output = compute(*args, **kwargs)
        finally:
            self._inside = False
        self._keep(position, output)
        if position == self.plan.stop - 1 and not self.plan.is_last:
            self.reached_end = True
            raise StageBoundary
        return output

    def _hand_on(self, module: nn.Module, position: int, args: Any, kwargs: Any) -> Any:
        """The output of a unit of an earlier stage: what was received of it, stand-ins for the rest."""
        given: list[Tensor] | None = None
        index = -1

        def fill(leaf: Any) -> Any:
            nonlocal given, index
            if not isinstance(leaf, LeafSpec):
                return leaf
            index += 1
            if leaf.alias is not None:
                given = tensor_leaves((args, kwargs)) if given is None else given
                return given[leaf.alias]
            arrived = self._arrived.get((position, index))
            if arrived is not None:
                return arrived
            name = self.plan.trace.units[position].name
            return stand_in(leaf, self.device, name, own_memory=position in self.plan.touched)

        output = map_leaves(fill, self.plan.trace.units[position].output)
        _show_to_hooks(module, output, args, kwargs)
        if position == self.plan.first - 1:
            self.is_live = True
            for tensor in self._arrived.values():
                tensor.__dict__.pop("register_hook", None)
        return output

    def _keep(self, position: int, output: Any) -> None:
        wanted = [key for key in self.plan.sent if key[0] == position]
        if not wanted:
            return
        tensors = tensor_leaves(output)
        for key in wanted:
            spec, tensor = self.plan.spec(key), tensors[key[1]] if key[1] < len(tensors) else None
            if tensor is None or tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                got = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise RuntimeError(
                    f"`{self.plan.trace.units[position].name}` returned {got} where the trace of this step found "
                    f"{spec.shape} {spec.dtype}. The shape of a value that travels between stages must follow from the "
                    "shapes in the batch."
                )
            self.outputs[key] = tensor.clone() if position in self.plan.touched else tensor

    def sent_tensors(self) -> list[Tensor]:
        """What leaves the stage, in the order of `plan.sent`; values only passing through are the received leaves."""
        received = dict(zip(self.plan.received, self.inputs, strict=True))
        # The first code after the unit that made it may run here: its hook is for the gradients of later stages too.
        received |= {key: tensor for key, tensor in self._arrived.items() if _host.has_gradient_hooks(tensor)}
        return [self.outputs[key] if key in self.outputs else received[key] for key in self.plan.sent]


def _no_hook(hook: Any) -> RemovableHandle:
    """In place of `register_hook` of what has arrived, while code of earlier stages is passed through.

    The stage that made the tensor runs that code too, and its hook sees the gradients of all stages.
    """
    return RemovableHandle(OrderedDict())


def _show_to_hooks(module: nn.Module, output: Any, args: Any, kwargs: Any) -> None:
    """Run the forward hooks users registered on a unit although it does not compute here: they may keep its output.

    They get a copy, as they have seen and perhaps changed the output already, where the unit computed.
    """
    before, after = _host.forward_hooks(module)
    for hook, takes_kwargs in before:
        if takes_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        else:
            changed = hook(module, args)
            args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
    shown = map_tensors(Tensor.clone, output) if after else output
    for hook, takes_kwargs in after:
        hook(module, args, kwargs, shown) if takes_kwargs else hook(module, args, shown)


class _Active:
    run: StageRun | None = None


def current_run() -> StageRun | None:
    """The stage forward in progress in this process, if any."""
    return _Active.run


def _refuse_absent(module: nn.Module) -> None:
    """Refuse to compute with parameters of another rank (one NaN expanded to their shape)."""
    if any(p.numel() > 1 and not any(p.stride()) for p in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} is called outside of a training, validation, test or predict step, but its "
            "parameters are on another rank of the pipeline. Only steps run through the pipeline: move the call into "
            "one (for example a `predict_step`), or make it after the run, when every rank has the whole model again."
        )


class _Gate:
    """Mixin put in front of a unit's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = _Active.run
        compute = super().__call__  # type: ignore[misc]  # nn.Module's
        if run is None:
            _refuse_absent(self)  # type: ignore[arg-type]  # mixed into nn.Module subclasses only
            return compute(*args, **kwargs)
        return run.call(self, compute, args, kwargs)  # type: ignore[arg-type]  # mixed into nn.Module subclasses only


def gate(modules: Iterable[nn.Module]) -> None:
    """Put gates on modules (once each)."""
    for module in modules:
        if not is_gated(module):
            cls = type(module)
            module.__class__ = type(
                cls.__name__, (_Gate, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            )


def ungate(modules: Iterable[nn.Module]) -> None:
    """Give gated modules their own class back."""
    for module in modules:
        if is_gated(module):
            module.__class__ = type(module).__mro__[2]


def is_gated(module: nn.Module) -> bool:
    """Whether `module` carries a gate."""
    return isinstance(module, _Gate)


class active:
    """Context manager: `run` decides what gated modules do within."""

    def __init__(self, run: StageRun) -> None:
        self._run = run

    def __enter__(self) -> StageRun:
        _Active.run = self._run
        return self._run

    def __exit__(self, *exception: object) -> None:
        _Active.run = None
