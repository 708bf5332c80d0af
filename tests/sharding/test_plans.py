"""A plan found for a module gives its numbers; what a plan cannot get right stays whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bigmodel._host import FakeTensorMode
from lightning_bigmodel.sharding.plan_calls import describe_call
from lightning_bigmodel.sharding.plan_trial import try_plan
from lightning_bigmodel.sharding.plans import find_tensor_plan
from lightning_bigmodel.sharding.tensor import check_tensor_plan
from lightning_bigmodel.testing import run_ranks
from tests.sharding.tensor_modules import BLOCK_PLAN, LENGTH, WIDTH, WORDS, Attention, Language, Mlp, randomize
from tests.sharding.transformers_models import compare_model, make_model, step

_TOLERANCE = 1e-5
_BYTES = 2 * 6 * 32 * 4
_HEAD_AND_WORDS = {"all_gather": (1, 2 * 6 * 16 * 4), "all_reduce": (5, 5 * _BYTES)}
_MEGATRON = {"all_reduce": (4, 4 * _BYTES)}
# Name -> (parameters cut, messages of a forward, messages of a backward).
_EXPECTED: dict[str, tuple[int, Any, Any]] = {
    "llama": (16, _HEAD_AND_WORDS, {"all_reduce": (5, 5 * _BYTES)}),
    "qwen3": (16, _HEAD_AND_WORDS, {"all_reduce": (5, 5 * _BYTES)}),
    "phi3": (10, None, None),
    "gpt_neox": (14, _HEAD_AND_WORDS, {"all_reduce": (5, 5 * _BYTES)}),
    "gpt2": (12, _MEGATRON, _MEGATRON),
    "gpt2_eager": (12, _MEGATRON, _MEGATRON),
    "bert": (20, _MEGATRON, _MEGATRON),
    "vit": (20, {"all_reduce": (4, 4 * 2 * 5 * 32 * 4)}, {"all_reduce": (4, 4 * 2 * 5 * 32 * 4)}),
    # Cross-attention reads two inputs.
    "t5": (34, {"all_reduce": (10, 10 * _BYTES)}, {"all_reduce": (12, 12 * _BYTES)}),
    "t5_gated": (38, {"all_reduce": (10, 10 * _BYTES)}, {"all_reduce": (12, 12 * _BYTES)}),
}


def _hidden() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))


def _find(module: nn.Module) -> dict[str, str]:
    return find_tensor_plan(module, lambda: module(_hidden()))


@pytest.mark.parametrize("name", _EXPECTED)
def test_models_of_the_transformers_library(name: str) -> None:
    """A plan that is nearly right trains to other numbers and says nothing."""
    model = make_model(name)
    plan = find_tensor_plan(model, lambda: step(model))
    num_cut, forward, backward = _EXPECTED[name]
    for result in run_ranks(compare_model, 2, name, plan):
        wrong = {key: error for key, error in result["errors"].items() if not error < _TOLERANCE}
        assert not wrong
        assert result["num_cut"] == num_cut
        if forward is not None:
            assert (result["forward"], result["backward"]) == (forward, backward)


def test_four_ranks() -> None:
    """A rank that is neither the first nor the last."""
    plan = {"attn.c_attn": "colwise", "attn.c_proj": "rowwise", "c_fc": "colwise", "mlp.c_proj": "rowwise"}
    results = run_ranks(compare_model, 4, "gpt2", plan)
    assert max(error for result in results for error in result["errors"].values()) < _TOLERANCE
    assert results[0]["num_cut"] == 12


def test_too_few_heads_are_refused_with_the_numbers() -> None:
    """Half a head gives numbers, and not those of the model."""
    model = make_model("llama")
    plan = find_tensor_plan(model, lambda: step(model))
    with pytest.raises(ValueError, match=r"k_proj' has 2 heads of width 8, which `tensor_parallel_size=4` does not"):
        check_tensor_plan(model, plan, 4)
    assert "model.embed_tokens" in find_tensor_plan(model, lambda: step(model), 2)
    assert not {"lm_head", "model.embed_tokens"} & set(find_tensor_plan(model, lambda: step(model), 3))


def test_own_modules() -> None:
    """Found by what they do, under any names; a norm of each head is part of it."""
    module = Language()
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS
    assert find_tensor_plan(module, lambda: module(tokens)) == BLOCK_PLAN


class _Mixing(nn.Module):
    """Between its layers every feature meets every other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class _Softmax(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


class _Leaking(Mlp):
    """What is between the layers goes elsewhere too."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden) + hidden.square().mean()


class _Watching(Mlp):
    """What is between the layers changes the output and no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden) + hidden.detach().square().mean()


class _Interleaved(nn.Module):
    """Each head has its q, k and v side by side, as GPT-NeoX has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Showing(Mlp):
    """What is between the layers is given out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.up(x))
        return self.down(hidden), hidden


class _Shown(nn.Module):
    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.inner, self.is_used = _Showing(), is_used

    def forward(self, x: Tensor) -> Tensor:
        output, hidden = self.inner(x)
        return output + hidden.mean() if self.is_used else output


class _FixedHeads(nn.Module):
    """The number of features is taken from the input, as nanoGPT does: not computable on some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(width, -1)
        )
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.c_proj(heads.transpose(1, 2).contiguous().view(batch, length, width))


@pytest.mark.parametrize("kind", [_Mixing, _Softmax, _Leaking, _Watching, _FixedHeads])
def test_what_cannot_be_cut_stays_whole(kind: type[nn.Module]) -> None:
    """Layers that follow each other and fit in size need not be a pair."""
    module = nn.Sequential(kind(), Mlp())
    assert _find(module) == {"1.up": "colwise", "1.down": "rowwise"}
    alone = kind()
    with pytest.raises(ValueError, match=r"found no layers.*Write the plan yourself, for example `tensor_plan=\{'"):
        _find(alone)


def test_heads_that_lie_together() -> None:
    """Cut like q|k|v side by side they would give the q of one head and the v of another."""
    assert _find(_Interleaved()) == {"qkv": "colwise:1", "out": "rowwise"}


def test_a_cut_tensor_that_is_handed_out() -> None:
    """It is right where nobody reads it, such as attention weights, and wrong where it goes into the loss."""
    found = _find(nn.Sequential(_Shown(is_used=False), Mlp()))
    assert found == {"0.inner.up": "colwise", "0.inner.down": "rowwise", "1.up": "colwise", "1.down": "rowwise"}
    assert _find(nn.Sequential(_Shown(is_used=True), Mlp())) == {"1.up": "colwise", "1.down": "rowwise"}


def test_torch_transformer_layers() -> None:
    """`nn.MultiheadAttention` does not call its layers and stays whole; the rest is cut."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    assert _find(nn.ModuleDict({"layer": layer})["layer"]) == {"linear1": "colwise", "linear2": "rowwise"}


def test_a_chain_of_equal_layers() -> None:
    """Each layer may be cut as the first or as the second of a pair, and not as both."""
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    found = _find(nn.Sequential(*layers))
    assert found == {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"}


def test_layers_that_never_run_or_are_not_there() -> None:
    """An error that does not show what to write leaves the user with nothing."""
    with pytest.raises(ValueError, match="fewer than two linear layers"):
        _find(nn.Linear(WIDTH, WIDTH))
    module = nn.ModuleDict({"first": nn.Linear(4, 8), "second": nn.Linear(8, 4)})
    with pytest.raises(ValueError, match="'first': 'colwise', 'second': 'rowwise'"):
        find_tensor_plan(module, lambda: module["second"](module["first"](torch.ones(2, 4))))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_said_of_sizes_is_of_the_size_asked_for(size: int) -> None:
    """Advice to run on a number of ranks that nobody has."""
    module = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8))
    with pytest.raises(ValueError, match=f"`tensor_parallel_size={size}` does not divide") as caught:
        find_tensor_plan(module, lambda: module(torch.ones(2, 8)), size)
    said = str(caught.value)
    assert said.count("tensor_parallel_size=") == 1
    assert ".." not in said
    assert "Write the plan yourself" not in said  # a plan that does not divide either
    assert said.endswith("Layers with weights to cut: 0, 2.")
    assert find_tensor_plan(module, lambda: module(torch.ones(2, 8)), 7) == {"0": "colwise", "2": "rowwise"}


def test_the_search_leaves_no_trace() -> None:
    """Hooks left behind cost each step; numbers drawn shift every later one."""
    module = nn.Sequential(Attention(dropout=0.5), Mlp(dropout=0.5))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    plan = _find(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert not any(found._forward_pre_hooks or found._forward_hooks for found in module.modules())
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert plan["0.qkv"] == "colwise:3"


def test_on_fake_tensors() -> None:
    """A model too large for one device is looked at before it has memory."""
    with FakeTensorMode():
        module = nn.Sequential(Attention(head_norm=False), Mlp())
        plan = find_tensor_plan(module, lambda: module(torch.empty(2, LENGTH, WIDTH)))
    assert plan == {"0.qkv": "colwise:3", "0.out": "rowwise", "1.up": "colwise", "1.down": "rowwise"}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"qkv": "colwise:1", "out": "rowwise", "q_norm": "replicate_partial"}, "disagrees"),
        ({"qkv": "colwise:3", "out": "rowwise", "q_norm": "replicate"}, "gradient of 'q_norm.weight' disagrees"),
    ],
)
def test_a_trial_sees_wrong_plans(plan: dict[str, str], why: str) -> None:
    """q|k|v cut across, or a gradient not summed: shapes fit, and numbers do not."""
    call = describe_call((_hidden(),), {})
    verdict = try_plan(randomize(Attention()), plan, call, 2)
    assert not verdict.is_right
    assert why in verdict.why
    right = {"qkv": "colwise:3", "out": "rowwise", "q_norm": "replicate_partial"}
    assert try_plan(randomize(Attention()), right, call, 2).is_right
