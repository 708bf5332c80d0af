"""Checks of what users give to the ways for replicas to agree."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

__all__ = ["check_count", "is_number"]


def is_number(value: Any) -> bool:
    """Whether a setting is a finite real number; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def check_count(name: str, value: Any, least: int, remedy: str = "") -> None:
    """Refuse what is no whole number of at least `least`.

    Raises:
        ValueError: With the name of the setting.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}={value!r}` must be a whole number of at least {least}.{remedy}")
