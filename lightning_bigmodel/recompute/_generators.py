"""Random generators that a block draws from beside the default ones, wherever it has them from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["GeneratorStates", "drawn_from"]


class GeneratorStates(TorchFunctionMode):
    """Within, each generator that a call of torch is given is noted, as it is before the call: once, and for `again`.

    Attributes of the block are not the only place to have one from: a collection, another object, an argument. Costs
    about a microsecond a call of torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._states: list[tuple[torch.Generator, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            return func(*args)
        generator = kwargs.get("generator")
        if generator is not None:
            self._note(generator)
        return func(*args, **kwargs)

    def _note(self, generator: torch.Generator) -> None:
        if not _is_default(generator) and not any(generator is known for known, _ in self._states):
            self._states.append((generator, generator.get_state()))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, they are as they were noted; as before on the way out."""
        present = [(generator, generator.get_state()) for generator, _ in self._states]
        for generator, state in self._states:
            generator.set_state(state)
        try:
            with self:  # compiled code within is compiled for the modes that it has met
                yield
        finally:
            for generator, state in present:
                generator.set_state(state)


def drawn_from(kwargs: Any) -> torch.Generator | None:
    """The generator of its own that an operator is given."""
    generator = None if not kwargs else kwargs.get("generator")
    return None if generator is None or _is_default(generator) else generator


def _is_default(generator: torch.Generator) -> bool:
    """Those are kept with all other random states, from the beginning of a block."""
    return generator is torch.default_generator or any(
        generator is default for default in torch.cuda.default_generators
    )
