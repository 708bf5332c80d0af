"""LightningModules of many shapes, as people write them: long skips, states, tuples, dataclasses, shared weights.

Each class says what about it a pipeline could get wrong. `MODULES` lists all of them; each is trained by
`test_architectures` under several schedules and compared with one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

__all__ = ["MODULES", "WIDTH", "OwnModule", "token_sequences"]

WIDTH = 8


class OwnModule(LightningModule):
    """What the modules here share: AdamW and a logged loss. `batch` makes a batch for it."""

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, a mean over its samples."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss of a batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW whose `eps` stands above the rounding noise of gradients that are zero in exact arithmetic.

        A bias before a normalisation, and a bias of attention keys, have such gradients; with the default `eps=1e-8`
        Adam turns their noise into steps of the full learning rate, of either sign.
        """
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)

    @staticmethod
    def batch(generator: torch.Generator, num_samples: int) -> Any:
        """Inputs and targets, both `(num_samples, WIDTH)`."""
        return tuple(torch.randn(num_samples, WIDTH, generator=generator) for _ in range(2))


def _images(generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(num_samples, 3, 8, 8, generator=generator),
        torch.randint(0, 5, (num_samples,), generator=generator),
    )


def token_sequences(generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 20, (num_samples, 7), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# -- images ------------------------------------------------------------------------------------------------------------


class _ConvBlock(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_inputs, num_outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, num_outputs)

    def forward(self, image: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(image)))


class UNet(OwnModule):
    """Every block of the way down also feeds its mirror on the way up: the longest skip passes over all others."""

    batch = staticmethod(_images)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.down = nn.ModuleList([_ConvBlock(4, 6), _ConvBlock(6, 8), _ConvBlock(8, 8)])
        self.middle = _ConvBlock(8, 8)
        self.up = nn.ModuleList([_ConvBlock(16, 8), _ConvBlock(16, 6), _ConvBlock(12, 4)])
        self.out = nn.Conv2d(4, 3, 1)

    def loss(self, batch: Any) -> Tensor:
        """Reconstruction of the image from a noisy one."""
        image, _ = batch
        hidden, skips = self.stem(image + 0.1), []
        for block in self.down:
            hidden = block(hidden)
            skips.append(hidden)
            hidden = F.max_pool2d(hidden, 2)
        hidden = self.middle(hidden)
        for block in self.up:
            hidden = F.interpolate(hidden, scale_factor=2)
            hidden = block(torch.cat([hidden, skips.pop()], 1))
        return F.mse_loss(self.out(hidden), image)


class _Residual(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(2, num_outputs)
        self.second = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(2, num_outputs)
        self.shortcut = nn.Conv2d(num_inputs, num_outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(image)), inplace=True)
        hidden = self.second_norm(self.second(hidden))
        hidden += self.shortcut(image)
        return F.relu(hidden, inplace=True)


class ResNet(OwnModule):
    """Named stages `layer1` to `layer3` of residual blocks, each an `nn.Sequential` with in-place operations inside."""

    batch = staticmethod(_images)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, 4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(_Residual(4, 4, 1), _Residual(4, 4, 1))
        self.layer2 = nn.Sequential(_Residual(4, 8, 2), _Residual(8, 8, 1))
        self.layer3 = nn.Sequential(_Residual(8, 12, 2), _Residual(12, 12, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        """Classification."""
        image, label = batch
        hidden = self.relu(self.norm1(self.conv1(image)))
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        logits = self.fc(self.avgpool(hidden).flatten(1))
        self.log("accuracy", (logits.argmax(1) == label).float().mean())
        return F.cross_entropy(logits, label)


class DenseNet(OwnModule):
    """Each block takes the outputs of all blocks before it, as a growing list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH + 4 * index, 4) for index in range(5))
        self.head = nn.Linear(WIDTH + 20, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        inputs, targets = batch
        features = [inputs]
        for block in self.blocks:
            features.append(torch.tanh(block(torch.cat(features, 1))))
        return F.mse_loss(self.head(torch.cat(features, 1)), targets)


class _Mixer(nn.Module):
    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(num_tokens, 6), nn.GELU(), nn.Linear(6, num_tokens))
        self.channels = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.tokens(self.norm1(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.channels(self.norm2(hidden))


class MLPMixer(OwnModule):
    """Transposes between and inside blocks: what crosses a cut is not contiguous. Returns a dict of nested outputs."""

    batch = staticmethod(_images)

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.mixers = nn.Sequential(*(_Mixer(16, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss and, nested, the logits."""
        image, label = batch
        hidden = self.mixers(self.patches(image).flatten(2).transpose(1, 2))
        logits = self.head(hidden.mean(1))
        loss = F.cross_entropy(logits, label)
        self.log_dict({"train_loss": loss, "spread": logits.detach().std(1).mean()}, batch_size=len(label))
        self.log("largest", logits.detach().max(), reduce_fx="max")
        return {"loss": loss, "outputs": {"logits": logits, "parts": [hidden.mean()]}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs what came back: one row a sample, as one process returns it."""
        logits = outputs["outputs"]["logits"]
        assert logits.shape == (len(batch[1]), 5)
        self.log("returned", logits.square().mean() + outputs["outputs"]["parts"][0])


# -- sequences ---------------------------------------------------------------------------------------------------------


class TorchTransformer(OwnModule):
    """torch's own encoder and decoder layers, called through their stacks with masks as keyword arguments."""

    batch = staticmethod(token_sequences)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 3, 12, dropout=0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))
        self.head = nn.Linear(WIDTH, 20)

    def loss(self, batch: Any) -> Tensor:
        """Prediction of the next token, with the sequence itself as the source."""
        tokens, labels = batch
        hidden = self.transformer(
            self.embedding(tokens), self.embedding(tokens), tgt_mask=self.mask, tgt_is_causal=True,
            src_key_padding_mask=tokens == 0,
        )  # fmt: skip
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class LSTMStack(OwnModule):
    """Blocks that return `(output, (hidden, cell))`; the last states of all of them are penalised."""

    batch = staticmethod(token_sequences)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, 20)

    def loss(self, batch: Any) -> Tensor:
        """Prediction of the next token."""
        tokens, labels = batch
        hidden, penalty = self.embedding(tokens), torch.zeros((), device=self.device)
        for layer in self.layers:
            output, (last, cell) = layer(hidden)
            hidden = hidden + output
            penalty = penalty + last.square().mean() + 0.1 * cell.abs().mean()
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) + 0.1 * penalty


class FunctionalHead(OwnModule):
    """Parameters used outside of their module: the head is the embedding's weight in `F.linear`, times a bare one."""

    batch = staticmethod(token_sequences)

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(_Mixer(6, WIDTH) for _ in range(4))
        self.gates = nn.ParameterList(nn.Parameter(torch.full((), 0.5)) for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        """Prediction of the next token."""
        tokens, labels = batch
        hidden = F.embedding(tokens, self.emb.weight) * self.scale
        for block, gate in zip(self.blocks, self.gates, strict=True):
            hidden = hidden + gate * block(hidden)
        logits = F.linear(hidden * self.scale, self.emb.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Detector(OwnModule):
    """As DETR: a convolutional backbone, an encoder, learned queries of the module itself, heads at every layer."""

    batch = staticmethod(_images)

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(_ConvBlock(3, 4), nn.MaxPool2d(2), _ConvBlock(4, WIDTH))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True), 2)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, 12, 0.0, batch_first=True) for _ in range(3))
        self.queries = nn.Parameter(torch.randn(3, WIDTH))
        self.classes = nn.Linear(WIDTH, 5)
        self.boxes = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def loss(self, batch: Any) -> Tensor:
        """Class and box losses of every decoder layer (deep supervision), through heads that all layers share."""
        image, label = batch
        memory = self.encoder(self.backbone(image).flatten(2).transpose(1, 2))
        hidden = self.queries.expand(len(image), -1, -1)
        levels = []
        for layer in self.decoder:
            hidden = layer(hidden, memory)
            levels.append(hidden)
        stacked = torch.stack(levels)
        logits, boxes = self.classes(stacked), self.boxes(stacked).sigmoid()
        class_loss = F.cross_entropy(logits.flatten(0, 2), label[None, :, None].expand(3, -1, 3).flatten())
        box_loss = F.l1_loss(boxes, torch.full_like(boxes, 0.3))
        self.log("class_loss", class_loss, prog_bar=True)
        self.log("box_loss", box_loss)
        return class_loss + 2 * box_loss


MODULES: dict[str, Callable[[], OwnModule]] = {
    module.__name__: module
    for module in (
        UNet,
        ResNet,
        DenseNet,
        MLPMixer,
        TorchTransformer,
        LSTMStack,
        FunctionalHead,
        Detector,
    )
}
