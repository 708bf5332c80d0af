"""Which operators compute in which precision, by the user's own lists.

Autocast has lists of its own, which cannot be changed from outside: it runs softmax in float32 on some devices and in
half on others, and knows no function of the user's. Here the user says what stays in float32 and what goes to half.

How: a `TorchFunctionMode` sees each call of torch that Python makes, and casts around those that are listed. A function
of the user's is replaced wherever a module or class holds it. What can be reached by neither:

- an operator that another one calls in C++, such as the softmax within `scaled_dot_product_attention`: name the outer
  one. Operators within torch's functions in Python, such as `multi_head_attention_forward`, are seen;
- calls within `torch.jit.script`, and within functions handed to `torch.cond`, `flex_attention` and their like;
- a function of the user's held in a closure, a table or a `partial`: decorate it with `full_precision`.
"""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_bigmodel import _host
from lightning_bigmodel.scaling.casting import (
    call_full,
    call_half,
    check_half_dtype,
    full_precision,
    half_precision,
    in_full_precision,
    run_full,
    run_half,
)
from lightning_bigmodel.scaling.module_precision import ModulePrecision, matching_modules
from lightning_bigmodel.scaling.op_names import STANDS_FOR, UserFunction, resolve

__all__ = ["ModulePrecision", "OpPrecision", "full_precision", "half_precision", "matching_modules"]


class OpPrecision:
    """Operators in full and in half precision, as the user lists them.

    An operator in `full_precision_ops` gets its float16 and bfloat16 tensors as float32, runs with autocast off, and
    gives float32. One in `half_precision_ops` gets its float32 tensors in `half_dtype`, runs with autocast off, and
    gives `half_dtype`. Gradients arrive in the dtype of their tensors. Integers, complex numbers and float64 are left
    alone, and so are calls with `out=` or `inplace=True`, with a warning: their result has the dtype it is written to.
    Within a function or module in full precision, `half_precision_ops` do not apply.

    `active` holds in the thread that enters it. Recomputed activations are computed in the backward pass: keep `active`
    around that, too. Autograd takes it along to the threads of devices. Without it, recomputed operators would run in
    other dtypes than before: torch refuses that with `use_reentrant=False`, and with `use_reentrant=True` it goes on
    with the other numbers. The user's functions do not depend on it: they are replaced from `install` to `remove`, in
    all threads.

    Under `torch.compile` the lists hold as they were when the code was traced, which is traced again when they change.
    Around a checkpoint it compiles in pieces, or with `fullgraph=True` refuses. By its own default it also traces the
    backward pass as if autocast were on there: products of matrices in the gradient of an operator in full precision
    go to half, unless `torch._functorch.config.backward_pass_autocast` is "off".

    Costs some microseconds for each call of torch within `active`, and the casts' memory.

    Args:
        full_precision_ops: Names, see below. Default: none.
        half_precision_ops: Names, see below. Default: none.
        half_dtype: float16 or bfloat16, as of the precision in use. Default: bfloat16.

    A name is a short one of torch ("softmax", "layer_norm", "bmm"), which stands for every form of it; a symbol ("@");
    a full one ("torch.nn.functional.softmax", "Tensor.softmax"), which stands for one form; or one of the user's own
    functions ("my_package.module.function", "my_package.module.Class.method").

    Raises:
        TypeError: If a list is one string, or holds something else than strings.
        ValueError: If a name is unknown, is in both lists in whatever form, or stands for something that has no
            precision of its own; or if `half_dtype` is none.

    Example::

        ops = OpPrecision(full_precision_ops=["softmax", "my_package.rotary.phase"], half_precision_ops=["bmm"])
        ops.install()
        with ops.active(), torch.autocast("cpu", torch.bfloat16):
            loss = model(batch)
        with ops.active():
            loss.backward()
        ops.remove()
    """

    def __init__(
        self,
        full_precision_ops: Sequence[str] = (),
        half_precision_ops: Sequence[str] = (),
        half_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_half_dtype("half_dtype", half_dtype)
        self.full_precision_ops = _names("full_precision_ops", full_precision_ops)
        self.half_precision_ops = _names("half_precision_ops", half_precision_ops)
        self.half_dtype = half_dtype
        full = {name: resolve(name, "full_precision_ops") for name in self.full_precision_ops}
        half = {name: resolve(name, "half_precision_ops") for name in self.half_precision_ops}
        _refuse_both(full, half)
        self._mode = _Mode(_operators(full), _operators(half), half_dtype)
        self._functions = [
            *(_Replaced(user, _in_full(user.function)) for user in full.values() if isinstance(user, UserFunction)),
            *(
                _Replaced(user, _in_half(user.function, half_dtype))
                for user in half.values()
                if isinstance(user, UserFunction)
            ),
        ]
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._installs = 0
        self._kept = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A launcher that starts processes sends the lists to them; what is replaced here stays here.
        return type(self), (self.full_precision_ops, self.half_precision_ops, self.half_dtype)

    def __bool__(self) -> bool:
        return bool(self.full_precision_ops or self.half_precision_ops)

    def install(self) -> None:
        """Replaces the user's functions in every module and class that holds them, until `remove`.

        Goes through all loaded modules, some tens of milliseconds for each function: call it once, at the start. A
        second call does nothing.
        """
        with self._lock:
            if not self._kept:
                self._kept = True
                self._replace()

    def remove(self) -> None:
        """Puts the user's functions back; without an `install` it does nothing."""
        with self._lock:
            if self._kept:
                self._kept = False
                self._restore()

    def active(self) -> AbstractContextManager[None]:
        """A context in which the lists hold. It may be entered again within itself.

        Without `install`, the user's functions are replaced for as long as the context lasts.
        """
        return self._active() if self else nullcontext()

    @contextmanager
    def _active(self) -> Iterator[None]:
        if getattr(self._thread, "inside", False):
            yield
            return
        with self._lock:
            self._replace()
        self._thread.inside = True
        try:
            if self._mode.table:
                with self._mode:
                    yield
            else:
                yield
        finally:
            self._thread.inside = False
            with self._lock:
                self._restore()

    def _replace(self) -> None:
        self._installs += 1
        if self._installs == 1:
            for function in self._functions:
                function.install()

    def _restore(self) -> None:
        self._installs -= 1
        if not self._installs:
            for function in reversed(self._functions):
                function.remove()


class _Mode(TorchFunctionMode):
    """Sees the calls of torch that Python makes.

    All is looked up in tables made before, so that `torch.compile` can follow.
    """

    def __init__(self, full: set[Any], half: set[Any], half_dtype: torch.dtype) -> None:
        super().__init__()
        # Function -> whether it runs in full precision.
        self.table = {**dict.fromkeys(full, True), **dict.fromkeys(half, False)}
        self.half_dtype = half_dtype
        self.inplace_positions = {
            function: position for function in self.table if (position := _inplace_position(function)) is not None
        }
        # Of functions in Python that are not listed: what to call in their place, so that what they call is seen again.
        self.past_dispatch = {
            function: inner for function, inner in _past_dispatch().items() if function not in self.table
        }
        self.warned: set[Any] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        full = self.table.get(func)
        if full is None:
            return self._pass_on(func, args, kwargs)
        if self._writes_elsewhere(func, args, kwargs):
            self._warn(func)
            return func(*args, **kwargs)
        if full:
            return call_full(func, args, kwargs)
        if in_full_precision():
            return func(*args, **kwargs)
        return call_half(func, args, kwargs, self.half_dtype)

    def _pass_on(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls what is not listed, and sees what it calls."""
        inner = self.past_dispatch.get(func)
        if inner is not None:
            with self:
                return inner(*args, **kwargs)
        if func is checkpoint:
            # Only `torch.compile` reports it, and would trace what is inside without this mode.
            _host.graph_break(
                "Operators with a precision of their own cannot be traced through a checkpoint. Compile what is inside"
                " of the checkpoint, and not what is around it, or leave out `fullgraph=True`."
            )
        return func(*args, **kwargs)

    def _writes_elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if kwargs.get("out") is not None or kwargs.get("inplace"):
            return True
        position = self.inplace_positions.get(func)
        return position is not None and len(args) > position and bool(args[position])

    def _warn(self, func: Any) -> None:
        if func not in self.warned:
            self.warned.add(func)
            warnings.warn(
                f"`{func.__name__}` has a precision of its own, but is called with `out=` or in place, and keeps the"
                " dtypes of its tensors there. Call it without.",
                stacklevel=4,
            )


@cache
def _past_dispatch() -> dict[Any, Callable[..., Any]]:
    """Torch's functions in Python -> the same without their own check for modes, which would come back without end.

    With them the backward pass, in which activations may be recomputed. No other methods of tensors: below they call a
    method of the same name, which torch reports as the same function again.
    """
    found: dict[Any, Callable[..., Any]] = {}
    for module in (torch.nn.functional, torch.functional, torch.autograd):
        functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
        found |= {each: inner for each in functions if (inner := _without_check(each, vars(module))) is not None}
    backward: Any = torch.Tensor.backward
    inner = _without_check(backward, backward.__globals__)
    return found if inner is None else {**found, backward: inner}


def _without_check(function: types.FunctionType, scope: Mapping[str, Any]) -> Callable[..., Any] | None:
    """None if the function does not look for modes by a name of its own module, which can be changed for it alone."""
    checks = [name for name in function.__code__.co_names if name.startswith("has_torch_function")]
    if function.__globals__ is not scope or not checks or not all(name in scope for name in checks):
        return None
    inner = types.FunctionType(
        function.__code__,
        {**scope, **dict.fromkeys(checks, _never)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner


def _never(*args: Any) -> bool:
    return False


def _inplace_position(func: Any) -> int | None:
    if not isinstance(func, types.FunctionType):
        return None
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    return names.index("inplace") if "inplace" in names else None


class _Replaced:
    """A function of the user's, and another in its place wherever a module, or its class, holds it."""

    def __init__(self, user: UserFunction, run: Callable[..., Any]) -> None:
        self.user = user
        # What a module still holds after `remove`, because it was loaded or changed in between, does nothing more.
        self.on = False
        function = user.function

        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs) if self.on else function(*args, **kwargs)

        setattr(replacement, STANDS_FOR, user.raw)
        self.function = function
        self.replacement = replacement
        kind = type(user.raw)
        self.raw = kind(replacement) if kind in (staticmethod, classmethod) else replacement
        self.inherited = isinstance(user.owner, type) and user.attribute not in vars(user.owner)

    def install(self) -> None:
        self.on = True
        setattr(self.user.owner, self.user.attribute, self.raw)
        _exchange(self.function, self.replacement)

    def remove(self) -> None:
        self.on = False
        if vars(self.user.owner).get(self.user.attribute) is self.raw:
            if self.inherited:
                delattr(self.user.owner, self.user.attribute)
            else:
                setattr(self.user.owner, self.user.attribute, self.user.raw)
        _exchange(self.replacement, self.function)


def _exchange(old: Any, new: Any) -> None:
    """Puts one function in the place of another in every loaded module, whatever name it has there."""
    for module in list(sys.modules.values()):
        scope = getattr(module, "__dict__", None)
        if type(scope) is dict:
            for name in [name for name, value in list(scope.items()) if value is old]:
                scope[name] = new


def _in_full(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: run_full(function, args, kwargs)


def _in_half(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    return lambda *args, **kwargs: run_half(function, args, kwargs, dtype)


def _operators(resolved: Mapping[str, frozenset[Any] | UserFunction]) -> set[Any]:
    return {function for found in resolved.values() if isinstance(found, frozenset) for function in found}


def _names(setting: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"`{setting}={names!r}` must be a list of names: write [{names!r}].")
    return tuple(dict.fromkeys(names))


def _refuse_both(
    full: Mapping[str, frozenset[Any] | UserFunction], half: Mapping[str, frozenset[Any] | UserFunction]
) -> None:
    for left, in_full in full.items():
        for right, in_half in half.items():
            if isinstance(in_full, UserFunction) and isinstance(in_half, UserFunction):
                same = in_full.function is in_half.function
            else:
                same = isinstance(in_full, frozenset) and isinstance(in_half, frozenset) and bool(in_full & in_half)
            if same:
                raise ValueError(
                    f"'{left}' in `full_precision_ops` and '{right}' in `half_precision_ops` are the same operator."
                    " Take it out of one of the lists."
                )
