"""A small transformer whose blocks count their forwards, and runs of it with and without recomputation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import TinyModule

# Outside of the modules, whose own attributes a second run leaves as they were.
FORWARDS: Counter[int] = Counter()


class Attention(nn.Module):
    """Causal self-attention with dropout inside of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(samples, positions, width)`."""
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """Takes a dict by keyword and a flag, gives a tuple, and counts its forwards."""

    def __init__(self, index: int, width: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: Tensor, *, given: dict[str, Any], twice: bool = False) -> tuple[Tensor, Tensor]:
        """`given["scale"]`: `(samples, 1, 1)`."""
        if type(hidden).__name__ != "FakeTensor":  # else the step is only traced
            FORWARDS[self.index] += 1
        hidden = hidden + self.dropout(self.attention(self.norm(hidden))) * given["scale"]
        hidden = hidden + self.dropout(self.mlp(hidden))
        return (2 * hidden if twice else hidden), hidden.detach().mean()


class Counted(TinyModule):
    """A chain of such blocks."""

    def __init__(self, num_blocks: int = 4, width: int = 16) -> None:
        super().__init__(width, num_blocks)
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(index, width) for index in range(num_blocks))
        self.head = nn.Linear(width, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        hidden = self.embedding(tokens)
        scale = (tokens.float().mean(1) / 20)[:, None, None]
        for block in self.blocks:
            hidden, _ = block(hidden, given={"scale": scale, "more": [None, 1.0]})
        output: Tensor = self.head(hidden)
        return output

    def loss(self, batch: Any) -> Tensor:
        """Next-token cross entropy."""
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def data() -> Tensor:
    """16 samples."""
    return torch.randint(20, (16, 9), generator=torch.Generator().manual_seed(1))


def trained(
    strategy: Any, callbacks: list[Any], devices: int = 1, batch_size: int = 8, module: Any = None, **options: Any
) -> dict[str, Any]:
    """Two epochs; weights, forwards of each block, the next random number, and what is left in the blocks."""
    torch.set_num_threads(1)
    FORWARDS.clear()
    module = Counted() if module is None else module
    torch.manual_seed(11)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "max_epochs": 2,
    }
    run = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=BigModelStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        callbacks=callbacks,
        **{**quiet, **options},
    )
    run.fit(module, DataLoader(data(), batch_size=batch_size))
    return {
        "weights": {name: value.detach().float().numpy() for name, value in module.state_dict().items()},
        "forwards": dict(FORWARDS),
        "random": float(torch.rand(())),
        "left": [name for name, part in module.named_modules() if "forward" in part.__dict__],
        "names": list(module.state_dict()),
    }
