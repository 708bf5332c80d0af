"""A LightningModule to be tuned, and what its runs count."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import CollectiveCounter
from tests.strategies.trainer_modules import trainer

WIDTH = 32


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """The same shape."""
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Tuned(LightningModule):
    """Blocks between an embedding's worth of a layer and a head; knows of no adapters.

    Args:
        on_meta: Whether the layers are made in `configure_model`, on the meta device.
        base_dtype: Type of all of it but the head.
    """

    def __init__(self, on_meta: bool = False, base_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.on_meta, self.base_dtype = on_meta, base_dtype
        self.has_frozen_gradients = False
        if not on_meta:
            self.build()

    def build(self) -> None:
        """Make the layers."""
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.enter = nn.Linear(WIDTH, WIDTH).to(self.base_dtype)
            self.blocks = nn.ModuleList(Block() for _ in range(4)).to(self.base_dtype)
            self.head = nn.Linear(WIDTH, 2)

    def configure_model(self) -> None:
        """The hook for large models."""
        if self.on_meta and not hasattr(self, "head"):
            with torch.device("meta"):
                self.build()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        hidden = self.enter(batch[0].to(self.base_dtype))
        for block in self.blocks:
            hidden = block(hidden)
        loss = nn.functional.mse_loss(self.head(hidden.float()), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note gradients that nobody asked for."""
        self.has_frozen_gradients |= any(p.grad is not None for p in self.parameters() if not p.requires_grad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


def batches(num_samples: int, batch_size: int) -> DataLoader[Any]:
    """Random inputs and targets."""
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(num_samples, WIDTH, generator=generator), torch.randn(num_samples, 2, generator=generator)
    )
    return DataLoader(data, batch_size=batch_size)


class CountStep(Callback):
    """What the second batch sends; the first one also sets things up."""

    def __init__(self) -> None:
        self.counter = CollectiveCounter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to count."""
        if batch_idx == 1 and trainer.current_epoch == 0:
            self.counter.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        if batch_idx == 1 and trainer.current_epoch == 0:
            self.counter.__exit__()


def fit(
    callbacks: list[Any],
    devices: int,
    settings: dict[str, Any],
    options: dict[str, Any] | None = None,
    *,
    kind: type[Tuned] = Tuned,
    max_epochs: int = 1,
    save: str | None = None,
    resume: str | None = None,
) -> dict[str, Any]:
    """Train, and tell weights, moments, gradients and bytes.

    Args:
        callbacks: The Trainer's.
        devices: Ranks.
        settings: Of the strategy.
        options: Of the module.
        kind: Its class.
        max_epochs: Of two batches each.
        save: Where to save at the end.
        resume: What to go on from.
    """
    module, count = kind(**(options or {})), CountStep()
    model_size = settings.get("pipeline_parallel_size", 1) * settings.get("tensor_parallel_size", 1)
    fitted = trainer(BigModelStrategy(**settings), devices, max_epochs=max_epochs, callbacks=[*callbacks, count])
    fitted.fit(module, batches(16, 8 * model_size // devices), ckpt_path=resume)
    if save:
        fitted.save_checkpoint(save)
    weights = {name: p.detach().float().numpy().copy() for name, p in module.named_parameters()}
    state = fitted.strategy.optimizer_state(fitted.optimizers[0])["state"]  # type: ignore[attr-defined]
    return {
        "weights": weights,
        "names_with_moments": sorted(name for name, entries in state.items() if "exp_avg" in entries),
        "sent": dict(count.counter.payload_bytes),
        "has_frozen_gradients": module.has_frozen_gradients,
    }
