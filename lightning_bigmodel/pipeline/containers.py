"""What was in lists, dicts and sets that code changes in place, at any depth, and how to put it back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["CONTAINERS", "Contents", "refill"]

CONTAINERS = (list, dict, set)


class Contents:
    """The contents of all containers in some values, at any depth; one that holds itself is no trouble.

    Not looked into: tuples, objects, and sets, whose elements do not change. Memory: a shallow copy of each container.

    Args:
        values: Where to look; what is no container is passed over.

    Attributes:
        saved: Id -> (container, what was in it).

    Example:
        >>> inner = {1}
        >>> values = [[inner]]
        >>> before = Contents(values)
        >>> inner.add(2), values[0].append(3)
        (None, None)
        >>> before.restore()
        >>> values
        [[{1}]]
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.saved: dict[int, tuple[Any, Any]] = {}
        todo = [value for value in values if isinstance(value, CONTAINERS)]
        while todo:  # no recursion: data may be nested more deeply than Python calls may be
            each = todo.pop()
            if id(each) in self.saved:
                continue
            if isinstance(each, dict):
                content: Any = dict(each)
                todo += [item for item in content.values() if isinstance(item, CONTAINERS)]
            elif isinstance(each, list):
                content = list(each)
                todo += [item for item in content if isinstance(item, CONTAINERS)]
            else:
                content = set(each)
            self.saved[id(each)] = each, content

    def of(self, container: Any) -> Any:
        """What was in one of the containers."""
        return self.saved[id(container)][1]

    def restore(self) -> None:
        """Put it back."""
        for container, content in self.saved.values():
            refill(container, content)


def refill(container: Any, content: Any) -> None:
    """Let a list, dict or set hold what another one holds, as the same object."""
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)
