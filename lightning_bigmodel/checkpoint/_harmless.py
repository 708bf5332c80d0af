"""Loading without running code from the file, though hyper-parameters and callbacks have values of their own classes.

torch refuses any class that it does not know. Those here hold values and nothing else: making one, and giving it its
content, calls no code that the file chooses. They are named by text and imported when a file asks for one.
"""

from __future__ import annotations

import collections
import functools
import importlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["harmless_classes", "needed_classes", "refused_classes"]

_MODULES_OF_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_HARMLESS = frozenset(
    {
        "argparse.Namespace",
        *(f"builtins.{name}" for name in ("bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list")),
        *(f"builtins.{name}" for name in ("range", "set", "slice", "str", "tuple")),
        *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
        "decimal.Decimal",
        "fractions.Fraction",
        "types.SimpleNamespace",
        "uuid.UUID",
        *(
            f"{module}.{name}"
            for module in ("jsonargparse.namespace", "jsonargparse._namespace")
            for name in ("Namespace",)
        ),
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
        ),
        "numpy.dtype",
        "numpy.ndarray",
        *(f"{module}.{name}" for module in _MODULES_OF_NUMPY for name in ("_reconstruct", "scalar")),
        "omegaconf.dictconfig.DictConfig",
        "omegaconf.listconfig.ListConfig",
        *(f"omegaconf.base.{name}" for name in ("ContainerMetadata", "Metadata")),
        *(
            f"omegaconf.nodes.{name}Node"
            for name in ("Any", "Boolean", "Bytes", "Enum", "Float", "Integer", "Path", "String")
        ),
        "typing.Any",
    }
)
# Dictionaries of a kind: torch fills plain ones only, so they are plain while the file is read.
_DICTIONARIES = frozenset(
    {
        "collections.defaultdict",
        "lightning.fabric.utilities.data.AttributeDict",
        "lightning_fabric.utilities.data.AttributeDict",
    }
)
# torch keeps its list of allowed classes for the whole process.
_LOCK = threading.RLock()


def needed_classes(source: Path | io.BytesIO) -> list[str]:
    """Full names of what a file asks for beyond what torch allows. Runs nothing of it.

    Returns:
        Sorted names; none for what is no file of ``torch.save``.
    """
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    except (ValueError, RuntimeError, OSError, EOFError, pickle.UnpicklingError):
        return []  # reading it says what is wrong
    finally:
        if isinstance(source, io.BytesIO):
            source.seek(0)


def refused_classes(needed: list[str]) -> list[str]:
    """Those of `needed_classes` that may run code."""
    return [name for name in needed if name not in _HARMLESS and name not in _DICTIONARIES]


@contextmanager
def harmless_classes(needed: list[str]) -> Iterator[Callable[[Any], Any]]:
    """Let ``torch.load(weights_only=True)`` take the harmless ones of ``needed``, and no others.

    Yields:
        What gives dictionaries of a kind their kind back; call it on what was loaded.
    """
    made: dict[int, tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any]]] = {}
    allowed: list[Any] = []
    for name in needed:
        if name in _DICTIONARIES:
            allowed.append((_plain_dictionary(_find(name), made), name))
        elif name in _HARMLESS:
            allowed.append((_find(name), name))
            if name == "numpy.dtype":  # an instance is of one of these
                allowed += _numbers_of_numpy()
    with _LOCK:
        present = torch.serialization.get_safe_globals()
        # On leaving, torch takes away what it was given, also what the user had allowed before.
        with torch.serialization.safe_globals([entry for entry in allowed if entry not in present]):
            yield lambda value: _with_kinds(value, made, {}) if made else value


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _numbers_of_numpy() -> list[Any]:
    import numpy as np

    kinds = {type(np.dtype(code)) for code in (*np.typecodes["All"], "U1", "S1") if code not in "OV"}
    return [(kind, f"{kind.__module__}.{kind.__qualname__}") for kind in kinds]


def _plain_dictionary(kind: Any, made: dict[int, Any]) -> Any:
    """A class whose instances are plain dictionaries, noted with what makes the real ones of them."""

    class Plain:
        def __new__(cls, *arguments: Any) -> Any:
            found: dict[Any, Any] = {}
            make = (
                functools.partial(collections.defaultdict, *arguments[:1]) if kind is collections.defaultdict else kind
            )
            made[id(found)] = (found, make)
            return found

    return Plain


def _with_kinds(value: Any, made: dict[int, Any], seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, dict):
        items = {key: _with_kinds(entry, made, seen) for key, entry in value.items()}
        if id(value) in made:
            result: Any = made[id(value)][1](items)
            seen[id(value)] = result
            return result
        for key, entry in items.items():  # not `update`, by which a `Counter` adds
            value[key] = entry
    elif isinstance(value, list):
        value[:] = [_with_kinds(entry, made, seen) for entry in value]
    elif type(value) is tuple:
        return tuple(_with_kinds(entry, made, seen) for entry in value)
    elif type(value).__module__ in ("argparse", "types") and hasattr(value, "__dict__"):
        vars(value).update({key: _with_kinds(entry, made, seen) for key, entry in vars(value).items()})
    return value
