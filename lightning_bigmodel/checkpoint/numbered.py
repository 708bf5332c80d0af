"""Optimizer states of a Lightning file in a sharded directory: by the place of the parameter, not by its name.

``optimizer.state_dict()`` numbers parameters in the order of the groups, and only the module knows their names. The
directory has them under ``.0``, ``.1``, ... (no parameter's name begins with a dot); who loads it says which names its
optimizers have in that order, as when a plain file is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_bigmodel.checkpoint.state import OptimizerState

__all__ = ["is_numbered", "named_groups", "numbered_state", "with_names"]

_MARK = "."


def numbered_state(saved: Mapping[str, Any]) -> OptimizerState:
    """A state dict of torch, by the place of each parameter.

    Example:
        >>> numbered_state({"state": {7: {"step": 1}}, "param_groups": [{"params": [7], "lr": 0.1}]})
        {'state': {'.0': {'step': 1}}, 'param_groups': [{'params': ['.0'], 'lr': 0.1}]}
    """
    # Numbers count by their order: those of some writers follow the module instead.
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    places = {key: f"{_MARK}{place}" for place, key in enumerate(keys)}
    return {
        "state": {places[key]: dict(entries) for key, entries in saved["state"].items()},
        "param_groups": [
            {**group, "params": [places[key] for key in group["params"]]} for group in saved["param_groups"]
        ],
    }


def is_numbered(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups of a sharded directory have places in place of names."""
    return any(name.startswith(_MARK) for group in groups for name in group["params"])


def named_groups(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], number: int
) -> list[dict[str, Any]]:
    """Groups with names in place of places.

    Args:
        groups: The saved ones.
        names: The names in each group of the optimizer.
        number: Which optimizer, for the message.

    Raises:
        ValueError: If the groups have other sizes.
    """
    saved, here = [len(group["params"]) for group in groups], [len(group) for group in names]
    if saved != here:
        raise ValueError(
            f"Optimizer {number} has groups of {here} parameters, and the checkpoint, which has no names of theirs, of"
            f" {saved}. Build the optimizer with the groups it had when it was saved."
        )
    return [{**group, "params": list(found)} for group, found in zip(groups, names, strict=True)]


def with_names(by_place: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What is kept by place, by name."""
    order = [name for group in names for name in group]
    return {order[int(place[len(_MARK) :])]: value for place, value in by_place.items()}
