"""From the name of an operator to every public function that computes it.

`softmax` alone is `torch.softmax`, `torch.nn.functional.softmax`, `torch.Tensor.softmax` and `torch.special.softmax`.
The functions are those that `torch.overrides` lists, under the names that they have in torch's namespaces.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.overrides import get_overridable_functions

from lightning_bigmodel.mesh.value_free import VALUE_FREE

__all__ = ["UserFunction", "resolve"]

_NAMESPACES = {
    "torch": torch,
    "torch.functional": torch.functional,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.Tensor": torch.Tensor,
}
_SYNONYMS = {"F.": "torch.nn.functional.", "nn.functional.": "torch.nn.functional.", "Tensor.": "torch.Tensor."}

# Attribute of what replaces a user's function: what the owner held before.
STANDS_FOR = "_bigmodel_stands_for"

# Symbol of an operator -> its names; the first is that of the operator's functions.
_OPERATORS = {
    "@": ("matmul", "__matmul__", "__rmatmul__"),
    "+": ("add", "__add__", "__radd__"),
    "-": ("sub", "subtract", "__sub__", "__rsub__"),
    "*": ("mul", "multiply", "__mul__", "__rmul__"),
    "/": ("div", "divide", "true_divide", "__truediv__", "__rtruediv__", "__div__", "__rdiv__"),
    "**": ("pow", "__pow__", "__rpow__"),
}
# They choose a dtype themselves, and are no arithmetic.
_CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool"}
)


@dataclass(frozen=True)
class UserFunction:
    """A function outside of torch, and where it is defined.

    Args:
        name: As the user wrote it.
        owner: The module or class that holds it.
        attribute: Its name there.
        raw: What the owner holds, with `staticmethod` or `classmethod` around the function if there is one.
    """

    name: str
    owner: Any
    attribute: str
    raw: Any

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        function: Callable[..., Any] = (
            self.raw.__func__ if isinstance(self.raw, (staticmethod, classmethod)) else self.raw
        )
        return function


def resolve(name: str, setting: str) -> frozenset[Any] | UserFunction:
    """Finds what a name stands for.

    Args:
        name: A short name of torch ("softmax"), which stands for every form; a symbol ("@"); a full name, which stands
            for one form ("torch.nn.functional.softmax", "Tensor.softmax"); or a function of any module
            ("my_package.module.function", "my_package.module.Class.method"), which is imported.
        setting: The setting that the name was given in, for messages.

    Returns:
        The functions as `__torch_function__` gets them, or the function outside of torch.

    Raises:
        TypeError: If the name is no string.
        ValueError: If there is no such function, or it cannot be given a precision.
        ImportError: If the named module exists but fails to import.
    """
    if not isinstance(name, str):
        raise TypeError(f"`{setting}` holds {name!r}; give names of operators, such as 'softmax'.")
    forms = _forms()
    full_name = _full_name(name)
    if full_name in forms:
        return forms[full_name]
    last = full_name.rsplit(".", 1)[-1]
    if _in_place(last) and last.removesuffix("_") in forms:
        raise ValueError(
            f"`{setting}` holds {name!r}, which works in place: its result has the dtype of the tensor it is written"
            f" to. Name '{last.removesuffix('_')}' and use that in the model."
        )
    if "." in name and not full_name.startswith("torch."):
        return _user_function(name, setting)
    raise ValueError(_unknown(name, setting))


def _full_name(name: str) -> str:
    if name in _OPERATORS:
        return _OPERATORS[name][0]
    for short, full in _SYNONYMS.items():
        if name.startswith(short):
            return full + name.removeprefix(short)
    return name


@cache
def _forms() -> dict[str, frozenset[Any]]:
    """Short and full name -> functions."""
    overridable = {function for functions in get_overridable_functions().values() for function in functions}
    forms: dict[str, set[Any]] = {}
    for space, holder in _NAMESPACES.items():
        for name in dir(holder):
            if not _is_arithmetic(name):
                continue
            function = getattr(holder, name, None)
            if callable(function) and function in overridable and function not in VALUE_FREE:
                forms.setdefault(name, set()).add(function)
                forms.setdefault(f"{space}.{name}", set()).add(function)
    for first, *others in _OPERATORS.values():
        # Any of the names stands for all: which of them an expression calls is not for its author to know.
        together = set().union(*(forms.get(name, set()) for name in (first, *others)))
        forms.update(dict.fromkeys((first, *others), together))
    return {name: frozenset(functions) for name, functions in forms.items()}


def _is_arithmetic(name: str) -> bool:
    if name.startswith("_"):
        return any(name in names for names in _OPERATORS.values())
    return not _in_place(name) and name not in _CONVERSIONS


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def _user_function(name: str, setting: str) -> UserFunction:
    parts = name.split(".")
    for num_parts in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:num_parts])
        try:
            owner: Any = importlib.import_module(path)
        except ModuleNotFoundError as error:
            # Only of the path itself: a module that misses another must say so.
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise
            continue
        return _member(name, owner, parts[num_parts:], setting)
    raise ValueError(f"{_unknown(name, setting)} There is no module '{parts[0]}' to import.")


def _member(name: str, owner: Any, path: list[str], setting: str) -> UserFunction:
    for attribute in path[:-1]:
        if not hasattr(owner, attribute):
            raise ValueError(_no_member(name, owner, attribute, setting))
        owner = getattr(owner, attribute)
    attribute = path[-1]
    if not hasattr(owner, attribute):
        raise ValueError(_no_member(name, owner, attribute, setting))
    raw = inspect.getattr_static(owner, attribute)
    # While other lists are installed, the owner holds what stands in for the function.
    raw = getattr(UserFunction(name, owner, attribute, raw).function, STANDS_FOR, raw)
    if isinstance(raw, type):
        raise ValueError(
            f"`{setting}` holds {name!r}, which is a class. Modules are named in `full_precision_modules`, by class or"
            " by their place in the model."
        )
    if not callable(getattr(owner, attribute)):
        raise ValueError(f"`{setting}` holds {name!r}, which is a {type(raw).__name__} and no function.")
    return UserFunction(name, owner, attribute, raw)


def _no_member(name: str, owner: Any, attribute: str, setting: str) -> str:
    close = difflib.get_close_matches(attribute, dir(owner), n=3)
    hint = f" Close to it: {close}." if close else ""
    return f"`{setting}` holds {name!r}, but '{owner.__name__}' has no '{attribute}'.{hint}"


def _unknown(name: str, setting: str) -> str:
    forms = _forms()
    # "LayerNorm" is close to "layer_norm" only without its capitals and underscores.
    plain = {known.lower().replace("_", ""): known for known in forms if not known.startswith("__")}
    same = plain.get(name.lower().replace("_", ""))
    close = ([same] if same else []) + [
        each for each in difflib.get_close_matches(name, forms, n=4, cutoff=0.6) if each != same
    ]
    hint = f" Close to it: {close[:4]}." if close else ""
    return (
        f"`{setting}` holds {name!r}, which is no operator of torch that a precision can be chosen for.{hint} A"
        " function of your own is named with its module, such as 'my_package.module.function'; modules belong in"
        " `full_precision_modules`."
    )
