"""The blocks that the tiny modules are made of, and the dataset they read."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["CrossBlock", "Rows", "SelfBlock", "TanhBlock"]


class TanhBlock(nn.Module):
    """Linear, optionally batch normalisation, and Tanh; `(..., num_features)` to the same shape."""

    def __init__(self, num_features: int, *, keep: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, num_features)
        self.norm = nn.BatchNorm1d(num_features) if batch_norm else nn.Identity()
        self._keep = keep
        self.kept: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Runs the block, and with `keep` stores what it has before the Tanh."""
        inner: Tensor = self.norm(self.linear(hidden))
        if self._keep:
            self.kept = inner
        return inner.tanh()


class _Attention(nn.Module):
    def __init__(self, num_features: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        if num_features % num_heads:
            raise ValueError(f"`num_features={num_features}` must be a multiple of `num_heads={num_heads}`.")
        self._num_heads = num_heads
        self._causal = causal
        self.query = nn.Linear(num_features, num_features)
        # A bias on keys has no gradient but rounding noise, which Adam blows up to full steps: nothing to compare.
        self.key_value = nn.Linear(num_features, 2 * num_features, bias=False)
        self.output = nn.Linear(num_features, num_features)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        keys, values = self.key_value(memory).chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(
            self._heads(self.query(hidden)), self._heads(keys), self._heads(values), is_causal=self._causal
        )
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, values: Tensor) -> Tensor:
        """Reshapes `(samples, positions, features)` to `(samples, heads, positions, features of a head)`."""
        split: Tensor = values.unflatten(-1, (self._num_heads, -1))
        return split.transpose(1, 2)


class SelfBlock(nn.Module):
    """Self-attention and a feed-forward layer, normalised before; keeps `(samples, positions, features)`."""

    def __init__(self, num_features: int, num_heads: int, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(num_features)
        self.attention = _Attention(num_features, num_heads, causal)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(num_features),
            nn.Linear(num_features, 2 * num_features),
            nn.GELU(),
            nn.Linear(2 * num_features, num_features),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Runs the block."""
        normed = self.attention_norm(hidden)
        hidden = hidden + self.dropout(self.attention(normed, normed))
        output: Tensor = hidden + self.dropout(self.feed_forward(hidden))
        return output


class CrossBlock(nn.Module):
    """Causal self-attention and feed-forward, then attention over a memory `(samples, source positions, features)`."""

    def __init__(self, num_features: int, num_heads: int) -> None:
        super().__init__()
        self.self_block = SelfBlock(num_features, num_heads, causal=True)
        self.norm = nn.LayerNorm(num_features)
        self.attention = _Attention(num_features, num_heads, causal=False)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """Runs the block."""
        hidden = self.self_block(hidden)
        output: Tensor = hidden + self.attention(self.norm(hidden), memory)
        return output


class Rows(Dataset[Any]):
    """The rows of a batch: a dict or tuple of tensors whose first dim counts the rows."""

    def __init__(self, batch: Any, num_rows: int) -> None:
        self._batch = batch
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Any:
        if isinstance(self._batch, dict):
            return {name: values[index] for name, values in self._batch.items()}
        return tuple(values[index] for values in self._batch)
