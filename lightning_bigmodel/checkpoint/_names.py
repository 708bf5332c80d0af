"""Error text about names that do not fit together."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_MOST_SHOWN = 8


def list_names(names: Iterable[str]) -> str:
    """Names in backticks, the first few of a long list, sorted so that every rank says the same."""
    ordered = sorted(names)
    shown = ", ".join(f"`{name}`" for name in ordered[:_MOST_SHOWN])
    return f"{shown} and {len(ordered) - _MOST_SHOWN} more" if len(ordered) > _MOST_SHOWN else shown


def list_with_nearest(names: Iterable[str], available: Collection[str]) -> str:
    """Names in backticks, each with the name in ``available`` that looks most like it."""
    ordered = sorted(names)
    parts = []
    for name in ordered[:_MOST_SHOWN]:
        nearest = difflib.get_close_matches(name, available, n=1)
        parts.append(f"`{name}` (nearest: `{nearest[0]}`)" if nearest else f"`{name}`")
    rest = f" and {len(ordered) - _MOST_SHOWN} more" if len(ordered) > _MOST_SHOWN else ""
    return ", ".join(parts) + rest


def why_left_out(where: object, names: Iterable[str]) -> str:
    """The text for parameters that are trained now, and were frozen and left out when a checkpoint was saved."""
    return (
        f'{where} lacks {list_names(names)}: it was saved with `checkpoint_parameters="trainable"` while they were'
        " frozen, and here they are trained. Freeze them as they were, or save a checkpoint with"
        ' `checkpoint_parameters="all"` before they are unfrozen.'
    )
