"""Blocks compiled one by one under every layout: the same numbers, the same names in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.checkpoint import read_index
from lightning_bigmodel.cli import main
from lightning_bigmodel.testing import run_ranks
from tests.strategies.test_trainer import assert_same_weights, fit
from tests.strategies.trainer_modules import Classifier, loader, trainer, weights

# The front end of torch.compile without a C++ compiler; other backends give zeros where eager mode gives no gradient.
EAGER: dict[str, Any] = {"compile_blocks": {"backend": "eager"}}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one_device": (1, 1, {}),
    "zero1": (2, 2, {"zero_stage": 1}),
    "zero3": (2, 2, {"zero_stage": 3}),
    "pipe": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "pipe_zero3": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}),
}


def _fit(devices: int, batch_size: int, settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.utils.counters.clear()
    result = fit(BigModelStrategy(**settings), devices, batch_size, **options)
    result["frames"] = torch._dynamo.utils.counters["frames"]["ok"]
    return result


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_blocks_equal_one_process(name: str) -> None:
    """Hooks or gates traced into a block, blocks that run as they were, other lengths than at first."""
    devices, data_size, settings = LAYOUTS[name]
    options = {"lengths": (3, 7, 5)}
    expected = fit("auto", 1, 8, **options)
    for result in run_ranks(_fit, devices, devices, 8 // data_size, {**settings, **EAGER}, options):
        assert_same_weights(result["weights"], expected["weights"])
        assert result["frames"] > 0


def _save(directory: str, devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    module = Classifier()
    run = trainer(BigModelStrategy(**settings), devices)
    run.fit(module, loader(16, 4), loader(10, 4))
    run.save_checkpoint(f"{directory}/run.ckpt")
    assert all("forward" not in part.__dict__ for part in module.modules())
    return weights(module)


def test_names_in_checkpoints_are_those_of_the_plain_module(tmp_path: Path) -> None:
    """A prefix of the compiler in parameter names, in sharded checkpoints and in consolidated ones."""
    found = run_ranks(_save, 2, str(tmp_path), 2, {"zero_stage": 3, **EAGER})
    assert set(read_index(tmp_path / "run.ckpt").model_names) == set(Classifier().state_dict())
    assert main(["convert", str(tmp_path / "run.ckpt"), str(tmp_path / "out.ckpt")]) == 0
    module: LightningModule = Classifier.load_from_checkpoint(tmp_path / "out.ckpt")
    assert_same_weights(weights(module), found[0])


class NoBlocks(LightningModule):
    """Nothing repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """A loss."""
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _no_blocks() -> str:
    with pytest.raises(ValueError, match="found no blocks"):
        trainer(BigModelStrategy(compile_blocks=True), 1).fit(NoBlocks(), torch.utils.data.DataLoader(torch.ones(4, 2)))
    return "refused"


def test_settings_without_effect_are_refused() -> None:
    """A setting that compiles nothing."""
    with pytest.raises(ValueError, match="must be True, False"):
        BigModelStrategy(compile_blocks="yes")  # type: ignore[arg-type]  # the mistake
    assert run_ranks(_no_blocks, 1) == ["refused"]
