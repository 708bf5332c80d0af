"""A module with batch normalisation in every place, and its training by hand in one process."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

CHANNELS, LENGTH = 4, 3
LEARNING_RATE = 0.1


class Block(nn.Module):
    """Normalises and mixes channels; `(samples, channels, length)` in and out."""

    def __init__(self, momentum: float | None, num_calls: int = 1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS, momentum=momentum)
        self.mix = nn.Conv1d(CHANNELS, CHANNELS, 1)
        self.num_calls = num_calls

    def forward(self, hidden: Tensor) -> Tensor:
        """With two calls the second sees something else."""
        for _ in range(self.num_calls):
            hidden = self.norm(hidden) + 0.5 * hidden
        output: Tensor = self.mix(hidden).tanh()
        return output


class Norms(LightningModule):
    """Layers of all kinds: without parameters before the blocks, first in a block, called twice, recomputed, frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.whiten = nn.BatchNorm1d(CHANNELS, affine=False)
        self.blocks = nn.ModuleList([Block(None), Block(0.3, num_calls=2), Block(0.1), Block(0.1), Block(0.2)])
        self.blocks[3].norm.eval()
        self.recomputes = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The first block sees the batch as it is, so its input is that of one process."""
        scale = self.whiten(batch).square().mean((1, 2), keepdim=True)
        hidden = self.blocks[0](batch)
        for index, block in enumerate(self.blocks[1:], 1):
            recomputes = self.recomputes and index == 2
            hidden = checkpoint(block, hidden, use_reentrant=False) if recomputes else block(hidden)
        return (hidden * scale).square().mean()

    def configure_optimizers(self) -> Any:
        """SGD, which turns no rounding noise into steps."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def samples(num_samples: int) -> Tensor:
    """Samples that drift, so that no two batches have equal statistics."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_samples, CHANNELS, LENGTH, generator=generator)
    return noise * torch.linspace(0.5, 2.0, num_samples)[:, None, None] + torch.arange(num_samples)[:, None, None] / 8


def loader(num_samples: int, batch_size: int) -> DataLoader[Any]:
    """Batches of `samples`, in order."""
    return DataLoader(samples(num_samples), batch_size=batch_size)  # type: ignore[arg-type]  # rows are samples


def by_hand(
    module: Norms, num_samples: int, batch_size: int, data_size: int, num_microbatches: int, window: int = 1
) -> dict[str, Tensor]:
    """State after an epoch in which micro-batches normalise by themselves.

    Running statistics are those of layers of one process that are shown what the layers saw, whole batches at a time.
    """
    module.recomputes = False
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.BatchNorm1d)}
    whole = {name: copy.deepcopy(layer) for name, layer in layers.items()}
    seen: dict[str, list[list[Tensor]]] = defaultdict(list)  # by layer and call
    calls: dict[str, int] = defaultdict(int)

    def note(name: str) -> Any:
        def hook(layer: nn.Module, args: Any) -> None:
            if calls[name] == len(seen[name]):
                seen[name].append([])
            seen[name][calls[name]].append(args[0].detach())
            calls[name] += 1

        return hook

    for name, layer in layers.items():
        layer.register_forward_pre_hook(note(name))
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    by_rank = [samples(num_samples)[rank::data_size].split(batch_size) for rank in range(data_size)]
    num_batches, weight = max(map(len, by_rank)), 0
    for index in range(num_batches):
        batches = [batches[index] for batches in by_rank if index < len(batches)]
        for batch in batches:
            for part in batch.tensor_split(min(num_microbatches, len(batch))):
                calls.clear()
                (module.training_step(part, index) * len(part)).backward()
                weight += len(part)
        for name, layer in whole.items():
            for inputs in seen[name]:
                layer(torch.cat(inputs))
        seen.clear()
        if (index + 1) % window == 0 or index + 1 == num_batches:
            for parameter in module.parameters():
                parameter.grad /= weight
            optimizer.step()
            optimizer.zero_grad()
            weight = 0
    state = module.state_dict()
    for name, layer in whole.items():
        state |= {f"{name}.{key}": value for key, value in layer.named_buffers()}
    return state
