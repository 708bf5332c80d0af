"""Numbers of few bits: the scale of the loss, overflows, and what is computed in which precision."""

from lightning_bigmodel.scaling.casting import full_precision, half_precision
from lightning_bigmodel.scaling.found_inf import (
    any_rank,
    first_overflowing,
    has_nonfinite,
    unscale_,
    unscale_and_check,
)
from lightning_bigmodel.scaling.loss_scale import LossScale, LossScaleError
from lightning_bigmodel.scaling.module_precision import ModulePrecision, matching_modules
from lightning_bigmodel.scaling.op_lists import OpPrecision

__all__ = [
    "LossScale",
    "LossScaleError",
    "ModulePrecision",
    "OpPrecision",
    "any_rank",
    "first_overflowing",
    "full_precision",
    "half_precision",
    "has_nonfinite",
    "matching_modules",
    "unscale_",
    "unscale_and_check",
]
