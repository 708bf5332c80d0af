"""Counts what a rank sends and runs, because counts, unlike times, are the same on every machine."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

__all__ = ["CollectiveCounter", "ForwardCounter"]

# Operator name -> (kind, position of the argument whose tensors are the payload). The first group is what
# `torch.distributed` functions, DDP, FSDP and pipeline stages issue; the second what DTensor and compiled code issue.
_OPERATORS: dict[str, tuple[str, int]] = {
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::recv_any_source_": ("recv", 0),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::allgather_coalesced_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::gather_": ("gather", 1),
    "c10d::scatter_": ("scatter", 0),
    "c10d::barrier": ("barrier", -1),
    "c10d::monitored_barrier_": ("barrier", -1),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::isend": ("send", 0),
    "_c10d_functional::irecv": ("recv", 0),
}

# Functions that send Python objects, each by two or more of the operators above: first the sizes, then the bytes.
_OBJECT_FUNCTIONS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


class CollectiveCounter:
    """Counts the messages and collectives this rank issues, and their payload, by kind.

    Kinds: "send", "recv", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
    "all_to_all", "barrier", and "object" for the functions that send Python objects (one count a call, whatever they
    issue underneath).

    Payload is the size of the tensors a rank hands to an operation: what it sends or receives, reduces, or contributes
    to a gather; for "scatter" what it gets. It is not what goes over the wire, which depends on the algorithm.

    Every operation is seen that passes torch's dispatcher, however it was called: also those of pipeline schedules,
    DDP, FSDP and DTensor, and those issued in a backward pass. Not seen: other threads of the rank (a checkpoint saved
    in the background), and what compiled code issues. Counting slows each tensor operation; it is for tests.

    Example::

        with CollectiveCounter() as counter:
            dist.all_reduce(torch.ones(10))
        assert counter.num_calls["all_reduce"] == 1
        assert counter.payload_bytes["all_reduce"] == 40
    """

    def __init__(self) -> None:
        self.num_calls: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()
        self._counting = ExitStack()
        self._is_counting = False

    def __enter__(self) -> "CollectiveCounter":
        if self._is_counting:
            raise RuntimeError("This `CollectiveCounter` is counting already; use a second one.")
        self._counting.enter_context(_Watch(self.num_calls, self.payload_bytes))
        self._is_counting = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_counting = False
        self._counting.close()

    def as_dict(self) -> dict[str, tuple[int, int]]:
        """Returns `(number of calls, payload in bytes)` of each kind that occurred, for a rank to return."""
        return {kind: (self.num_calls[kind], self.payload_bytes[kind]) for kind in sorted(self.num_calls)}


class _Watch(TorchDispatchMode):
    """Sees every operator before it runs."""

    def __init__(self, num_calls: Counter[str], payload_bytes: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_calls = num_calls
        self._payload_bytes = payload_bytes
        self._object_codes = frozenset(_codes(_OBJECT_FUNCTIONS))
        # Held, not only its id: the next call's frame could otherwise take its place in memory and pass for it.
        self._object_frame: FrameType | None = None

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A DTensor issues its collectives while it handles the operator, and only a mode that declines sees them.
        if any(_is_dtensor(kind) for kind in types):
            return NotImplemented
        found = _OPERATORS.get(func.name().split(".")[0]) if isinstance(func, torch._ops.OpOverload) else None
        if found is not None:
            self._count(*found, args)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, position: int, args: tuple[Any, ...]) -> None:
        num_bytes = (
            0 if position < 0 else sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args[position]))
        )
        frame = self._frame_of_object_function()
        if frame is None:
            self._num_calls[kind] += 1
        else:
            kind = "object"
            self._num_calls[kind] += frame is not self._object_frame
            self._object_frame = frame
        self._payload_bytes[kind] += num_bytes

    def _frame_of_object_function(self) -> FrameType | None:
        # By the stack, not by wrapping the functions: callers may have imported them by name long before.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in self._object_codes:
            frame = frame.f_back
        return frame


class ForwardCounter:
    """Counts the forwards of a module and of each of its submodules, by name.

    A forward is a call of the module that runs: its pre-forward hooks. The module itself has the name "". Recomputation
    by `torch.utils.checkpoint` counts again if it calls the module, and not if it lies inside the module's own forward;
    the modules inside count again in both. Submodules added later are not counted.

    Args:
        module: The module to watch. Its hooks are removed at the end.

    Example::

        with ForwardCounter(model) as counter:
            model(inputs)
        assert counter.num_forwards["blocks.0"] == 1
    """

    def __init__(self, module: nn.Module) -> None:
        self.num_forwards: Counter[str] = Counter()
        self._module = module
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "ForwardCounter":
        if self._handles:
            raise RuntimeError("This `ForwardCounter` is counting already; use a second one.")
        self._handles = [
            submodule.register_forward_pre_hook(self._hook(name)) for name, submodule in self._module.named_modules()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.num_forwards[name] += 1

        return count


def _codes(names: Iterable[str]) -> Iterator[CodeType]:
    for name in names:
        function = inspect.unwrap(getattr(dist, name))  # torch wraps them to log their errors
        yield function.__code__


def _is_dtensor(kind: type) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
