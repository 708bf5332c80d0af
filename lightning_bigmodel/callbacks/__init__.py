"""Lightning callbacks that know what a rank holds of a model; their techniques are in the plain-torch packages."""

from lightning_bigmodel.callbacks.ema import ExponentialMovingAverage

__all__ = ["ExponentialMovingAverage"]
