"""An optimizer of 32 bits becomes its twin of 8 bits, as the same object, before its first step.

Method: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (https://arxiv.org/abs/2110.02861), as
bitsandbytes has it: moments are kept as 8-bit codes of a table and one fp32 scale for each block of 256 elements.

Memory a parameter: 1 + 4/256 bytes for each moment in place of 4.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bigmodel.sharding._bitsandbytes import is_bitsandbytes, is_blockwise, keep_in_full_precision

__all__ = ["embedding_parameters", "to_eight_bit"]

# What bitsandbytes calls its optimizers of 32 bits that have a twin without norms of whole parameters.
_OWN = ("AdamW", "Adam", "Lion", "AdEMAMix")
# Options of torch's implementation, which mean nothing to another one.
_IMPLEMENTATION = ("amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay")


def embedding_parameters(root: nn.Module) -> set[int]:
    """Ids of the parameters of embeddings: their gradients are mostly zero with a few large rows."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(p) for module in root.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}


def to_eight_bit(
    optimizer: Optimizer, *, full_precision: Collection[int] = (), min_size: int = 4096, paged: bool = False
) -> None:
    """Change an optimizer in place: its class and implementation; its groups, options, hooks and schedulers stay.

    Taken are torch's AdamW and Adam, bitsandbytes' AdamW, Adam, Lion and AdEMAMix, and any `Lion` whose groups have
    `lr`, `betas` and `weight_decay`. One that has 8 bits already only gets `full_precision`.

    Args:
        optimizer: The optimizer, without state.
        full_precision: Ids of parameters whose moments stay fp32.
        min_size: Parameters of fewer elements keep fp32 moments.
        paged: Moments in memory that the device may move to the host.

    Raises:
        ValueError: For another optimizer, options that the twin does not have, or one that has stepped already.
        ModuleNotFoundError: Without bitsandbytes.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        to_eight_bit(optimizer, full_precision=embedding_parameters(model))
    """
    if not (is_bitsandbytes(optimizer) and is_blockwise(optimizer)):
        _swap(optimizer, _twin_name(optimizer, paged=paged), min_size)
    places = {
        (index, position)
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) in full_precision
    }
    keep_in_full_precision(optimizer, places)


def _twin_name(optimizer: Optimizer, *, paged: bool) -> str:
    kind = type(optimizer)
    name = kind.__name__.removeprefix("Paged").removesuffix("32bit")
    is_own = is_bitsandbytes(optimizer) and name in _OWN
    is_torch = kind in (torch.optim.AdamW, torch.optim.Adam)
    if not (is_own or is_torch or name == "Lion"):
        raise ValueError(
            f"`{kind.__name__}` has no twin of 8 bits. Use AdamW or Adam of torch, or AdamW, Adam, Lion or AdEMAMix of "
            "bitsandbytes, or leave `EightBitOptimizer` out."
        )
    for group in optimizer.param_groups:
        refused = [option for option in ("amsgrad", "maximize", "differentiable") if group.get(option)]
        if refused:
            raise ValueError(
                f"`{kind.__name__}({refused[0]}=True)` must be without that option: its twin of 8 bits has none such. "
                "Leave it out, or leave `EightBitOptimizer` out."
            )
    if name == "Adam" and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
        name = "AdamW"
    # Of an optimizer that pages already the twin does, too, where there is a device that can.
    paged = paged or (kind.__name__.startswith("Paged") and torch.cuda.is_available())
    return f"{'Paged' if paged else ''}{name}8bit"


def _swap(optimizer: Optimizer, name: str, min_size: int) -> None:
    if optimizer.state:
        raise ValueError(
            f"`{type(optimizer).__name__}` has state already, which would be lost. Make a new optimizer in "
            "`configure_optimizers`."
        )
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"`step` of this `{type(optimizer).__name__}` object has been replaced, and what replaced it would be "
            "lost. Override `step` in a subclass of an 8-bit optimizer, or leave `EightBitOptimizer` out."
        )
    try:
        import bitsandbytes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "8-bit optimizers are those of bitsandbytes. Run `pip install 'lightning-bigmodel[optim]'`."
        ) from error
    kind: Any = getattr(bitsandbytes.optim, name)
    groups = [
        {key: _number(value) for key, value in group.items() if key not in _IMPLEMENTATION}
        for group in optimizer.param_groups
    ]
    twin = kind([{**group, "params": list(group["params"])} for group in groups], min_8bit_size=min_size)
    hooks = {key: value for key, value in vars(optimizer).items() if key.endswith("_hooks")}
    optimizer.__dict__.clear()
    optimizer.__dict__.update(vars(twin))
    optimizer.__dict__.update(hooks)
    optimizer.__class__ = kind
    if step is not None:
        _mark_steps(optimizer)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else copy.copy(value)


def _mark_steps(optimizer: Optimizer) -> None:
    """What a scheduler has hung on `step`, by which it tells whether the optimizer steps before it."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return type(self).step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
