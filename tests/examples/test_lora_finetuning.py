"""The fine-tuning example, small: tuned over four ranks, merged, and evaluated by plain Lightning to the same loss."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_EXAMPLE = Path(__file__).parents[2] / "examples" / "lora_finetuning"
_SMALL = ["--model.hidden_size=64", "--model.num_layers=2", "--data.num_steps=2"]


def _loss(arguments: list[str], folder: Path) -> float:
    """What a command says at its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (found,) = re.findall(r"val_loss (\S+)", done.stdout)
    return float(found)


@pytest.mark.timeout(600)
def test_tuned_in_four_bits_and_merged(tmp_path: Path) -> None:
    """A merged model that is another one, or a run that does not start as its README says."""
    folder = tmp_path / "example"
    shutil.copytree(_EXAMPLE, folder, ignore=shutil.ignore_patterns("results"))
    _loss(["train.py", "fit", "--config", "pretrain.yaml", *_SMALL], folder)
    tuned = _loss(["train.py", "fit", "--config", "qlora.yaml", *_SMALL], folder)
    arguments = ["evaluate.py", "results/qlora.pt", "--hidden-size=64", "--num-layers=2"]
    assert _loss(arguments, folder) == pytest.approx(tuned, abs=1e-5)
    base, merged = (torch.load(folder / "results" / f"{name}.pt", weights_only=True) for name in ("base", "qlora"))
    changed = {name for name, value in merged.items() if not value.equal(base[name])}
    assert changed == {name for name in base if "_proj." in name}
    assert {file.name for file in (folder / "results" / "qlora").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
