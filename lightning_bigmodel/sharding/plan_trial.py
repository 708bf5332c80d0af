"""Whether a tensor-parallel plan is right for a module: tried on copies, against the module whole, in one process.

The ranks are threads, each with a copy of the module; random weights and inputs stand in for the real ones, so that
nothing that happens to be zero hides a mistake, and that the real ones may be fake. Outputs and the gradients of every
parameter and of the input must agree.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel import _host
from lightning_bigmodel.sharding.tensor import UnlistedModuleError, cut_module

__all__ = ["Call", "Verdict", "describe_call", "tensors_in", "try_plan"]

_TOLERANCE = 1e-4
_SECONDS = 60.0


@dataclass(frozen=True)
class _Random:
    """Stands for a tensor of numbers; only its shape matters."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """What a module was called with, without the memory of its activations."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What a trial found.

    Attributes:
        is_right: Whether first outputs and all gradients agree.
        gives_slices: Whether further outputs are this rank's slice of the whole ones, such as a bias for each head that
            is handed to the next layer. The plan is right only where whoever takes them is cut alike.
        why: What disagreed.
    """

    is_right: bool
    gives_slices: bool = False
    why: str = ""


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Keep what a trial needs of a call: shapes of floating-point tensors, values of the rest."""
    return Call(tuple(_describe(value) for value in args), {name: _describe(value) for name, value in kwargs.items()})


def try_plan(module: nn.Module, plan: Mapping[str, str], call: Call, size: int) -> Verdict:
    """Compare a module that is cut over `size` ranks with the whole one, in evaluation mode and 32 bits on the CPU.

    Takes memory for two copies of the module's parameters. Draws nothing from the global generators.

    Args:
        module: The module; unchanged.
        plan: As of `apply_tensor_plan`, for this module.
        call: What the module is called with.
        size: Number of ranks.

    Raises:
        UnlistedModuleError: If a module runs on cut activations that the plan does not mention.
        ValueError: If the plan cannot be followed at all.
    """
    if any("forward" in vars(found) for found in module.modules()):
        return Verdict(False, why="a forward is replaced on the instance, which a copy would not follow")
    if not all(parameter.is_floating_point() for parameter in module.parameters()):
        return Verdict(False, why="parameters are not floating-point numbers")
    # A thread of its own: modes such as FakeTensorMode hold for the caller's.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_try_plan, module, plan, call, size).result()


def _try_plan(module: nn.Module, plan: Mapping[str, str], call: Call, size: int) -> Verdict:
    # The generators of all threads are one; ranks that drew from it would disturb the caller's.
    whole = _copy(module, _random_parameter, {}).eval()
    try:
        outputs, gradient = _run(whole, call)
    except Exception as error:  # whatever user code raises on random numbers
        return Verdict(False, why=f"whole: {type(error).__name__}: {error}")
    meeting = _Meeting(size)
    # Memory is shared with the whole copy until a parameter is cut.
    copies = [_copy(whole, lambda parameter: nn.Parameter(parameter.detach()), {}).eval() for _ in range(size)]
    slices = [cut_module(found, plan, _ThreadExchange(meeting, rank)) for rank, found in enumerate(copies)]

    def run(rank: int) -> tuple[list[Tensor], Tensor | None]:
        try:
            return _run(copies[rank], call, outputs, rank, size)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(run, rank) for rank in range(size)]
    failures = [failure for failure in (future.exception() for future in futures) if failure is not None]
    if failures:
        # A thread that only lost its peers says nothing.
        cause = next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
        if isinstance(cause, UnlistedModuleError):
            raise cause
        return Verdict(False, why=f"cut: {type(cause).__name__}: {cause}")
    results = [future.result() for future in futures]
    gives_slices = False
    for rank, (own, own_gradient) in enumerate(results):
        if len(own) != len(outputs):
            return Verdict(False, why=f"{len(own)} outputs for {len(outputs)}")
        for index, (value, expected) in enumerate(zip(own, outputs, strict=True)):
            if value.shape != expected.shape:
                share = _share(expected, value.shape, rank, size)
                if index == 0 or share is None:
                    return Verdict(False, why=f"output {index} has shape {tuple(value.shape)}")
                expected, gives_slices = share, True
            if not _agree(value, expected):
                return Verdict(False, why=f"output {index} disagrees")
        if gradient is not None and (own_gradient is None or not _agree(own_gradient, gradient)):
            return Verdict(False, why="the gradient of the input disagrees")
    parameters = [dict(found.named_parameters()) for found in copies]
    for name, parameter in whole.named_parameters():
        owns = [found[name] for found in parameters]
        gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in owns]
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if any(owns[0] is partial for partial in slices[0].partial_gradients):
            gradients = [torch.stack(gradients).sum(0)]
        for rank, value in enumerate(gradients):
            if not _agree(value, slices[rank].slice_full(owns[rank], expected)):
                return Verdict(False, why=f"the gradient of {name!r} disagrees")
    return Verdict(True, gives_slices)


class _Meeting:
    """Where the threads that play ranks hand each other tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self._slots: list[Tensor] = [torch.empty(0)] * size

    def swap(self, tensor: Tensor, rank: int) -> list[Tensor]:
        self._slots[rank] = tensor.detach()
        self.barrier.wait()
        everything = list(self._slots)
        self.barrier.wait()
        return everything


class _ThreadExchange:
    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._meeting.swap(tensor, self.rank)).sum(0)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._meeting.swap(tensor, self.rank), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.all_reduce(tensor).chunk(self.size, dim)[self.rank].contiguous()


def _run(
    module: nn.Module, call: Call, whole: list[Tensor] | None = None, rank: int = 0, size: int = 1
) -> tuple[list[Tensor], Tensor | None]:
    """Outputs and the gradient of the first input; parameters get theirs. `whole` are the whole module's outputs."""
    generator = torch.Generator().manual_seed(1)
    args = _make(call.args, generator)
    kwargs = _make(call.kwargs, generator)
    first = next((t for t in tensors_in((args, kwargs)) if t.is_floating_point() and t.dim() > 1), None)
    if first is not None:
        first.requires_grad_()
    outputs = [t for t in tensors_in(module(*args, **kwargs)) if t.is_floating_point()]
    generator.manual_seed(2)
    loss = torch.zeros(())
    for output, expected in zip(outputs, whole or outputs, strict=False):
        weights: Tensor | None = torch.randn(expected.shape, generator=generator)
        if output.shape != expected.shape:
            assert weights is not None
            weights = _share(weights, output.shape, rank, size)
        if output.requires_grad and weights is not None:
            loss = loss + (output * weights).sum()
    if not loss.requires_grad:
        raise ValueError("no output depends on a parameter")
    loss.backward()
    return [output.detach() for output in outputs], None if first is None else first.grad


def _share(tensor: Tensor, shape: torch.Size, rank: int, size: int) -> Tensor | None:
    """A rank's slice of a tensor, if one that is `size` times smaller along one dimension has this shape."""
    for dim, length in enumerate(tensor.shape):
        if length % size == 0 and (*tensor.shape[:dim], length // size, *tensor.shape[dim + 1 :]) == tuple(shape):
            return tensor.narrow(dim, rank * (length // size), length // size)
    return None


def _agree(value: Tensor, expected: Tensor) -> bool:
    # NaN disagrees.
    return bool((value - expected).abs().max() <= _TOLERANCE * max(1.0, expected.abs().max().item()))


def _random_parameter(parameter: nn.Parameter) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(parameter.shape))
    noise = torch.randn(parameter.shape, generator=generator)
    # Of weights, so that activations neither vanish nor saturate; of norms and biases, away from 0 and 1.
    return nn.Parameter(noise / max(1, min(parameter.shape)) ** 0.5 if parameter.dim() > 1 else 1 + 0.3 * noise)


def _copy(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter], memo: dict[int, Any]) -> nn.Module:
    """A copy with other parameters and without hooks; what else it refers to is shared."""
    if id(module) in memo:
        found: nn.Module = memo[id(module)]
        return found
    twin: nn.Module = type(module).__new__(type(module))
    memo[id(module)] = twin
    state = dict(vars(module))
    for name in state:
        if name.startswith("_") and "_hooks" in name:
            state[name] = OrderedDict()
    parameters: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in memo:
            memo[id(parameter)] = make(parameter)
        parameters[name] = None if parameter is None else memo[id(parameter)]
    buffers: dict[str, Tensor | None] = {}
    for name, buffer in module._buffers.items():
        buffers[name] = None if buffer is None else _value(buffer)
    vars(twin).update(state)
    vars(twin).update(
        _parameters=parameters,
        _buffers=buffers,
        _modules={name: None if child is None else _copy(child, make, memo) for name, child in module._modules.items()},
    )
    return twin


def _value(tensor: Tensor) -> Tensor:
    """A copy of a tensor's numbers; of one that has none, zeros or random ones."""
    if not _host.is_fake(tensor) and tensor.device.type != "meta":
        return tensor.detach().cpu().clone()
    if tensor.is_floating_point():
        return torch.randn(tuple(tensor.shape), generator=torch.Generator().manual_seed(4))
    return (
        torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) == 0
        if tensor.dtype == torch.bool
        else torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    )


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Random(tuple(value.shape)) if value.is_floating_point() else _value(value)
    if isinstance(value, nn.Module):
        return value
    return _map(value, _describe, _copied)


def _make(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, _Random):
        return torch.randn(value.shape, generator=generator)
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, nn.Module):
        return value
    return _map(value, lambda item: _make(item, generator), _copied)


def _map(value: Any, change: Callable[[Any], Any], otherwise: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[change(item) for item in value])
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(change(item) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((name, change(item)) for name, item in value.items())
    return otherwise(value)


def _copied(value: Any) -> Any:
    """A copy of an object such as a cache, which a forward may write; itself where it cannot be copied."""
    if value is None or isinstance(value, (int, float, str, torch.dtype, torch.device)) or callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # objects of any library
        return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in containers, dataclasses and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
