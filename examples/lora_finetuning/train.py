"""A causal language model of transformers, as an ordinary LightningModule: nothing in it knows of adapters or ranks.

python train.py fit --config pretrain.yaml
python train.py fit --config lora.yaml
python train.py fit --config qlora.yaml
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_bigmodel import LoRA
from lightning_bigmodel.demo.data import ByteWindows, read_texts, window_order


class CausalLM(LightningModule):
    """A small Llama over bytes.

    Args:
        base: File of weights to begin with; random ones without.
        hidden_size: Width.
        num_layers: Blocks.
        learning_rate: Of AdamW.
    """

    def __init__(
        self, base: str | None = None, hidden_size: int = 128, num_layers: int = 4, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=hidden_size,
                intermediate_size=3 * hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                use_cache=False,
            )
        )
        if base is not None:
            self.model.load_state_dict(torch.load(base, weights_only=True))

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean cross entropy in nats a byte."""
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Logs `train_loss`."""
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs `val_loss`."""
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of all parameters; what takes no gradients is not stepped."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class LibraryText(LightningDataModule):
    """Sources of Python's own standard library, byte by byte; nothing is downloaded.

    Args:
        package: A package of the library, such as "encodings"; its top-level modules without.
        num_steps: Batches of an epoch.
        batch_size: Windows a batch, over all ranks.
        data_size: Ranks that take different batches.
    """

    def __init__(self, package: str = "", num_steps: int = 300, batch_size: int = 16, data_size: int = 1) -> None:
        super().__init__()
        self.num_steps, self.batch_size, self.data_size = num_steps, batch_size, data_size
        self.texts = read_texts(Path(sysconfig.get_path("stdlib")) / package)

    def train_dataloader(self) -> DataLoader[Any]:
        """One order of windows on any number of ranks."""
        windows = ByteWindows(self.texts[0], 64)
        order = window_order(windows.num_windows, self.num_steps * self.batch_size, seed=0)
        return DataLoader(ByteWindows(self.texts[0], 64, order), batch_size=self.batch_size // self.data_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """The first windows of files that nothing is trained on."""
        windows = ByteWindows(self.texts[1], 64, torch.arange(512))
        return DataLoader(windows, batch_size=64 // self.data_size)


class CLI(LightningCLI):
    """Trains, and writes an ordinary model: with adapters, what they were merged into, and them alone as peft does."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Where to write."""
        parser.add_argument("--output", default="results/model.pt")

    def after_fit(self) -> None:
        """All ranks have the whole model again."""
        output = Path(self.config["fit"]["output"])
        model = self.model.model
        if self.trainer.is_global_zero:
            output.parent.mkdir(parents=True, exist_ok=True)
        for callback in self.trainer.callbacks:
            if isinstance(callback, LoRA):
                if self.trainer.is_global_zero:
                    callback.save_peft(model, output.with_suffix(""))
                callback.merge(self.model)
        if self.trainer.is_global_zero:
            torch.save(model.state_dict(), output)
            print(f"{output}: val_loss {float(self.trainer.callback_metrics['val_loss']):.6f}")


if __name__ == "__main__":
    CLI(CausalLM, LibraryText, save_config_callback=None)
