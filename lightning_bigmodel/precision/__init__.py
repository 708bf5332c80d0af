"""Precision plugins."""

from lightning_bigmodel.precision.bigmodel import BigModelPrecision

__all__ = ["BigModelPrecision"]
