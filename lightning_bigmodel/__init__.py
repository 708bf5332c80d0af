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
    from lightning_bigmodel.callbacks.communication_monitor import CommunicationMonitor
    from lightning_bigmodel.callbacks.eight_bit import EightBitOptimizer
    from lightning_bigmodel.callbacks.ema import ExponentialMovingAverage
    from lightning_bigmodel.callbacks.lora import LoRA
    from lightning_bigmodel.callbacks.noise_scale import GradientNoiseScale
    from lightning_bigmodel.callbacks.precision_audit import PrecisionAudit
    from lightning_bigmodel.callbacks.preemption import PreemptionCheckpoint
    from lightning_bigmodel.callbacks.quantize import Quantize
    from lightning_bigmodel.callbacks.recompute import Recompute
    from lightning_bigmodel.pipeline.token_weight import TokenWeight
    from lightning_bigmodel.precision.bigmodel import BigModelPrecision
    from lightning_bigmodel.recompute.full import Full
    from lightning_bigmodel.recompute.offload import Offload
    from lightning_bigmodel.recompute.optimal import Optimal
    from lightning_bigmodel.recompute.selective import Selective
    from lightning_bigmodel.recompute.square_root import SquareRoot
    from lightning_bigmodel.replicas.adaptive_local_sgd import AdaptiveLocalSGD
    from lightning_bigmodel.replicas.dense import AllReduce
    from lightning_bigmodel.replicas.dgc import DGC
    from lightning_bigmodel.replicas.diloco import DiLoCo
    from lightning_bigmodel.replicas.hierarchical import HierarchicalAllReduce
    from lightning_bigmodel.replicas.largest import SampledThreshold
    from lightning_bigmodel.replicas.local_sgd import LocalSGD
    from lightning_bigmodel.replicas.power_sgd import PowerSGD
    from lightning_bigmodel.replicas.top_k import TopKErrorFeedback
    from lightning_bigmodel.sharding.offload import OffloadPolicy
    from lightning_bigmodel.strategies.bigmodel import BigModelStrategy
    from lightning_bigmodel.strategies.presets import (
        AdaptiveLocalSGDStrategy,
        DGCStrategy,
        DiLoCoStrategy,
        LocalSGDStrategy,
    )

__all__ = [
    "AdaScale",
    "AdaptiveAccumulation",
    "AdaptiveLocalSGD",
    "AdaptiveLocalSGDStrategy",
    "AllReduce",
    "BigModelPrecision",
    "BigModelStrategy",
    "CommunicationMonitor",
    "DGC",
    "DGCStrategy",
    "DiLoCo",
    "DiLoCoStrategy",
    "EightBitOptimizer",
    "ExponentialMovingAverage",
    "Full",
    "GradientNoiseScale",
    "HierarchicalAllReduce",
    "LoRA",
    "LocalSGD",
    "LocalSGDStrategy",
    "Offload",
    "OffloadPolicy",
    "PowerSGD",
    "Optimal",
    "PrecisionAudit",
    "PreemptionCheckpoint",
    "Quantize",
    "Recompute",
    "SampledThreshold",
    "Selective",
    "SquareRoot",
    "TokenWeight",
    "TopKErrorFeedback",
    "__version__",
]

# Public name -> the module that defines it.
_HOMES = {
    "AdaScale": "lightning_bigmodel.callbacks.adascale",
    "AdaptiveAccumulation": "lightning_bigmodel.callbacks.accumulation",
    "AdaptiveLocalSGD": "lightning_bigmodel.replicas.adaptive_local_sgd",
    "AdaptiveLocalSGDStrategy": "lightning_bigmodel.strategies.presets",
    "AllReduce": "lightning_bigmodel.replicas.dense",
    "BigModelPrecision": "lightning_bigmodel.precision.bigmodel",
    "BigModelStrategy": "lightning_bigmodel.strategies.bigmodel",
    "CommunicationMonitor": "lightning_bigmodel.callbacks.communication_monitor",
    "DGC": "lightning_bigmodel.replicas.dgc",
    "DGCStrategy": "lightning_bigmodel.strategies.presets",
    "DiLoCo": "lightning_bigmodel.replicas.diloco",
    "DiLoCoStrategy": "lightning_bigmodel.strategies.presets",
    "EightBitOptimizer": "lightning_bigmodel.callbacks.eight_bit",
    "ExponentialMovingAverage": "lightning_bigmodel.callbacks.ema",
    "Full": "lightning_bigmodel.recompute.full",
    "GradientNoiseScale": "lightning_bigmodel.callbacks.noise_scale",
    "HierarchicalAllReduce": "lightning_bigmodel.replicas.hierarchical",
    "LoRA": "lightning_bigmodel.callbacks.lora",
    "LocalSGD": "lightning_bigmodel.replicas.local_sgd",
    "LocalSGDStrategy": "lightning_bigmodel.strategies.presets",
    "Offload": "lightning_bigmodel.recompute.offload",
    "OffloadPolicy": "lightning_bigmodel.sharding.offload",
    "PowerSGD": "lightning_bigmodel.replicas.power_sgd",
    "Optimal": "lightning_bigmodel.recompute.optimal",
    "PrecisionAudit": "lightning_bigmodel.callbacks.precision_audit",
    "PreemptionCheckpoint": "lightning_bigmodel.callbacks.preemption",
    "Quantize": "lightning_bigmodel.callbacks.quantize",
    "Recompute": "lightning_bigmodel.callbacks.recompute",
    "SampledThreshold": "lightning_bigmodel.replicas.largest",
    "Selective": "lightning_bigmodel.recompute.selective",
    "SquareRoot": "lightning_bigmodel.recompute.square_root",
    "TokenWeight": "lightning_bigmodel.pipeline.token_weight",
    "TopKErrorFeedback": "lightning_bigmodel.replicas.top_k",
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
