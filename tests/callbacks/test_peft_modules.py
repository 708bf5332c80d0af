"""Forms of fine-tuning that peft has, through peft: a LightningModule around a wrapped model, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import assert_parallel_equivalent, run_ranks
from tests.callbacks.test_lora import assert_same
from tests.strategies import hf_modules
from tests.strategies.trainer_modules import trainer

# Of what peft imports.
pytestmark = pytest.mark.filterwarnings("ignore")


class Wrapped(hf_modules.PretrainedModule):
    """A transformers model in peft's wrapper.

    Args:
        kind: Of peft's configurations.
    """

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(name)
        self.kind = kind

    def configure_model(self) -> None:
        """As a user would write it."""
        import peft

        if self.model is not None:
            return
        super().configure_model()
        assert self.model is not None
        configs: dict[str, Any] = {
            "IA3": lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
            "bias": lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], bias="all", fan_in_fan_out=True),
            "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        }
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model = peft.get_peft_model(self.model, configs[self.kind]())  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """By the size of gradients."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


@pytest.mark.parametrize(("name", "kind"), [("llama", "IA3"), ("gpt2", "bias"), ("llama", "prompts")])
def test_wrapped_models(name: str, kind: str) -> None:
    """A wrapper whose frozen weights, or tokens of its own, are lost between stages and shards."""
    pytest.importorskip("peft")
    _, batch = hf_modules.build(name, 8)
    weight = hf_modules.MODELS[name].weight
    strategy = BigModelStrategy(pipeline_parallel_size=2, num_microbatches=2, zero_stage=3, microbatch_weight=weight)
    report = assert_parallel_equivalent(Wrapped(name, kind), batch, strategy, world_size=4, timeout_seconds=80.0)
    assert report.num_parameters > 20


def _fit(settings: dict[str, Any], devices: int, *, save: str | None = None, resume: str | None = None) -> Any:
    """An epoch of two batches of four, or one more; no loader may mix the samples."""
    _, batch = hf_modules.build("llama", 8)
    samples = [{key: value[index] for key, value in batch.items()} for index in range(8)]
    module = Wrapped("llama", "prompts")
    strategy = BigModelStrategy(**settings, checkpoint_parameters="trainable", microbatch_weight="equal")
    copies = devices // settings.get("pipeline_parallel_size", 1)
    fitted = trainer(strategy, devices, max_epochs=1 if save else 2)
    fitted.fit(module, DataLoader(samples, batch_size=4 // copies), ckpt_path=resume)  # type: ignore[arg-type]
    if save:
        fitted.save_checkpoint(save)
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_of_what_peft_trains(tmp_path: Path) -> None:
    """A file as large as the model; prompts or momentum lost on the way to another layout; a base that moves."""
    pytest.importorskip("peft")
    saved = str(tmp_path / "prompts.ckpt")
    (straight,) = run_ranks(_fit, 1, {}, 1, timeout_seconds=80.0)
    (zero, _) = run_ranks(_fit, 2, {"zero_stage": 3}, 2, save=saved, timeout_seconds=80.0)
    num_bytes = sum(file.stat().st_size for file in Path(saved).rglob("*") if file.is_file())
    assert num_bytes < 4 * sum(value.size for value in zero.values())
    pipe = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    for found in run_ranks(_fit, 2, pipe, 2, resume=saved, timeout_seconds=80.0):
        assert_same(found, straight)
    moved = [name for name in zero if (zero[name] != straight[name]).any()]
    assert moved == ["model.prompt_encoder.default.embedding.weight"]
