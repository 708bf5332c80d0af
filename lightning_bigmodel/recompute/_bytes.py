"""Numbers of bytes as users write them."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["check_bytes", "shown_bytes"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def check_bytes(name: str, value: Any, least: int = 1) -> int:
    """A number of bytes, given as such or as a string with a unit.

    Raises:
        ValueError: With the name of the setting.

    Example:
        >>> check_bytes("budget", "1.5GiB")
        1610612736
    """
    number: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*([\d.]+)\s*([kKmMgGtT]?[iI]?[bB])\s*", value)):
        unit = _UNITS.get(match[2].upper())
        number = float(match[1]) * unit if unit and match[1].count(".") <= 1 and match[1] != "." else None
    if number is None or number < least:
        raise ValueError(f"`{name}={value!r}` must be a number of bytes of at least {least}, or such as '24GiB'.")
    return int(number)


def shown_bytes(num_bytes: float) -> str:
    """For people.

    Example:
        >>> shown_bytes(3 * 2**20)
        '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("the last unit takes all")
