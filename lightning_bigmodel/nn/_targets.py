"""Which layers of a module patterns stand for, and which of them have a matrix that inputs are multiplied by."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = [
    "check_patterns",
    "features_of",
    "is_conv1d",
    "linear_layers",
    "match_names",
    "names_of_parameters",
    "own_weight",
]


def check_patterns(name: str, patterns: Any, *, may_be_empty: bool = False) -> list[str]:
    """A setting that lists patterns, checked.

    Raises:
        ValueError: For one string, or what is no list of them.
    """
    is_list = isinstance(patterns, Sequence) and not isinstance(patterns, (str, bytes))
    if not is_list or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(
            f"`{name}={patterns!r}` must be a list of module names or patterns, such as ['q_proj', 'layers.*.mlp.up']."
        )
    if not patterns and not may_be_empty:
        raise ValueError(f"`{name}=[]` names no layer. Give names or patterns, such as ['q_proj', 'v_proj'].")
    return list(patterns)


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that a pattern fits: whole ones, or by their last components where it fits no whole one.

    Example:
        >>> match_names("q", ["layers.0.q", "layers.1.q", "layers.1.k"]), match_names("layers.*.k", ["layers.1.k"])
        (['layers.0.q', 'layers.1.q'], ['layers.1.k'])
    """
    wanted = pattern.split(".")
    split = {name: name.split(".") for name in names}
    whole = [name for name, parts in split.items() if len(parts) == len(wanted) and _fits(parts, wanted)]
    return whole or [name for name, parts in split.items() if _fits(parts[-len(wanted) :], wanted)]


def _fits(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def linear_layers(root: nn.Module, patterns: Sequence[str], setting: str) -> dict[str, nn.Module]:
    """Name -> linear layer, of all that the patterns fit, in the order of the module.

    Args:
        root: The module.
        patterns: Each must fit a linear layer: `nn.Linear`, a subclass of it, or transformers' `Conv1D`.
        setting: Name of the setting, for messages.

    Raises:
        ValueError: For a pattern that fits nothing, or nothing that can be taken; with what is near.
    """
    modules = {name: module for name, module in root.named_modules() if name}
    chosen: set[str] = set()
    for pattern in patterns:
        found = match_names(pattern, modules)
        if not found:
            raise ValueError(f"`{setting}` has {pattern!r}, which matches no module.{_near(pattern, modules)}")
        taken = {name for name in found if _why_not_linear(modules[name]) is None}
        if not taken:
            raise ValueError(
                f"`{setting}` has {pattern!r}, which matches {found[0]!r}: {_why_not_linear(modules[found[0]])}. Name "
                f"linear layers (`nn.Linear`, transformers' `Conv1D`), such as {_examples(modules)}."
            )
        chosen |= taken
    return {name: module for name, module in modules.items() if name in chosen}


def _near(pattern: str, names: Mapping[str, Any]) -> str:
    candidates = sorted(set(names) | {name.rpartition(".")[2] for name in names})
    near = difflib.get_close_matches(pattern, candidates, 3, cutoff=0.4)
    return f" The nearest names are {', '.join(map(repr, near))}." if near else f" There are {sorted(names)[:10]}."


def _examples(modules: Mapping[str, nn.Module]) -> str:
    found = [name for name, module in modules.items() if _why_not_linear(module) is None]
    return ", ".join(map(repr, found[:3])) or "there are none here"


def is_conv1d(module: nn.Module) -> bool:
    """Whether a layer is transformers' `Conv1D`, whose weight is stored with inputs first."""
    if getattr(module, "cut_like", None) == "Conv1D":  # one that computes on 8-bit integers
        return True
    # By name: to import transformers for this would cost every process a second.
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _why_not_linear(module: nn.Module) -> str | None:
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "`nn.MultiheadAttention` reads this weight without calling the layer"
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return None
    return f"a `{type(module).__name__}` has no matrix that its input is multiplied by"


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Numbers of input and output features of a linear layer, whole."""
    if is_conv1d(layer):
        return int(getattr(layer, "nx")), int(getattr(layer, "nf"))  # noqa: B009  # untyped
    assert isinstance(layer, nn.Linear)
    return layer.in_features, layer.out_features


def names_of_parameters(root: nn.Module) -> dict[int, list[str]]:
    """Id of each parameter -> its name in each module that uses it; a tied one has several.

    A module that the tree has at two places, such as `self.model` and `self.encoder = self.model.encoder`, is one user.
    """
    found: dict[int, list[str]] = {}
    for name, module in root.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(f"{name}.{own}" if name else own)
    return found


def own_weight(name: str, layer: nn.Module) -> nn.Parameter:
    """The weight of a layer that computes as plain linear layers do, with a weight that is its own parameter.

    Raises:
        ValueError: By name, for any other.
    """
    if type(layer).forward is not nn.Linear.forward and not is_conv1d(layer):
        raise ValueError(
            f"{name!r} is a `{type(layer).__name__}`, which computes in a way of its own. Leave it out of `targets`."
        )
    weight = layer._parameters.get("weight")
    if weight is None:
        raise ValueError(f"The weight of {name!r} is computed from others. Leave it out of `targets`.")
    return weight
