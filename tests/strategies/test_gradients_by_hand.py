"""Gradients that user code clips, edits or makes by itself, and weights it reads where each rank has a part."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import RanksFailedError
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)
PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_plan": PLAN}
PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 2}


class ByHand(LightningModule):
    """Does something of its own with gradients or weights."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what, self.automatic_optimization = what, not what.startswith("manual")
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, 6) -> (n, 3)."""
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        """Regression."""
        loss, what = nn.functional.mse_loss(self(batch[0]), batch[1]), self.what
        first: Any = self.blocks[0][0]  # type: ignore[index]  # a Sequential
        if what == "weight_norm":
            loss = loss + 0.1 * first.weight.norm()
        if what == "weight_product":
            loss = loss + (first.weight.t() @ first.weight).mean()
        if what == "layer_alone":
            loss = loss + first(batch[0]).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers(use_pl_optimizer=what != "manual_past_strategy")
        optimizer.zero_grad()
        if what == "manual_raw_backward":
            loss.backward()
        else:
            self.manual_backward(loss)
        self._edit()
        optimizer.step()
        return None

    def _edit(self) -> None:
        match self.what.removeprefix("manual_"):
            case "norm":
                clip_grad_norm_(self.parameters(), 0.05)
            case "largest":
                clip_grad_norm_(self.parameters(), 0.05, norm_type=float("inf"))
            case "smallest":
                clip_grad_norm_(self.parameters(), 1e-6, norm_type=float("-inf"))
            case "value":
                clip_grad_value_(self.parameters(), 0.01)
            case "halves":
                for parameter in self.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            case "drops":
                self.head.weight.grad = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Where automatic optimization edits."""
        if self.automatic_optimization:
            self._edit()

    def configure_optimizers(self) -> Any:
        """With momentum; or one with a step size over all parameters."""
        kind = Coupled if self.what == "coupled" else torch.optim.SGD
        return kind(self.parameters(), lr=0.2, momentum=0.9)


class Coupled(torch.optim.SGD):
    """Divides by the largest gradient of all parameters."""

    def step(self, closure: Any = None) -> Any:
        """As SGD, after the division."""
        loss = None if closure is None else closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        torch._foreach_div_(gradients, largest)
        super().step()
        return loss


def fit(strategy: Any, devices: int, batch_size: int, what: str) -> dict[str, Any]:
    """Four steps."""
    module = ByHand(what)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randn(48, 3, generator=generator))
    run = trainer(strategy, devices, max_epochs=1)
    run.fit(module, DataLoader(data, batch_size=batch_size))
    return weights(module)


def _fit(settings: dict[str, Any], batch_size: int, what: str) -> dict[str, Any]:
    return fit(BigModelStrategy(**settings), 2, batch_size, what)


def _settings(name: str) -> tuple[dict[str, Any], int]:
    """And the batch size of a data rank."""
    if name.startswith("zero"):
        return {"zero_stage": int(name[-1])}, 6
    return ({"replicas": {}, "tensor": TENSOR, "pipe": PIPE}[name], 6 if name == "replicas" else 12)


@pytest.mark.parametrize("layout", ["replicas", "zero1", "zero2", "zero3", "tensor"])
@pytest.mark.parametrize("what", ["norm", "value", "halves", "drops"])
def test_manual_steps_see_and_change_gradients(layout: str, what: str) -> None:
    """Gradients that are nowhere to be seen, so that clipping them does nothing; the norm of one rank's part."""
    settings, batch_size = _settings(layout)
    expected = fit("auto", 1, 12, f"manual_{what}")
    for found in run_ranks(_fit, 2, settings, batch_size, f"manual_{what}"):
        assert_same_weights(found, expected)


@pytest.mark.parametrize("layout", ["zero2", "zero3", "tensor", "pipe"])
@pytest.mark.parametrize("what", ["norm", "largest", "smallest"])
def test_clipping_functions_are_right_however_they_are_imported(layout: str, what: str) -> None:
    """Only `torch.nn.utils.clip_grad_norm_` written out; the smallest of one rank."""
    settings, batch_size = _settings(layout)
    expected = fit("auto", 1, 12, what)
    for found in run_ranks(_fit, 2, settings, batch_size, what):
        assert_same_weights(found, expected)


def test_clipping_of_other_modules_is_left_alone() -> None:
    """A norm over all ranks of a module that is only this rank's; a function that stays replaced."""
    for inside, outside in run_ranks(_other, 2):
        assert inside == pytest.approx(2.0)
        assert outside


def _other() -> tuple[float, bool]:
    before = clip_grad_norm_.__closure__[0].cell_contents  # type: ignore[attr-defined]
    found: list[float] = []

    class Module(ByHand):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            own = nn.Parameter(torch.zeros(4))
            own.grad = torch.ones(4)
            found.append(float(clip_grad_norm_([own], 1.0)))

    module = Module("nothing")
    data = TensorDataset(torch.ones(4, 6), torch.ones(4, 3))
    trainer(BigModelStrategy(zero_stage=1), 2).fit(module, DataLoader(data, batch_size=2))
    return found[0], clip_grad_norm_.__closure__[0].cell_contents is before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layout", "what", "said"),
    [
        ("replicas", "manual_raw_backward", r"`self.manual_backward` did not make"),
        ("zero1", "manual_raw_backward", r"`self.manual_backward` did not make"),
        ("zero3", "manual_raw_backward", r"`self.manual_backward` did not make"),
        ("zero1", "manual_past_strategy", r"called past the strategy.*without `use_pl_optimizer=False`"),
        ("tensor", "weight_norm", r"`blocks.0.0.weight` is read outside of its own layer's forward"),
        ("tensor", "layer_alone", r"'blocks.0.0' ran without 'blocks.0.2' after it"),
        ("tensor", "weight_product", r"`blocks.0.0.weight` is read outside of its own layer's forward"),
        (
            "pipe",
            "coupled",
            r"`Coupled` cannot train where each rank of a pipeline holds some.*alone than with",
        ),
    ],
)
def test_what_would_be_one_ranks_number_is_refused(layout: str, what: str, said: str) -> None:
    """Ranks that drift apart without a word."""
    settings, batch_size = _settings(layout)
    with pytest.raises(RanksFailedError, match=f"(?s){said}") as caught:
        run_ranks(_fit, 2, settings, batch_size, what)
    assert len(caught.value.failures) == 2


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_slices_are_guarded_under_sharding_too(zero_stage: int) -> None:
    """A slice that is put together from rows, and taken for the weight."""
    settings = {**TENSOR, "zero_stage": zero_stage}
    with pytest.raises(RanksFailedError, match="is read outside of its own layer's forward"):
        run_ranks(_fit_on_four, 4, settings)


def _fit_on_four(settings: dict[str, Any]) -> None:
    fit(BigModelStrategy(**settings), 4, 6, "weight_norm")
