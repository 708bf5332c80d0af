"""Which implementation torch's optimizers step with: one kernel for all (fused), or torch's own choice.

Numbers are the same up to the order of operations. Fused steps read and write each parameter and moment once; torch
chooses between the others by itself, `foreach` on GPUs and a loop on the CPU.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim import Optimizer

from lightning_bigmodel.sharding._step import behaves_as

__all__ = ["check_fused", "choose_fused"]

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_DEVICES = ("cuda", "cpu", "xpu", "mps", "hpu", "mtia")  # with fused kernels in torch 2.11 and newer


def check_fused(fused: Any) -> None:
    """Refuse what is no choice.

    Raises:
        ValueError: With the choices.
    """
    if not (fused is None or isinstance(fused, bool) or (isinstance(fused, str) and fused == "auto")):
        raise ValueError(f"`fused={fused!r}` must be 'auto', True, False, or None for what the module has chosen.")


def choose_fused(optimizer: Optimizer, fused: Literal["auto"] | bool, device: torch.device) -> None:
    """Let an optimizer that has not stepped yet use fused kernels, or not.

    Args:
        optimizer: As the module made it.
        fused: `"auto"`: where the module has chosen nothing and there are such kernels; True: everywhere; False:
            nowhere.
        device: Where it will step.

    Raises:
        ValueError: For True, where there are no such kernels.

    Example:
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
        >>> choose_fused(optimizer, "auto", torch.device("cpu"))
        >>> optimizer.param_groups[0]["fused"]
        True
    """
    has_option = any(behaves_as(optimizer, kind) for kind in _FUSED)
    if fused is False:
        if has_option:
            _set(optimizer, None)
        return
    reason = _why_not(optimizer, device) if has_option else "it has no fused kernels"
    if fused is True:
        if reason:
            raise ValueError(
                f"`fused=True` cannot be followed by `{type(optimizer).__name__}`: {reason}. Use `fused='auto'`, or "
                f"{', '.join(kind.__name__ for kind in _FUSED)} of torch."
            )
        _set(optimizer, True)
    elif not reason and not any(_is_chosen(group) for group in optimizer.param_groups):
        _set(optimizer, True)


def _is_chosen(group: dict[str, Any]) -> bool:
    return group.get("fused") is not None or group.get("foreach") is not None


def _why_not(optimizer: Optimizer, device: torch.device) -> str | None:
    if device.type not in _DEVICES:
        return f"torch has no fused kernels for {device.type!r}"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "its option `differentiable` needs other ones"
        if not all(p.is_floating_point() for p in group["params"] if p.requires_grad):
            return "it has parameters that are no real floating-point numbers"
    return None


def _set(optimizer: Optimizer, fused: bool | None) -> None:
    # Not `_step_supports_amp_scaling`, by which a gradient scaler would leave it to the kernel to unscale: gradients
    # are unscaled before they are clipped.
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"] = fused
        if fused:
            group["foreach"] = False
    if not fused:
        vars(optimizer).pop("_step_supports_amp_scaling", None)
