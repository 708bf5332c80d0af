"""An ordinary Lightning script; how many hosts and ranks there are is the Trainer's business and torchrun's."""

import argparse
import json
import logging
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy

_GLOBAL_BATCH_SIZE = 16
_NUM_STEPS = 10


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.layers(hidden)


class Classifier(LightningModule):
    """Nothing in it knows of hosts, ranks or stages."""

    def __init__(self, width: int = 128, num_blocks: int = 6, num_classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(num_blocks)))
        self.head = nn.Linear(width, num_classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, labels = batch
        loss = F.cross_entropy(self.head(self.blocks(features)), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


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
    parser.add_argument("--zero-stage", type=int, default=0, help="states that data ranks shard (1, 2 or 3)")
    parser.add_argument("--replicas", type=int, help="whole-model replicas; default: one a host, sharded inside it")
    parser.add_argument("--output", type=Path, required=True, help="folder for each rank's losses and the weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.simplefilter("ignore")

    seed_everything(0, verbose=False)
    model = Classifier()
    num_rows = _NUM_STEPS * _GLOBAL_BATCH_SIZE
    num_replicas = options.num_nodes * options.devices // options.stages
    # As with any data-parallel strategy of Lightning, a loader's batch size is that of one replica.
    data = TensorDataset(torch.randn(num_rows, 128), torch.randint(0, 10, (num_rows,)))
    loader = DataLoader(data, _GLOBAL_BATCH_SIZE // num_replicas, shuffle=True)
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=options.num_nodes,
        devices=options.devices,
        strategy=BigModelStrategy(
            pipeline_parallel_size=options.stages,
            zero_stage=options.zero_stage,
            data_replicate_size=options.replicas,
        )
        if options.stages > 1 or options.zero_stage
        else "auto",
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
    environment = getattr(trainer.strategy, "cluster_environment", None)
    report = {"losses": losses.values, "node": trainer.node_rank, "environment": type(environment).__name__}
    (options.output / f"rank-{rank}.json").write_text(json.dumps(report))
    if rank == 0:
        torch.save(model.state_dict(), options.output / "weights.pt")


if __name__ == "__main__":
    main()
