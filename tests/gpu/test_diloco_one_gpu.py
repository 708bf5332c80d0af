"""What one GPU can show of DiLoCo: the numbers of the CPU, with common weights pinned on the host or on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel import DiLoCo
from lightning_bigmodel.replicas.sync import Replicas, StepProgress

DEVICE = "cuda"
SHAPES = {"matrix": (200, 300), "vector": (100,), "none": (0, 3)}
STREAMING: dict[str, Any] = {"period": 4, "num_fragments": 2, "fragment_delay": 1, "mixing": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "pinned": {"period": 3},
    "on the device": {"period": 3, "snapshot_device": None},
    "streaming": STREAMING,
    "int8": {**STREAMING, "quantize": "int8"},
    "float8": {**STREAMING, "quantize": "float8"},
    "adam": {"period": 3, "outer_optimizer": "torch.optim.Adam", "outer_options": {"lr": 0.1}},
    "adam on the device": {"period": 3, "outer_optimizer": "torch.optim.Adam", "snapshot_device": None},
}


@pytest.fixture(autouse=True)
def _world_of_one() -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _trained(name: str, device: str, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Weights in the end; from a state saved and loaded half way, with a part under way."""
    numbers = torch.Generator().manual_seed(0)
    held = {key: torch.randn(shape, generator=numbers, dtype=torch.float64) for key, shape in SHAPES.items()}
    held = {key: value.to(device, dtype) for key, value in held.items()}
    replicas = Replicas(group=None, size=1, rank=0, ranks_a_machine=1, levels=lambda _: (None, None))
    state: dict[str, Any] | None = None
    for step in range(14):
        if step % 6 == 0:
            sync = DiLoCo(**SETTINGS[name])
            sync.begin(replicas, held)
            if state is not None:
                sync.load_state_dict(state)
        sync.before_step(held)
        for value in held.values():
            value -= 0.1 * torch.randn(value.shape, generator=numbers, dtype=torch.float64).to(device, dtype)
        sync.after_step(held, StepProgress())
        state = sync.state_dict()
        on_host = SETTINGS[name].get("snapshot_device", "cpu") == "cpu"
        for common in state["common"].values():
            assert common.device.type == ("cpu" if on_host else device)
            assert common.is_pinned() == (on_host and device == "cuda" and common.numel() > 0)
    return {key: value.cpu() for key, value in held.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_same_numbers_on_both_devices(name: str) -> None:
    """Common weights that are read before they have come; a state on the wrong device."""
    expected = _trained(name, "cpu")
    for key, value in _trained(name, DEVICE).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9)


def test_half_precision_on_the_device() -> None:
    """Changes in bf16 whose common weights are fp32."""
    for key, value in _trained("streaming", DEVICE, torch.bfloat16).items():
        torch.testing.assert_close(value, _trained("streaming", "cpu", torch.bfloat16)[key], rtol=2e-2, atol=2e-2)
