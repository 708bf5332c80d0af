"""Small LightningModules, each with one thing that makes it awkward to cut into stages.

They train in milliseconds on a CPU. Use them to test a technique, or as the smallest example of what your own module
does. None sets a seed: seed before building one.

Example::

    torch.manual_seed(0)
    module = TinyTransformer(num_blocks=4)
    loader = DataLoader(module.dataset(num_samples=8), batch_size=4)
    Trainer(max_steps=2).fit(module, loader)
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_bigmodel.testing._tiny_layers import CrossBlock, Rows, SelfBlock, TanhBlock

__all__ = [
    "TinyBatchNorm",
    "TinyCalledTwice",
    "TinyChain",
    "TinyEncoderDecoder",
    "TinyLeak",
    "TinyManualOptimization",
    "TinyModule",
    "TinyNoChain",
    "TinySkips",
    "TinyTransformer",
]


class TinyModule(LightningModule):
    """What the tiny modules share: AdamW with a learning rate of 1e-3, and "train_loss" and "val_loss" logged.

    A batch is a pair `(inputs, targets)`, both `(num_samples, num_features)`, unless the class says otherwise; the loss
    is their mean squared error.

    Args:
        num_features: Width of inputs, blocks and outputs.
        num_blocks: Number of blocks.
    """

    def __init__(self, num_features: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_blocks = num_blocks

    def loss(self, batch: Any) -> Tensor:
        """Returns the mean loss of a batch, a scalar."""
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Returns the loss of a batch and logs it as "train_loss"."""
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the loss of a batch as "val_loss"."""
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the outputs for a batch, `(num_samples, ...)`."""
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def example_batch(self, num_samples: int = 4, seed: int = 0) -> Any:
        """Returns a batch that depends on the seed alone and leaves the global random state as it is."""
        generator = torch.Generator().manual_seed(seed)
        shape = (num_samples, self.num_features)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def dataset(self, num_samples: int = 16, seed: int = 0) -> Dataset[Any]:
        """Returns a dataset whose rows, collated in order, are `example_batch(num_samples, seed)`."""
        return Rows(self.example_batch(num_samples, seed), num_samples)


class TinyChain(TinyModule):
    """A plain `nn.Sequential` of Linear and Tanh: the easy case."""

    # What `TanhBlock` is made with.
    _block_options: ClassVar[dict[str, bool]] = {}

    def __init__(self, num_features: int = 8, num_blocks: int = 4) -> None:
        super().__init__(num_features, num_blocks)
        self.blocks = nn.Sequential(*(TanhBlock(num_features, **self._block_options) for _ in range(num_blocks)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `(num_samples, num_features)` to the same shape."""
        output: Tensor = self.blocks(inputs)
        return output


class TinyTransformer(TinyModule):
    """A byte-level GPT whose positions are a parameter of the module itself, owned by no submodule.

    A batch is a dict of "input_ids" and "labels", both integers of shape `(num_samples, num_positions)`; the loss is
    the mean cross entropy over all labels.

    Args:
        num_features: Width of the model; a multiple of `num_heads`.
        num_blocks: Number of transformer blocks.
        num_heads: Number of attention heads.
        num_tokens: Size of the vocabulary.
        num_positions: Length of every sequence.
        tied_head: Whether the head is the embedding's weight: a parameter needed by the first stage and the last.
        dropout: Probability of dropping an element of each block's branches.
    """

    def __init__(
        self,
        num_features: int = 16,
        num_blocks: int = 4,
        num_heads: int = 2,
        num_tokens: int = 256,
        num_positions: int = 12,
        tied_head: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_features, num_blocks)
        self.num_tokens = num_tokens
        self.embedding = nn.Embedding(num_tokens, num_features)
        self.positions = nn.Parameter(0.02 * torch.randn(num_positions, num_features))
        self.blocks = nn.ModuleList(SelfBlock(num_features, num_heads, dropout, causal=True) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(num_features)
        self.head = nn.Linear(num_features, num_tokens, bias=False)
        if tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Maps `(num_samples, num_positions)` to logits `(num_samples, num_positions, num_tokens)`."""
        hidden = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, batch: Any) -> Tensor:
        """Returns the mean cross entropy of a batch."""
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the logits of a batch, `(num_samples, num_positions, num_tokens)`."""
        return self(batch["input_ids"])

    def example_batch(self, num_samples: int = 4, seed: int = 0) -> dict[str, Tensor]:
        """Returns random bytes and, as labels, the byte that follows each."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.num_tokens, (num_samples, len(self.positions) + 1), generator=generator)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


class TinySkips(TinyModule):
    """What block 0 gives is added before the last block, and what block 1 gives is penalised in the loss.

    Args:
        num_features: Width of inputs, blocks and outputs.
        num_blocks: Number of blocks, 3 or more.
    """

    def __init__(self, num_features: int = 8, num_blocks: int = 4) -> None:
        if num_blocks < 3:
            raise ValueError(f"`num_blocks={num_blocks}` must be 3 or more for a skip that passes over a block.")
        super().__init__(num_features, num_blocks)
        self.blocks = nn.ModuleList(TanhBlock(num_features) for _ in range(num_blocks))

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `(num_samples, num_features)` to the same shape."""
        return self._outputs(inputs)[0]

    def loss(self, batch: Any) -> Tensor:
        """Returns the mean squared error and a tenth of the mean square of block 1's values."""
        inputs, targets = batch
        output, penalised = self._outputs(inputs)
        return F.mse_loss(output, targets) + 0.1 * penalised.square().mean()

    def _outputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        first = self.blocks[0](inputs)
        second = hidden = self.blocks[1](first)
        for block in self.blocks[2:-1]:
            hidden = block(hidden)
        return self.blocks[-1](hidden + first), second


class TinyEncoderDecoder(TinyModule):
    """The encoder's output goes to every decoder block, and both sides share one embedding.

    A batch is `(source, target, labels)`, integers of shape `(num_samples, num_positions)`; the loss is the mean cross
    entropy over all labels.

    Args:
        num_features: Width of the model; a multiple of `num_heads`.
        num_blocks: Number of blocks of the encoder, and of the decoder.
        num_heads: Number of attention heads.
        num_tokens: Size of the vocabulary.
        num_positions: Length of every sequence.
    """

    def __init__(
        self,
        num_features: int = 16,
        num_blocks: int = 2,
        num_heads: int = 2,
        num_tokens: int = 32,
        num_positions: int = 6,
    ) -> None:
        super().__init__(num_features, num_blocks)
        self.num_tokens = num_tokens
        self.num_positions = num_positions
        self.shared = nn.Embedding(num_tokens, num_features)
        self.encoder = nn.ModuleList(SelfBlock(num_features, num_heads) for _ in range(num_blocks))
        self.decoder = nn.ModuleList(CrossBlock(num_features, num_heads) for _ in range(num_blocks))
        self.head = nn.Linear(num_features, num_tokens)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Maps two `(num_samples, num_positions)` to logits `(num_samples, num_positions, num_tokens)`."""
        memory = self.shared(source)
        for block in self.encoder:
            memory = block(memory)
        hidden = self.shared(target)
        for block in self.decoder:
            hidden = block(hidden, memory)
        logits: Tensor = self.head(hidden)
        return logits

    def loss(self, batch: Any) -> Tensor:
        """Returns the mean cross entropy of a batch."""
        source, target, labels = batch
        return F.cross_entropy(self(source, target).flatten(0, 1), labels.flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the logits of a batch, `(num_samples, num_positions, num_tokens)`."""
        return self(batch[0], batch[1])

    def example_batch(self, num_samples: int = 4, seed: int = 0) -> tuple[Tensor, ...]:
        """Returns random sources, targets and labels."""
        generator = torch.Generator().manual_seed(seed)
        shape = (num_samples, self.num_positions)
        return tuple(torch.randint(self.num_tokens, shape, generator=generator) for _ in range(3))


class TinyNoChain(TinyModule):
    """One layer and nothing else: there is no chain of blocks to cut."""

    def __init__(self, num_features: int = 8) -> None:
        super().__init__(num_features, num_blocks=0)
        self.layer = nn.Linear(num_features, num_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `(num_samples, num_features)` to the same shape."""
        output: Tensor = self.layer(inputs)
        return output


class TinyCalledTwice(TinyChain):
    """The second block runs twice, with the others in between: it would be needed in two stages."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `(num_samples, num_features)` to the same shape."""
        output: Tensor = self.blocks[1](self.blocks(inputs))
        return output


class TinyLeak(TinyChain):
    """Each block keeps a value from its inside as an attribute, and the loss reads that of block 0.

    Such a value does not travel from block to block, so no stage but the first would have it.
    """

    _block_options: ClassVar[dict[str, bool]] = {"keep": True}

    def loss(self, batch: Any) -> Tensor:
        """Returns the mean squared error and a tenth of the mean square of what block 0 kept."""
        error = super().loss(batch)
        kept: Tensor = self.blocks[0].kept  # type: ignore[assignment]
        return error + 0.1 * kept.square().mean()


class TinyBatchNorm(TinyChain):
    """Blocks with batch normalisation, whose result for a sample depends on the other samples of its micro-batch."""

    _block_options: ClassVar[dict[str, bool]] = {"batch_norm": True}


class TinyManualOptimization(TinyChain):
    """Calls backward and steps its optimizer by itself."""

    def __init__(self, num_features: int = 8, num_blocks: int = 4) -> None:
        super().__init__(num_features, num_blocks)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Makes one optimizer step on a batch and logs its loss as "train_loss"."""
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        self.log("train_loss", loss)
