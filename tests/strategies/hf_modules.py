"""LightningModules around unmodified transformers models: random weights, a few narrow blocks, no downloads.

Every entry of `MODELS` is an architecture that nobody fitted the pipeline to. A model's class, its forward and its
module tree are those of the library; only sizes are small, and dropout is off, as no two layouts draw equal masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn

__all__ = ["MODELS", "PretrainedModule", "build", "count_live_labels", "count_shifted_labels"]

NUM_TOKENS = 40
NUM_POSITIONS = 6
Batch = dict[str, Tensor]

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": NUM_TOKENS,
}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class PretrainedModule(LightningModule):
    """Trains a transformers model on the loss that it returns, and logs that loss.

    The model is built in `configure_model`, in the process that trains it: some of the library's models record their
    outputs through state that is set up when they are built, and some do not pickle.

    Args:
        name: An entry of `MODELS`.
        options: Further keyword arguments of the model's forward.
    """

    def __init__(self, name: str, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.name = name
        self.options = options or {}
        self.checkpointing = False
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Builds the model, with the same weights in every process."""
        if self.model is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.model = MODELS[self.name].make()
            if self.checkpointing:
                self.model.activation_checkpointing_enable()  # type: ignore[operator]  # a PreTrainedModel's

    def loss(self, output: Any) -> Tensor:
        """The loss in what the model returned."""
        loss: Tensor = output.loss
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        assert self.model is not None
        loss = self.loss(self.model(**batch, **self.options))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW whose `eps` stands above the rounding noise of gradients that are zero in exact arithmetic.

        A bias of attention keys has such a gradient: softmax does not depend on it. With the default `eps=1e-8` Adam
        would turn noise of 1e-9 into a step of the full learning rate, of either sign.
        """
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)


class TwoTowers(PretrainedModule):
    """CLIP trained to align each image with its own text: a mean over samples, and `logit_scale` gets no gradient."""

    def loss(self, output: Any) -> Tensor:
        """One minus the cosine of the pairs, plus a part that reads both hidden states."""
        aligned = 1 - (output.text_embeds * output.image_embeds).sum(-1).mean()
        return aligned + 0.1 * output.text_model_output.last_hidden_state.square().mean()


def count_live_labels(microbatch: Batch) -> Tensor:
    """Labels of a micro-batch that enter a mean of masked language modelling."""
    return (microbatch["labels"] != -100).sum()


def count_shifted_labels(microbatch: Batch) -> Tensor:
    """Labels of a micro-batch that enter a mean of causal language modelling."""
    return (microbatch["labels"][:, 1:] != -100).sum()


def _tokens(generator: torch.Generator, num_samples: int, length: int = NUM_POSITIONS) -> Tensor:
    return torch.randint(2, NUM_TOKENS, (num_samples, length), generator=generator)


def _causal(generator: torch.Generator, num_samples: int) -> Batch:
    tokens = _tokens(generator, num_samples)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _padded(generator: torch.Generator, num_samples: int) -> Batch:
    """Padded rows of different lengths, with labels at about half of the positions: micro-batches weigh differently."""
    tokens = _tokens(generator, num_samples)
    lengths = torch.randint(3, NUM_POSITIONS + 1, (num_samples, 1), generator=generator)
    mask = torch.arange(NUM_POSITIONS) < lengths
    chosen = (torch.rand(tokens.shape, generator=generator) < 0.5) & mask
    chosen[:, 1] = True
    return {
        "input_ids": tokens.masked_fill(~mask, 1),
        "attention_mask": mask.long(),
        "labels": tokens.masked_fill(~chosen, -100),
    }


def _translation(generator: torch.Generator, num_samples: int) -> Batch:
    return {"input_ids": _tokens(generator, num_samples, 7), "labels": _tokens(generator, num_samples, 5)}


def _images(size: int) -> Callable[[torch.Generator, int], Batch]:
    def batch(generator: torch.Generator, num_samples: int) -> Batch:
        return {
            "pixel_values": torch.randn(num_samples, 3, size, size, generator=generator),
            "labels": torch.randint(0, 5, (num_samples,), generator=generator),
        }

    return batch


def _pairs(generator: torch.Generator, num_samples: int) -> Batch:
    return {
        "input_ids": _tokens(generator, num_samples),
        "pixel_values": torch.randn(num_samples, 3, 16, 16, generator=generator),
    }


def _spectrograms(generator: torch.Generator, num_samples: int) -> Batch:
    return {
        "input_features": torch.randn(num_samples, 8, 20, generator=generator),
        "labels": _tokens(generator, num_samples, 5),
    }


def _waveforms(generator: torch.Generator, num_samples: int) -> Batch:
    return {
        "input_values": torch.randn(num_samples, 160, generator=generator),
        "labels": torch.randint(0, 5, (num_samples,), generator=generator),
    }


def _answers(generator: torch.Generator, num_samples: int) -> Batch:
    return {
        "input_ids": _tokens(generator, num_samples),
        "start_positions": torch.randint(0, NUM_POSITIONS, (num_samples,), generator=generator),
        "end_positions": torch.randint(0, NUM_POSITIONS, (num_samples,), generator=generator),
    }


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**_SIZES, "num_hidden_layers": 8, "num_key_value_heads": 1})
    )


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=16, n_layer=5, n_head=2, vocab_size=NUM_TOKENS, n_positions=16, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _t5(tied: bool) -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=4, num_heads=2, vocab_size=NUM_TOKENS, decoder_start_token_id=0,
            use_cache=False, dropout_rate=0.0, tie_word_embeddings=tied,
            feed_forward_proj="relu" if tied else "gated-gelu",
        )
    )  # fmt: skip


def _t5_tied() -> nn.Module:
    return _t5(True)


def _t5_untied() -> nn.Module:
    return _t5(False)


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**_SIZES, **_NO_DROPOUT, max_position_embeddings=16, pad_token_id=1)
    )


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**_SIZES, **_NO_DROPOUT, image_size=16, patch_size=8, num_labels=5)
    )


def _bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=NUM_TOKENS, max_position_embeddings=16, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=24,
            decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2, d_model=16, dropout=0.0,
            use_cache=False, decoder_start_token_id=2,
        )
    )  # fmt: skip


def _mixtral(output_router_logits: bool = False) -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **_SIZES, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2,
            output_router_logits=output_router_logits, router_aux_loss_coef=0.1,
        )
    )  # fmt: skip


def _mixtral_router() -> nn.Module:
    return _mixtral(True)


def _whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=NUM_TOKENS, num_mel_bins=8, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, d_model=16, max_source_positions=10,
            max_target_positions=8, dropout=0.0, decoder_start_token_id=1, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
        )
    )  # fmt: skip


def _wav2vec2() -> nn.Module:
    return transformers.Wav2Vec2ForSequenceClassification(
        transformers.Wav2Vec2Config(
            **_SIZES, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
            final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, conv_dim=(8, 8), conv_stride=(5, 2),
            conv_kernel=(10, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=5,
            classifier_proj_size=12,
        )
    )  # fmt: skip


def _clip() -> nn.Module:
    text = {**_SIZES, "max_position_embeddings": 8, "eos_token_id": 2, "num_hidden_layers": 3}
    vision = {**_SIZES, "image_size": 16, "patch_size": 8, "num_hidden_layers": 3}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))


def _swin() -> nn.Module:
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2,
            drop_path_rate=0.0, num_labels=5,
        )
    )  # fmt: skip


def _mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=NUM_TOKENS, hidden_size=16, state_size=4, num_hidden_layers=4,
            use_mambapy=False,
        )
    )  # fmt: skip


def _deberta() -> nn.Module:
    """Its relative positions are one parameter, normalised once and handed to every block."""
    return transformers.DebertaV2ForMaskedLM(
        transformers.DebertaV2Config(
            **_SIZES, **_NO_DROPOUT, relative_attention=True, position_buckets=4, norm_rel_ebd="layer_norm",
            pos_att_type=["p2c", "c2p"], max_position_embeddings=16, pad_token_id=1, share_att_key=True,
        )
    )  # fmt: skip


def _distilbert() -> nn.Module:
    return transformers.DistilBertForQuestionAnswering(
        transformers.DistilBertConfig(
            vocab_size=NUM_TOKENS, dim=16, n_layers=4, n_heads=2, hidden_dim=24, dropout=0.0, attention_dropout=0.0,
            qa_dropout=0.0, max_position_embeddings=16,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    module: type[PretrainedModule] = PretrainedModule
    weight: str | Callable[[Batch], Tensor] = "samples"


MODELS: dict[str, _Entry] = {
    "llama": _Entry(_llama, _causal),
    "gpt2": _Entry(_gpt2, _padded, weight=count_shifted_labels),
    "t5": _Entry(_t5_tied, _translation),
    "t5_untied": _Entry(_t5_untied, _translation),
    "bert": _Entry(_bert, _padded, weight=count_live_labels),
    "vit": _Entry(_vit, _images(16)),
    "bart": _Entry(_bart, _translation),
    "mixtral": _Entry(_mixtral, _causal),
    "mixtral_router": _Entry(_mixtral_router, _causal),
    "whisper": _Entry(_whisper, _spectrograms),
    "wav2vec2": _Entry(_wav2vec2, _waveforms),
    "clip": _Entry(_clip, _pairs, module=TwoTowers),
    "swin": _Entry(_swin, _images(16)),
    "mamba": _Entry(_mamba, _causal),
    "deberta": _Entry(_deberta, _padded, weight=count_live_labels),
    "distilbert": _Entry(_distilbert, _answers),
}


def build(name: str, num_samples: int = 8) -> tuple[PretrainedModule, Batch]:
    """The module of that name and a batch for it."""
    entry = MODELS[name]
    return entry.module(name), entry.batch(torch.Generator().manual_seed(1), num_samples)
