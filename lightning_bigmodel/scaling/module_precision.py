"""Chosen modules in full precision, within a model that computes in half.

What sums many numbers or raises them to powers (norms, routers of experts, rotary embeddings) loses more in half
precision than it saves in time (https://arxiv.org/abs/1710.03740, section 3.3).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_bigmodel.scaling.casting import cast_floats, in_full_precision, run_full

__all__ = ["ModulePrecision", "matching_modules"]


def matching_modules(root: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that patterns stand for.

    Args:
        root: The model.
        patterns: Each the name of modules ("model.layers.0.norm", "*.norm", "model.layers.0.*") or of their class or a
            class it derives from ("LayerNorm", "*Norm"), capitals as written.

    Returns:
        Name -> module, in the order of the model. The model itself has the name ""; of it, and of lists and dicts of
        modules, which nobody calls, all that they hold.

    Raises:
        TypeError: If `patterns` is one string, or holds something else than strings.
        ValueError: If a pattern matches no module.

    Example::

        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        list(matching_modules(model, ["LayerNorm"]))  # ["1"]
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"`full_precision_modules={patterns!r}` must be a list of names or patterns, such as ['LayerNorm',"
            " '*.norm']."
        )
    names = {name: (name, *_class_names(module)) for name, module in root.named_modules()}
    for pattern in patterns:
        if not any(fnmatchcase(known, pattern) for group in names.values() for known in group):
            raise ValueError(_unmatched(pattern, names))
    found = {
        name: module
        for name, module in root.named_modules()
        if any(fnmatchcase(known, pattern) for pattern in patterns for known in names[name])
    }
    inside = {id(part) for module in found.values() if module is root or _is_list(module) for part in module.modules()}
    return {
        name: module
        for name, module in root.named_modules()
        if (name in found or id(module) in inside) and not _is_list(module)
    }


class ModulePrecision:
    """Runs the matching modules in float32 between `install` and `remove`.

    Floating inputs are cast to float32, autocast is off inside, and float32 comes out. `half_precision_ops` do not
    apply inside. Since it belongs to the module, it also holds when activations are recomputed, in evaluation, in any
    thread, and under `torch.compile`.

    The parameters must be float32 already: under "bf16-true" and "16-true" the caller keeps them so, see
    `matching_modules`. Costs twice the bytes of the modules' half inputs and outputs.

    Args:
        root: The model.
        patterns: As of `matching_modules`.
        output_dtype: What floating outputs are cast to. For models whose weights are half: without autocast the next
            module would refuse float32. Default: None, float32.

    Raises:
        TypeError: As by `matching_modules`.
        ValueError: As by `matching_modules`.

    Example::

        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        precision = ModulePrecision(model, ["LayerNorm"])
        precision.install()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 2)).dtype  # torch.float32, and so are the sums inside
        precision.remove()
    """

    def __init__(self, root: nn.Module, patterns: Sequence[str], *, output_dtype: torch.dtype | None = None) -> None:
        self.modules = matching_modules(root, patterns)
        self.output_dtype = output_dtype
        self._installed: list[tuple[nn.Module, _Forward]] = []

    def install(self) -> None:
        """Begins; a second call does nothing."""
        if not self._installed:
            self._installed = [(module, _Forward(module, self.output_dtype)) for module in self.modules.values()]

    def remove(self) -> None:
        """Leaves each module as it was; without an `install` it does nothing."""
        for module, forward in self._installed:
            forward.remove(module)
        self._installed = []


class _Forward:
    """The forward of one module, in its `__dict__`.

    A hook cannot do this: those after the forward do not run when a pipeline leaves it at the end of its stage, and
    autocast would stay off.
    """

    def __init__(self, module: nn.Module, output_dtype: torch.dtype | None) -> None:
        self.before = module.__dict__.get("forward")
        self.switch = {"on": True}
        # Bound as a method, so that a deep copy of the module calls the copy.
        self.installed = MethodType(_full_forward(self.before, self.switch, output_dtype), module)
        module.__dict__["forward"] = self.installed

    def remove(self, module: nn.Module) -> None:
        if module.__dict__.get("forward") is not self.installed:
            # Another wrapper has come around this one, and will go on calling it.
            self.switch["on"] = False
        elif self.before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self.before


def _full_forward(
    before: Callable[..., Any] | None, switch: dict[str, bool], output_dtype: torch.dtype | None
) -> Callable[..., Any]:
    # By this name a pickled module finds the forward of its class again.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call, first = (before, ()) if before is not None else (type(self).forward, (self,))
        if not switch["on"]:
            return call(*first, *args, **kwargs)
        is_inner = in_full_precision()  # of another such module, which goes on in float32
        output = run_full(call, (*first, *args), kwargs)
        return output if output_dtype is None or is_inner else cast_floats(output, output_dtype)

    return forward


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _class_names(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]


def _unmatched(pattern: str, names: dict[str, tuple[str, ...]]) -> str:
    known = dict.fromkeys(name for group in names.values() for name in group if name)
    # "*.norm" does not match a "norm" at the top.
    close = difflib.get_close_matches(pattern.replace("*", "").strip("."), known, n=4, cutoff=0.5)
    hint = f" Close to it: {close}." if close else f" The first modules are {list(known)[:6]}."
    return (
        f"`full_precision_modules` holds {pattern!r}, which matches no module's name or class.{hint} Take it out, or"
        " write the name as `named_modules` gives it; '*' stands for any characters."
    )
