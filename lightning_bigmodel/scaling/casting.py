"""Running one function in full or half precision, inside or outside of autocast.

A function in full precision gets its float16 and bfloat16 tensors as float32, runs with autocast off, and gives
float32. A function in half precision gets and gives the half dtype. The casts are part of the graph, so each gradient
arrives in the dtype of its tensor. Integers, complex numbers and float64 pass untouched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

__all__ = ["full_precision", "half_precision"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

HALF_DTYPES = (torch.float16, torch.bfloat16)
_CAST_DTYPES = (torch.float32, *HALF_DTYPES)


class _Region(threading.local):
    """How many functions in full precision this thread is inside of, one within another."""

    def __init__(self) -> None:
        self.depth = 0  # not on the class: `torch.compile` would look for it in vain the first time


_region = _Region()


def in_full_precision() -> bool:
    """Whether a function in full precision is running, so that no part of it may go to half."""
    return _region.depth > 0


def keep_region() -> Callable[[], AbstractContextManager[None]]:
    """What enters the present region (in full precision, or not) again later, as a second run of the same code needs.

    Example:
        >>> enter = keep_region()
        >>> with enter():
        ...     in_full_precision()
        False
    """
    depth = _region.depth

    @contextmanager
    def enter() -> Iterator[None]:
        before, _region.depth = _region.depth, depth
        try:
            yield
        finally:
            _region.depth = before

    return enter


def full_precision(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: the function always computes in float32, whatever autocast and `half_precision_ops` say.

    Its float16 and bfloat16 tensors, also within lists, tuples and mappings, are cast to float32, and so is what it
    returns. It costs the casts' memory: twice the bytes of each half argument, until backward if it is saved.

    Wherever the function is held, in a closure or a table of activations, it is decorated there too. It also holds when
    activations are recomputed, and in any thread.

    Args:
        function: Takes tensors, or structures of them. Tensors that it finds elsewhere are not cast.

    Example::

        @full_precision
        def phase(position, frequency):
            return torch.cos(position * frequency)

        phase(torch.arange(4.0).bfloat16(), 0.5).dtype  # torch.float32
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        output: _T = run_full(function, args, kwargs)
        return output

    return run


@overload
def half_precision(function: Callable[_P, _T]) -> Callable[_P, _T]: ...
@overload
def half_precision(*, dtype: torch.dtype) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...
def half_precision(function: Callable[..., Any] | None = None, *, dtype: torch.dtype | None = None) -> Any:
    """Decorator: the function gets and gives half precision.

    Inside, autocast goes on as it is around: it casts weights that the function reaches, and keeps what it deems
    delicate in float32. Inside of a function in full precision the decorator does nothing.

    Args:
        function: As of `full_precision`.
        dtype: float16 or bfloat16. Default: that of autocast where it is on; elsewhere the function runs as it is.

    Raises:
        ValueError: If `dtype` is neither.

    Example::

        @half_precision(dtype=torch.bfloat16)
        def scores(query, key):
            return query @ key.mT

        scores(torch.ones(2, 2), torch.ones(2, 2)).dtype  # torch.bfloat16
    """
    if dtype is not None:
        check_half_dtype("dtype", dtype)
    if function is None:
        return functools.partial(half_precision, dtype=dtype)
    inner = function

    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype or _autocast_dtype((args, kwargs))
        return inner(*args, **kwargs) if wanted is None else run_half(inner, args, kwargs, wanted)

    return run


def check_half_dtype(name: str, dtype: Any) -> None:
    """Refuses what is no half precision.

    Raises:
        ValueError: With the name of the setting.
    """
    if dtype not in HALF_DTYPES:
        raise ValueError(f"`{name}={dtype}` must be `torch.float16` or `torch.bfloat16`.")


def run_full(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a user's function in full precision."""
    _region.depth += 1
    try:
        return _to_full(call_full(function, args, kwargs))
    finally:
        _region.depth -= 1


def run_half(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Calls a user's function with half precision at its ends, unless it is part of one in full precision."""
    if in_full_precision():
        return function(*args, **kwargs)
    return cast_floats(function(*cast_floats(args, dtype), **cast_floats(kwargs, dtype)), dtype)


def call_full(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator with float32 and without autocast: what comes out is float32 by itself."""
    return _without_autocast(function, _to_full(args), _to_full(kwargs))


def call_half(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Any:
    """Calls an operator with `dtype` and without autocast, which would take some operators to float32."""
    return _without_autocast(function, cast_floats(args, dtype), cast_floats(kwargs, dtype))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Casts float32, float16 and bfloat16 tensors in a structure; dtypes in it that name one of those follow."""
    return _map(value, _CAST_DTYPES, dtype)


def _to_full(value: Any) -> Any:
    return _map(value, HALF_DTYPES, torch.float32)


def _map(value: Any, source: tuple[torch.dtype, ...], target: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype in source and value.dtype != target else value
    if isinstance(value, torch.dtype):
        # The argument `dtype=` of an operator would undo the cast.
        return target if value in source else value
    if isinstance(value, tuple):
        parts = [_map(each, source, target) for each in value]
        # A named tuple takes its parts one by one; the results of torch's operators take them as one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is list:
        return [_map(each, source, target) for each in value]
    if type(value) is dict:
        return {key: _map(each, source, target) for key, each in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure that the casts see."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) or type(value) is list:
        for each in value:
            yield from tensors_in(each)
    elif type(value) is dict:
        for each in value.values():
            yield from tensors_in(each)


def _without_autocast(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    kinds = _autocast_kinds((args, kwargs))
    if not kinds:
        return function(*args, **kwargs)
    if len(kinds) == 1:
        with torch.autocast(kinds[0], enabled=False):
            return function(*args, **kwargs)
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return function(*args, **kwargs)


def _autocast_kinds(value: Any) -> list[str]:
    """The device types of the tensors for which autocast is on."""
    kinds: list[str] = []
    for tensor in tensors_in(value):
        kind = tensor.device.type
        if kind not in kinds and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            kinds.append(kind)
    return kinds


def _autocast_dtype(value: Any) -> torch.dtype | None:
    kinds = _autocast_kinds(value)
    return torch.get_autocast_dtype(kinds[0]) if kinds else None
