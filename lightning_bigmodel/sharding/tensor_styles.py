"""The words of a tensor-parallel plan: styles, the patterns that name modules, and the layers that can be cut."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = ["STYLES", "Layer", "Style", "Target", "layer_of", "match_plan", "parse_style"]

STYLES: dict[str, str] = {
    "colwise": "output features cut, output stays cut; a `rowwise` layer must read it",
    "colwise_gather": "output features cut, output gathered",
    "colwise_local": "an embedding whose features stay cut, such as a bias for each attention head",
    "rowwise": "input features cut and read as cut, output summed; of an embedding: its rows cut",
    "rowwise_split": "like `rowwise`, for an input that every rank has whole",
    "replicate": "whole on every rank, used on whole activations",
    "replicate_partial": "whole on every rank, used between `colwise` and `rowwise`: its gradient is summed over ranks",
    "sequence": "norm or dropout on activations cut along the sequence",
    "sequence_split": "cuts the module's output along the sequence",
    "sequence_gather": "gathers the module's input along the sequence",
}
_WITH_PARTS = ("colwise",)
_WITH_DIM = ("sequence", "sequence_split", "sequence_gather")


@dataclass(frozen=True)
class Style:
    """A style and what stands after its colon.

    Args:
        name: One of `STYLES`.
        numbers: `colwise:3` has (3,), `colwise:64,16,16` has (64, 16, 16); `sequence:0` has (0,).
    """

    name: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """A module, or a parameter that lies directly in one, and the style that the plan gives it."""

    name: str
    owner: nn.Module
    parameter: str | None
    style: Style
    pattern: str


@dataclass(frozen=True)
class Layer:
    """How a layer that can be cut stores its weight.

    Args:
        kind: "linear" or "embedding".
        out_dim: Dimension of the weight that holds output features.
        in_dim: Dimension that holds input features; an embedding's rows.
        out_attribute: Attribute of the module with the number of output features.
        in_attribute: Attribute with the number of input features.
        needs_bias: Whether the layer cannot be computed without a bias.
    """

    kind: str
    out_dim: int
    in_dim: int
    out_attribute: str
    in_attribute: str
    needs_bias: bool = False


_LINEAR = Layer("linear", 0, 1, "out_features", "in_features")
_CONV1D = Layer("linear", 1, 0, "nf", "nx", needs_bias=True)
_EMBEDDING = Layer("embedding", 1, 0, "embedding_dim", "num_embeddings")


def layer_of(module: nn.Module) -> Layer | None:
    """How to cut a module, or None if it is none of `nn.Linear`, transformers' `Conv1D`, `nn.Embedding`.

    A subclass with a forward of its own may use its weight in any way, and is none of them.
    """
    # What layers in low bits say of themselves.
    cut_like = getattr(module, "cut_like", None)
    if type(module).forward is nn.Linear.forward or cut_like == "Linear":
        return _LINEAR
    if type(module).forward is nn.Embedding.forward:
        return _EMBEDDING
    # By name: to import transformers for this would cost every process a second.
    kind = type(module)
    if cut_like == "Conv1D" or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"):
        return _CONV1D
    return None


def parse_style(pattern: str, text: str) -> Style:
    """Read a style of a plan.

    Raises:
        ValueError: If it is unknown, or its numbers are no use.

    Example:
        >>> parse_style("qkv", "colwise:3")
        Style(name='colwise', numbers=(3,))
    """
    name, colon, rest = text.partition(":") if isinstance(text, str) else (str(text), "", "")
    if name not in STYLES:
        near = difflib.get_close_matches(name, STYLES, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"`tensor_plan` gives {pattern!r} the style {text!r}, which does not exist.{hint} The styles are "
            f"{', '.join(STYLES)}."
        )
    if not colon:
        return Style(name)
    numbers = tuple(int(number) for number in rest.split(",") if number.strip().isdigit())
    is_parts = name in _WITH_PARTS and bool(numbers) and all(numbers)
    is_dim = name in _WITH_DIM and len(numbers) == 1
    if len(numbers) != len(rest.split(",")) or not (is_parts or is_dim):
        raise ValueError(
            f"`tensor_plan` gives {pattern!r} the style {text!r}. After the colon stand the number of equal parts side "
            "by side (`colwise:3` for q|k|v) or their widths (`colwise:64,16,16`), or the sequence dimension "
            "(`sequence:0`); other styles have none."
        )
    return Style(name, numbers)


def match_plan(module: nn.Module, plan: Mapping[str, str]) -> list[Target]:
    """What a plan says of each module, in the order of modules; of two patterns that match one, the later counts.

    `*` stands for any text within one component of a name. A pattern that fits no whole name may fit the last
    components of names: `q_proj` is every `q_proj`. Parameters that lie directly in a module can be named too.

    Raises:
        ValueError: If a pattern matches nothing or a style does not exist.
    """
    modules = dict(module.named_modules())
    owners: dict[str, tuple[nn.Module, str | None]] = {name: (found, None) for name, found in modules.items() if name}
    parameters = {
        f"{name}.{own}" if name else own: (found, own)
        for name, found in modules.items()
        for own, parameter in found._parameters.items()
        if parameter is not None
    }
    targets: dict[str, Target] = {}
    for pattern, text in plan.items():
        style = parse_style(pattern, text)
        names = _matches(pattern, owners) or _matches(pattern, parameters)
        if not names:
            raise ValueError(
                f"`tensor_plan` names {pattern!r}, which matches no module.{_nearest(pattern, owners)} Write a "
                "module's name, with `*` for a component that varies, such as 'layers.*.mlp.up_proj'."
            )
        for name in names:
            owner, own = owners[name] if name in owners else parameters[name]
            targets[name] = Target(name, owner, own, style, pattern)
    order = {name: position for position, name in enumerate([*owners, *parameters])}
    return sorted(targets.values(), key=lambda target: order[target.name])


def _matches(pattern: str, names: Mapping[str, Any]) -> list[str]:
    wanted = pattern.split(".")
    split = {name: name.split(".") for name in names}
    whole = [name for name, parts in split.items() if len(parts) == len(wanted) and _fits(parts, wanted)]
    return whole or [name for name, parts in split.items() if _fits(parts[-len(wanted) :], wanted)]


def _fits(parts: list[str], wanted: list[str]) -> bool:
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nearest(pattern: str, names: Iterable[str]) -> str:
    candidates = sorted(set(names) | {name.rpartition(".")[2] for name in names})
    near = difflib.get_close_matches(pattern, candidates, 3, cutoff=0.4)
    return f" The nearest names are {', '.join(map(repr, near))}." if near else ""
