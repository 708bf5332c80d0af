"""LoRA under every layout: the numbers of one process, nothing for what is frozen, and the files of peft."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_bigmodel import BigModelStrategy, LoRA
from lightning_bigmodel.testing import TinyTransformer, assert_parallel_equivalent
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.callbacks import lora_runs
from tests.callbacks.lora_runs import WIDTH
from tests.strategies import hf_modules
from tests.strategies.trainer_modules import trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipe": (2, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2_microbatches": (2, {"zero_stage": 2, "num_microbatches": 2}),
    "pipe_zero3": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}),
    "tensor_auto": (2, {"tensor_parallel_size": 2}),
    "tensor_zero3": (4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "tensor_pipe": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}),
}
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}


class Tuned(hf_modules.PretrainedModule):
    """Of its optimizer the size of a gradient counts, and not only its sign."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of all parameters, as modules are written that know of no adapters."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "pipe"),
        ("llama", "zero1"),
        ("llama", "zero2_microbatches"),
        ("llama", "pipe_zero3"),
        ("gpt2", "tensor_auto"),
        ("gpt2", "tensor_zero3"),
        ("llama", "tensor_pipe"),
    ],
)
def test_layouts(name: str, layout: str) -> None:
    """An adapter cut apart from its layer, a gradient summed twice or not at all, a frozen weight that moves."""
    pytest.importorskip("transformers")
    _, batch = hf_modules.build(name, 8)
    module = Tuned(name)
    world_size, settings = LAYOUTS[layout]
    strategy = BigModelStrategy(microbatch_weight=hf_modules.MODELS[name].weight, **settings)
    report = assert_parallel_equivalent(
        module,
        batch,
        strategy,
        world_size=world_size,
        timeout_seconds=80.0,
        callbacks=[LoRA(TARGETS[name], rank=4, alpha=32, seed=1)],
    )
    assert report.num_parameters > len(TARGETS[name]) * 8


run_ranks = functools.partial(run_ranks_for, timeout_seconds=80.0)
RANK = 4
NUM_TRAINED = 2 * 4 * RANK * (WIDTH + 2 * WIDTH)  # of two layers a block, with A and B
PLACES = [f"blocks.{index}.{layer}" for index in range(4) for layer in ("up", "down")]


def adapters(*targets: str, **options: Any) -> LoRA:
    return LoRA(list(targets) or ["up", "down"], rank=RANK, alpha=8, seed=1, **options)


def _fit(devices: int, settings: dict[str, Any], targets: tuple[str, ...] = (), *args: Any, **options: Any) -> Any:
    return lora_runs.fit([adapters(*targets)], devices, settings, *args, **options)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def test_what_is_frozen_costs_nothing() -> None:
    """A gradient, a moment or a message for the base; a base in 16 bits beside fp32 adapters refused, or cast."""
    half = {"base_dtype": torch.bfloat16}
    expected = run_ranks(_fit, 1, 1, {}, (), half)[0]
    settings: dict[str, tuple[int, dict[str, Any], tuple[str, int]]] = {
        "replicas": (2, {}, ("all_reduce", 1)),
        "zero2": (2, {"zero_stage": 2}, ("reduce_scatter", 1)),
        "zero3": (2, {"zero_stage": 3}, ("reduce_scatter", 1)),
    }
    for name, (devices, chosen, (kind, times)) in settings.items():
        for result in run_ranks(_fit, devices, devices, chosen, (), half):
            # Its weights are bf16: sums of two halves of a batch round apart.
            assert_same(result["weights"], expected["weights"], 2e-2)
            assert (
                result["weights"]["blocks.0.up.weight"].tolist() == expected["weights"]["blocks.0.up.weight"].tolist()
            )
            assert not result["has_frozen_gradients"]
            assert result["names_with_moments"] == sorted(f"{p}.lora_{m}" for p in PLACES for m in "AB")
            # Besides the gradients a few numbers: losses and weights of the mean.
            assert 0 <= result["sent"][kind] - times * 4 * NUM_TRAINED < 200, name


def test_a_stage_without_anything_to_train() -> None:
    """A stage that waits for a gradient, or a message that nobody sends."""
    last = ("blocks.3.*",)
    expected = run_ranks(_fit, 1, 1, {}, last)[0]
    settings = {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}
    results = run_ranks(_fit, 4, 4, settings, last)
    for rank, result in enumerate(results):
        assert_same(result["weights"], expected["weights"])
        # The first stage sends activations and gets no gradients.
        assert rank > 1 or "recv" not in result["sent"]
    assert expected["names_with_moments"] == [f"blocks.3.{p}.lora_{m}" for p in ("down", "up") for m in "AB"]


def _resume(path: str, settings: dict[str, Any], callbacks: list[Any]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        lora_runs.fit(callbacks, 2, settings, max_epochs=2, resume=path)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_of_adapters(tmp_path: Path) -> None:
    """A file as large as the model; a flag to resume; a base or moments that change; a lost adapter unseen."""
    small, zero3 = str(tmp_path / "small.ckpt"), {"zero_stage": 3, "checkpoint_parameters": "trainable"}
    straight = run_ranks(_fit, 1, 1, {}, (), None, max_epochs=2)[0]
    run_ranks(_fit, 2, 2, zero3, (), None, save=small)
    run_ranks(_fit, 2, 2, {"zero_stage": 3}, (), None, save=f"{tmp_path}/whole.ckpt")
    num_bytes = [
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in ("whole.ckpt", "small.ckpt")
    ]
    assert num_bytes[0] - num_bytes[1] > 4 * sum(v.size for n, v in straight["weights"].items() if ".lora_" not in n)
    pipe = {"pipeline_parallel_size": 2, "num_microbatches": 2, "checkpoint_parameters": "trainable"}
    for settings in (zero3, pipe):
        for result in run_ranks(_fit, 2, 2, settings, (), None, max_epochs=2, resume=small):
            assert_same(result["weights"], straight["weights"])
    for message in run_ranks(_resume, 2, small, zero3, [adapters("up", "down", "enter")]):
        assert "enter.lora_A" in message
    for message in run_ranks(_resume, 2, small, zero3, [LoRA(["up", "down"], rank=RANK, alpha=16)]):
        assert "scaling 2" in message


def test_a_model_on_the_meta_device() -> None:
    """Adapters left without values, or base weights that depend on there being adapters."""
    results = {
        devices: run_ranks(_fit, devices, devices, {"zero_stage": 3}, (), {"on_meta": True}) for devices in (1, 2)
    }
    for result in results[2]:
        assert_same(result["weights"], results[1][0]["weights"])
    assert np.abs(results[1][0]["weights"]["blocks.0.up.lora_A"]).min() > 0


def tuned(*targets: str, **options: Any) -> tuple[lora_runs.Tuned, LoRA]:
    """A module whose adapters have values."""
    module, callback = lora_runs.Tuned(), adapters(*targets, **options)
    for layer in callback.inject(module).values():
        torch.nn.init.normal_(layer.lora_B)
    return module.eval(), callback


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(dtype: torch.dtype) -> None:
    """A product that is scaled twice, transposed or rounded in between; a module that is not ordinary afterwards."""
    from transformers.pytorch_utils import Conv1D

    model = torch.nn.Sequential(torch.nn.Linear(8, 6), Conv1D(4, 6)).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    callback = LoRA(["*"], rank=2, alpha=3, use_rslora=True)
    for layer in callback.inject(model).values():
        torch.nn.init.normal_(layer.lora_B)
    factors = [(layer.lora_A.double(), layer.lora_B.double()) for layer in model]
    inputs = torch.randn(5, 8, dtype=dtype)
    adapted = model(inputs)
    assert pickle.loads(pickle.dumps(model))(inputs).equal(adapted)
    assert copy.deepcopy(model)(inputs).equal(adapted)
    assert callback.merge(model) == ["0", "1"]
    for index, (first, second) in enumerate(factors):
        update = 3 / 2**0.5 * second @ first
        whole = before[f"{index}.weight"].double() + (update.T if index else update)
        torch.testing.assert_close(model[index].weight.double(), whole, rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(
        model(inputs),
        adapted,
        rtol=0.05 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-5 if dtype == torch.float32 else 0.2,
    )
    assert model.state_dict().keys() == before.keys()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in model)
    with pytest.raises(ValueError, match="no adapters to merge"):
        callback.merge(model)


def test_dropout_and_what_is_trained_besides() -> None:
    """Dropout in evaluation; a head that stays frozen; adapters that draw from the run's random numbers."""
    state = torch.get_rng_state()
    module, callback = tuned("up", dropout=0.5, also_train=["head", "blocks.0.norm.bias"])
    callback.inject(module)
    inputs = torch.randn(4, WIDTH)
    layer = module.blocks[0].up
    assert layer(inputs).equal(layer(inputs))
    assert not layer.train()(inputs).equal(layer(inputs))
    aliased = lora_runs.Tuned()
    aliased.last = aliased.blocks[3].up  # one layer at two places is no tied weight
    assert len(adapters("up").inject(aliased)) == 4
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == {f"blocks.{i}.up.lora_{m}" for i in range(4) for m in "AB"} | {
        "head.weight", "head.bias", "blocks.0.norm.bias",
    }  # fmt: skip
    torch.set_rng_state(state)
    after = torch.get_rng_state()
    callback.inject(lora_runs.Tuned())
    assert torch.get_rng_state().equal(after)


class Early(lora_runs.Tuned):
    """An optimizer that was made too early."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Knows of no adapters."""
        return self.optimizer


def test_what_cannot_be_right_is_refused_by_name() -> None:
    """Adapters on nothing, wider than the layer, on a shared weight, or that nothing steps."""
    module = lora_runs.Tuned()
    before = {name: (id(p), p.requires_grad) for name, p in module.named_parameters()}
    tied = TinyTransformer(tied_head=True)
    attention = torch.nn.MultiheadAttention(8, 2)
    cases: list[tuple[torch.nn.Module, LoRA, str]] = [
        (module, LoRA(["upp"]), "'upp', which matches no module.*'up'"),
        (module, LoRA(["up", "norm"]), "'norm'.*LayerNorm.*no matrix"),
        (module, LoRA(["up"], rank=WIDTH + 1), f"rank={WIDTH + 1}.*'blocks.0.up'.*at most {WIDTH}"),
        (module, LoRA(["up"], also_train=["heed"]), "also_train.*'heed'"),
        (tied, LoRA(["head"], rank=2), "'head'.*also 'embedding.weight'"),
        (attention, LoRA(["out_proj"], rank=2), "reads this weight without calling"),
    ]
    for root, callback, message in cases:
        with pytest.raises(ValueError, match=message):
            callback.inject(root)
    assert {name: (id(p), p.requires_grad) for name, p in module.named_parameters()} == before
    adapters("up").inject(module)
    with pytest.raises(ValueError, match="other layers"):
        adapters("down").inject(module)
    with pytest.raises(ValueError, match="'blocks.0.up' has an adapter of rank 4"):
        LoRA(["up"], rank=2).inject(module)
    with pytest.raises(ValueError, match=r"'blocks.0.up.lora_A' and 7 more.*Early"):
        trainer("auto", 1, callbacks=adapters("up")).fit(Early(), lora_runs.batches(8, 8))


@pytest.mark.filterwarnings("ignore")  # of peft and what it imports
@pytest.mark.parametrize("use_rslora", [False, True])
def test_peft_files_both_ways(use_rslora: bool, tmp_path: Path) -> None:
    """Another scale, a matrix transposed, a name that peft does not know, a head that is left behind."""
    peft = pytest.importorskip("peft")
    from transformers.pytorch_utils import Conv1D

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), Conv1D(4, 6), torch.nn.Linear(4, 3))

    ours, inputs = build(), torch.randn(5, 8)
    callback = LoRA(["0", "2"], rank=2, alpha=6, use_rslora=use_rslora, also_train=["3"])
    for layer in callback.inject(ours).values():
        torch.nn.init.normal_(layer.lora_B)
    torch.nn.init.normal_(ours[3].weight)
    callback.save_peft(ours, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(build(), str(tmp_path / "ours"))
    torch.testing.assert_close(theirs(inputs), ours(inputs), rtol=1e-6, atol=1e-6)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = build()
    loaded = LoRA.load_peft(again, tmp_path / "theirs")
    torch.testing.assert_close(again(inputs), ours(inputs), rtol=1e-6, atol=1e-6)
    assert (loaded.settings.rank, loaded.settings.scaling) == (2, callback.settings.scaling)
    with pytest.raises(ValueError, match="'0', which matches"):
        LoRA.load_peft(lora_runs.Tuned(), tmp_path / "theirs")
    with pytest.raises(ValueError, match="adapter_config.json"):
        LoRA.load_peft(again, tmp_path)
    config = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    wider = torch.nn.Sequential(torch.nn.Linear(9, 6), torch.nn.Tanh(), Conv1D(4, 6), torch.nn.Linear(4, 3))
    before = {name: p.requires_grad for name, p in wider.named_parameters()}
    with pytest.raises(ValueError, match=r"has shape \[2, 8\] in the file and \[2, 9\]"):
        LoRA.load_peft(wider, tmp_path / "theirs")
    assert {name: p.requires_grad for name, p in wider.named_parameters()} == before
    bias = LoRA(["0"], rank=2, also_train=["3.bias"])
    bias.inject(single := build())
    with pytest.raises(ValueError, match="also_train.*parameter '3.bias'"):
        bias.save_peft(single, tmp_path / "bias")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        # Each would load and give other outputs than peft's, without a word.
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'.*changes the weights of the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"of_tomorrow": True}, "of_tomorrow"),
    ]
    for change, message in changes:
        (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=message):
            LoRA.load_peft(build(), tmp_path / "theirs")
