"""A small GPT over bytes, as an ordinary LightningModule: nothing in it knows of ranks, stages or replicas."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

__all__ = ["ByteGPT", "TransformerBlock", "generate_text"]

_NUM_BYTES = 256


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a two-layer perceptron, each added to its input.

    Args:
        width: Size of the hidden vectors.
        num_heads: Attention heads; must divide `width`.

    Raises:
        ValueError: If `num_heads` does not divide `width`.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(
                f"`width`={width} is not divisible by `num_heads`={num_heads}; choose a divisor of `width`."
            )
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden vectors of shape ``(batch, context, width)`` to the same shape."""
        batch_size, context, width = hidden.shape
        heads = self.attention_in(self.attention_norm(hidden)).view(batch_size, context, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch_size, context, width))
        perceived: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + perceived


class ByteGPT(LightningModule):
    """Predicts the next byte of a text.

    Args:
        width: Size of the hidden vectors.
        num_blocks: Transformer blocks.
        num_heads: Attention heads of each block; must divide `width`.
        context: Longest input in bytes.
        learning_rate: Learning rate of AdamW.

    Raises:
        ValueError: If `num_heads` does not divide `width`.

    Memory: about ``12 * num_blocks * width ** 2`` parameters of 4 bytes, thrice that with AdamW's state.

    Example:
        >>> ByteGPT(width=32, num_blocks=2)(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 256])
    """

    def __init__(
        self, width: int = 96, num_blocks: int = 4, num_heads: int = 4, context: int = 64, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        self.context = context
        self.learning_rate = learning_rate
        self.tokens = nn.Embedding(_NUM_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([TransformerBlock(width, num_heads) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _NUM_BYTES)
        self._initialise()

    def forward(self, byte_ids: Tensor) -> Tensor:
        """Maps byte values of shape ``(batch, context)`` to logits of shape ``(batch, context, 256)``."""
        hidden = self.tokens(byte_ids) + self.positions(torch.arange(byte_ids.shape[1], device=byte_ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross entropy in nats a byte and logs it as ``train_loss``."""
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the mean cross entropy in nats a byte as ``val_loss``."""
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))

    def _initialise(self) -> None:
        # Weights at this scale learn steadily from the first step at a high rate; a run that starts on a plateau
        # enlarges rounding differences a thousandfold before it leaves it, and two exact runs would look different.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for name in ("attention_out", "mlp_out"):
                nn.init.normal_(
                    block.get_parameter(f"{name}.weight"), std=(8 * self.head.in_features * len(self.blocks)) ** -0.5
                )
        nn.init.normal_(self.head.weight, std=0.02)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        byte_ids, targets = batch
        return F.cross_entropy(self(byte_ids).flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate_text(model: ByteGPT, prompt: str, num_bytes: int = 240, temperature: float = 0.6, seed: int = 0) -> str:
    """Continues a prompt byte by byte on one process.

    Args:
        model: A model with its full weights.
        prompt: Text to continue, at least one character.
        num_bytes: Bytes to add.
        temperature: Logits are divided by it before sampling; 0 takes the likeliest byte.
        seed: Seed of the sampling.

    Returns:
        The prompt and its continuation; bytes that are not UTF-8 appear as the replacement character.

    Raises:
        ValueError: If the prompt is empty.

    Cost: one forward over at most `model.context` bytes for each byte added.
    """
    if not prompt:
        raise ValueError("`prompt` is empty; give at least one character to continue.")
    device = model.tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt.encode())
    was_training = model.training
    model.eval()
    for _ in range(num_bytes):
        byte_ids = torch.tensor([text[-model.context :]], device=device)
        logits = model(byte_ids)[0, -1].float().cpu()
        if temperature > 0:
            text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
        else:
            text.append(int(logits.argmax()))
    model.train(was_training)
    return bytes(text).decode(errors="replace")
