"""Trains an unchanged LightningModule under any layout of ranks to the numbers it would reach in one process.

Public names load on first use, so that importing the package costs milliseconds and touches no device:

Example::

    import lightning_bigmodel
    from lightning.pytorch import Trainer

    trainer = Trainer(devices=2, accelerator="cpu", strategy="bigmodel_pipeline")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_bigmodel._registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_bigmodel.callbacks.accumulation import AdaptiveAccumulation
    from lightning_bigmodel.callbacks.adascale import AdaScale
    from lightning_bigmodel.callbacks.eight_bit import EightBitOptimizer
    from lightning_bigmodel.callbacks.ema import ExponentialMovingAverage
    from lightning_bigmodel.callbacks.lora import LoRA
    from lightning_bigmodel.callbacks.noise_scale import GradientNoiseScale
    from lightning_bigmodel.callbacks.precision_audit import PrecisionAudit
    from lightning_bigmodel.callbacks.preemption import PreemptionCheckpoint
    from lightning_bigmodel.pipeline.token_weight import TokenWeight
    from lightning_bigmodel.precision.bigmodel import BigModelPrecision
    from lightning_bigmodel.sharding.offload import OffloadPolicy
    from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = [
    "AdaScale",
    "AdaptiveAccumulation",
    "BigModelPrecision",
    "BigModelStrategy",
    "EightBitOptimizer",
    "ExponentialMovingAverage",
    "GradientNoiseScale",
    "LoRA",
    "OffloadPolicy",
    "PrecisionAudit",
    "PreemptionCheckpoint",
    "TokenWeight",
    "__version__",
]

# Public name -> the module that defines it.
_HOMES = {
    "AdaScale": "lightning_bigmodel.callbacks.adascale",
    "AdaptiveAccumulation": "lightning_bigmodel.callbacks.accumulation",
    "BigModelPrecision": "lightning_bigmodel.precision.bigmodel",
    "BigModelStrategy": "lightning_bigmodel.strategies.bigmodel",
    "EightBitOptimizer": "lightning_bigmodel.callbacks.eight_bit",
    "ExponentialMovingAverage": "lightning_bigmodel.callbacks.ema",
    "GradientNoiseScale": "lightning_bigmodel.callbacks.noise_scale",
    "LoRA": "lightning_bigmodel.callbacks.lora",
    "OffloadPolicy": "lightning_bigmodel.sharding.offload",
    "PrecisionAudit": "lightning_bigmodel.callbacks.precision_audit",
    "PreemptionCheckpoint": "lightning_bigmodel.callbacks.preemption",
    "TokenWeight": "lightning_bigmodel.pipeline.token_weight",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first asked for."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("lightning-bigmodel")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its public names are {sorted(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})


register_with_lightning()
