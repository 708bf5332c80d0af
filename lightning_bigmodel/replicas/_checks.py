"""Checks of what users give to a way of agreeing."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch

__all__ = ["check_count", "check_flag", "check_names", "float_type", "is_number", "refuse_unmatched"]


def is_number(value: Any) -> bool:
    """Whether a setting is a finite real number, numpy's included; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def check_count(name: str, value: Any, least: int, remedy: str = "") -> None:
    """Refuse what is no whole number of at least `least`.

    Raises:
        ValueError: With the name of the setting.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}={value!r}` must be a whole number of at least {least}.{remedy}")


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ValueError: With the name of the setting.
    """
    if not isinstance(value, bool):
        raise ValueError(f"`{name}={value!r}` must be True or False.")


def check_names(name: str, value: Any) -> tuple[str, ...]:
    """Patterns of parameter names, from one or a list of them.

    Raises:
        ValueError: With the name of the setting.
    """
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"`{name}={value!r}` must be patterns of parameter names, such as ['embedding.*'].")
    return tuple(patterns)


def refuse_unmatched(name: str, patterns: Sequence[str], known: Collection[str]) -> None:
    """Refuse patterns that none of the known names fits; nothing is refused where no name is known.

    Raises:
        ValueError: With the patterns, and some of the names.
    """
    unmatched = [p for p in patterns if known and not any(fnmatchcase(each, p) for each in known)]
    if unmatched:
        listed = ", ".join(repr(each) for each in sorted(known)[:5])
        raise ValueError(
            f"`{name}={list(patterns)!r}`: no parameter fits {', '.join(map(repr, unmatched))}. Names are those of the "
            f"module's parameters ({listed}{', ...' if len(known) > 5 else ''}); leave out what is not there."
        )


def float_type(name: str, value: Any, known: Sequence[str]) -> torch.dtype | None:
    """The type of torch that a setting names, by a string or itself; None for None.

    Raises:
        ValueError: With those that are known.
    """
    if value is None:
        return None
    for choice in known:
        dtype: torch.dtype = getattr(torch, choice)
        if value == choice or value is dtype:
            return dtype
    raise ValueError(f"`{name}={value!r}` is not known. Use None, {', '.join(repr(choice) for choice in known)}.")
