"""Dividing gradients by the loss scale, and whether any of them overflowed, on any rank.

A few kernels for all gradients of one device and dtype, and no answer is waited for: flags stay on the device until
`any_rank` asks for them, once a step. The gradients are read once, and written once where they are scaled.

Why every rank must be asked: the ranks hold different parts of the model (tensor and pipeline axes, shards, experts).
If only the one that saw the overflow skips its step, the weights of the ranks part for good. A rank that holds no
gradient at all takes part too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel import _host

__all__ = ["any_rank", "first_overflowing", "has_nonfinite", "unscale_", "unscale_and_check"]

# What torch's operator for `GradScaler` takes on every device: it multiplies in float32 and checks in one pass. On CUDA
# it knows no bfloat16, which is multiplied first and read again for the check.
_FUSED_DTYPES = (torch.float16, torch.float32, torch.float64)


@torch.no_grad()
def has_nonfinite(tensors: Iterable[Tensor | None], device: torch.device | None = None) -> Tensor:
    """Whether any value is infinite or NaN.

    Args:
        tensors: Of any shapes, devices and floating or complex dtypes. None and integers are passed over; of a sparse
            tensor its summed values count, of a `DTensor` the part that is here.
        device: Where the flag is wanted. Default: where the tensors are; of several devices, the first that is not the
            CPU; the CPU if there are none.

    Returns:
        A flag of shape (), 1.0 or 0.0 in float32, for which nothing has waited.

    Example::

        has_nonfinite([torch.tensor([1.0, float("inf")])])  # tensor(1.)
    """
    return _any_nonfinite([_whole_values(part) for part in _parts(tensors)], device)


@torch.no_grad()
def unscale_(tensors: Iterable[Tensor | None], inverse_scale: float | Tensor) -> None:
    """Multiplies the tensors in place.

    Args:
        tensors: As for `has_nonfinite`; gradients, of which none shares memory with another.
        inverse_scale: What to multiply by: 1 over the loss scale. A tensor of one element is not read on the host.

    Raises:
        ValueError: If `inverse_scale` is a number that is not finite and over 0, or a tensor of several elements.

    Example::

        gradient = torch.tensor([8.0])
        unscale_([gradient], 1 / 4.0)
        gradient  # tensor([2.])
    """
    _unscale([_stored_values(part) for part in _parts(tensors)], _checked(inverse_scale), None)


@torch.no_grad()
def unscale_and_check(
    tensors: Iterable[Tensor | None], inverse_scale: float | Tensor, device: torch.device | None = None
) -> Tensor:
    """Multiplies the tensors in place and tells whether any value was, or became, infinite or NaN.

    A value becomes infinite where the loss scale is under 1, and the repeated indices of a sparse gradient may add up
    to infinity. Where neither can be, the tensors are read only once.

    Args:
        tensors: As for `unscale_`.
        inverse_scale: As for `unscale_`. If it is a tensor, float16 tensors are read a second time, because it may be
            over 1.
        device: As for `has_nonfinite`.

    Returns:
        The flag, as of `has_nonfinite`.

    Raises:
        ValueError: As by `unscale_`.

    Example::

        gradients = [torch.tensor([8.0]), torch.tensor([float("nan")])]
        unscale_and_check(gradients, 1 / 4.0)  # tensor(1.), and the first gradient is tensor([2.])
    """
    parts = _parts(tensors)
    inverse_scale = _checked(inverse_scale)
    found: list[Tensor] = []
    _unscale([_stored_values(part) for part in parts], inverse_scale, found)
    if isinstance(inverse_scale, Tensor):
        again = [part for part in parts if part.is_sparse or part.dtype == torch.float16]
    else:
        again = [part for part in parts if part.is_sparse or inverse_scale > 1]
    home = _home([part.device for part in parts], device)
    if again:
        found.append(_any_nonfinite([_whole_values(part) for part in again], home))
    return _together(found, home)


def any_rank(flag: bool | Tensor, groups: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None) -> bool:
    """Whether the flag is set on any rank.

    Every rank of the groups calls it, also one without gradients. One message of 4 bytes a group, and the one wait of a
    step.

    Args:
        flag: Of this rank: true or false, or a tensor of one element, of which anything but 0 (NaN too) is true.
        groups: A process group, or several that together span the ranks: asked one after another, so that of a mesh
            every axis may be given. None means all ranks, or this one alone where there is no process group.

    Returns:
        The same on every rank of the groups.

    Raises:
        ValueError: If the flag is a tensor of several elements.

    Example::

        flag = unscale_and_check([torch.tensor([2.0])], 1 / 4.0)
        any_rank(flag)  # False, on every rank; of a mesh: any_rank(flag, mesh.get_all_groups())
    """
    if isinstance(flag, Tensor) and flag.numel() != 1:
        raise ValueError(
            f"The flag has {flag.numel()} elements; it must have one. Take that of `has_nonfinite` or"
            " `unscale_and_check`, or `flags.any()`."
        )
    if groups is None:
        asked: list[dist.ProcessGroup | None] = [None] if dist.is_available() and dist.is_initialized() else []
    elif isinstance(groups, Sequence):
        asked = list(groups)
    else:
        asked = [groups]
    # NaN has no maximum that all backends agree on.
    number = (torch.as_tensor(flag).detach() != 0).float().reshape(())
    for group in asked:
        number = number.to(_device_for(number, group))
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return bool(number.item())


@torch.no_grad()
def first_overflowing(
    named_gradients: Mapping[str, Tensor | None] | Iterable[tuple[str, Tensor | None]], limit: int | None = 5
) -> list[str]:
    """Names of the gradients with an infinite or NaN value, for a message.

    Waits once for each device. Some kernels a gradient: for when an overflow is known, not for every step.

    Args:
        named_gradients: Names and gradients, such as `((name, p.grad) for name, p in module.named_parameters())`.
        limit: How many names at most. None for all. Default: 5.

    Returns:
        The names, in the order given.

    Example::

        first_overflowing({"a": torch.ones(2), "b": torch.tensor([float("nan")])})  # ["b"]
    """
    pairs = named_gradients.items() if isinstance(named_gradients, Mapping) else named_gradients
    names: dict[torch.device, list[int]] = {}
    flags: dict[torch.device, list[Tensor]] = {}
    ordered = []
    for index, (name, gradient) in enumerate(pairs):
        ordered.append(name)
        for part in _parts([gradient]):
            names.setdefault(part.device, []).append(index)
            flags.setdefault(part.device, []).append(_any_nonfinite([_whole_values(part)], part.device))
    overflowing = sorted(
        index
        for device, indices in names.items()
        for index, flag in zip(indices, torch.stack(flags[device]).tolist(), strict=True)
        if flag
    )
    return [ordered[index] for index in overflowing[:limit]]


def _parts(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """What can overflow of what is on this rank."""
    local = [
        tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a `DTensor`
        for tensor in tensors
        if tensor is not None
    ]
    return [part for part in local if part.is_floating_point() or part.is_complex()]


def _stored_values(part: Tensor) -> Tensor:
    """The memory that holds the values, to change them in place."""
    values = part._values() if part.is_sparse else part
    return torch.view_as_real(values) if values.is_complex() else values


def _whole_values(part: Tensor) -> Tensor:
    """The values as they count: entries of one sparse index are summed."""
    return _stored_values(part.coalesce() if part.is_sparse else part)


def _grouped(values: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """What one kernel takes at once. Empty tensors have no largest value and nothing to scale."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        if value.numel():
            groups.setdefault((value.device, value.dtype), []).append(value)
    return groups


def _any_nonfinite(values: Sequence[Tensor], device: torch.device | None) -> Tensor:
    found = []
    for group in _grouped(values).values():
        # The largest magnitude of each tensor: infinite or NaN if one of its values is, and unlike a sum it does not
        # overflow by itself.
        largest = torch.stack(torch._foreach_norm(group, math.inf))
        found.append((~torch.isfinite(largest)).any().float())
    return _together(found, _home([value.device for value in values], device))


def _unscale(values: Sequence[Tensor], inverse_scale: float | Tensor, found: list[Tensor] | None) -> None:
    """Multiplies the values; adds a flag for each device and dtype to `found`, if it is given."""
    for (device, dtype), group in _grouped(values).items():
        factor = torch.as_tensor(inverse_scale, dtype=torch.float32).to(device, non_blocking=True).reshape(())
        if dtype in _FUSED_DTYPES:
            flag = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)
        else:
            torch._foreach_mul_(group, factor)
            if found is None:
                continue
            flag = _any_nonfinite(group, device)
        if found is not None:
            found.append(flag)


def _home(devices: Iterable[torch.device], wanted: torch.device | None) -> torch.device:
    """Where flags come together. Bringing one to the CPU waits for its device, the other way does not."""
    if wanted is not None:
        return wanted
    given = list(devices)
    return next((device for device in given if device.type != "cpu"), given[0] if given else torch.device("cpu"))


def _together(found: Sequence[Tensor], device: torch.device) -> Tensor:
    if not found:
        return torch.zeros((), device=device)
    largest: Tensor = torch.stack([flag.to(device, non_blocking=device.type != "cpu") for flag in found]).amax()
    return largest


def _checked(inverse_scale: float | Tensor) -> float | Tensor:
    if isinstance(inverse_scale, Tensor):
        if inverse_scale.numel() != 1:
            raise ValueError(
                f"`inverse_scale` is a tensor of {inverse_scale.numel()} elements; it must have one: 1 over the scale."
            )
    elif not (math.isfinite(inverse_scale) and inverse_scale > 0):
        raise ValueError(
            f"`inverse_scale={inverse_scale}` must be finite and over 0: give 1 over the scale of the loss."
        )
    return inverse_scale


def _device_for(flag: Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """Where the group can reduce the flag."""
    device = flag.device
    if device.type == "cpu":
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return _host.device_for_numbers(group, device)
