"""Cut a list of parameters into consecutive fragments of about equal bytes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fragments_of"]


def fragments_of(num_bytes: Sequence[int], num_fragments: int) -> list[int]:
    """Index of the fragment of each parameter: consecutive ones, of about equal bytes, none empty if that can be."""
    total, done, fragment = sum(num_bytes), 0, 0
    places: list[int] = []
    for index, size in enumerate(num_bytes):
        num_later = num_fragments - 1 - fragment
        is_beyond = done + size / 2 > total * (fragment + 1) / num_fragments
        if index and num_later and (is_beyond or len(num_bytes) - index <= num_later):
            fragment += 1
        places.append(fragment)
        done += size
    return places
