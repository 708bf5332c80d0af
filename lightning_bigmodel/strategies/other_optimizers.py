"""Optimizer states of another class than the one that is to go on with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_bigmodel import _host
from lightning_bigmodel.sharding.optimizers import state_keys

__all__ = ["raise_lost_options", "raise_other_states"]

_ADVICE = (
    " Go on with the optimizer that was saved, or begin a new run from the weights alone"
    " (`YourModule.load_from_checkpoint`, and no `ckpt_path`)."
)


def raise_other_states(optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Before states are loaded: raise if they are not such as these optimizers have. Collective.

    Args:
        optimizers: Those of this rank.
        saved: The state that was saved of each, by parameter and entry, and its groups.

    Raises:
        ValueError: On all ranks, if it is so on one.
    """
    found = [_why(number, *each) for number, each in enumerate(zip(optimizers, saved, strict=False))]
    for reason in (reason for of_rank in _host.all_objects(found) for reason in of_rank):
        if reason is not None:
            raise ValueError(reason)


def _why(number: int, optimizer: Optimizer, saved: Mapping[str, Any]) -> str | None:
    options = {key for group in saved["param_groups"] for key in group} - {"params"}
    states = [entries for entries in saved["state"].values() if entries]
    # Options are those of a class; where they are alike, so are the states. A tried step costs little, but not nothing.
    if not states or not set(optimizer.defaults) ^ options - {"initial_lr"}:
        return None
    needed = state_keys(optimizer)
    there = {str(key).partition("~")[0] for entries in states for key in entries}
    inner = [value for entries in states for value in entries.values() if isinstance(value, Mapping)]
    there |= {str(key) for value in inner for key in value}
    if needed is None or needed <= there:
        return None
    return (
        f"Optimizer {number} is {type(optimizer).__name__}, whose states have {sorted(needed)}; the checkpoint has"
        f" those of another class, with {sorted(there)}." + _ADVICE
    )


def raise_lost_options(optimizers: Sequence[Optimizer], before: Sequence[Sequence[Collection[str]]]) -> None:
    """After states were loaded: raise if the saved groups, which are the same on all ranks, lack options.

    Args:
        optimizers: Those of this rank.
        before: For each, the names of the options of each group before the load.

    Raises:
        ValueError: A group has lost an option of its optimizer.
    """
    for number, (optimizer, options) in enumerate(zip(optimizers, before, strict=True)):
        for had, group in zip(options, optimizer.param_groups, strict=False):
            if lost := sorted((set(had) & set(optimizer.defaults)) - set(group)):
                raise ValueError(
                    f"Optimizer {number} is {type(optimizer).__name__}; the checkpoint is of another class, whose"
                    f" groups have no {lost}." + _ADVICE
                )
