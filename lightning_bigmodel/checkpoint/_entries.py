"""What a checkpoint is given, as one flat table of keys, and the memory that its values are read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_bigmodel.checkpoint.index import CheckpointIndex, extra_key, model_key, optimizer_key
from lightning_bigmodel.checkpoint.optimizer_rows import Rows, state_target
from lightning_bigmodel.checkpoint.regions import RegionLayout, TensorRegions
from lightning_bigmodel.checkpoint.state import OptimizerState

__all__ = ["check_given", "flat_state", "read_target"]


def check_given(
    optimizer_states: Sequence[OptimizerState] | None,
    metadata: Mapping[str, Any],
    extra_states: Mapping[str, Mapping[str, Any]],
) -> int | None:
    """The number of optimizers, which all ranks must agree on.

    Raises:
        ValueError: If `metadata` has tensors that belong elsewhere, or a set cannot have its name.
    """
    for key, belongs in (("state_dict", "model_state"), ("optimizer_states", "optimizer_states")):
        if key in metadata:
            raise ValueError(f"`metadata` has `{key}`: take it out and give its content as `{belongs}`.")
    for name in extra_states:
        if not name.isidentifier():
            raise ValueError(f"`extra_states` has a set named {name!r}: use letters, digits and `_` only.")
    return None if optimizer_states is None else len(optimizer_states)


def flat_state(
    model_state: Mapping[str, Any],
    optimizer_states: Sequence[OptimizerState],
    extra_states: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Checkpoint key -> value."""
    flat = {model_key(name): value for name, value in model_state.items()}
    for number, optimizer_state in enumerate(optimizer_states):
        for name, entries in optimizer_state["state"].items():
            flat.update({optimizer_key(number, name, key): value for key, value in entries.items()})
    for set_name, tensors in extra_states.items():
        flat.update({extra_key(set_name, name): value for name, value in tensors.items()})
    return flat


def read_target(
    index: CheckpointIndex,
    key: str,
    state_key: str | None,
    layout: RegionLayout | None,
    rows: Rows | None,
    live: torch.Tensor | None = None,
) -> Any:
    """Memory to read a value into: of this rank's part, where it has one; None for what is no tensor.

    That is `live`, if it can be overwritten with what was saved and nothing else is in its memory, or new memory.
    """
    entry = index.tensors.get(key)
    if entry is None:
        return None
    part = state_target(state_key, entry.shape, layout, rows)
    shape = entry.shape if part is None else part.local_shape
    if live is None or not _can_take(live, shape, entry.torch_dtype):
        live = torch.empty(shape, dtype=entry.torch_dtype)
    return live if part is None else TensorRegions(live, part)


def _can_take(live: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    # An expanded tensor, such as what stands for a parameter held elsewhere, has several elements in one place.
    has_memory = live.layout == torch.strided and live.device.type != "meta" and live.is_contiguous()
    return type(live) is torch.Tensor and has_memory and tuple(live.shape) == shape and live.dtype == dtype
