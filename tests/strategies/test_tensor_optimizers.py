"""Adafactor and Muon under the Trainer with tensor ranks: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import assert_parallel_equivalent
from tests.sharding.tensor_modules import BLOCK_PLAN, LENGTH, WORDS, Language
from tests.strategies import hf_modules

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {}),
    "tensor_zero1": (4, {"zero_stage": 1}),
    "tensor_zero2": (4, {"zero_stage": 2, "num_microbatches": 2}),
    "tensor_zero3": (4, {"zero_stage": 3}),
    "tensor_pipe": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


class Adafactored(hf_modules.PretrainedModule):
    """A transformers model, trained with one of the two Adafactors."""

    theirs = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """`eps` stands above the rounding noise of gradients that are zero in exact arithmetic, as of key biases."""
        if self.theirs:
            from transformers.optimization import Adafactor

            return Adafactor(self.parameters(), lr=2e-2, eps=(1e-10, 1e-3), relative_step=False)
        return torch.optim.Adafactor(self.parameters(), lr=2e-2, eps=(1e-5, 1e-3), weight_decay=0.1)


def check(module: LightningModule, batch: Any, layout: str, **options: Any) -> None:
    world_size, settings = LAYOUTS[layout]
    plan = {} if "tensor_plan" not in options else {"tensor_plan": options.pop("tensor_plan")}
    weight = options.pop("weight", "samples")
    strategy = BigModelStrategy(tensor_parallel_size=2, microbatch_weight=weight, **plan, **settings)
    report = assert_parallel_equivalent(module, batch, strategy, world_size=world_size, timeout_seconds=80.0, **options)
    assert report.num_parameters > 0


@pytest.mark.parametrize(
    ("name", "layout", "theirs"),
    [
        *(("gpt2", layout, False) for layout in LAYOUTS),
        ("llama", "tensor", False),
        ("llama", "tensor_zero2", True),
        ("gpt2", "tensor_pipe", True),
    ],
)
def test_adafactor_with_tensor_ranks(name: str, layout: str, theirs: bool) -> None:
    """Means and norms of a slice, of q|k|v cut by parts, or of rows of a slice, taken for those of the parameter."""
    pytest.importorskip("transformers")
    _, batch = hf_modules.build(name, 8)
    module = Adafactored(name)
    module.theirs = theirs
    check(module, batch, layout, weight=hf_modules.MODELS[name].weight, gradient_clip_val=0.5)


class Orthogonal(LightningModule):
    """A language model whose matrices are stepped by Muon, and nothing else is."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = Language()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The model's loss."""
        loss: Tensor = self.model(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Muon takes matrices only."""
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_with_tensor_ranks(layout: str) -> None:
    """A slice orthogonalised by itself is another matrix.

    The iterations round to bf16, where an error of 1e-7 in a gradient may become one of 4e-3: of the steps of at most
    2e-3 an element, 8e-6 each. A slice taken for the matrix is off by the size of a step.
    """
    tokens = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    plan = {f"model.{name}": style for name, style in BLOCK_PLAN.items()}
    check(Orthogonal(), tokens, layout, tensor_plan=plan, absolute_tolerance=4e-5, num_steps=3)
