"""What one GPU can show of precision: fp16 with a loss scale, operator lists, fp8 and TF32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_bigmodel import BigModelPrecision, BigModelStrategy
from lightning_bigmodel.testing import run_ranks
from tests.gpu.test_one_gpu import fit


def _fit(settings: dict[str, Any], knobs: dict[str, Any]) -> dict[str, Any]:
    precision = BigModelPrecision(**knobs)
    return {**fit(BigModelStrategy(**settings), plugins=[precision]), "scale": precision.scale}


def _plain(precision: str) -> dict[str, Any]:
    return fit("auto", precision=precision)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("16-mixed", {}),
        ("16-mixed", {"full_precision_ops": ["softmax", "layer_norm"], "half_precision_ops": ["bmm"]}),
        ("bf16-mixed", {"full_precision_modules": ["LayerNorm"]}),
        ("bf16-true", {}),
        ("32-true", {"matmul_precision": "high"}),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"zero_stage": 1}, {"zero_stage": 3, "offload": "cpu"}])
def test_precision_equals_plain(settings: dict[str, Any], name: str, knobs: dict[str, Any]) -> None:
    """A flag read before the device has made it; weights kept in another type than autocast uses."""
    (expected,) = run_ranks(_plain, 1, name, init_process_group=False)
    (found,) = run_ranks(_fit, 1, settings, {"precision": name, **knobs}, init_process_group=False)
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    assert (found["scale"] > 1) == (name == "16-mixed")


def test_fp8_layers_train() -> None:
    """The units of Ada and Hopper; other GPUs are refused by their capability."""
    if torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(Exception, match="compute capability"):
            run_ranks(_fit, 1, {}, {"precision": "fp8"}, init_process_group=False)
        return
    (expected,) = run_ranks(_plain, 1, "bf16-mixed", init_process_group=False)
    (found,) = run_ranks(_fit, 1, {}, {"precision": "fp8"}, init_process_group=False)
    assert found["loss"] == pytest.approx(expected["loss"], rel=5e-2)
