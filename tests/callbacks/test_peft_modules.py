"""Forms of fine-tuning that peft has, through peft: a LightningModule around a wrapped model, under every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import assert_parallel_equivalent
from tests.strategies import hf_modules

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
