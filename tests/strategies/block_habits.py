"""LightningModules whose blocks take, return or share what a pipeline could lose on the way.

`HABITS` lists them; each must train to the numbers of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategies.own_modules import WIDTH, OwnModule, token_sequences

__all__ = ["HABITS"]


@dataclass
class _State:
    hidden: Tensor
    total: Tensor
    depth: int = 0


class _DataclassBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: _State) -> _State:
        hidden = torch.tanh(self.linear(state.hidden)) + state.hidden
        return _State(hidden, state.total + hidden.square().mean(1), state.depth + 1)


class DataclassBlocks(OwnModule):
    """Blocks that take and return a dataclass with two tensors and a counter; a dict batch with a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_DataclassBlock() for _ in range(4))

    @staticmethod
    def batch(generator: torch.Generator, num_samples: int) -> Any:
        """A nested batch: tensors in a dict and in a list, names of samples, a number and None."""
        first, second = OwnModule.batch(generator, num_samples)
        names = [f"sample {index}" for index in range(num_samples)]
        return {"views": [first, second], "extra": {"names": names, "scale": 0.5, "mask": None}}

    def loss(self, batch: Any) -> Tensor:
        """Alignment of the two views."""
        first, second = batch["views"]
        assert len(batch["extra"]["names"]) == len(first)
        state = _State(first * batch["extra"]["scale"], first.new_zeros(len(first)))
        for block in self.blocks:
            state = block(state)
        assert state.depth == 4
        return F.mse_loss(state.hidden, second) + 0.01 * state.total.mean()


class _Pair(NamedTuple):
    left: Tensor
    right: Tensor


class _PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: _Pair, *, context: dict[str, Tensor]) -> _Pair:
        left = pair.left + torch.tanh(self.left(pair.right)) * context["gain"]
        return _Pair(left, pair.right + torch.tanh(self.right(left)))


class Reversible(OwnModule):
    """Blocks named `block1` to `block4`, called by name, that exchange named tuples under a keyword of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.context = nn.Linear(WIDTH, WIDTH)
        self.block1, self.block2, self.block3, self.block4 = (_PairBlock() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        """Regression; the context is computed once and read by every block."""
        inputs, targets = batch
        context = {"gain": self.context(inputs).sigmoid()}
        pair = _Pair(inputs, inputs.flip(1))
        pair = self.block2(self.block1(pair, context=context), context=context)
        pair = self.block4(self.block3(pair, context=context), context=context)
        return F.mse_loss(pair.left, targets) + F.mse_loss(pair.right, targets.flip(1))


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + checkpoint(self.inner, hidden, use_reentrant=False)
        return output


class Checkpointed(OwnModule):
    """Recomputed blocks - some from inside, some from outside, where the recomputation calls the block again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Checkpointed() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden, targets = batch
        for index, block in enumerate(self.blocks):
            hidden = checkpoint(block, hidden, use_reentrant=False) if index % 2 else block(hidden)
        return F.mse_loss(hidden, targets)


class FrozenBackbone(OwnModule):
    """Frozen blocks with low-rank updates in every second one: what crosses the first cut needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
        self.blocks.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(2))

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden, targets = batch
        for index, block in enumerate(self.blocks):
            output = block(hidden)
            hidden = output if index < 4 else output + self.up[index - 4](self.down[index - 4](hidden))
        return F.mse_loss(hidden, targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two groups of the trained parameters alone, with learning rates of their own."""
        groups = [{"params": list(self.down.parameters())}, {"params": list(self.up.parameters()), "lr": 2e-3}]
        return torch.optim.AdamW(groups, lr=1e-3, eps=1e-5)


class SharedNorm(OwnModule):
    """One norm and one bias inside all blocks: parameters owned by every stage, each with a part of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        norm, bias = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        for block in self.blocks:
            block[1].bias = bias

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden, targets = batch
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.mse_loss(hidden, targets)


class LayerMix(OwnModule):
    """As ELMo: the loss reads a learned mean of all blocks' outputs; a teacher without gradient reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.mix = nn.Parameter(torch.zeros(4))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        """Regression and distillation."""
        hidden, targets = batch
        outputs = []
        for layer in self.layers:
            hidden = layer(hidden)
            outputs.append(hidden)
        with torch.no_grad():
            taught = self.teacher(outputs[0])
        mixed = (torch.stack(outputs) * self.mix.softmax(0)[:, None, None]).sum(0)
        return F.mse_loss(mixed, targets) + 0.1 * F.mse_loss(hidden, taught)


class SharedTower(OwnModule):
    """A Siamese network: both halves of a batch go through one tower as one tensor, split apart for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({f"level{index}": nn.Linear(WIDTH, WIDTH) for index in range(4)})

    def loss(self, batch: Any) -> Tensor:
        """One minus the cosine of the two views."""
        hidden = torch.cat(batch)
        for level in self.tower.values():
            hidden = torch.relu(level(hidden)) + hidden
        first, second = hidden.chunk(2)
        return 1 - F.cosine_similarity(first, second).mean()


class _Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor, flags: Tensor) -> dict[str, Any]:
        output = torch.tanh(self.linear(hidden))
        return {
            "hidden": output,
            "flags": flags ^ (output > 0),
            "index": output.detach().argmax(1),
            "gain": self.gain(output).sigmoid().bfloat16(),
            "scale": output.square().mean(),
            "spectrum": torch.fft.rfft(output),
            "nothing": output[:, :0],
            "none": None,
            "depth": 1,
        }


class ManyKinds(OwnModule):
    """All kinds of values cross the cuts: bool, integer, half and complex tensors, scalars, empty ones, None."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Zoo() for _ in range(4))
        self.codes = nn.Embedding(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        """Regression on everything that the blocks returned."""
        hidden, targets = batch
        flags, found = hidden > 0, []
        for block in self.blocks:
            result = block(hidden, flags)
            hidden, flags = result["hidden"] * result["gain"].float(), result["flags"]
            found.append(result)
        assert sum(result["depth"] for result in found) == 4
        codes = self.codes(torch.stack([result["index"] for result in found], 1)).mean(1)
        penalty = sum(result["scale"] + result["nothing"].sum() for result in found)
        energy = torch.stack([result["spectrum"].abs().mean() for result in found]).mean()
        return F.mse_loss(hidden * flags + codes, targets) + 0.1 * penalty + 0.1 * energy


class WeightNormed(OwnModule):
    """Parametrised blocks, whose class is one of a kind already, built when training starts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: nn.ModuleList | None = None

    def configure_model(self) -> None:
        """Builds the blocks (such modules do not pickle), with the same weights in every process."""
        if self.blocks is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.blocks = nn.ModuleList(
                    nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)
                )

    def loss(self, batch: Any) -> Tensor:
        """Regression, with a penalty on every weight, read outside of its block."""
        hidden, targets = batch
        for block in self.blocks or ():
            hidden = hidden + torch.tanh(block(hidden))
        return F.mse_loss(hidden, targets) + 0.01 * sum(p.square().sum() for p in self.parameters())


class TwoBranches(OwnModule):
    """Two chains that exchange values at every depth, and whose inputs blocks hand through unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(_Passing() for _ in range(3))
        self.right = nn.ModuleList(_Passing() for _ in range(3))

    def loss(self, batch: Any) -> Tensor:
        """Regression on both ends; the detached left end is the right one's second target."""
        inputs, targets = batch
        left = right = inputs
        for first, second in zip(self.left, self.right, strict=True):
            (new_left, old_left), (new_right, old_right) = first(left), second(right)
            left, right = new_left + old_right, new_right + old_left
        return F.mse_loss(left, targets) + F.mse_loss(right, targets) + F.mse_loss(right, left.detach())


class _Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(hidden)), hidden


class PackedLSTM(OwnModule):
    """Packed sequences travel between the layers: a named tuple sized by the lengths in the batch."""

    batch = staticmethod(token_sequences)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, 20)

    def loss(self, batch: Any) -> Tensor:
        """Prediction of the next token of sequences whose lengths are read from their first token."""
        tokens, labels = batch
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), (tokens[:, 0] % 4 + 3).cpu(), batch_first=True, enforce_sorted=False
        )
        for layer in self.layers:
            packed, _ = layer(packed)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=tokens.shape[1])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


HABITS: dict[str, Callable[[], OwnModule]] = {
    module.__name__: module
    for module in (
        DataclassBlocks,
        Reversible,
        Checkpointed,
        FrozenBackbone,
        SharedNorm,
        LayerMix,
        SharedTower,
        ManyKinds,
        WeightNormed,
        TwoBranches,
        PackedLSTM,
    )
}
