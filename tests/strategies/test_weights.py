"""Weights of micro-batches, accumulated batches and ranks: any split of the same samples gives the same gradient."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as checked_with
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bigmodel import BigModelStrategy, TokenWeight
from lightning_bigmodel.testing import RanksFailedError
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.hf_modules import build
from tests.strategies.trainer_modules import trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")  # else it is made in the working directory
_NUM_SAMPLES, _LENGTH, _NUM_TOKENS = 12, 8, 16


class Texts(Dataset[dict[str, Tensor]]):
    """Sample i has as many live labels as `live[i]` says, the others are -100."""

    def __init__(self, live: list[int]) -> None:
        self.live = live

    def __len__(self) -> int:
        return len(self.live)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, _NUM_TOKENS, (_LENGTH,), generator=generator)
        labels = torch.randint(0, _NUM_TOKENS, (_LENGTH,), generator=generator)
        labels[self.live[index] :] = -100
        return {"tokens": tokens, "labels": labels}


class Block(nn.Module):
    """Position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, length, 8) in and out."""
        return hidden + torch.tanh(self.linear(hidden))


class Tagger(LightningModule):
    """A mean over live labels."""

    def __init__(self, *, causal: bool = False, returns: bool = False, class_weights: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_NUM_TOKENS, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, _NUM_TOKENS)
        self.causal, self.returns = causal, returns
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, _NUM_TOKENS) if class_weights else None)
        self.gradients: dict[str, Any] = {}
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Cross entropy, of the next label where causal."""
        hidden = self.embed(batch["tokens"])
        for block in self.blocks:
            hidden = block(hidden)
        logits, labels = self.head(hidden), batch["labels"]
        if self.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(
            logits.reshape(-1, _NUM_TOKENS), labels.reshape(-1), weight=self.class_weights
        )
        self.log("loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "microbatch_weight": (labels != -100).sum()} if self.returns else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What callbacks see."""
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        """A step shows the gradient."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


def step(
    strategy: Any, devices: int, batch_size: int, accumulate: int, live: list[int], returns: bool = False, **habits: Any
) -> Any:
    """The weights after one optimizer step over all samples."""
    module = Tagger(returns=returns, **habits)
    run = trainer(strategy, devices, accumulate_grad_batches=accumulate, max_epochs=1)
    run.fit(module, DataLoader(Texts(live), batch_size=batch_size))
    assert run.global_step == 1
    return {**weights(module), "loss": float(run.callback_metrics["loss"])}


def _step(settings: dict[str, Any], devices: int, *args: Any, **habits: Any) -> Any:
    return step(BigModelStrategy(**settings), devices, *args, **habits)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Every parameter after the step, and the logged loss."""
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


# name: ranks, data ranks, settings
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "one_microbatches": (1, 1, {"num_microbatches": 2}),
    "replicas": (2, 2, {}),
    "replicas_microbatches": (2, 2, {"num_microbatches": 2}),
    "zero1": (2, 2, {"zero_stage": 1}),
    "zero3": (2, 2, {"zero_stage": 3, "num_microbatches": 2}),
    "tensor": (2, 1, {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*.linear": "colwise_gather"}}),
    "pipe": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "pipe_data": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "zero_bubble": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "ZBVZeroBubble"}),
    "pipe_tensor": (
        4,
        1,
        {
            "pipeline_parallel_size": 2,
            "num_microbatches": 4,
            "tensor_parallel_size": 2,
            "tensor_plan": {"blocks.*.linear": "colwise_gather"},
        },
    ),
}
# One to all labels; some samples, and so some micro-batches and ranks, have none.
LIVE = [1, 8, 3, 0, 5, 2, 0, 0, 7, 0, 4, 6]
_DRY_RANK = [4, 0] * 6  # data ranks take every second sample


def _steps(settings: dict[str, Any], devices: int, data_size: int, all_accumulate: list[int]) -> list[Any]:
    return [
        _step({**settings, "microbatch_weight": weight}, devices, _NUM_SAMPLES // accumulate // data_size, *rest)
        for accumulate in all_accumulate
        for weight, rest in (("tokens", (accumulate, LIVE)), ("samples", (accumulate, LIVE, True)))
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_token_means_are_those_of_one_batch(name: str) -> None:
    """A mean of means; NaN from a micro-batch without labels; tokens counted once for each rank of a pipeline."""
    expected = step("auto", 1, _NUM_SAMPLES, 1, LIVE)
    devices, data_size, settings = LAYOUTS[name]
    for results in run_ranks(_steps, devices, settings, devices, data_size, [1, 3]):
        for found in results:
            assert_same(found, expected)


_SPLITS = st.tuples(
    st.lists(st.integers(0, _LENGTH), min_size=6, max_size=6).filter(any),  # live labels of each sample
    st.sampled_from([1, 2, 3, 6]),  # accumulated batches
    st.integers(1, 4),  # micro-batches
)


def _any_split(devices: int) -> int:
    checked: list[Any] = []

    @checked_with(max_examples=15, derandomize=True, deadline=None, database=None)
    @given(_SPLITS)
    def check(split: Any) -> None:
        live, accumulate, num_microbatches = split
        live = live * devices
        checked.append(split)
        layout = {"num_microbatches": num_microbatches, "microbatch_weight": "tokens"}
        found = _step(layout, devices, len(live) // accumulate // devices, accumulate, live)
        assert_same(found, _whole(live), 1e-5)

    check()
    return len(checked)


def _whole(live: list[int]) -> dict[str, Any]:
    """One optimizer step by hand."""
    module, data = Tagger(), Texts(live)
    batch = {key: torch.stack([data[index][key] for index in range(len(data))]) for key in ("tokens", "labels")}
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    loss = module.training_step(batch, 0)
    loss.backward()
    found = {name: p.detach() - p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**{name: value.double().numpy() for name, value in found.items()}, "loss": float(loss)}


@pytest.mark.parametrize("devices", [1, 2])
def test_any_split_gives_one_gradient(devices: int) -> None:
    """Splits nobody thought of: more micro-batches than samples, windows of one sample, most of them without labels."""
    assert min(run_ranks(_any_split, devices, devices)) >= 15


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3}, {"zero_stage": 2, "num_microbatches": 2}])
def test_a_rank_without_any_labels(settings: dict[str, Any]) -> None:
    """A rank that waits, or spreads its NaN."""
    expected = step("auto", 1, _NUM_SAMPLES, 1, _DRY_RANK)
    for found in run_ranks(_step, 2, {**settings, "microbatch_weight": "tokens"}, 2, 2, 3, _DRY_RANK):
        assert_same(found, expected)


@pytest.mark.parametrize("habits", [{"causal": True}, {"class_weights": True}, {"causal": True, "class_weights": True}])
def test_labels_are_found(habits: dict[str, Any]) -> None:
    """A first label counted that the model drops; classes that weigh differently counted alike."""
    expected = step("auto", 1, _NUM_SAMPLES, 1, LIVE, **habits)
    for found in run_ranks(_step, 2, {"microbatch_weight": "tokens"}, 2, 2, 3, LIVE, **habits):
        assert_same(found, expected)


@pytest.mark.parametrize(("name", "shifted"), [("gpt2", True), ("llama", True), ("bert", False), ("t5", False)])
def test_shifting_is_told_apart(name: str, shifted: bool) -> None:
    """A causal model's first labels counted, or a masked model's left out."""
    module, batch = build(name, 4)
    labels = batch["labels"].clone()
    labels[:, 0] = -100
    labels[1:, 3:] = -100
    module.configure_model()
    module.log = lambda *_, **__: None
    weight = TokenWeight()
    batch = {**batch, "labels": labels}
    weight.resolve(module, batch, lambda batch: module.training_step(batch, 0), torch.device("cpu"))
    assert (weight.labels, weight.shifted) == ("labels", shifted)
    assert weight({"labels": labels}) == float((labels[:, 1:] != -100).sum() if shifted else (labels != -100).sum())


class Computed(Tagger):
    """Labels that are in no batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Of another vocabulary."""
        return super().training_step({**batch, "labels": (batch["labels"] + 1).clamp(min=0) % _NUM_TOKENS}, batch_idx)


class Pair(Tagger):
    """Batches that are tuples, in which labels and inputs are the same where nothing is masked."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Labels first."""
        return super().training_step({"labels": batch[0], "tokens": batch[1]}, batch_idx)


class Two(Tagger):
    """Another cross entropy before, of targets that are in no batch and ignore another class."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Multiplied by zero."""
        logits = self.head(self.embed(batch["tokens"])).reshape(-1, _NUM_TOKENS)
        other = nn.functional.cross_entropy(logits, (batch["tokens"].reshape(-1) * 3 + 1) % 5, ignore_index=0)
        return super().training_step(batch, batch_idx) + 0.0 * other


def test_the_cross_entropy_that_matches_says_what_is_ignored() -> None:
    """The first one's ignored class counted as missing."""
    module, weight = Two(), TokenWeight()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    data = Texts(LIVE)
    batch = {key: torch.stack([data[index][key] for index in range(12)]) for key in ("tokens", "labels")}
    weight.resolve(module, batch, lambda batch: module.training_step(batch, 0), torch.device("cpu"))
    assert (weight.labels, weight.shifted, weight.ignore_index) == ("labels", False, -100)


def test_a_first_batch_without_labels_is_named() -> None:
    """Labels that fit both ways because none counts."""
    module, weight = Tagger(), TokenWeight()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    batch = {"tokens": torch.zeros(2, _LENGTH, dtype=torch.long), "labels": torch.full((2, _LENGTH), -100)}
    with pytest.raises(ValueError, match="No label of the first batch counts"):
        weight.resolve(module, batch, lambda batch: module.training_step(batch, 0), torch.device("cpu"))


def test_labels_that_may_be_inputs_are_refused() -> None:
    """The wrong one of two that are equal in the first batch only."""
    module, weight = Pair(), TokenWeight()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    tokens = torch.randint(0, _NUM_TOKENS, (4, _LENGTH))
    with pytest.raises(ValueError, match=r"found several: \[\('0', False\), \('1', False\)\]"):
        weight.resolve(module, (tokens, tokens), lambda batch: module.training_step(batch, 0), torch.device("cpu"))


def test_classes_weigh_where_the_labels_are_given() -> None:
    """Class weights that only a search for the labels would find."""
    habits = {"class_weights": True}
    expected = step("auto", 1, _NUM_SAMPLES, 1, LIVE, **habits)
    given = {"microbatch_weight": TokenWeight("labels", False)}
    for found in run_ranks(_step, 2, given, 2, 2, 3, LIVE, **habits):
        assert_same(found, expected)


def minus_one(batch: Any) -> int:
    """No weight."""
    return -1


def _refused(settings: dict[str, Any], module_class: Any, devices: int = 2, **habits: Any) -> None:
    run = trainer(BigModelStrategy(**settings), devices, max_epochs=1)
    run.fit(module_class(**habits), DataLoader(Texts(LIVE), batch_size=2))


class ReturnsWrong(Tagger):
    """A weight that is none, or is missing at times."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Returns it."""
        loss = super().training_step(batch, batch_idx)
        if self.what == "sometimes":
            return {"loss": loss, "microbatch_weight": 1.0} if batch["labels"][0, 0] < 8 else loss
        return {"loss": loss, "microbatch_weight": self.what}


@pytest.mark.parametrize(
    ("settings", "module_class", "habits", "said"),
    [
        ({"microbatch_weight": "tokens"}, Computed, {}, r"found none of the batch's tensors.*TokenWeight\(labels="),
        (
            {"microbatch_weight": TokenWeight("other", False)},
            Tagger,
            {},
            "numbers 'other'.*'tokens'",
        ),
        ({"microbatch_weight": "sum"}, Tagger, {"returns": True}, "which takes no weights"),
        ({"microbatch_weight": "equal", "num_microbatches": 2}, Tagger, {"returns": True}, "which take no weights"),
        ({}, ReturnsWrong, {"what": -1.0}, "finite and not negative"),
        ({"num_microbatches": 2}, ReturnsWrong, {"what": float("nan")}, "finite and not negative"),
        ({}, ReturnsWrong, {"what": "many"}, "must be a number"),
        ({"num_microbatches": 2}, ReturnsWrong, {"what": "sometimes"}, "Return it always, or never"),
        ({"microbatch_weight": minus_one}, Tagger, {}, "finite and not negative"),
    ],
)
def test_bad_weights_are_named_on_every_rank(settings: Any, module_class: Any, habits: Any, said: str) -> None:
    """A gradient of the wrong sign, or NaN, on one rank first."""
    with pytest.raises(RanksFailedError, match=f"(?s){said}") as caught:
        run_ranks(_refused, 2, settings, module_class, **habits)
    assert len(caught.value.failures) == 2


class ReturnsHere(Tagger):
    """A weight on the first data rank only; or everywhere, and no loss for what has no labels."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Of live labels."""
        loss = super().training_step(batch, batch_idx)
        num_live = (batch["labels"] != -100).sum()
        if self.skips and not num_live:
            return None
        returns = self.skips or self.trainer.strategy.mesh.data_rank == 0
        return {"loss": loss, "microbatch_weight": num_live} if returns else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """There may be no loss."""


_TWO_DATA_RANKS = [name for name, (_, data_size, _) in LAYOUTS.items() if data_size == 2]


@pytest.mark.parametrize("name", _TWO_DATA_RANKS)
def test_a_weight_from_some_data_ranks_only_is_refused_on_all(name: str) -> None:
    """Samples of one rank weighed against tokens of another."""
    devices, _, settings = LAYOUTS[name]
    said = r"^ValueError: `training_step` returned .* \d of \d micro-batches.*; it is missing on data ranks \[1\]"
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_refused, devices, settings, ReturnsHere, devices)
    assert len(caught.value.failures) == devices
    for text in caught.value.failures.values():
        assert re.search(said, text.splitlines()[-1]), text


class ReturnsAtFirst(ReturnsHere):
    """A weight for the first batch only."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Of live labels."""
        loss = Tagger.training_step(self, batch, batch_idx)
        return loss if batch_idx else {"loss": loss, "microbatch_weight": (batch["labels"] != -100).sum()}


@pytest.mark.parametrize("name", ["one_microbatches", "pipe", "replicas"])
def test_a_weight_of_some_batches_only_is_refused(name: str) -> None:
    """Tokens of one batch weighed against samples of the next."""
    devices, _, settings = LAYOUTS[name]
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_refused, devices, settings, ReturnsAtFirst, devices)
    assert len(caught.value.failures) == devices
    for text in caught.value.failures.values():
        assert "for earlier batches, but not for this one" in text.splitlines()[-1], text


def _skipping_step(settings: dict[str, Any], devices: int, batch_size: int, live: list[int]) -> dict[str, Any]:
    module = ReturnsHere(skips=True)
    run = trainer(BigModelStrategy(**settings), devices, accumulate_grad_batches=3, max_epochs=1)
    run.fit(module, DataLoader(Texts(live), batch_size=batch_size))
    return weights(module)


@pytest.mark.parametrize("name", ["one_microbatches", "pipe", *_TWO_DATA_RANKS])
@pytest.mark.parametrize("live", [LIVE, _DRY_RANK], ids=["some", "dry"])
def test_what_has_no_loss_returns_no_weight(name: str, live: list[int]) -> None:
    """A rank or a micro-batch without a loss, taken for one that forgot its weight."""
    devices, data_size, settings = LAYOUTS[name]
    expected = step("auto", 1, _NUM_SAMPLES, 1, live)
    del expected["loss"]
    for found in run_ranks(_skipping_step, devices, settings, devices, _NUM_SAMPLES // data_size // 3, live):
        assert_same(found, expected)


@pytest.mark.parametrize("name", _TWO_DATA_RANKS)
def test_a_rank_that_ran_out_of_batches_returns_no_weight(name: str) -> None:
    """The batch that it repeats, counted or missed."""
    expected = step("auto", 1, 9, 1, LIVE[:9])
    devices, _, settings = LAYOUTS[name]
    for found in run_ranks(_step, devices, settings, devices, 4, 2, LIVE[:9], True):
        assert_same(found, expected)
