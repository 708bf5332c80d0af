"""LightningModules whose steps do between blocks what a stage must repeat to the letter, or cannot repeat.

`HABITS` lists those that must train to the numbers of one process, `REFUSED` those that must be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategies.own_modules import WIDTH, OwnModule

__all__ = ["HABITS", "REFUSED"]


def _chain(num_blocks: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(num_blocks))


class _TwoArguments(nn.Module):
    """A linear block that takes and returns a second value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + torch.tanh(self.linear(hidden)), other * 1.0


class DistributionVAE(OwnModule):
    """Distributions check their arguments, also where a stage repeats code on values it does not have.

    The losses are logged where their values are, on different stages; the noise is part of the batch, as no two layouts
    draw equal noise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 12), nn.ELU(), nn.Linear(12, 12), nn.ELU())
        self.mean, self.log_variance = nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ELU(), nn.Linear(12, 12), nn.ELU(), nn.Linear(12, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Reconstruction and divergence."""
        inputs, noise = batch
        hidden = self.encoder(inputs)
        posterior = torch.distributions.Normal(self.mean(hidden), (0.5 * self.log_variance(hidden)).exp())
        prior = torch.distributions.Normal(torch.zeros_like(posterior.loc), torch.ones_like(posterior.scale))
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        self.log("divergence", divergence)
        latent = posterior.loc + posterior.scale * noise[:, :4]
        reconstruction = F.mse_loss(self.decoder(latent), inputs)
        self.log("reconstruction", reconstruction, on_step=True, on_epoch=True)
        return reconstruction + 0.1 * divergence


class Edits(OwnModule):
    """Blocks' outputs edited in place between blocks, through views and with other blocks' values, read later."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _chain(6)
        self.head = nn.Linear(6 * WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        """Regression on all blocks' outputs, gathered in a buffer that is written slice by slice."""
        hidden, targets = batch
        gathered = hidden.new_zeros(len(hidden), 6, WIDTH)
        first = None
        for index, block in enumerate(self.blocks):
            output = block(hidden)
            first = output.clone() if first is None else first
            output += hidden
            output[:, :2] = first[:, 2:4]
            output[:, 3:].mul_(1.1)
            gathered[:, index] = output
            hidden = output
        return F.mse_loss(self.head(gathered.flatten(1)), targets) + F.mse_loss(hidden, targets)


class EditsInside(OwnModule):
    """Blocks that begin with an in-place activation of what the previous one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden, targets = self.stem(batch[0]), batch[1]
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(hidden, targets)


class EditsBatch(OwnModule):
    """The batch is scaled in place: a second run of the step on it, or a trace, must not scale it again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _chain()

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden, targets = batch
        hidden.mul_(0.5).add_(1.0)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.mse_loss(hidden, targets)


class ReadsValues(OwnModule):
    """Values of an early block become Python numbers and NumPy arrays, which steer the loss and are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _chain()

    def loss(self, batch: Any) -> Tensor:
        """Regression, weighted by what was read; no later block gets the first one's output."""
        hidden, targets = batch
        hidden = self.blocks[0](hidden)
        column = int(float(hidden.detach().norm()) > 1e-6)
        array = hidden.detach().cpu().numpy()
        self.log("first", float(array.mean()))
        for block in list(self.blocks)[1:]:
            hidden = block(hidden)
        self.log("accuracy", float((hidden.detach().argmax(1).numpy() == targets.argmax(1).numpy()).mean()))
        self.log("last", sum(hidden.detach().mean(1).tolist()) / len(hidden))
        weight = 2.0 if np.abs(array).sum() > 0 else 1.0
        return weight * F.mse_loss(hidden, targets) + hidden[:, column].square().mean()


class DrawsNoise(OwnModule):
    """Noise drawn between blocks is used by code of the first stage and of the last: both must have drawn the same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_TwoArguments() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        """Regression, and the difference between the noise that travelled and the noise at hand: zero."""
        hidden, targets = self.stem(batch[0]), batch[1]
        noise = carried = torch.randn(hidden.shape)
        for block in self.blocks:
            hidden, carried = block(hidden, carried)
        return F.mse_loss(hidden, targets) + 100 * (noise - carried).square().mean()


class KeepsTensors(OwnModule):
    """Buffers and tensor attributes, written after the blocks, in place and anew, and read on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _chain()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("latest", torch.zeros(()))
        self.plain = torch.zeros(WIDTH)

    def loss(self, batch: Any) -> Tensor:
        """Regression, at a distance from the center."""
        hidden, targets = batch
        for block in self.blocks:
            hidden = block(hidden)
        self.center.fill_(self.global_step + 1.0)
        self.latest = torch.full((), self.global_step + 2.0)
        self.plain.fill_(self.global_step + 3.0)
        return F.mse_loss(hidden, targets + self.center)

    def on_train_batch_end(self, *args: Any) -> None:
        """Logs what this rank has."""
        self.log_dict({"center": self.center.sum(), "latest": self.latest, "plain": self.plain.sum()})


class FeatureHook(OwnModule):
    """A forward hook keeps the output of an early block, and the loss reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _chain()
        self.kept: Tensor | None = None

    def setup(self, stage: str) -> None:
        """Registers the hook."""
        self.blocks[0].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def loss(self, batch: Any) -> Tensor:
        """Regression with a penalty on the features."""
        hidden, targets = batch
        for block in self.blocks:
            hidden = block(hidden)
        assert self.kept is not None
        return F.mse_loss(hidden, targets) + 0.1 * self.kept.square().mean()


class ChangingHooks(OwnModule):
    """Hooks that change what blocks take and return, in place or not, and a second one that keeps the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _chain()
        self.kept: list[Tensor] = []

    def setup(self, stage: str) -> None:
        """Registers them on a block of each stage."""
        for block in (self.blocks[0], self.blocks[-1]):
            block.register_forward_pre_hook(lambda module, args: args[0] * 0.5)
            block.register_forward_hook(lambda module, args, output: output * 1.5)
            block.register_forward_hook(lambda module, args, kwargs, output: self.kept.append(output), with_kwargs=True)
        self.blocks[1].register_forward_hook(lambda module, args, output: output.mul_(0.5))

    def loss(self, batch: Any) -> Tensor:
        """Regression with residual connections, so that early outputs pass all cuts."""
        hidden, targets = batch
        self.kept.clear()
        outputs = []
        for block in self.blocks:
            hidden = hidden + block(hidden)
            outputs.append(hidden)
        return F.mse_loss(sum(outputs, torch.zeros(())), targets) + 0.1 * self.kept[0].square().mean()


class GradientHooks(OwnModule):
    """Hooks on the gradients of blocks' outputs and of sums of them, which later stages use too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _chain()

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden, targets = batch
        outputs = []
        for block in self.blocks:
            output = block(hidden)
            hidden = hidden + output
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * 2.0)
                hidden.register_hook(lambda gradient: gradient * 0.7)
            outputs.append(output)
        return F.mse_loss(hidden + sum(outputs, torch.zeros(())), targets)


class CheckpointedGroups(OwnModule):
    """Functions of several blocks that are recomputed as a whole: no stage may begin inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))

    def loss(self, batch: Any) -> Tensor:
        """Regression; groups of three, one, two, and two blocks, where equal stages would begin at 2, 4 and 6."""
        hidden, targets = batch

        def run(hidden: Tensor, first: int, last: int) -> Tensor:
            for block in self.blocks[first:last]:
                hidden = hidden + block(hidden)
            return hidden

        for first, last in ((0, 3), (3, 4), (4, 6), (6, 8)):
            hidden = checkpoint(run, hidden, first, last, use_reentrant=False)
        return F.mse_loss(hidden, targets)


# -- refused -----------------------------------------------------------------------------------------------------------


class Reentrant(OwnModule):
    """Recomputation that builds its graph in backward only: a stage cannot end inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = _chain()

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden = self.stem(batch[0])
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        return F.mse_loss(hidden, batch[1])


class _WritesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        memory[:, 0].add_(1.0)
        return torch.tanh(self.linear(hidden)) + memory


class WritesMemory(OwnModule):
    """Blocks that write into one argument, through a view: the others' stages would not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_WritesMemory() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden, memory = batch[0], self.stem(batch[0])
        for block in self.blocks:
            hidden = block(hidden, memory)
        return F.mse_loss(hidden, batch[1])


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Tensor]) -> None:
        state["hidden"] = torch.tanh(self.linear(state["hidden"]))


class WritesState(OwnModule):
    """Blocks that return nothing and put their result into a dict they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Writes() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        state = {"hidden": batch[0]}
        for block in self.blocks:
            block(state)
        return F.mse_loss(state["hidden"], batch[1])


class _Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _ReturnsOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: _Opaque) -> _Opaque:
        return _Opaque(torch.tanh(self.linear(value.hidden)))


class ReturnsOpaque(OwnModule):
    """Blocks that return an object of a class of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ReturnsOpaque() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        value = _Opaque(batch[0])
        for block in self.blocks:
            value = block(value)
        return F.mse_loss(value.hidden, batch[1])


HABITS: dict[str, Callable[[], OwnModule]] = {
    module.__name__: module
    for module in (
        ChangingHooks,
        GradientHooks,
        CheckpointedGroups,
        DistributionVAE,
        Edits,
        EditsInside,
        EditsBatch,
        ReadsValues,
        DrawsNoise,
        KeepsTensors,
        FeatureHook,
    )
}

# Each with a part of the message that refuses it.
REFUSED: dict[str, tuple[Callable[[], OwnModule], str]] = {
    "Reentrant": (Reentrant, "Use `use_reentrant=False`"),
    "WritesMemory": (WritesMemory, "A value made inside `blocks.0` (pipeline stage 0) is used by blocks.1"),
    "WritesState": (WritesState, "written into an argument in place"),
    "ReturnsOpaque": (ReturnsOpaque, "`blocks.0` returns an object of type _Opaque"),
}
