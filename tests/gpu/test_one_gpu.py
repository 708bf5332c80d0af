"""What one GPU can show: the engine's CUDA paths on one rank, against the CPU and against plain Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.pipeline.blocks import find_units
from lightning_bigmodel.pipeline.trace import call_order, trace_step
from lightning_bigmodel.testing import TinyTransformer, run_ranks


def fit(strategy: Any, **options: Any) -> dict[str, Any]:
    """Four steps on the GPU; parameters and metrics."""
    torch.manual_seed(0)
    module = TinyTransformer(num_features=64, num_blocks=4)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="gpu", devices=1, strategy=strategy, max_steps=4, **{**quiet, **options})
    trainer.fit(module, DataLoader(module.dataset(32), batch_size=8))
    return {
        "weights": {name: parameter.detach().cpu().numpy() for name, parameter in module.named_parameters()},
        "loss": float(trainer.callback_metrics["train_loss"]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _micro(num_microbatches: int, options: dict[str, Any]) -> dict[str, Any]:
    return fit(BigModelStrategy(num_microbatches=num_microbatches), **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_micro_batches_on_one_gpu_equal_the_whole_batch(precision: str) -> None:
    """The schedule, the loss node and the gradient window on CUDA tensors."""
    options = {"precision": precision}
    (expected,) = run_ranks(_plain, 1, options, init_process_group=False)
    (found,) = run_ranks(_micro, 1, 4, options, init_process_group=False)
    tolerance = 1e-4 if precision == "32-true" else 1e-2
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    for name, value in expected["weights"].items():
        assert abs(found["weights"][name] - value).max() < tolerance, name


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return fit("auto", **options)


def test_trace_for_a_cuda_device_allocates_nothing_there() -> None:
    """A trace that puts the model on the device would defeat its purpose."""
    module = TinyTransformer(num_features=256, num_blocks=4)
    device = torch.device("cuda")
    batch = {name: value.to(device) for name, value in module.example_batch(4, seed=0).items()}
    before = torch.cuda.memory_allocated()

    def step() -> Any:
        return module.loss(batch)

    units = find_units(module, call_order(module, step, device), "auto", 2)
    trace = trace_step(module, step, {m: units.names[m] for m in units.candidates}, units.blocks, device)
    assert trace.trained == {id(parameter) for parameter in module.parameters()}
    assert torch.cuda.memory_allocated() - before < sum(p.numel() * 4 for p in module.parameters()) / 10
