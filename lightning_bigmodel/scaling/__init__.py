"""Numbers of few bits: the scale of the loss, overflows, and what is computed in which precision."""

from lightning_bigmodel.scaling.found_inf import (
    any_rank,
    first_overflowing,
    has_nonfinite,
    unscale_,
    unscale_and_check,
)
from lightning_bigmodel.scaling.loss_scale import LossScale, LossScaleError

__all__ = [
    "LossScale",
    "LossScaleError",
    "any_rank",
    "first_overflowing",
    "has_nonfinite",
    "unscale_",
    "unscale_and_check",
]
