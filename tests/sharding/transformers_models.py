"""Tiny transformers models, one of each way to write a layer, and a training step for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.sharding.tensor_modules import compare, quietly, randomize

__all__ = ["MODELS", "compare_model", "make_model", "step"]

_WORDS = 32
_SIZES = {"vocab_size": _WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_GROUPED = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
_GPT2 = {
    "vocab_size": _WORDS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_ENCODER = {
    **_SIZES,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5 = {
    "vocab_size": _WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}

# Name -> (model, config, settings).
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "pad_token_id": 0}),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_SIZES, "num_attention_heads": 4, "hidden_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2_eager": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "attn_implementation": "eager"}),
    "bert": ("BertForMaskedLM", "BertConfig", {**_ENCODER, "max_position_embeddings": 16}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_ENCODER, "image_size": 8, "patch_size": 4, "num_labels": 3}),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "t5_gated": ("T5ForConditionalGeneration", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu"}),
}


def make_model(name: str) -> nn.Module:
    model, config, settings = MODELS[name]
    settings = {key: value for key, value in settings.items() if name != "vit" or key != "vocab_size"}
    made: nn.Module = quietly(lambda: getattr(transformers, model)(getattr(transformers, config)(**settings)))
    return randomize(made)


def step(module: nn.Module) -> Tensor:
    """The loss of a batch, the same every time."""
    if type(module).__name__.startswith("ViT"):
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        batch = {"pixel_values": images, "labels": torch.tensor([0, 2])}
    else:
        tokens = torch.arange(12).view(2, 6).mul(5) % (_WORDS - 2) + 2
        batch = {"input_ids": tokens, "labels": tokens}
    loss: Tensor = module(**batch).loss
    return loss


def _named(name: str) -> Callable[[], nn.Module]:
    return lambda: make_model(name)


def compare_model(name: str, plan: dict[str, str]) -> dict[str, Any]:
    """Run in ranks: `compare` for a model."""
    return compare(_named(name), step, plan)
