"""Numbers of few bits: the scale of the loss, overflows, and what is computed in which precision."""

from lightning_bigmodel.scaling.loss_scale import LossScale, LossScaleError

__all__ = ["LossScale", "LossScaleError"]
