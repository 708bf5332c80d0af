"""Which operators compute in which type: in every stage, in recomputation, under sharding; or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_bigmodel import BigModelPrecision, BigModelStrategy
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.scaled_modules import WIDTH, assert_close, run

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)

SEEN: dict[str, set[str]] = {}


def note(name: str, tensor: Tensor) -> Tensor:
    """Keep the type of a result, but for those of a trace without values."""
    SEEN.setdefault(name, set()).add(str(tensor.dtype))
    return tensor


def gate(x: Tensor) -> Tensor:
    """A function of the user's."""
    return note("gate", x * torch.sigmoid(x))


class Attention(nn.Module):
    """Products and a softmax in functions, a norm in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`(samples, width)`; samples look at each other's features."""
        x = note("norm", self.norm(x))
        scores = note("bmm", torch.bmm(self.query(x)[:, :, None], self.key(x)[:, None, :]))
        weights = note("softmax", torch.softmax(scores, -1))
        return x + gate(note("matmul", weights @ x[:, :, None])[:, :, 0])


class Attending(LightningModule):
    """Blocks that may be recomputed."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Each sample attends to the batch's own features only, so that batches may be split."""
        x, y = batch
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and x.requires_grad else block(x)
        return nn.functional.mse_loss(self.head(x).float(), y.float())

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


LISTS = {
    "full_precision_ops": ["softmax", f"{__name__}.gate"],
    "half_precision_ops": ["bmm"],
    "full_precision_modules": ["blocks.*.norm"],
}


def _fit(
    settings: dict[str, Any] | None, devices: int, data_ranks: int, lists: dict[str, Any], recompute: bool = False
) -> dict[str, Any]:
    SEEN.clear()
    strategy = BigModelStrategy(**settings) if settings is not None else None
    found = run(Attending(recompute), BigModelPrecision("16-mixed", **lists), strategy, devices, data_ranks)
    assert gate.__module__ == __name__
    return {**found, "types": {name: sorted(types) for name, types in SEEN.items()}}


LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {"num_microbatches": 2}),
    (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    (2, 2, {"zero_stage": 3}),
    (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 2}),
]
HALF, FULL = ["torch.float16"], ["torch.float32"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_lists_hold_in_every_layout(layout: int, recompute: bool) -> None:
    """Lists that a stage, a recomputation or a sharded weight does not see."""
    devices, data_ranks, settings = LAYOUTS[layout]
    expected = run_ranks(_fit, 1, None, 1, 1, LISTS, False)[0]
    types = {"norm": FULL, "bmm": HALF, "softmax": FULL, "matmul": HALF, "gate": FULL}
    assert expected["types"] == types
    for found in run_ranks(_fit, devices, settings, devices, data_ranks, LISTS, recompute):
        assert found["types"] == types
        assert_close(found["weights"], expected["weights"])


def test_without_lists_operators_are_those_of_autocast() -> None:
    """A list that is always there."""
    found = run_ranks(_fit, 1, {}, 1, 1, {})[0]
    assert (found["types"]["softmax"], found["types"]["gate"]) == (HALF, HALF)  # on the CPU


def _refuse_compiled() -> str:
    with pytest.raises(ValueError, match="compile") as caught:
        run(Attending(), BigModelPrecision("bf16-mixed", **LISTS), BigModelStrategy(compile_blocks=True))
    return str(caught.value)


def test_compiled_blocks_refuse_lists() -> None:
    """Compiled code that computes in other types than asked for."""
    message = run_ranks(_refuse_compiled, 1)[0]
    assert "`compile_blocks`" in message
    assert "`full_precision_modules`" in message


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"full_precision_ops": ["softmx"]}, "softmx.*softmax"),
        ({"full_precision_ops": ["bmm"], "half_precision_ops": ["bmm"]}, "bmm"),
        ({"full_precision_ops": [f"{__name__}.gates"]}, "gates"),
    ],
)
def test_unknown_names_are_refused_at_once(lists: dict[str, Any], words: str) -> None:
    """A typo that leaves an operator in half precision."""
    with pytest.raises(ValueError, match=words):
        BigModelPrecision("bf16-mixed", **lists)


def _refuse(lists: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="nrm") as caught:
        run(Attending(), BigModelPrecision("bf16-mixed", **lists), BigModelStrategy(pipeline_parallel_size=2), 2)
    return str(caught.value)


def test_a_pattern_that_matches_nothing_is_refused_on_every_rank() -> None:
    """One rank that waits for the others."""
    for message in run_ranks(_refuse, 2, {"full_precision_modules": ["blocks.*.nrm"]}):
        assert "blocks.*.nrm" in message
