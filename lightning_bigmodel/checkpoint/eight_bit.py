"""8-bit optimizer states of bitsandbytes in a form that any layout can load.

Their blocks of 256 elements follow the rows a rank holds, so they cannot be cut anew. A checkpoint has the values in
fp32; loaded, they are quantised again. Where the blocks are the same, the codes come back bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["portable_entries", "quantized_entries"]

_MARK = "~8bit"
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
        blocks = table[codes.reshape(-1).long()].split(_BLOCK_SIZE)
        values = torch.cat([block * scale for block, scale in zip(blocks, scales, strict=False)] or [scales[:0]])
        found[f"state{number}{_MARK}"] = values.float().view(codes.shape)
        for key in (f"state{number}", f"absmax{number}"):
            del found[key]
    return found


def quantized_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `portable_entries` for the rows that are here."""
    found = dict(entries)
    for number in ("1", "2"):
        values = found.pop(f"state{number}{_MARK}", None)
        if values is None:
            continue
        table = found[f"qmap{number}"].to(values.device)
        found[f"state{number}"], found[f"absmax{number}"] = _quantize(values, table)
    return found


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
