"""8-bit optimizer states of bitsandbytes in a form that any layout can load.

Their blocks of 256 elements follow the rows a rank holds, so they cannot be cut anew. A checkpoint has the values in
fp32; loaded, they are quantised again. Where the blocks are the same, the codes come back bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["portable_entries", "quantized_entries", "requantization_error"]

_MARK = "~8bit"
_HALVES = ("~fast", "~slow")  # AdEMAMix keeps two averages in one tensor, in this order
_WRAPPED = "__bnb_optimizer_quant_state__"  # where `state_dict` of bitsandbytes 0.45 and newer puts quantised entries
_BLOCK_SIZE = 256


def portable_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter with 8-bit values made fp32, under marked keys; other state as it is.

    Memory: four times that of the 8-bit state.
    """
    found = dict(entries)
    found.update(found.pop(_WRAPPED, {}))
    entries = dict(found)
    for number in ("1", "2"):
        codes, scales = entries.get(f"state{number}"), entries.get(f"absmax{number}")
        if not isinstance(codes, Tensor) or codes.dtype != torch.uint8 or scales is None:
            continue
        table = entries[f"qmap{number}"]
        if scales.dim() == 2:
            values = torch.stack([_values(own, of_own, table) for own, of_own in zip(codes, scales, strict=True)])
        else:
            values = _values(codes, scales, table)
        found[f"state{number}{_MARK}"] = values
        for key in (f"state{number}", f"absmax{number}"):
            del found[key]
    shape = getattr(entries.get("state2"), "shape", None)
    for key in ("state1", f"state1{_MARK}"):
        if shape is not None and key in found and found[key].shape == (2, *shape):
            found.update({f"{key}{half}": own for half, own in zip(_HALVES, found.pop(key), strict=True)})
    return found


def _values(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    blocks = table[codes.reshape(-1).long()].split(_BLOCK_SIZE)
    values = torch.cat([block * scale for block, scale in zip(blocks, scales, strict=False)] or [scales[:0]])
    return values.float().view(codes.shape)


def quantized_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `portable_entries` for the rows that are here."""
    found = dict(entries)
    for key in ("state1", f"state1{_MARK}"):
        if f"{key}{_HALVES[0]}" in found:
            found[key] = torch.stack([found.pop(f"{key}{half}") for half in _HALVES])
    for number in ("1", "2"):
        values = found.pop(f"state{number}{_MARK}", None)
        if values is None:
            continue
        table = found[f"qmap{number}"].to(values.device)
        two = number == "1" and values.dim() == found.get("state2", found.get(f"state2{_MARK}", values)).dim() + 1
        parts = [_quantize(own, table) for own in (values if two else (values,))]
        codes, scales = ([part[index] for part in parts] for index in (0, 1))
        found[f"state{number}"] = torch.stack(codes) if two else codes[0]
        found[f"absmax{number}"] = torch.stack(scales) if two else scales[0]
    return found


def requantization_error(saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> tuple[float, float]:
    """By what loading has changed 8-bit values, each relative to the largest magnitude in its block; and the bound.

    The bound is half of the widest gap in the table. Where blocks are the same both codes and values come back, and the
    error is that of fp32.

    Args:
        saved: Portable entries.
        loaded: What `quantized_entries` made of them.
    """
    again = portable_entries(loaded)
    worst = bound = 0.0
    for key, values in saved.items():
        if _MARK not in key or not values.numel():
            continue
        table = loaded[f"qmap{key[len('state')]}"]
        bound = max(bound, float((table[1:] - table[:-1]).max()) / 2)
        padded = nn.functional.pad(values.reshape(-1).abs(), (0, -values.numel() % _BLOCK_SIZE))
        scales = padded.view(-1, _BLOCK_SIZE).amax(1).repeat_interleave(_BLOCK_SIZE)[: values.numel()]
        error = (again[key] - values).reshape(-1).abs() / torch.where(scales > 0, scales, 1.0)
        worst = max(worst, float(error.max()))
    return worst, bound


def _quantize(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks: the scale is the largest magnitude, as the table's two ends stand for it."""
    num_blocks = -(-values.numel() // _BLOCK_SIZE)
    padded = values.new_zeros(num_blocks * _BLOCK_SIZE)
    padded[: values.numel()] = values.reshape(-1)
    blocks = padded.view(num_blocks, _BLOCK_SIZE)
    # A signed table ends a little above -1: what has that code is smaller than the scale it came from.
    lowest = table.min()
    magnitudes = torch.where(blocks < 0, blocks / lowest, blocks / table.max()) if lowest < 0 else blocks / table.max()
    scales = magnitudes.amax(1) if num_blocks else padded
    normalized = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(normalized, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return codes.view(-1)[: values.numel()].view(values.shape).contiguous(), scales.contiguous()
