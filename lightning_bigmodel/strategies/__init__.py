"""Lightning strategies: thin glue over the plain-torch packages."""

__all__ = ["register_strategies"]


def register_strategies() -> None:
    """Make the short names known to `Trainer(strategy="...")`. Does nothing twice."""
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_bigmodel.strategies.bigmodel import BigModelStrategy
    from lightning_bigmodel.strategies.presets import PRESETS

    if "bigmodel" not in StrategyRegistry:
        BigModelStrategy.register_strategies(StrategyRegistry)
        for name, (strategy, description) in PRESETS.items():
            StrategyRegistry.register(name, strategy, description=description)


register_strategies()
