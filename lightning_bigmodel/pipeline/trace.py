"""The one trace: run a user's step once without memory or arithmetic, and learn what every layer needs to know.

Parameters are replaced by fake tensors (shape, dtype and device only); the batch stays real, so Python decisions that
depend on it are taken as in a real step. See `dataflow` for how values are followed.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import CheckpointFunction

from lightning_bigmodel import _host
from lightning_bigmodel._host import FakeTensorMode
from lightning_bigmodel.mesh.rng import capture_rng, restore_rng
from lightning_bigmodel.pipeline.containers import Contents
from lightning_bigmodel.pipeline.dataflow import Dataflow, FlowRecord, PythonReads
from lightning_bigmodel.pipeline.tree import leaves, map_leaves, tensor_leaves

__all__ = ["LeafSpec", "ModuleState", "StepTrace", "TraceError", "UnitCall", "call_order", "is_metric", "trace_step"]

_SMALL_BUFFER_ELEMENTS = 1 << 20


class TraceError(RuntimeError):
    """The step could not be traced; the message says where it stopped and what to do."""


@dataclass(frozen=True)
class LeafSpec:
    """One tensor a unit returns: what a stand-in or a receive buffer for it must look like."""

    is_tree_leaf: ClassVar[bool] = True
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    alias: int | None = None  # index of the argument tensor that this output is, where a unit hands one through

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit in a step.

    Attributes:
        module: The unit.
        name: Its module name.
        nth: 0 for the first call of this module in the step, 1 for the second, ...
        output: The returned structure with a `LeafSpec` in place of each tensor.
        is_block: Whether a stage may begin here: not within a checkpointed function, which backward runs as a whole.
        flops: Floating-point operations of one forward (multiply-adds counted as two), with the code between the
            previous unit and this one.
        saved_bytes: Bytes kept for backward by the same code.
    """

    module: nn.Module
    name: str
    nth: int
    output: Any
    is_block: bool
    flops: int = 0
    saved_bytes: int = 0

    @property
    def leaf_specs(self) -> list[LeafSpec]:
        """The output's tensors in leaf order."""
        return [leaf for leaf in leaves(self.output) if isinstance(leaf, LeafSpec)]


@dataclass(frozen=True)
class StepTrace:
    """The result of `trace_step`: unit calls in order and the dataflow among them.

    Attributes:
        units: Calls in order; index in this tuple = position.
        flow: Consumers of every value; position `len(units)` stands for code after the last unit (the loss).
        trained: Keys of parameters that get a gradient in one process.
        edits_batch: Whether the step writes into the tensors of its batch, so that each run of it needs a copy.
        shapes_depend_on_data: Whether sizes before the last unit may change with values, not only sizes, of the batch.
    """

    units: tuple[UnitCall, ...]
    flow: FlowRecord
    trained: frozenset[int]
    shapes_depend_on_data: bool
    edits_batch: bool = False

    @property
    def end(self) -> int:
        """The position that stands for the code after the last unit."""
        return len(self.units)

    def carried(self, cut: int) -> list[tuple[int, int]]:
        """(unit, leaf) of every value made before position `cut` and needed at or after it."""
        return sorted(
            (tag[1], tag[2])
            for tag, positions in self.flow.consumers.items()
            if tag[0] == "out" and tag[1] < cut <= max(positions)
        )

    def parameter_uses(self, key: int) -> set[int]:
        """Positions at which the parameter is used outside its own unit."""
        return set(self.flow.consumers.get(("param", key, 0), ()))

    def sizes(self) -> tuple[int, ...]:
        """All output sizes in one flat vector (see `shapes.SizeRules`)."""
        return tuple(size for call in self.units for leaf in call.leaf_specs for size in leaf.shape)

    def with_sizes(self, sizes: tuple[int, ...]) -> StepTrace:
        """The same trace with other output sizes."""
        remaining = iter(sizes)

        def resize(leaf: Any) -> Any:
            if isinstance(leaf, LeafSpec):
                return replace(leaf, shape=tuple(next(remaining) for _ in leaf.shape))
            return leaf

        return replace(self, units=tuple(replace(call, output=map_leaves(resize, call.output)) for call in self.units))


class ModuleState:
    """The attributes of a module and of those inside it: numbers, tensors written in place, lists, dicts and sets.

    Not parameters and buffers, nor tensors of over a million elements. Memory: copies of the tensors.
    """

    def __init__(self, root: nn.Module) -> None:
        self._attributes = [(module, dict(module.__dict__)) for module in root.modules()]
        values = [value for _, saved in self._attributes for value in saved.values()]
        self._contents = Contents(values)
        held = [*values, *(item for _, content in self._contents.saved.values() for item in _items(content))]
        plain = {id(value): value for value in held if _is_plain(value)}
        registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        own = [value for key, value in plain.items() if key not in registered]
        self._tensors = [(value, value.clone(), value._version) for value in own]

    @torch.no_grad()
    def restore(self) -> None:
        """As it was."""
        self._contents.restore()
        for module, saved in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(saved)
        for tensor, value, version in self._tensors:
            if tensor._version != version:
                tensor.copy_(value)


_COPIED_ELEMENTS = 1 << 20  # a counter is small; a table that a module holds as a plain attribute is only read


def _items(container: Any) -> Iterator[Any]:
    yield from container.values() if isinstance(container, dict) else container


def _is_plain(value: Any) -> bool:
    # Of a graph or in inference mode, nothing is written in place that could be written back.
    is_own = type(value) is Tensor and value.layout is torch.strided and not value.is_meta
    return is_own and value.numel() <= _COPIED_ELEMENTS and not (value.requires_grad or value.is_inference())


@contextmanager
def _untouched(root: nn.Module) -> Iterator[None]:
    """Undo every change to module attributes, and to what they hold, made within."""
    before, state = ModuleState(root), capture_rng()
    try:
        yield
    finally:
        restore_rng(state)
        before.restore()


def _metrics(root: nn.Module) -> list[Any]:
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return []
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection)
    return [module for module in root.modules() if isinstance(module, kinds)]


def is_metric(module: nn.Module) -> bool:
    """Whether `module` is a torchmetrics object."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _silence_metrics(root: nn.Module) -> None:
    # Metrics check and count real values; in a trace there are none. Undone by `_untouched`.
    def zero(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())

    for metric in _metrics(root):
        if hasattr(metric, "items"):
            names = list(metric.keys())  # a MetricCollection
            metric.forward = lambda *args, names=names, **kwargs: {name: torch.zeros(()) for name in names}
            metric.compute = metric.forward
        else:
            metric.forward = zero
            metric.compute = zero
        metric.update = lambda *args, **kwargs: None


def _substitute_tensors(root: nn.Module, device: torch.device, *, fake: bool) -> dict[int, int]:
    """Put fake parameters and private buffers into the module tree. Returns id(tensor) -> key of the parameter."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    keys: dict[int, int] = {}
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            key = id(parameter)
            if key not in parameters:
                if fake:
                    with mode:
                        empty = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device=device)
                    parameters[key] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                else:
                    parameters[key] = parameter
                keys[id(parameters[key])] = keys[key] = key
            module._parameters[name] = parameters[key]  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if id(buffer) not in buffers:
                if buffer.numel() > _SMALL_BUFFER_ELEMENTS and fake or buffer.is_meta:
                    with mode:
                        buffers[id(buffer)] = torch.empty(tuple(buffer.shape), dtype=buffer.dtype, device=device)
                else:
                    buffers[id(buffer)] = buffer.detach().clone().to(device)
            module._buffers[name] = buffers[id(buffer)]
    # The module keeps its attribute dicts alive; these lists must live as long as the ids are used as keys.
    root.__dict__["_bigmodel_trace_keepalive"] = (parameters, buffers)
    return keys


def _private_dicts(root: nn.Module) -> None:
    # `_untouched` restores `module.__dict__`; parameter and buffer dicts must be copies for that to undo substitutions.
    for module in root.modules():
        module.__dict__["_parameters"] = dict(module._parameters)
        module.__dict__["_buffers"] = dict(module._buffers)


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    # An operator whose shape rule fails is run on zeros instead (see `dataflow`); torch logs an error first.
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _sandbox(root: nn.Module, device: torch.device, *, fake: bool) -> Iterator[dict[int, int]]:
    with _untouched(root), _quiet_fake_tensors():
        _private_dicts(root)
        _silence_metrics(root)
        yield _substitute_tensors(root, device, fake=fake)


def call_order(root: nn.Module, step: Callable[[], Any], device: torch.device, *, fake: bool = True) -> list[nn.Module]:
    """Every module call of one step, in order, metrics left out."""
    order: list[nn.Module] = []

    def before(module: nn.Module, args: Any) -> None:
        if not is_metric(module):
            order.append(module)

    with _sandbox(root, device, fake=fake) as keys:
        if hasattr(root, "log"):
            root.__dict__["log"] = lambda *args, **kwargs: None
        hook = module_hooks.register_module_forward_pre_hook(before)
        try:
            with Dataflow(keys) as flow, PythonReads(flow):
                step()
        finally:
            hook.remove()
    return order


def saved_bytes(root: nn.Module, step: Callable[[], Any], device: torch.device) -> int:
    """What `step` keeps for backward beside parameters, each storage once, by a fake run. No communication."""
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if not _host.is_of_parameter(tensor):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
            kept.append(tensor)  # so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call_order(root, step, device)
    return sum(sizes.values())


class _Recorder:
    """Turns module calls into `UnitCall`s by forward hooks on the candidates."""

    def __init__(self, flow: Dataflow, candidates: Mapping[nn.Module, str], blocks: frozenset[nn.Module]) -> None:
        self.calls: list[UnitCall] = []
        self.saved_bytes: Counter[int] = Counter()
        self._flow, self._candidates, self._blocks = flow, candidates, blocks
        self._counts: Counter[nn.Module] = Counter()
        self._stack: list[tuple[nn.Module, bool]] = []
        self._region: Any = None  # the checkpointed function the unit at work lies in
        self._last_region: Any = None  # that of the unit before

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._candidates:
                if not is_metric(module):
                    stack.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._after, with_kwargs=True).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._flow.inside is not None:
            return
        self._refuse_reentrant(module)
        owns_parameters = next(module.parameters(), None) is not None
        self._stack.append((module, owns_parameters))
        self._region = _host.checkpoint_region()
        if owns_parameters:
            self._flow.enter(len(self.calls), module, (args, kwargs))

    def _refuse_reentrant(self, module: nn.Module) -> None:
        if torch.is_grad_enabled():
            return
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is CheckpointFunction.forward.__code__:
                raise TraceError(
                    f"`{self._candidates[module]}` runs inside `torch.utils.checkpoint(..., use_reentrant=True)`, "
                    "which builds its graph in backward only: no stage can end there. Use `use_reentrant=False`."
                )

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._stack or self._stack[-1][0] is not module:
            return
        if not self._stack.pop()[1] and not self._works_on_units(args, kwargs, output):
            return
        aliases = iter(self._flow.leave(len(self.calls), (args, kwargs), output))
        name = self._candidates[module]

        def describe(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return LeafSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, next(aliases))
            if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
                raise TraceError(
                    f"`{name}` returns an object of type {type(leaf).__name__}, which cannot be sent to another stage. "
                    "Return tensors in tuples, lists, dicts or dataclasses, or name other `blocks`."
                )
            return leaf

        output_spec = map_leaves(describe, output)
        is_block = module in self._blocks and (self._region is None or self._region is not self._last_region)
        self.calls.append(UnitCall(module, name, self._counts[module], output_spec, is_block))
        self._last_region = self._region
        self._counts[module] += 1

    def _works_on_units(self, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether a module without parameters made new values from those of units (a dropout, not a rotary table)."""
        given = {id(tensor) for tensor in tensor_leaves((args, kwargs))}
        made = [tensor for tensor in tensor_leaves(output) if id(tensor) not in given]
        return any(tag[0] == "out" for tag in self._flow.tags(made))

    def _pack(self, tensor: Tensor) -> Tensor:
        where = self._flow.position if self._flow.inside is None else self._flow.inside
        self.saved_bytes[where] += tensor.numel() * tensor.element_size()
        return tensor


def trace_step(
    root: nn.Module,
    step: Callable[[], Any],
    candidates: Mapping[nn.Module, str],
    blocks: Collection[nn.Module],
    device: torch.device,
    *,
    log: Callable[[Dataflow], Callable[..., None]] | None = None,
    fake: bool = True,
) -> StepTrace:
    """Run `step` once and record unit calls and dataflow.

    Args:
        root: The user's module; left exactly as it was, whatever the step does to its attributes.
        step: Calls the user's step on one micro-batch and returns its result.
        candidates: Outermost modules -> name (from `blocks.find_units`). One without parameters counts as a unit only
            if it works on values that come from other units; else every stage computes it itself, as it costs no
            traffic.
        blocks: Those of the candidates a stage may begin with.
        device: Where the real computation will run.
        log: Makes the function put in place of the module's `log`, given the dataflow; None leaves it alone.
        fake: False runs the step for real (one micro-batch, whole model): for steps a fake run cannot follow.

    Memory: the micro-batch; with `fake=False` one forward of the whole model. Communication: none.
    """
    with _sandbox(root, device, fake=fake) as keys:
        flow = Dataflow(keys)
        recorder = _Recorder(flow, candidates, frozenset(blocks))
        if log is not None:
            root.__dict__["log"] = log(flow)
        with recorder.hooked(), flow, PythonReads(flow):
            result = step()
            flow.finish(result)
        trained = _trained_keys(result, keys)
    units = tuple(
        replace(call, flops=flow.record.flops[index], saved_bytes=recorder.saved_bytes[index])
        for index, call in enumerate(recorder.calls)
    )
    last_block = max((index for index, call in enumerate(units) if call.is_block), default=0)
    data_sized_at = flow.record.data_sized_at
    return StepTrace(units, flow.record, trained, data_sized_at is not None and data_sized_at <= last_block)


def _trained_keys(result: Any, keys: Mapping[int, int]) -> frozenset[int]:
    """Keys of the parameters that the graph of the returned loss reaches."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return frozenset()
    found: set[int] = set()
    seen, queue = set(), [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in keys:
            found.add(keys[id(variable)])
        queue.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    return frozenset(found)
