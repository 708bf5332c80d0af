"""State of optimizers that step rows of parameters, under keys that tell how it lies in the whole.

A key without a mark is of a tensor of the parameter's shape, or equal on all ranks. `~leading` marks one whose first
dimension alone is the parameter's; `~shard1of4` what cannot be cut anew, such as 8-bit blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightning_bigmodel.checkpoint.regions import RegionLayout, TensorRegions

__all__ = ["Rows", "is_of_other_shard", "marked_state", "state_target", "unmarked_state"]

_LEADING = "~leading"
_SHARD = "~shard"


class Rows(Protocol):
    """Which rows of a parameter this rank has."""

    name: str
    rank: int
    num_ranks: int

    @property
    def shape(self) -> Any:
        """Shape of the whole parameter."""

    @property
    def start(self) -> int:
        """First row held here."""

    @property
    def length(self) -> int:
        """Rows held here."""


def marked_state(
    entries: Mapping[str, Any],
    kinds: Mapping[str, str],
    layout: RegionLayout,
    rows: Rows | None,
    factored: Mapping[str, RegionLayout] | None = None,
) -> dict[str, Any]:
    """What to save of a parameter's state.

    Args:
        entries: State key -> value, as the optimizer has it.
        kinds: State key -> "rows", "whole", "leading" or "local".
        layout: How what this rank holds of the parameter lies in the whole.
        rows: Which rows it holds; None where rows are not what it holds.
        factored: State key -> how an entry of another shape than the parameter's lies in the whole entry.
    """
    found: dict[str, Any] = {}
    for key, value in entries.items():
        kind = kinds.get(key, "whole")
        if factored is not None and key in factored:
            found[key + (_LEADING if kind == "leading" else "")] = TensorRegions(value, factored[key])
        elif kind == "rows":
            found[key] = TensorRegions(value, layout)
        elif kind == "leading" and rows is not None:
            shape = (rows.shape[0], *value.shape[1:])
            found[key + _LEADING] = TensorRegions(value, RegionLayout.of_rows(shape, rows.start, rows.length))
        elif kind == "local" and rows is not None and rows.num_ranks > 1:
            found[f"{key}{_SHARD}{rows.rank}of{rows.num_ranks}"] = value
        else:
            found[key] = value
    return found


def state_target(
    key: str | None, shape: tuple[int, ...], layout: RegionLayout | None, rows: Rows | None
) -> RegionLayout | None:
    """What this rank reads of a saved tensor: its part, or all of it (None).

    Args:
        key: Saved state key; None for the parameter itself.
        shape: Saved shape.
        layout: How what this rank holds of the parameter lies in the whole; None if it has all.
        rows: Which rows it holds; None where rows are not what it holds.
    """
    if key is not None and _SHARD in key:
        return None
    if key is not None and key.endswith(_LEADING):
        return None if rows is None else RegionLayout.of_rows(shape, rows.start, rows.length)
    return layout if layout is not None and layout.shape == shape else None


def is_of_other_shard(key: str, rows: Rows | None) -> bool:
    """Whether a saved key is what another rank of the same number of ranks had to itself."""
    if _SHARD not in key or rows is None:
        return False
    rank, _, num_ranks = key.rpartition(_SHARD)[2].partition("of")
    return int(num_ranks) == rows.num_ranks and int(rank) != rows.rank


def unmarked_state(entries: Mapping[str, Any], rows: Rows | None, name: str) -> dict[str, Any]:
    """State keys as the optimizer has them.

    Raises:
        ValueError: For state that only another number of ranks can load.
    """
    found: dict[str, Any] = {}
    for key, value in entries.items():
        plain, mark, place = key.removesuffix(_LEADING).rpartition(_SHARD)
        if not mark:
            found[key.removesuffix(_LEADING)] = value
            continue
        num_ranks = place.partition("of")[2]
        if rows is None or int(num_ranks) != rows.num_ranks:
            raise ValueError(
                f"The optimizer state {plain!r} of `{name}` was saved by {num_ranks} ranks that shard it and is made "
                f"of blocks that cannot be cut anew, but here {rows.num_ranks if rows is not None else 1} ranks hold "
                f"it. Resume with {num_ranks} sharding ranks, or load the weights alone."
            )
        if not is_of_other_shard(key, rows):
            found[plain] = value
    return found
