"""Slices of parameters say so where code other than their own layer's reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_bigmodel.sharding.guard import mark_absent, mark_present

__all__ = ["SliceGuard", "refuse_slice"]

_SLICED = "_bigmodel_slice_of"


def refuse_slice(parameter: nn.Parameter) -> None:
    """Say that `parameter` is a slice, if it is one.

    Raises:
        RuntimeError: With the parameter's name and what to change.
    """
    name = parameter.__dict__.get(_SLICED)
    if name is not None:
        raise RuntimeError(
            f"`{name}` is read outside of its own layer's forward, but tensor parallelism made it one rank's slice: "
            "a norm, a penalty or a product of it would be another number on every rank. Leave the layer out of "
            "`tensor_plan`, or read the whole parameter after the step within "
            "`with trainer.strategy.whole_parameters():`."
        )


class SliceGuard:
    """Lets only their own layers read sliced parameters while a user's step runs.

    Args:
        root: The module.
        names: `id(parameter)` -> name, of the slices.
        checks: Called at the end of a step that did not fail.

    Cost: the class of each slice is set twice a call of its layer.
    """

    def __init__(self, root: nn.Module, names: Mapping[int, str], checks: Sequence[Callable[[], None]] = ()) -> None:
        self._checks = checks
        self._is_on = False
        self._parameters: list[nn.Parameter] = []
        self._handles: list[RemovableHandle] = []
        for module in root.modules():
            own = [p for p in module._parameters.values() if p is not None and id(p) in names]
            if own:
                self._handles += [
                    module.register_forward_pre_hook(lambda *_, own=own: _allow(own), prepend=True),
                    module.register_forward_hook(lambda *_, own=own: self._forbid(own), always_call=True),
                ]
                self._parameters += own
        for parameter in self._parameters:
            parameter.__dict__[_SLICED] = names[id(parameter)]

    def _forbid(self, parameters: list[nn.Parameter]) -> None:
        if self._is_on:
            for parameter in parameters:
                mark_absent(parameter, refuse_slice)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a user's step."""
        self._is_on = True
        self._forbid(self._parameters)
        try:
            yield
            for check in self._checks:
                check()
        finally:
            self._is_on = False
            _allow(self._parameters)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._parameters:
            parameter.__dict__.pop(_SLICED, None)
        self._parameters.clear()


def _allow(parameters: list[Any]) -> None:
    for parameter in parameters:
        mark_present(parameter)
