"""Whole-model replicas that send less, under short names: `Trainer(strategy="local_sgd")` and the like."""

from __future__ import annotations

from typing import Any

from lightning_bigmodel.replicas.adaptive_local_sgd import AdaptiveLocalSGD
from lightning_bigmodel.replicas.dgc import DGC
from lightning_bigmodel.replicas.diloco import DiLoCo
from lightning_bigmodel.replicas.local_sgd import LocalSGD
from lightning_bigmodel.replicas.sync import ReplicaSync
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["PRESETS", "AdaptiveLocalSGDStrategy", "DGCStrategy", "DiLoCoStrategy", "LocalSGDStrategy"]


class _Preset(BigModelStrategy):
    """A strategy with a `replica_sync` of its own; all other settings are those of `BigModelStrategy`."""

    def __init__(self, sync: ReplicaSync, **settings: Any) -> None:
        if "replica_sync" in settings:
            raise ValueError(
                f"`replica_sync={settings['replica_sync']!r}` is what `{type(self).__name__}` sets itself. Leave it "
                "out, or use `BigModelStrategy(replica_sync=...)`."
            )
        super().__init__(replica_sync=sync, **settings)


class DGCStrategy(_Preset):
    """`BigModelStrategy(replica_sync=DGC(...))`: each step sends the largest elements of gradients; see `DGC`.

    Args:
        sparsity: Part of each gradient that is not sent.
        warmup_steps: Optimizer steps over which sparsity rises to that.
        **settings: Those of `BigModelStrategy`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=DGCStrategy(warmup_steps=500), logger=False)
    """

    def __init__(self, sparsity: float = 0.999, warmup_steps: int = 0, **settings: Any) -> None:
        super().__init__(DGC(sparsity=sparsity, warmup_steps=warmup_steps), **settings)


class LocalSGDStrategy(_Preset):
    """`BigModelStrategy(replica_sync=LocalSGD(...))`: weights are averaged every few steps; see `LocalSGD`.

    Args:
        period: Optimizer steps between agreements.
        warmup_steps: Optimizer steps at the start after each of which replicas agree.
        **settings: Those of `BigModelStrategy`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=LocalSGDStrategy(period=8), logger=False)
    """

    def __init__(self, period: int = 16, warmup_steps: int = 0, **settings: Any) -> None:
        super().__init__(LocalSGD(period=period, warmup_steps=warmup_steps), **settings)


class AdaptiveLocalSGDStrategy(_Preset):
    """`BigModelStrategy(replica_sync=AdaptiveLocalSGD(...))`: the period follows the loss; see `AdaptiveLocalSGD`.

    Args:
        initial_period: Optimizer steps between agreements at the start.
        **settings: Those of `BigModelStrategy`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=AdaptiveLocalSGDStrategy(8), logger=False)
    """

    def __init__(self, initial_period: int = 8, **settings: Any) -> None:
        super().__init__(AdaptiveLocalSGD(initial_period=initial_period), **settings)


class DiLoCoStrategy(_Preset):
    """`BigModelStrategy(replica_sync=DiLoCo(...))`: an outer optimizer steps every few dozen steps; see `DiLoCo`.

    Args:
        period: Optimizer steps between outer steps.
        **settings: Those of `BigModelStrategy`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=DiLoCoStrategy(period=50), logger=False)
    """

    def __init__(self, period: int = 50, **settings: Any) -> None:
        super().__init__(DiLoCo(period=period), **settings)


PRESETS = {
    "dgc": (DGCStrategy, "Replicas that send the largest elements of gradients (Deep Gradient Compression)"),
    "local_sgd": (LocalSGDStrategy, "Replicas that average their weights every 16 steps"),
    "adaptive_local_sgd": (AdaptiveLocalSGDStrategy, "Replicas that average their weights as often as the loss asks"),
    "diloco": (DiLoCoStrategy, "Replicas that an outer optimizer brings together every 50 steps"),
}
"""Short name -> strategy, and what it is."""
