"""LightningModules of many shapes, as people write them: long skips, states, tuples, dataclasses, shared weights.

Each class says what about it a pipeline could get wrong. `MODULES` lists all of them; each is trained by
`test_architectures` under several schedules and compared with one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["MODULES", "OwnModule"]

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


def _sequences(generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
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

    batch = staticmethod(_sequences)

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

    batch = staticmethod(_sequences)

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

    batch = staticmethod(_sequences)

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


# -- what blocks take and return ---------------------------------------------------------------------------------------


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


class VAE(OwnModule):
    """Two losses of values from the middle and the end; the noise is part of the batch, as layouts draw other noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 12), nn.ELU(), nn.Linear(12, 12), nn.ELU())
        self.mean, self.log_variance = nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ELU(), nn.Linear(12, 12), nn.ELU(), nn.Linear(12, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Reconstruction and divergence, logged apart and at places of different stages."""
        inputs, noise = batch
        hidden = self.encoder(inputs)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        self.log("divergence", divergence)
        latent = mean + (0.5 * log_variance).exp() * noise[:, :4]
        reconstruction = F.mse_loss(self.decoder(latent), inputs)
        self.log("reconstruction", reconstruction, on_step=True, on_epoch=True)
        return reconstruction + 0.1 * divergence


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


class InPlace(OwnModule):
    """The residual is added in place to what a block returned, between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        """Regression."""
        hidden, targets = batch
        for block in self.blocks:
            output = block(hidden)
            output += hidden
            hidden = output
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


class HalfPrecisionPart(OwnModule):
    """Values of three dtypes cross the cuts: float32, bfloat16, and integer indices from an argmax."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Router() for _ in range(4))
        self.codes = nn.Embedding(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        """Regression on the last output and the codes chosen by every block."""
        hidden, targets = batch
        chosen = []
        for block in self.blocks:
            hidden, index, gain = block(hidden)
            hidden = hidden * gain.float()
            chosen.append(index)
        return F.mse_loss(hidden + self.codes(torch.stack(chosen, 1)).mean(1), targets)


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = torch.tanh(self.linear(hidden))
        return output, output.detach().argmax(1), self.gain(output).sigmoid().bfloat16()


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
        DataclassBlocks,
        Reversible,
        VAE,
        Checkpointed,
        FrozenBackbone,
        SharedNorm,
        InPlace,
        LayerMix,
        SharedTower,
        HalfPrecisionPart,
    )
}
