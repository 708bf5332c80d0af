"""A small model and its training loop under row shards, in plain torch, to compare with one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel.sharding.gather import ParameterShards
from lightning_bigmodel.sharding.offload import HostCopies
from lightning_bigmodel.sharding.passes import GatherPasses
from lightning_bigmodel.sharding.reduce import BucketReducer, reduce_leftovers
from lightning_bigmodel.sharding.units import find_blocks, make_units
from lightning_bigmodel.sharding.zero import ZeroShards
from lightning_bigmodel.testing import CollectiveCounter

VOCABULARY = 11


class Block(nn.Module):
    """Widths that no number of ranks divides, and a raw parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """A residual block."""
        return hidden + self.gain * self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    """Tied embedding and head, blocks, a raw parameter at the top, a layer that only some batches use."""

    def __init__(self, width: int = 6, num_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(width))
        self.extra = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, uses_extra: bool = False) -> Tensor:
        """Logits."""
        hidden = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if uses_extra and index == 0:
                hidden = self.extra(hidden)
        logits: Tensor = self.head(hidden * self.scale)
        return logits


def batch(step: int, part: int) -> Tensor:
    """Tokens of one rank's part of a step, or of one micro-batch of it."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(0, VOCABULARY, (4, 5), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor, num_parts: int, uses_extra: bool) -> Tensor:
    """This part's share of the mean."""
    logits = model(tokens, uses_extra=uses_extra)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / num_parts


def reference(num_parts: int, uses_extra: list[bool], num_steps: int = 3, frozen: str = "") -> dict[str, Any]:
    """One process; part `i` of each step goes through the extra blocks where `uses_extra[i]`."""
    model = Model()
    freeze(model, frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in range(num_parts):
            loss_of(model, batch(step, part), num_parts, uses_extra[part]).backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def freeze(model: nn.Module, pattern: str) -> None:
    """Take the gradient off parameters with `pattern` in their name."""
    for name, parameter in model.named_parameters():
        if pattern and pattern in name:
            parameter.requires_grad_(False)


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages under some tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Sharded:
    """One rank of a sharded training of `Model`, without Lightning."""

    def __init__(
        self,
        stage: int,
        *,
        keep_gathered: bool = False,
        every_microbatch: bool | None = None,
        frozen: str = "",
        model: nn.Module | None = None,
        compute_dtype: torch.dtype | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        self.stage, self.model = stage, model if model is not None else Model()
        freeze(self.model, frozen)
        names = {id(p): name for name, p in self.model.named_parameters()}
        parameters = list(self.model.parameters())
        self.every = stage >= 2 if every_microbatch is None else every_microbatch
        self.optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)
        group, device = dist.group.WORLD, torch.device("cpu")
        self.passes: GatherPasses | None = None
        if stage == 3:
            blocks = find_blocks(self.model)
            units = make_units(blocks, parameters, list(blocks.values()))
            self.shards: Any = ParameterShards(
                units,
                names,
                group=group,
                device=device,
                keep_gathered=keep_gathered,
                compute_dtype=compute_dtype,
                copies=copies,
            )
            self.passes = GatherPasses(self.shards, units, reduce_every_microbatch=self.every)
            self.reducer = self.passes.reducer
        else:
            named = dict(self.model.named_parameters())
            self.shards = ZeroShards(named, stage=stage, group=group, compute_dtype=compute_dtype, copies=copies)
            self.reducer = BucketReducer(self.shards, parameters, while_backward=self.every)
        self.shards.hand_to(self.optimizer)

    def microbatch(self, step: int, part: int, num_parts: int, uses_extra: bool) -> None:
        """Forward and backward of one part."""
        with self.passes.forward(part) if self.passes else nullcontext():
            loss = loss_of(self.model, batch(step, part), num_parts, uses_extra)
        self.backward(loss, part)

    def backward(self, loss: Tensor, part: int) -> None:
        """Backward of one part, announced as a stage does."""
        if self.passes:
            self.passes.begin_backward(part)
            loss.backward()
            self.passes.end_backward(part)
        elif self.every:
            self.reducer.open()
            loss.backward()
            self.reducer.flush()
        else:
            loss.backward()

    def finish_step(self) -> None:
        """Reduce the rest, step, publish."""
        if self.every:
            reduce_leftovers([self.reducer], None, torch.device("cpu"))
        else:
            self.reducer.flush()
        for parameter in self.shards.trained():
            self.forget_unused(parameter)
        self.optimizer.step()
        self.shards.publish(self.shards.trained())
        self.shards.start_window()

    def forget_unused(self, parameter: nn.Parameter) -> None:
        """Leave a parameter alone that no rank used, as the gradient window does."""
        used = torch.tensor(float(id(parameter) in self.shards.present))
        dist.all_reduce(used)
        if not used:
            self.shards.shards[id(parameter)].grad = None

    def state_bytes(self) -> dict[str, int]:
        """Bytes of parameters (rows included), gradients and optimizer state."""
        shards = list(self.shards.shards.values())
        wholes = list(self.shards.wholes.values())
        gradients = [t.grad for t in [*shards, *self.model.parameters()] if t.grad is not None]
        states = [v for s in self.optimizer.state.values() for v in s.values() if v.ndim]
        return {
            "parameters": storage_bytes([*[s.data for s in shards], *wholes]),
            "gradients": storage_bytes(gradients),
            "optimizer": storage_bytes(states),
        }


def counted(work: Any) -> dict[str, tuple[int, int]]:
    """Collectives of `work()`."""
    with CollectiveCounter() as counter:
        work()
    return counter.as_dict()
