"""Modules for the tests of tensor parallelism, and one way to compare a cut module with the whole one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bigmodel.sharding.tensor import TensorSlices, apply_tensor_plan
from lightning_bigmodel.testing import CollectiveCounter

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 24, 6


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


class Gated(nn.Module):
    """Gate and value lie side by side in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 64)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Attention(nn.Module):
    """A fused q|k|v and a norm of each head."""

    def __init__(self, dropout: float = 0.0, head_norm: bool = True) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.head_dim = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q_norm = nn.LayerNorm(self.head_dim) if head_norm else nn.Identity()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.num_heads, self.head_dim)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        heads = F.dropout(heads, self.dropout, self.training)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), Mlp()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Language(nn.Module):
    """A small language model whose forward gives a loss."""

    def __init__(self, num_blocks: int = 2, tied: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.start = nn.Dropout(0.0)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.start(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


BLOCK_PLAN = {
    "blocks.*.attn.qkv": "colwise:3",
    "blocks.*.attn.q_norm": "replicate_partial",
    "blocks.*.attn.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}


def randomize(module: nn.Module) -> nn.Module:
    """Weights of which none is zero or one, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 if parameter.dim() > 1 else 1 + noise * 0.2)
    return module


def quietly(make: Callable[[], Any]) -> Any:
    """What a function returns, without the advice of libraries on tiny models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def train(module: nn.Module, step: Callable[[nn.Module], Tensor], num_steps: int, summed: Any = ()) -> list[float]:
    """SGD; leaves the last gradients. Returns the losses."""
    losses = []
    for index in range(num_steps):
        module.zero_grad()
        loss = step(module)
        loss.backward()
        for parameter in summed:
            dist.all_reduce(parameter.grad)
        losses.append(loss.item())
        if index < num_steps - 1:
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 * parameter.grad
    return losses


def largest_error(value: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference, relative to the largest number expected or to 0.1.

    Below that stands rounding only: of gradients that are zero in exact arithmetic, such as a key's bias has.
    """
    if value is None or expected is None:
        other = value if expected is None else expected
        return 0.0 if other is None else other.abs().max().item()
    return ((value - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()


def compare(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module], Tensor],
    plan: dict[str, str],
    num_steps: int = 3,
) -> dict[str, Any]:
    """Run in ranks: trains the module whole and cut. Returns the largest errors and what was sent in one step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = quietly(make)
    cut = copy.deepcopy(whole)
    names = {name: id(parameter) for name, parameter in cut.named_parameters()}
    slices = apply_tensor_plan(cut, plan, dist.group.WORLD, rank, size)
    assert {name: id(parameter) for name, parameter in cut.named_parameters()} == names
    losses = train(whole, step, num_steps)
    own_losses = train(cut, step, num_steps, slices.partial_gradients)
    errors = {"loss": max(abs(a - b) for a, b in zip(losses, own_losses, strict=True))}
    expected = dict(whole.named_parameters())
    for name, parameter in cut.named_parameters():
        gradient = None if parameter.grad is None else slices.gather_full(parameter, parameter.grad)
        errors[f"gradient of {name}"] = largest_error(gradient, expected[name].grad)
        errors[name] = largest_error(slices.gather_full(parameter, parameter.data), expected[name].data)
    with CollectiveCounter() as forward:
        loss = step(cut)
    with CollectiveCounter() as backward:
        loss.backward()
    del loss  # a graph that is alive keeps the shape of a parameter's gradient
    num_cut = len(slices.records)
    regions_are_right(cut, slices)
    slices.restore()
    errors["restored"] = abs(train(cut, step, 1)[0] - train(whole, step, 1)[0])
    return {
        "errors": errors,
        "forward": forward.as_dict(),
        "backward": backward.as_dict(),
        "num_cut": num_cut,
        "shapes": all(p.shape == expected[name].shape for name, p in cut.named_parameters()),
    }


def regions_are_right(module: nn.Module, slices: TensorSlices) -> None:
    """Rectangles must say what `slice_full` does."""
    for parameter in module.parameters():
        if not slices.is_sliced(parameter):
            continue
        full = slices.gather_full(parameter, parameter.data)
        assert torch.equal(slices.slice_full(parameter, full), parameter.data)
        assert full.shape == slices.full_shape(parameter)
        local = torch.full_like(parameter.data, torch.nan)
        for region in slices.records[id(parameter)].regions:
            source = tuple(slice(o, o + s) for o, s in zip(region.full_offsets, region.sizes, strict=True))
            target = tuple(slice(o, o + s) for o, s in zip(region.local_offsets, region.sizes, strict=True))
            local[target] = full[source]
        assert torch.equal(local, parameter.data)
