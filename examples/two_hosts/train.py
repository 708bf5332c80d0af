"""An ordinary Lightning script; how many hosts and ranks there are is the Trainer's business and torchrun's."""

import argparse
import json
import logging
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.demo.model import ByteGPT

_GLOBAL_BATCH_SIZE = 16
_NUM_STEPS = 10


class Losses(Callback):
    """Keeps the loss of each step, as this rank was told it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="ranks a node")
    parser.add_argument("--stages", type=int, default=1, help="ranks the model is cut over; 1 is plain Lightning")
    parser.add_argument("--output", type=Path, required=True, help="folder for losses, weights and the layout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")

    seed_everything(0, verbose=False)
    model = ByteGPT(width=64, num_blocks=4, context=32)
    rows = torch.randint(0, 256, (_NUM_STEPS * _GLOBAL_BATCH_SIZE, 33))
    num_replicas = options.num_nodes * options.devices // options.stages
    loader = DataLoader(
        TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), _GLOBAL_BATCH_SIZE // num_replicas
    )
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=options.num_nodes,
        devices=options.devices,
        strategy="auto" if options.stages == 1 else BigModelStrategy(pipeline_parallel_size=options.stages),
        max_epochs=1,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    options.output.mkdir(parents=True, exist_ok=True)
    rank = trainer.global_rank
    (options.output / f"losses-{rank}.json").write_text(json.dumps(losses.values))
    if rank == 0:
        torch.save(model.state_dict(), options.output / "weights.pt")


if __name__ == "__main__":
    main()
