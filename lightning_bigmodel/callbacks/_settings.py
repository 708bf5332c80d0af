"""Checks of what users give to the callbacks."""

from __future__ import annotations

from numbers import Real
from typing import Any

__all__ = ["check_flag", "is_count", "is_number"]


def is_number(value: Any) -> bool:
    """Whether a setting is a real number, numpy's included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: Any, least: int) -> bool:
    """Whether a setting is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ValueError: With the name of the setting.
    """
    if not isinstance(value, bool):
        raise ValueError(f"`{name}={value!r}` must be True or False.")
