"""Tensors whose values are spread over ranks: they say so when they are read, or fetch them where that is possible.

A sharded parameter stays the same object, with its name, shape, dtype and optimizer options; only its class changes
while its memory is given up, so that no operation can read memory that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.mesh.value_free import VALUE_FREE

__all__ = ["AbsentParameter", "RowGradient", "mark_absent", "mark_present"]

# Besides: gradient slots and hooks, which a parameter keeps while its values are away.
_VALUE_FREE: frozenset[Any] = VALUE_FREE | {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "grad",
            "nbytes",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_mps",
            "_version",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
        )
    ),
    *(
        getattr(Tensor, name).__set__
        for name in ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    ),
    getattr(Tensor, "grad").__delete__,  # noqa: B009  # the descriptor, not the attribute
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.__hash__,
}


class AbsentParameter(nn.Parameter):
    """A parameter whose values are spread over ranks at the moment.

    Reading it calls `fetch(parameter)`, which makes the values present or raises an error that says what to do.
    """

    fetch: Callable[[nn.Parameter], None]
    present_class: type[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let through what reads no values; fetch them for everything else."""
        if func in (torch.equal, Tensor.equal):
            # How callbacks look for a parameter in an optimizer, which has the rows of it in its place.
            one, other = args
            return one is other or any(
                isinstance(a, AbsentParameter) and a.__dict__["rows"] is b for a, b in ((one, other), (other, one))
            )
        if func not in _VALUE_FREE:
            for leaf in _absent((args, kwargs or {})):
                fetch = leaf.__dict__.get("fetch")
                if fetch is not None:  # else it has come with another one
                    fetch(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype; printing must not need the other ranks."""
        return f"Parameter(sharded, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of the values, for which they must be present."""
        self.__dict__["fetch"](self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickling takes values too."""
        self.__dict__["fetch"](self)
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _absent(value: Any) -> list[AbsentParameter]:
    if isinstance(value, AbsentParameter):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _absent(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _absent(item)]
    return []


def mark_absent(
    parameter: nn.Parameter, fetch: Callable[[nn.Parameter], None], rows: nn.Parameter | None = None
) -> None:
    """From now on reading `parameter` calls `fetch`. Does nothing twice.

    Args:
        parameter: The parameter.
        fetch: Makes its values present, or raises.
        rows: What optimizers hold in its place.
    """
    if not isinstance(parameter, AbsentParameter):
        parameter.__dict__["present_class"] = type(parameter)
        parameter.__dict__["fetch"] = fetch
        parameter.__dict__["rows"] = rows
        parameter.__class__ = AbsentParameter


def mark_present(parameter: nn.Parameter) -> None:
    """An ordinary parameter again."""
    if isinstance(parameter, AbsentParameter):
        parameter.__class__ = parameter.__dict__.pop("present_class")
        del parameter.__dict__["fetch"], parameter.__dict__["rows"]


class RowGradient(Tensor):
    """A gradient of which each rank has rows, as user code sees it between backward and the optimizer step.

    Whatever reads it gets the whole gradient, and what is done to it in place is kept. All ranks of the shards must do
    the same; each operation gathers the gradient once. Changes made through a view of it are lost.

    Example:
        >>> rows = torch.ones(2, 3)
        >>> gradient = RowGradient.wrap(rows, torch.Size((2, 3)), lambda rows: rows.clone(), lambda whole: whole)
        >>> gradient.mul_(2.0); gradient.norm() ** 2, rows[0, 0]  # doctest: +SKIP
        (tensor(24.), tensor(2.))
    """

    _rows: Tensor
    _gather: Callable[[Tensor], Tensor]
    _own: Callable[[Tensor], Tensor]

    @staticmethod
    def wrap(
        rows: Tensor,
        shape: torch.Size,
        gather: Callable[[Tensor], Tensor],
        own: Callable[[Tensor], Tensor],
        like: Tensor | None = None,
    ) -> RowGradient:
        """Show `rows` as a whole tensor.

        Args:
            rows: This rank's rows.
            shape: Shape of the whole.
            gather: Rows -> whole, a new tensor; collective.
            own: Whole -> view of this rank's rows.
            like: Has the type and device of the whole; default: `rows`.
        """
        like = rows if like is None else like
        shown = torch.empty((), dtype=like.dtype, device=like.device).expand(shape).as_subclass(RowGradient)
        shown._rows, shown._gather, shown._own = rows, gather, own
        return shown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run on the whole gradient, and keep what changed."""
        if func in _SAME_GRADIENT:
            return args[0]
        if func == _SET_DATA and isinstance(args[0], RowGradient):
            args[0].copy_(args[1])
            return None
        if func in _VALUE_FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        wholes: dict[int, tuple[RowGradient, Tensor, int]] = {}

        def whole(value: Any) -> Any:
            if isinstance(value, RowGradient):
                if id(value) not in wholes:
                    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                        made = value.__dict__["_gather"](value.__dict__["_rows"]).to(value.dtype)
                    wholes[id(value)] = (value, made, made._version)
                return wholes[id(value)][1]
            if isinstance(value, (list, tuple)):
                return type(value)(whole(item) for item in value)
            return {key: whole(item) for key, item in value.items()} if isinstance(value, dict) else value

        given, options = [whole(value) for value in args], whole(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*given, **options)
        with torch.no_grad():
            for gradient, values, version in wholes.values():
                if values._version != version:
                    gradient.__dict__["_rows"].copy_(gradient.__dict__["_own"](values))
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype; printing must not need the other ranks."""
        return f"RowGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


_SET_DATA = getattr(Tensor, "data").__set__  # noqa: B009  # the descriptor
_SAME_GRADIENT = frozenset([getattr(Tensor, "data").__get__, Tensor.detach])  # noqa: B009  # the descriptor
