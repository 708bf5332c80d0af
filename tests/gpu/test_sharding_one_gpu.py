"""What one GPU can show of sharding, on one NCCL rank: storage that comes and goes, copies to and from the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel import BigModelStrategy, OffloadPolicy
from lightning_bigmodel.sharding.gather import ParameterShards
from lightning_bigmodel.sharding.passes import GatherPasses
from lightning_bigmodel.sharding.units import find_blocks, make_units
from lightning_bigmodel.testing import run_ranks
from tests.gpu.test_one_gpu import fit
from tests.sharding.zero_models import Model, batch, loss_of, reference


def _fit(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return fit(BigModelStrategy(**settings), **options)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return fit("auto", **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1},
        {"zero_stage": 3, "num_microbatches": 2},
        {"zero_stage": 2, "offload": "cpu"},
        {"zero_stage": 3, "offload": "cpu", "num_microbatches": 2},
        {"zero_stage": 3, "compile_blocks": True},
    ],
)
def test_sharded_training_equals_plain(settings: dict[str, Any], precision: str) -> None:
    """Copies that are read too early, a norm on the host in a group that speaks NCCL only."""
    options = {"precision": precision, "gradient_clip_val": 0.05}
    (expected,) = run_ranks(_plain, 1, options, init_process_group=False)
    (found,) = run_ranks(_fit, 1, settings, options, init_process_group=False)
    tolerance = 1e-4 if precision == "32-true" else 1e-2
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    for name, value in expected["weights"].items():
        assert abs(found["weights"][name] - value).max() < tolerance, name


def test_optimizer_state_on_disk(tmp_path: Path) -> None:
    """Mapped files behind parameters of a device."""
    settings = {"zero_stage": 1, "offload": OffloadPolicy("disk", path=str(tmp_path))}
    (expected,) = run_ranks(_plain, 1, {}, init_process_group=False)
    (found,) = run_ranks(_fit, 1, settings, {}, init_process_group=False)
    for name, value in expected["weights"].items():
        assert abs(found["weights"][name] - value).max() < 1e-4, name


def _gathered() -> dict[str, Any]:
    """Stage 3 as it runs on many ranks, with a group of one: memory of parameters is given up and taken again."""
    torch.cuda.set_device(0)
    device = torch.device("cuda")
    model = Model()
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    blocks = find_blocks(model)
    units = make_units(blocks, list(model.parameters()), list(blocks.values()))
    shards = ParameterShards(units, names, group=dist.group.WORLD, device=device)
    passes = GatherPasses(shards, units)
    shards.hand_to(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            with passes.forward(part):
                loss = loss_of(model, batch(step, part).to(device), 2, True)
            passes.begin_backward(part)
            loss.backward()
            passes.end_backward(part)
        assert all(whole.untyped_storage().nbytes() == 0 for whole in shards.wholes.values())
        optimizer.step()
        shards.publish()
    shards.restore()
    return {name: value.detach().cpu().numpy() for name, value in model.named_parameters()}


def test_storage_that_comes_and_goes() -> None:
    """Memory handed to another tensor while a kernel still reads it."""
    (found,) = run_ranks(_gathered, 1, backend="nccl")
    for name, value in reference(2, [True, True]).items():
        assert abs(found[name] - value).max() < 1e-4, name
