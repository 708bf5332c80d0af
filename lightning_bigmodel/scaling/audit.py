"""What 16 bits cost an operator: each one run again in fp32 on what it was given, and the two results compared.

Mixed precision rounds twice: where a tensor is cast for an operator, and in what the operator gives. The reference is
computed from the fp32 tensors before such casts, so that an operator's error is what it would not lose in fp32.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bigmodel import _host
from lightning_bigmodel.scaling.comparison import Comparison, PairSums
from lightning_bigmodel.scaling.op_lists import OpPrecision, _past_dispatch
from lightning_bigmodel.scaling.op_names import _OPERATORS

__all__ = ["OperatorAudit", "OperatorKey", "listed_name"]

_NUM_CASTS = 64  # what is cast is used by the next few operators
_UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class OperatorKey:
    """Which operator: where, in which pass, its name within torch, and the function that the code called."""

    block: str
    phase: str
    operator: str
    function: str


class OperatorAudit:
    """Watches operators that give 16 bits.

    In-place and random operators have no reference: only their largest values are kept. Costs each operator a second
    run in fp32, with its operands in fp32 for as long, and some reductions.

    Args:
        half_dtype: float16 or bfloat16.

    Example:
        >>> audit = OperatorAudit(torch.float16)
        >>> with audit.watching("", "forward"):
        ...     _ = torch.full((4,), 300.0).half().square()
        >>> [(key.function, numbers.num_overflows) for key, numbers in audit.read().items()]
        [('square', 4.0)]
    """

    def __init__(self, half_dtype: torch.dtype) -> None:
        self.half_dtype = half_dtype
        self.paused = 0  # within code that is watched another time
        self.num_seen = 0  # operators on real tensors, whether or not they are looked at
        self._rows: dict[OperatorKey, PairSums] = {}
        self._block, self._phase, self._scale = "", "", 1.0
        self._functions: list[str] = []
        self._without_reference: set[Any] = set()
        # id of a cast tensor, or of a view of one -> itself, so that the id stays its own, and what it was cast from
        self._casts: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()

    @contextmanager
    def watching(self, block: str, phase: str, scale: float = 1.0) -> Iterator[None]:
        """Operators within are those of `block` in `phase`; gradients within are `scale` times too large."""
        self._block, self._phase, self._scale = block, phase, scale
        self.paused = 0
        try:
            with _Functions(self), _Operators(self):
                yield
        finally:
            self._casts.clear()
            self._functions.clear()

    def read(self) -> dict[OperatorKey, Comparison]:
        """What was seen since the last call."""
        found = {key: sums.read() for key, sums in self._rows.items()}
        self._rows.clear()
        return found

    def enter(self, function: str) -> None:
        """A function of torch is called."""
        self._functions.append(function)

    def leave(self) -> None:
        """It has returned."""
        self._functions.pop()

    def see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """An operator has run."""
        given = _tensors((args, kwargs))
        if not given or any(type(t) not in (Tensor, nn.Parameter) or _host.is_fake(t) for t in given):
            return
        self.num_seen += 1
        if self.paused or func.namespace != "aten" or func._opname in _UNSET:
            return
        if _is_view(func):
            cast = self._casts.get(id(args[0]))
            if cast is not None and isinstance(output, Tensor):
                self._keep(output, func(cast[1], *args[1:], **kwargs))
            return
        results = [t for t in _tensors(output) if t.dtype == self.half_dtype]
        if not results:
            return
        if func._opname == "_to_copy" and args[0].dtype == torch.float32:
            self._keep(output, args[0])
            return
        reference = self._reference(func, args, kwargs)
        halves = _tensors(output)
        key = OperatorKey(self._block, self._phase, func._opname, self._function())
        sums = self._rows.setdefault(key, PairSums(self.half_dtype))
        for index, half in enumerate(halves):
            if half.dtype == self.half_dtype:
                sums.add(half, None if reference is None else reference[index], self._scale)

    def _function(self) -> str:
        """The innermost call that the lists of operators know; in backward only `backward` itself is called."""
        if self._phase == "backward":
            return ""
        return next((name for each in reversed(self._functions) if (name := listed_name(each))), "")

    def _keep(self, cast: Tensor, source: Tensor) -> None:
        self._casts[id(cast)] = (cast, source)
        if len(self._casts) > _NUM_CASTS:
            self._casts.popitem(last=False)

    def _reference(self, func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
        if func in self._without_reference or not _is_repeatable(func):
            return None
        try:
            return _tensors(func(*self._full(args), **self._full(kwargs)))
        except (RuntimeError, NotImplementedError):  # some kernels are there for 16 bits only
            self._without_reference.add(func)
            return None

    def _full(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype != self.half_dtype:
                return value
            return self._casts[id(value)][1] if id(value) in self._casts else value.float()
        if value is self.half_dtype:
            return torch.float32
        if isinstance(value, (list, tuple)):
            return type(value)(self._full(each) for each in value)
        return {key: self._full(each) for key, each in value.items()} if isinstance(value, dict) else value


class _Functions(TorchFunctionMode):
    """Tells which functions of torch are running, those within functions in Python too."""

    def __init__(self, audit: OperatorAudit) -> None:
        super().__init__()
        self._audit = audit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._audit.enter(getattr(func, "__name__", ""))
        try:
            inner = _past_dispatch().get(func)
            if inner is None:
                return func(*args, **(kwargs or {}))
            with self:
                return inner(*args, **(kwargs or {}))
        finally:
            self._audit.leave()


class _Operators(TorchDispatchMode):
    def __init__(self, audit: OperatorAudit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._audit = audit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # lists of operators are not for what is measured here
            self._audit.see(func, args, kwargs or {}, output)
        return output


@cache
def listed_name(function: str) -> str:
    """The name by which `OpPrecision` takes a function, or nothing."""
    name = next((names[0] for names in _OPERATORS.values() if function in names), function)
    try:
        OpPrecision(full_precision_ops=[name])
    except (ImportError, ValueError):
        return ""
    return name


@cache
def _is_view(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


@cache
def _is_repeatable(func: Any) -> bool:
    return not func._schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in _tensors(each)] if isinstance(value, (list, tuple)) else []
