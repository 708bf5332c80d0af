"""The versions of modules that a state dict carries beside its entries.

``state_dict()._metadata`` is what torch.save keeps of it; torch documents ``local_metadata`` for loading hooks but
gives no accessor. Present in torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


def module_versions(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Module path to its version, in the order of the modules; ``None`` for a plain dictionary."""
    return getattr(state, "_metadata", None)


def set_module_versions(state: OrderedDict[str, Any], versions: Mapping[str, Any] | None) -> None:
    """Put versions on a state dict; ``None`` leaves it without."""
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]  # "OrderedDict" has no attribute "_metadata"
