"""Models of transformers: caches that are filled twice, masks and positions by keyword, outputs of their own types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_bigmodel.recompute.full import Full
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.offload import Offload
from lightning_bigmodel.recompute.policy import Block, Chain
from lightning_bigmodel.recompute.selective import Selective
from lightning_bigmodel.recompute.square_root import SquareRoot
from lightning_bigmodel.sharding.units import find_blocks

TOKENS = torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(1))


def _llama() -> tuple[Any, Any]:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        vocab_size=64,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config)
    return model, model.model.layers


def _gpt2() -> tuple[Any, Any]:
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=4, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0))
    return model, model.transformer.h


def _t5() -> tuple[Any, Any]:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    return model, [*model.encoder.block, *model.decoder.block]


def _gradients(make: Any, policy: Any, prefix: int | None, use_cache: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, layers = make()
    model.train()
    chain = Chain([Block(str(index), layer, index) for index, layer in enumerate(layers)])
    treated = None if policy is None else TreatedBlocks(chain, policy.treatments(chain))
    torch.manual_seed(3)
    learned = torch.randn(2, 2, 2, prefix or 1, 8, requires_grad=True)  # keys and values of two heads
    given: dict[str, Any] = {"use_cache": use_cache}
    if prefix is not None:
        given["past_key_values"] = DynamicCache([tuple(learned) for _ in layers])
    model(input_ids=TOKENS, labels=TOKENS, **given).loss.backward()
    if treated is not None:
        treated.close()
    return [parameter.grad for parameter in model.parameters()] + ([] if prefix is None else [learned.grad])


@pytest.mark.filterwarnings("ignore:`loss_type=None`")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize(("make", "prefix"), [(_llama, None), (_llama, 3), (_gpt2, None), (_gpt2, 3), (_t5, None)])
def test_gradients(make: Any, prefix: int | None) -> None:
    """A cache that has each key twice in the second run, or none, with keys that lie otherwise; a lost prefix."""
    for use_cache in (True,) if prefix else (True, False):
        expected = _gradients(make, None, prefix, use_cache)
        assert all(gradient is not None for gradient in expected)
        for policy in (Full(), SquareRoot(), Selective(), Offload(min_bytes=0)):
            found = _gradients(make, policy, prefix, use_cache)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), policy


def test_blocks_of_an_encoder_and_a_decoder() -> None:
    """Two blocks, each of them half of the model: its whole activations are back as soon as backward begins."""
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2))
    found = [name for name, part in find_blocks(model).items() if any(part.children())]
    assert found == [f"{stack}.block.{index}" for stack in ("encoder", "decoder") for index in range(3)]
