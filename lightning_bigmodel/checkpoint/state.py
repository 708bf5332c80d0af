"""A module's and an optimizer's state by parameter name, restricted to what a rank owns.

In a pipeline every rank keeps every ``Parameter`` object, so names, shapes and optimizer groups are the same
everywhere, but only owned parameters hold memory, gradients and optimizer state. The functions here read and
write exactly the owned part. They do not communicate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from lightning_bigmodel.checkpoint._names import list_names, list_with_nearest
from lightning_bigmodel.checkpoint._versions import module_versions, set_module_versions

__all__ = [
    "OptimizerState",
    "load_model_state",
    "load_optimizer_state",
    "model_state_by_name",
    "optimizer_state_by_name",
]

# torch copies the names given to an optimizer into its groups; they repeat what `params` says here.
_PARAMETER_NAMES_OPTION = "param_names"


class OptimizerState(TypedDict):
    """What ``optimizer.state_dict()`` says, with parameter names in place of positions."""

    state: dict[str, dict[str, Any]]
    """Per parameter name its state (moments, steps); only owned parameters that have any."""
    param_groups: list[dict[str, Any]]
    """All groups: ``params`` is the list of parameter names, every other key an option (``lr``, ``betas``, ...)."""


def model_state_by_name(module: nn.Module, owned_names: Collection[str] | None = None) -> dict[str, Any]:
    """The entries of ``module.state_dict()`` that this rank owns.

    Tensors are not copied: save or clone them before the next optimizer step.

    Args:
        module: The whole module, its names as the user wrote them.
        owned_names: Names of the parameters, persistent buffers and extra states whose values are held here. One name
            of a tied parameter stands for all its names. Default: ``None``, all.

    Returns:
        State-dict name to tensor (extra state: to whatever ``get_extra_state`` gave), in the order of the state dict.

    Raises:
        ValueError: If an owned name is not in the state dict, or an owned parameter holds no memory.

    Example:
        >>> sorted(model_state_by_name(torch.nn.Linear(2, 3), {"bias"}))
        ['bias']
    """
    # keep_vars: tied names are found by the identity of the Parameter, which detached views would hide.
    full_state = module.state_dict(keep_vars=True)
    names = _owned(full_state, owned_names)
    empty = [name for name in names if isinstance(full_state[name], nn.Parameter) and _is_placeholder(full_state[name])]
    if empty:
        raise ValueError(
            f"`owned_names` has {list_names(empty)}, which hold no memory on this rank (one element expanded to the"
            " full shape). Saving them would write NaN over trained weights: name only what this rank owns."
        )
    owned: OrderedDict[str, Any] = OrderedDict()
    for name, value in full_state.items():
        if name in names:
            owned[name] = value.detach() if isinstance(value, Tensor) else value
    set_module_versions(owned, module_versions(full_state))
    return owned


def load_model_state(module: nn.Module, tensors: Mapping[str, Any], owned_names: Collection[str] | None = None) -> None:
    """Copy ``tensors`` into the module's own tensors in place, converting their dtype; the rest stays untouched.

    Args:
        module: The whole module.
        tensors: State-dict name to tensor, or to extra state: exactly the owned names, of a tied parameter one at
            least.
        owned_names: As for :func:`model_state_by_name`. Default: ``None``, all.

    Raises:
        ValueError: If owned names are missing, names are not owned or not in the module, or shapes differ. Nothing has
            been copied then.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> load_model_state(layer, {"bias": torch.ones(1)}, {"bias"})
        >>> layer.bias.item()
        1.0
    """
    full_state = module.state_dict(keep_vars=True)
    names = _owned(full_state, owned_names)
    problems = []
    # A tied parameter is there if any of its names is.
    given = {id(full_state[name]) for name in tensors if isinstance(full_state.get(name), Tensor)}
    if missing := {name for name in names - set(tensors) if id(full_state[name]) not in given}:
        problems.append(f"missing {list_with_nearest(missing, list(tensors))}")
    if unexpected := set(tensors) - set(full_state):
        problems.append(f"not in the module {list_with_nearest(unexpected, list(full_state))}")
    if foreign := (set(tensors) & set(full_state)) - names:
        problems.append(f"not owned by this rank {list_names(foreign)}")
    for name in sorted(names & set(tensors)):
        ours, theirs = full_state[name], tensors[name]
        if isinstance(ours, Tensor) and (not isinstance(theirs, Tensor) or theirs.shape != ours.shape):
            found = f"shape {list(theirs.shape)}" if isinstance(theirs, Tensor) else type(theirs).__name__
            problems.append(f"`{name}` has {found} in the checkpoint and shape {list(ours.shape)} in the module")
    if problems:
        raise ValueError(f"The checkpoint does not fit {type(module).__name__}: " + "; ".join(problems) + ".")
    selected = OrderedDict((name, tensors[name]) for name in full_state if name in names & set(tensors))
    # Without versions torch takes a module's branch for legacy checkpoints, which may rewrite its tensors.
    set_module_versions(selected, module_versions(tensors) or module_versions(full_state))
    # load_state_dict, not a loop of copies: it honours the module's own loading hooks and `set_extra_state`.
    module.load_state_dict(selected, strict=False)


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer,
    parameter_names: Mapping[int, str],
    owned_names: Collection[str] | None = None,
) -> OptimizerState:
    """The optimizer's state by parameter name. Only reads: no step is taken, no state is created, nothing is copied.

    Args:
        optimizer: A ``torch.optim`` optimizer (unwrapped).
        parameter_names: ``id(parameter)`` to its name, for every parameter in the optimizer's groups.
        owned_names: Parameters whose state is wanted. Default: ``None``, all.

    Returns:
        State of the owned parameters that have any, and every group.

    Raises:
        ValueError: If a parameter has no name, or the optimizer keeps state that belongs to no parameter.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> names = {id(parameter): name for name, parameter in layer.named_parameters()}
        >>> optimizer_state_by_name(torch.optim.SGD(layer.parameters()), names)["state"]
        {}
    """
    names_by_group = _names_by_group(optimizer, parameter_names)
    saved = optimizer.state_dict()
    name_of_position: dict[int, str] = {}
    param_groups = []
    for group, names in zip(saved["param_groups"], names_by_group, strict=True):
        name_of_position.update(zip(group["params"], names, strict=True))
        options = {key: value for key, value in group.items() if key not in ("params", _PARAMETER_NAMES_OPTION)}
        param_groups.append({"params": names, **options})
    state = {}
    for position, entries in saved["state"].items():
        if position not in name_of_position:
            raise ValueError(
                f"{type(optimizer).__name__} keeps state under {position!r}, which is no parameter. Only state that"
                " belongs to a parameter can be spread over ranks: keep it in a group option instead."
            )
        name = name_of_position[position]
        if owned_names is None or name in owned_names:
            state[name] = dict(entries)
    return {"state": state, "param_groups": param_groups}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    saved: OptimizerState,
    parameter_names: Mapping[int, str],
    owned_names: Collection[str] | None = None,
) -> None:
    """Put state and group options back by parameter name, through the optimizer's own ``load_state_dict``.

    So devices and dtypes follow torch's rules: moments go to the parameter's device and, if floating, to its dtype;
    ``step`` keeps what was saved unless the group is ``capturable`` or ``fused``. Tensors that need no
    conversion are kept, not copied. Owned parameters without saved state, and all others, get none.

    Args:
        optimizer: A ``torch.optim`` optimizer (unwrapped) over the same parameters; the order of its groups and of
            parameters within a group may differ from the saved one.
        saved: What :func:`optimizer_state_by_name` gave, state of parameters not owned being left out.
        parameter_names: ``id(parameter)`` to its name, for every parameter in the optimizer's groups.
        owned_names: Parameters whose state is loaded. Default: ``None``, all.

    Raises:
        ValueError: If the groups do not hold the same parameters as the saved ones, or a parameter has no name.
    """
    names_by_group = _names_by_group(optimizer, parameter_names)
    saved_groups = _match_groups(type(optimizer).__name__, names_by_group, saved["param_groups"])
    state: dict[int, dict[str, Any]] = {}
    param_groups = []
    position = 0
    for group, names, saved_group in zip(optimizer.param_groups, names_by_group, saved_groups, strict=True):
        positions = list(range(position, position + len(names)))
        position += len(names)
        for name, at in zip(names, positions, strict=True):
            if name in saved["state"] and (owned_names is None or name in owned_names):
                state[at] = saved["state"][name]
        options = {}
        for key, value in saved_group.items():
            if key not in ("params", _PARAMETER_NAMES_OPTION):
                current = group.get(key)
                if isinstance(value, Tensor) and isinstance(current, Tensor):
                    # A learning rate that is a tensor lives where the compiled or captured step expects it.
                    value = value.to(current.device)
                options[key] = value
        param_groups.append({"params": positions, **options})
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def _owned(full_state: Mapping[str, Any], owned_names: Collection[str] | None) -> set[str]:
    """The owned names of a state dict, all names of a tied parameter included."""
    if owned_names is None:
        return set(full_state)
    if unknown := set(owned_names) - set(full_state):
        raise ValueError(
            f"`owned_names` has names that the module's state dict lacks:"
            f" {list_with_nearest(unknown, list(full_state))}."
        )
    identities = {id(full_state[name]) for name in owned_names if isinstance(full_state[name], Tensor)}
    owned = set(owned_names)
    return {name for name, value in full_state.items() if name in owned or id(value) in identities}


def _is_placeholder(parameter: Tensor) -> bool:
    return parameter.numel() > 1 and parameter.layout == torch.strided and not any(parameter.stride())


def _names_by_group(optimizer: torch.optim.Optimizer, parameter_names: Mapping[int, str]) -> list[list[str]]:
    names_by_group = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in parameter_names:
                raise ValueError(
                    f"Group {number} of {type(optimizer).__name__} holds a parameter of shape"
                    f" {list(parameter.shape)} that the module does not have: optimize the module's own."
                )
        names_by_group.append([parameter_names[id(parameter)] for parameter in group["params"]])
    return names_by_group


def _match_groups(
    optimizer_type: str, names_by_group: list[list[str]], saved_groups: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved group for each present one: the one with the same set of names."""
    remaining = list(saved_groups)
    matched = []
    for number, names in enumerate(names_by_group):
        found = next((at for at, group in enumerate(remaining) if set(group["params"]) == set(names)), None)
        if found is None:
            saved_names = [set(group["params"]) for group in remaining]
            nearest: set[str] = max(saved_names, key=lambda candidate: len(candidate & set(names)), default=set())
            added, gone = set(names) - nearest, nearest - set(names)
            raise ValueError(
                f"Group {number} of {optimizer_type} ({len(names)} parameters) matches no saved group."
                f" Against the nearest one, only the present group has: {list_names(added) or 'none'};"
                f" only the saved one has: {list_names(gone) or 'none'}."
                " Build the optimizer with the groups it had when it was saved."
            )
        matched.append(remaining.pop(found))
    if remaining:
        names = [name for group in remaining for name in group["params"]]
        raise ValueError(
            f"The checkpoint has {len(remaining)} more group(s) than {optimizer_type},"
            f" with {list_names(names) or 'no parameters'}."
            " Build the optimizer with the groups it had when it was saved."
        )
    return matched
