"""Whether a tensor-parallel plan is right for a module: tried on copies, against the module whole, in one process.

The ranks are threads, each with a copy of the module; random weights and inputs stand in for the real ones, so that
nothing that happens to be zero hides a mistake, and that the real ones may be fake. Outputs and the gradients of every
parameter and of the input must agree.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bigmodel.sharding.plan_calls import Call, make_values, tensors_in
from lightning_bigmodel.sharding.plan_copies import copy_module, why_not_copied
from lightning_bigmodel.sharding.tensor import UnlistedModuleError, cut_module

__all__ = ["Verdict", "try_plan", "why_not_repeatable"]

_TOLERANCE = 1e-4
_SECONDS = 60.0


@dataclass(frozen=True)
class Verdict:
    """What a trial found.

    Attributes:
        is_right: Whether first outputs and all gradients agree.
        gives_slices: Whether further outputs are this rank's slice of the whole ones, such as a bias for each head that
            is handed to the next layer. The plan is right only where whoever takes them is cut alike.
        why: What disagreed.
        disagrees: Whether both ran and numbers differed, instead of an error or another shape.
        is_further: Whether it was a further output only, and no gradient.
    """

    is_right: bool
    gives_slices: bool = False
    why: str = ""
    disagrees: bool = False
    is_further: bool = False


def try_plan(
    module: nn.Module,
    plan: Mapping[str, str],
    call: Call,
    size: int,
    *,
    tolerance: float = _TOLERANCE,
    seed: int = 0,
) -> Verdict:
    """Compare a module that is cut over `size` ranks with the whole one, in evaluation mode and 32 bits on the CPU.

    Takes memory for two copies of the module's parameters. Draws nothing from the global generators.

    Args:
        module: The module; unchanged.
        plan: As of `apply_tensor_plan`, for this module.
        call: What the module is called with.
        size: Number of ranks.
        tolerance: Largest difference allowed, relative to what is larger of 1 and the largest number.
        seed: Other ones give other random weights and inputs.

    Raises:
        UnlistedModuleError: If a module runs on cut activations that the plan does not mention.
        ValueError: If the plan cannot be followed at all.
    """
    why = why_not_copied(module, call)
    if why:
        return Verdict(False, why=why)
    # A thread of its own: modes such as FakeTensorMode hold for the caller's.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_try_plan, module, plan, call, size, tolerance, seed).result()


def why_not_repeatable(module: nn.Module, call: Call, *, tolerance: float = _TOLERANCE) -> str:
    """Why two copies of the whole module, run alike, need not give the same, so that a trial tells nothing; or "".

    Memory and time: those of a trial.
    """
    why = why_not_copied(module, call)
    if why:
        return why
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_why_not_repeatable, module, call, tolerance).result()


def _why_not_repeatable(module: nn.Module, call: Call, tolerance: float) -> str:
    state = torch.get_rng_state()
    results: list[tuple[list[Tensor], Tensor | None]] = []
    for _ in range(2):
        twin = copy_module(module, lambda parameter: _random_parameter(parameter, 0), {}).eval()
        try:
            results.append(_run(twin, call, 0))
        except Exception as error:  # whatever user code raises on random numbers
            return f"{type(error).__name__}: {error}"
    if not torch.equal(state, torch.get_rng_state()):
        return "it draws random numbers"
    (one, one_gradient), (other, other_gradient) = results
    pairs = list(zip(one, other, strict=True))
    if one_gradient is not None and other_gradient is not None:
        pairs.append((one_gradient, other_gradient))
    if not all(_agree(first, second, tolerance) for first, second in pairs):
        return "on random numbers it does not give the same twice"
    return ""


def _try_plan(
    module: nn.Module, plan: Mapping[str, str], call: Call, size: int, tolerance: float, seed: int
) -> Verdict:
    # The generators of all threads are one; ranks that drew from it would disturb the caller's.
    whole = copy_module(module, lambda parameter: _random_parameter(parameter, seed), {}).eval()
    meeting = _Meeting(size)
    # Made before the whole one runs, which may count its calls. Memory is shared with it until a parameter is cut.
    copies = [copy_module(whole, lambda parameter: nn.Parameter(parameter.detach()), {}).eval() for _ in range(size)]
    foreign: list[nn.Parameter] = []
    try:
        outputs, gradient = _run(whole, call, seed, foreign=foreign)
    except Exception as error:  # whatever user code raises on random numbers
        return Verdict(False, why=f"whole: {type(error).__name__}: {error}")
    if foreign:
        # Such as a function that was made where the module was: the copies would all run the module itself.
        return Verdict(False, why="it reaches parameters by a way that copies do not follow")
    slices = [cut_module(found, plan, _ThreadExchange(meeting, rank)) for rank, found in enumerate(copies)]

    def run(rank: int) -> tuple[list[Tensor], Tensor | None]:
        try:
            return _run(copies[rank], call, seed, outputs, rank, size)
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
    gives_slices, further = False, ""
    for rank, (own, own_gradient) in enumerate(results):
        if len(own) != len(outputs):
            return Verdict(False, why=f"{len(own)} outputs for {len(outputs)}")
        for index, (value, expected) in enumerate(zip(own, outputs, strict=True)):
            if value.shape != expected.shape:
                share = _share(expected, value.shape, rank, size)
                if index == 0 or share is None:
                    return Verdict(False, why=f"output {index} has shape {tuple(value.shape)}")
                expected, gives_slices = share, True
            if not _agree(value, expected, tolerance):
                if index == 0:
                    return Verdict(False, why="output 0 disagrees", disagrees=True)
                further = further or f"output {index} disagrees"
        if gradient is not None and (own_gradient is None or not _agree(own_gradient, gradient, tolerance)):
            return Verdict(False, why=further or "the gradient of the input disagrees", disagrees=True)
    parameters = [dict(found.named_parameters()) for found in copies]
    for name, parameter in whole.named_parameters():
        owns = [found[name] for found in parameters]
        gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in owns]
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if any(owns[0] is partial for partial in slices[0].partial_gradients):
            gradients = [torch.stack(gradients).sum(0)]
        for rank, value in enumerate(gradients):
            if not _agree(value, slices[rank].slice_full(owns[rank], expected), tolerance):
                return Verdict(False, why=further or f"the gradient of {name!r} disagrees", disagrees=True)
    if further:
        return Verdict(False, why=further, disagrees=True, is_further=True)
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
    module: nn.Module,
    call: Call,
    seed: int,
    whole: list[Tensor] | None = None,
    rank: int = 0,
    size: int = 1,
    foreign: list[nn.Parameter] | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Outputs and the gradient of the first input; parameters get theirs.

    Args:
        module: A copy.
        call: What to call it with.
        seed: Of inputs and of the weights of outputs.
        whole: The whole module's outputs.
        rank: The rank that is played.
        size: Number of ranks.
        foreign: Takes parameters that the outputs depend on and that are not the module's.
    """
    generator = torch.Generator().manual_seed(1 + 10 * seed)
    args = make_values(call.args, generator)
    kwargs = make_values(call.kwargs, generator)
    first = next((t for t in tensors_in((args, kwargs)) if t.is_floating_point() and t.dim() > 1), None)
    if first is not None:
        first.requires_grad_()
    method = module if call.method is None else getattr(module, call.method)
    # A step may talk to other ranks, which are not here; a module that does is found by the search on all of them.
    with nullcontext() if call.method is None else _NoCollectives():  # type: ignore[no-untyped-call]
        outputs = [t for t in tensors_in(method(*args, **kwargs)) if t.is_floating_point()]
    generator.manual_seed(2 + 10 * seed)
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
    own = {id(parameter): parameter for parameter in module.parameters()}
    if foreign is not None:
        foreign += [found for found in _leaves(loss) if isinstance(found, nn.Parameter) and id(found) not in own]
    # Into these only: a parameter of the real module that a copy reaches keeps its gradient.
    loss.backward(inputs=[tensor for tensor in (*own.values(), first) if tensor is not None and tensor.requires_grad])
    return [output.detach() for output in outputs], None if first is None else first.grad


class _NoCollectives(TorchDispatchMode):
    """Refuses to talk to other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError("it talks to other ranks")
        return func(*args, **(kwargs or {}))


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Leaves of an autograd graph."""
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def _share(tensor: Tensor, shape: torch.Size, rank: int, size: int) -> Tensor | None:
    """A rank's slice of a tensor, if one that is `size` times smaller along one dimension has this shape."""
    for dim, length in enumerate(tensor.shape):
        if length % size == 0 and (*tensor.shape[:dim], length // size, *tensor.shape[dim + 1 :]) == tuple(shape):
            return tensor.narrow(dim, rank * (length // size), length // size)
    return None


def _agree(value: Tensor, expected: Tensor, tolerance: float) -> bool:
    if not expected.numel():
        return value.shape == expected.shape
    # NaN disagrees.
    return bool((value - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item()))


def _random_parameter(parameter: nn.Parameter, seed: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(parameter.shape) + 1000 * seed)
    noise = torch.randn(parameter.shape, generator=generator)
    # Of weights, so that activations neither vanish nor saturate; of norms and biases, away from 0 and 1.
    return nn.Parameter(noise / max(1, min(parameter.shape)) ** 0.5 if parameter.dim() > 1 else 1 + 0.3 * noise)
