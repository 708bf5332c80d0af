"""What one GPU can show of compressed gradients: the numbers of the CPU, in the memory of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_bigmodel import DGC, PowerSGD, SampledThreshold, TopKErrorFeedback
from lightning_bigmodel.replicas.sparse_exchange import add_selected
from lightning_bigmodel.replicas.sync import GradientSync, NamedGradient, Replicas, StepProgress

DEVICE = "cuda"
SHAPES = {"matrix": (200, 300), "image": (16, 8, 5, 5), "vector": (100,)}
SYNCS: dict[str, tuple[type[GradientSync], dict[str, Any]]] = {
    "dgc sampled": (DGC, {"sparsity": 0.99, "min_numel": 100, "gradient_clip_val": 1.0, "warmup_steps": 3}),
    "dgc at random": (DGC, {"min_numel": 100, "threshold": SampledThreshold(strided=False, resample=False)}),
    "dgc exact, half": (DGC, {"min_numel": 100, "threshold": "exact", "value_dtype": "float16"}),
    "top-k": (TopKErrorFeedback, {"min_numel": 100}),
    "power": (PowerSGD, {"rank": 2}),
}


def _trained(name: str, device: str) -> dict[str, torch.Tensor]:
    """What is stepped by in all; from a state saved and loaded half way."""
    options = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    kind, settings = SYNCS[name]
    numbers = torch.Generator().manual_seed(0)
    parameters = {n: torch.randn(s, generator=numbers, dtype=torch.float64).to(device) for n, s in SHAPES.items()}
    totals = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    replicas = Replicas(group=None, size=1, rank=0, ranks_a_machine=1, levels=lambda _: (None, None))
    state: dict[str, Any] | None = None
    for step in range(10):
        if step % 5 == 0:
            sync = kind(**settings)
            sync.begin(replicas, parameters)
            if state is not None:
                sync.load_state_dict(state)
        gradients = []
        for key, parameter in parameters.items():
            value = torch.randn(SHAPES[key], generator=numbers, dtype=torch.float64).to(device)
            gradients.append(NamedGradient(name=key, value=value, parameter=parameter, options=options))
        sync.reduce(gradients, StepProgress())
        for gradient in gradients:
            assert gradient.value.device.type == device
            totals[gradient.name] += gradient.value
        state = sync.state_dict()
        for table in state.values():
            for kept in table.values() if isinstance(table, dict) else ():
                assert kept.device.type == device
    return {key: value.cpu() for key, value in totals.items()}


@pytest.mark.parametrize("name", SYNCS)
def test_same_numbers_on_both_devices(name: str) -> None:
    """A sample, a residual or a factor on the wrong device; another element chosen there."""
    for key, value in _trained(name, DEVICE).items():
        torch.testing.assert_close(value, _trained(name, "cpu")[key], rtol=1e-9, atol=1e-9)


def test_sparse_sums_on_the_device() -> None:
    """Indices or values of a type that the device does not add by."""
    target = torch.zeros(1000, device=DEVICE)
    places = torch.tensor([3, 999, 20], device=DEVICE)
    values = torch.tensor([1.0, 2.0, 3.0], device=DEVICE, dtype=torch.float16)
    for dtype in (torch.int32, torch.int64):
        add_selected([target.zero_(), target[:0]], [places.to(dtype), places[:0]], [values, values[:0]], None, 1)
        assert target[places].tolist() == [1.0, 2.0, 3.0]
        assert float(target.sum()) == 6.0
