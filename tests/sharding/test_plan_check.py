"""A plan written by hand is tried out: what mixes features between two cut layers is told, what is right passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from lightning_bigmodel.sharding import plan_check
from lightning_bigmodel.sharding.plan_calls import describe_call
from lightning_bigmodel.sharding.plan_check import Judgement, judge_plan
from lightning_bigmodel.sharding.plan_search import record_calls
from tests.sharding.tensor_modules import BLOCK_PLAN, LENGTH, WIDTH, WORDS, Attention, Gated, Language, Mlp
from tests.sharding.transformers_models import make_model, step

_PAIR = {"up": "colwise", "down": "rowwise"}
_NAMES = "'up' (`colwise`) and 'down' (`rowwise`)"


class _Softmax(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


class _Normed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.layer_norm(self.up(x), self.up.weight.shape[:1]))


class _Scaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden / hidden.square().mean(-1, keepdim=True).sqrt())


class _Leaking(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden) + hidden.square().mean()


class _Telling(Mlp):
    """Gives a number of what is cut, which nobody uses for training."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.up(x))
        return self.down(hidden), hidden.detach().square().mean()


class _First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = _Telling(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(x)[0]


class _Noisy(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x + torch.randn_like(x)))


class _Bound(Mlp):
    """Calls itself by a method that is bound when it is made, and by a function that nobody can follow."""

    def __init__(self, is_hidden: bool) -> None:
        super().__init__()
        self.run = (lambda x: self._run(x)) if is_hidden else self._run

    def _run(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class _Tracker:
    """An object of the user's."""


class _Step(nn.Module):
    """A step that uses its layers itself; keeps what it saw."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.mixes, self.losses = mixes, []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.up(batch[0])
        loss = self.down(hidden.softmax(-1) if self.mixes else hidden.tanh()).square().mean()
        self.losses.append(loss.detach())
        self.metric.update(loss)
        self.metric(loss)
        return loss


def _hidden() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))


def _judge(module: nn.Module, plan: dict[str, str], size: int = 2, run: Any = None) -> Judgement:
    calls, _ = record_calls(module, run or (lambda: module(_hidden())))
    return judge_plan(module, plan, size, calls, None)


@pytest.mark.parametrize("kind", [_Softmax, _Normed, _Scaled, _Leaking, _Telling])
@pytest.mark.parametrize("size", [2, 4])
def test_what_mixes_features_is_told_with_its_layers(kind: type[nn.Module], size: int) -> None:
    """It trains another model, and no shape tells so."""
    module = nn.Sequential(Mlp(), kind(), *([nn.Identity()] if kind is not _Telling else []))
    if kind is _Telling:
        found = _judge(kind(), _PAIR, size)
        assert not found.wrong  # nobody may use it
        assert "may be given, or give, what is cut" in found.untried[0]
        return
    plan = {f"{index}.{name}": style for index in (0, 1) for name, style in _PAIR.items()}
    found = _judge(module, plan, size)
    assert "cuts '1.up' (`colwise`) and '1.down' (`rowwise`), and the numbers are not those of the whole" in found.wrong
    assert "'0.up'" not in found.wrong
    assert "`colwise_gather`" in found.wrong
    assert _judge(nn.Sequential(Mlp()), {"0.up": "colwise", "0.down": "rowwise"}, size) == Judgement()


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (lambda: nn.Sequential(Mlp(), Attention()), {"0.up": "colwise", "0.down": "rowwise"}),
        (Attention, {"qkv": "colwise:3", "out": "rowwise", "q_norm": "replicate_partial"}),
        (Gated, {"both": "colwise:2", "down": "rowwise"}),
        (_First, {"inner.up": "colwise", "inner.down": "rowwise"}),
        (lambda: _Bound(False), _PAIR),
        (
            lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)),
            {"0": "colwise", "2": "rowwise"},
        ),
    ],
    ids=["mlp", "attention", "gated", "unused output", "bound method", "sequential"],
)
def test_a_right_plan_passes(make: Any, plan: dict[str, str]) -> None:
    """A run that was right would be refused."""
    assert _judge(make(), plan) == Judgement()


def test_a_right_plan_of_a_whole_model_passes() -> None:
    """Pairs of several kinds, and embeddings beside them."""
    module, tokens = Language(), torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS
    plan = {**BLOCK_PLAN, "words": "rowwise", "head": "colwise_gather"}
    assert _judge(module, plan, 4, lambda: module(tokens)) == Judgement()
    wrong = _judge(module, {**plan, "blocks.*.attn.qkv": "colwise:1"}, 2, lambda: module(tokens)).wrong
    assert "'blocks.0.attn.qkv' (`colwise`) and 'blocks.0.attn.out'" in wrong
    assert "2 more" not in wrong
    forgotten = _judge(module, {**plan, "blocks.*.attn.q_norm": "replicate"}, 2, lambda: module(tokens)).wrong
    assert "the gradient of 'q_norm.weight' disagrees" in forgotten


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_plans_of_transformers_models_pass(name: str) -> None:
    """Masks, position biases and rotary embeddings are handed to layers from outside."""
    from lightning_bigmodel.sharding.plans import find_tensor_plan

    model = make_model(name)
    plan = find_tensor_plan(model, lambda: step(model), 2)
    calls, _ = record_calls(model, lambda: step(model))
    assert judge_plan(model, plan, 2, calls, None).wrong == ""


@pytest.mark.parametrize(
    ("module", "why"),
    [(_Noisy(), "numbers"), (_Bound(True), "copies do not follow"), (Mlp().requires_grad_(False), "")],
    ids=["noise", "function", "frozen"],
)
def test_what_cannot_be_tried_is_not_called_wrong(module: nn.Module, why: str) -> None:
    """Noise that differs between the ranks of a trial is no fault of the plan."""
    found = _judge(module, _PAIR)
    assert found.wrong == ""
    assert all(why in reason for reason in found.untried)
    assert bool(found.untried) is bool(why)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_step_that_uses_its_layers_itself(mixes: bool) -> None:
    """No module around the pair is called; the whole step is tried, on copies."""
    module = _Step(mixes)
    call = describe_call(([_hidden()], 0), {}, "training_step")
    found = judge_plan(module, _PAIR, 2, {}, call)
    assert ("'up' (`colwise`) and 'down' (`rowwise`)" in found.wrong) is mixes
    assert not found.untried
    assert module.losses == []
    assert module.metric.update_count == 0
    module.tracker = _Tracker()
    found = judge_plan(module, _PAIR, 2, {}, call)
    assert found == Judgement("", (f"{_NAMES}: a trial might change `tracker` (_Tracker)",))
    module.tracker = lambda: module.losses.append(1)
    assert "a trial might change `tracker` (function)" in judge_plan(module, _PAIR, 2, {}, call).untried[0]


def test_a_cut_sequence_is_tried_in_the_whole_step() -> None:
    """Activations between pairs are cut along another dimension, where no module alone has whole inputs."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS
    module = Language()
    norms = {f"blocks.*.norm{index}": "sequence" for index in (1, 2)}
    plan = {**BLOCK_PLAN, **norms, "start": "sequence_split", "norm": "sequence", "head": "sequence_gather"}
    calls, _ = record_calls(module, lambda: module(tokens))
    call = describe_call((tokens,), {}, "forward")
    assert judge_plan(module, plan, 2, calls, call) == Judgement()
    del plan["norm"]  # its gradient is then a part on each rank
    assert "gradient of 'norm" in judge_plan(module, plan, 2, calls, call).wrong


def test_a_trial_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers drawn, gradients, counters or hooks left behind would change the run that follows."""
    module = nn.Sequential(_First(), _Noisy(), _Bound(True), _Softmax())
    plan = {f"{name}.{own}": style for name in ("0.inner", "1", "2", "3") for own, style in _PAIR.items()}
    calls, _ = record_calls(module, lambda: module(_hidden()))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in module.modules()]
    state = torch.get_rng_state()
    found = judge_plan(module, plan, 2, calls, None)
    assert "'3.up'" in found.wrong
    assert len(found.untried) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in module.modules()] == attributes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    # What is large is not copied.
    monkeypatch.setattr(plan_check, "_MAX_PARAMETERS", 10)
    monkeypatch.setattr(plan_check, "_MAX_PARAMETERS_AROUND", 10)
    found = judge_plan(module, plan, 2, calls, None)
    assert not found.wrong
    assert "too large for two copies" in found.untried[0]
