"""Precision plugins."""

# First: once Lightning is there, the strategies register themselves, and they need what is below whole.
import lightning.pytorch  # noqa: F401

from lightning_bigmodel.precision.bigmodel import BigModelPrecision

__all__ = ["BigModelPrecision"]
