"""Give memory and first values to a model built on the meta device, a part at a time.

Each module is initialised under a random seed of its own, so values do not depend on which rank holds what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.mesh.rng import derive_seed, seeded_rng

__all__ = ["Materializer", "has_meta_tensors", "put_in_place"]


def has_meta_tensors(root: nn.Module) -> bool:
    """Whether any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def put_in_place(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a meta parameter hold `values`; it stays the same object, in the module and in optimizers."""
    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))


class Materializer:
    """Makes modules real: memory, then `reset_parameters` or what initialises them in the model around them.

    Args:
        root: The model.
        seed: Equal on all ranks.
        device: Where values are made.
        is_loaded: Values come from a checkpoint afterwards, so that modules that cannot initialise themselves may stay
            empty.

    Memory: what is asked for.
    """

    def __init__(self, root: nn.Module, seed: int, device: torch.device, *, is_loaded: bool = False) -> None:
        self._seed, self._device, self._is_loaded = seed, device, is_loaded
        self._modules: list[tuple[int, str, nn.Module, nn.Module | None]] = []
        owner: dict[str, nn.Module] = {}
        for index, (name, module) in enumerate(root.named_modules()):
            if hasattr(module, "_init_weights"):  # what transformers models call their initialisation
                owner[name] = module
            around = max(
                (path for path in owner if not path or name == path or name.startswith(f"{path}.")),
                key=len,
                default=None,
            )
            self._modules.append((index, name, module, None if around is None else owner[around]))

    def fill(self, parameters: Iterable[nn.Parameter], *, buffers: bool = True) -> None:
        """Make the modules that own any of these parameters real; those with meta buffers only too, if `buffers`.

        Raises:
            ValueError: For a module that cannot initialise itself, or leaves a buffer without values.
        """
        wanted = {id(parameter) for parameter in parameters if parameter.is_meta}
        for index, name, module, around in self._modules:
            own = [p for p in module._parameters.values() if p is not None]
            empty = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
            if any(id(p) in wanted for p in own) or (buffers and empty and not any(p.is_meta for p in own)):
                self._fill_one(index, name, module, around, empty)

    def _fill_one(
        self, index: int, name: str, module: nn.Module, around: nn.Module | None, empty: Collection[str]
    ) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                put_in_place(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device))
        for key in empty:
            buffer = module._buffers[key]
            assert buffer is not None
            module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
        made = {key: (module._buffers[key], _version(module._buffers[key])) for key in empty}
        with torch.no_grad(), seeded_rng(derive_seed(self._seed, index)):
            initialise: Any = getattr(module, "reset_parameters", None)
            initialise_inside: Any = getattr(around, "_init_weights", None)
            if callable(initialise):
                initialise()
            if callable(initialise_inside):  # has the last word, as in the model's own constructor
                initialise_inside(module)
            elif not callable(initialise) and not self._is_loaded:
                raise ValueError(
                    f"`{name}` ({type(module).__name__}) is on the meta device and has no `reset_parameters` to give "
                    "its parameters their first values. Add that method, build the module on the CPU, or fit from a "
                    "checkpoint (`ckpt_path=`)."
                )
        for key, (buffer, version) in made.items():
            if module._buffers[key] is buffer and _version(buffer) == version:
                raise ValueError(
                    f"The buffer `{name}.{key}` is on the meta device, and `{type(module).__name__}` has no "
                    "`reset_parameters` that fills it. Fill it there, or build this module on the CPU."
                )


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version
