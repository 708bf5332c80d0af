"""What callbacks have in common that act right after the module's `configure_model` or `configure_optimizers`."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_bigmodel import _host

__all__ = ["AfterConfigure"]


class AfterConfigure(Callback):
    """Takes off, at the end of a run however it ends, what `setup` asked the module's hooks for and did not come to."""

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _host.forget_after_configure(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        _host.forget_after_configure(pl_module)
