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
    from lightning_bigmodel.callbacks.ema import ExponentialMovingAverage
    from lightning_bigmodel.callbacks.noise_scale import GradientNoiseScale
    from lightning_bigmodel.callbacks.precision_audit import PrecisionAudit
    from lightning_bigmodel.callbacks.preemption import PreemptionCheckpoint
    from lightning_bigmodel.callbacks.recompute import Recompute
    from lightning_bigmodel.pipeline.token_weight import TokenWeight
    from lightning_bigmodel.precision.bigmodel import BigModelPrecision
    from lightning_bigmodel.recompute.full import Full
    from lightning_bigmodel.recompute.offload import Offload
    from lightning_bigmodel.recompute.optimal import Optimal
    from lightning_bigmodel.recompute.selective import Selective
    from lightning_bigmodel.recompute.square_root import SquareRoot
    from lightning_bigmodel.sharding.offload import OffloadPolicy
    from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = [
    "AdaScale",
    "AdaptiveAccumulation",
    "BigModelPrecision",
    "BigModelStrategy",
    "ExponentialMovingAverage",
    "Full",
    "GradientNoiseScale",
    "Offload",
    "OffloadPolicy",
    "Optimal",
    "PrecisionAudit",
    "PreemptionCheckpoint",
    "Recompute",
    "Selective",
    "SquareRoot",
    "TokenWeight",
    "__version__",
]

# Public name -> the module that defines it.
_HOMES = {
    "AdaScale": "lightning_bigmodel.callbacks.adascale",
    "AdaptiveAccumulation": "lightning_bigmodel.callbacks.accumulation",
    "BigModelPrecision": "lightning_bigmodel.precision.bigmodel",
    "BigModelStrategy": "lightning_bigmodel.strategies.bigmodel",
    "ExponentialMovingAverage": "lightning_bigmodel.callbacks.ema",
    "Full": "lightning_bigmodel.recompute.full",
    "GradientNoiseScale": "lightning_bigmodel.callbacks.noise_scale",
    "Offload": "lightning_bigmodel.recompute.offload",
    "OffloadPolicy": "lightning_bigmodel.sharding.offload",
    "Optimal": "lightning_bigmodel.recompute.optimal",
    "PrecisionAudit": "lightning_bigmodel.callbacks.precision_audit",
    "PreemptionCheckpoint": "lightning_bigmodel.callbacks.preemption",
    "Recompute": "lightning_bigmodel.callbacks.recompute",
    "Selective": "lightning_bigmodel.recompute.selective",
    "SquareRoot": "lightning_bigmodel.recompute.square_root",
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
