"""Frozen layers in 4 and 8 bits, alone and under adapters: one process's numbers in every layout, and bytes."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bigmodel import BigModelStrategy, LoRA, Quantize
from lightning_bigmodel.nn.quantized import quantize_layers, quantized_layers
from lightning_bigmodel.testing import RanksFailedError, TinyTransformer, assert_parallel_equivalent
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.callbacks import lora_runs
from tests.callbacks.test_lora import assert_same

run_ranks = functools.partial(run_ranks_for, timeout_seconds=80.0)


class Wide(lora_runs.Tuned):
    """Wide enough to be cut between blocks of 64 elements; learns by the size of gradients."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            for block in self.blocks:
                block.up, block.down = nn.Linear(lora_runs.WIDTH, 128), nn.Linear(128, lora_runs.WIDTH)
            self.enter = nn.Linear(lora_runs.WIDTH, lora_runs.WIDTH)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of all parameters, codes too."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def _callbacks(bits: int, *, lora_first: bool = False) -> list[Any]:
    # Rows of 32 inputs (`up`) are no whole blocks, those of 128 (`down`) are.
    both = [Quantize(["up", "down"], bits=bits), LoRA(["up", "down"], rank=4, alpha=16, seed=1)]  # type: ignore[arg-type]
    return both[::-1] if lora_first else both


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipe": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "zero1": (2, {"zero_stage": 1}),
    "pipe_zero3": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}),
}


@pytest.mark.parametrize(("layout", "bits"), [("pipe", 8), ("zero1", 4), ("pipe_zero3", 4)])
def test_layouts(layout: str, bits: int) -> None:
    """Codes cut between their scales, sums of codes, a codebook lost on the way, or a base that moves."""
    world_size, settings = LAYOUTS[layout]
    module = Wide()
    batch = next(iter(lora_runs.batches(8, 8)))
    report = assert_parallel_equivalent(
        module,
        batch,
        BigModelStrategy(**settings),
        world_size=world_size,
        timeout_seconds=80.0,
        callbacks=_callbacks(bits, lora_first=layout == "zero1"),
    )
    assert report.num_parameters > 4 * 2 * 6


class Pair(lora_runs.Tuned):
    """A pair of wide layers in each block, which a plan may cut."""

    def build(self) -> None:
        """Make the layers."""
        super().build()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            for block in self.blocks:
                block.norm = nn.LayerNorm(lora_runs.WIDTH)
                block.up, block.down = nn.Linear(lora_runs.WIDTH, 128), nn.Linear(128, lora_runs.WIDTH)


def _cut(targets: list[str], bits: int, plan: dict[str, str], whole: bool) -> dict[str, Any]:
    settings = {} if whole else {"tensor_parallel_size": 2, "tensor_plan": plan}
    callbacks = [Quantize(targets, bits=bits), LoRA(["down", "up"], rank=4, seed=1)]  # type: ignore[arg-type]
    return lora_runs.fit(callbacks, 1 if whole else 2, settings, kind=Pair)


def test_a_tensor_plan_cuts_between_blocks_only() -> None:
    """A scale that belongs to another rank's codes."""
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    for targets, bits in ((["down"], 4), (["up", "down"], 8)):
        whole = run_ranks(_cut, 1, targets, bits, plan, True)[0]["weights"]
        for result in run_ranks(_cut, 2, targets, bits, plan, False):
            # Scales in 8 bits are whole numbers in 32, with the same values.
            adapters = [{n: v for n, v in weights.items() if ".lora_" in n} for weights in (result["weights"], whole)]
            assert_same(*adapters)
            assert len(adapters[0]) == 16
    with pytest.raises(RanksFailedError, match=r"'blocks.0.up'.*blocks of 64 elements along its 32 inputs"):
        run_ranks(_cut, 2, ["up"], 4, plan, False)


@pytest.mark.parametrize(("bits", "double"), [(4, True), (4, False), (8, False)])
@pytest.mark.parametrize("width", [128, 24])
def test_values_are_those_of_bitsandbytes(bits: int, double: bool, width: int) -> None:
    """A table or a scale of another kind, a row that is shifted, a gradient of other values than the forward's."""
    import bitsandbytes

    layer = nn.Sequential(nn.Linear(width, 6))
    plain = layer[0].weight.detach().clone()
    inputs = torch.randn(3, 5, width, requires_grad=True)
    quantize_layers(layer, ["0"], bits, double_quantization=double)
    if bits == 4:
        codes, state = bitsandbytes.functional.quantize_4bit(plain, quant_type="nf4", compress_statistics=double)
        values = bitsandbytes.functional.dequantize_4bit(codes, state)
    else:
        codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(plain.half())
        values = codes * scales[:, None] / 127
    torch.testing.assert_close(layer[0].dequantized_weight(), values, rtol=1e-6, atol=1e-7)
    reference = nn.functional.linear(inputs, values, layer[0].bias)
    torch.testing.assert_close(layer(inputs), reference, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(out.square().sum(), inputs)[0] for out in (layer(inputs), reference)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
    again = pickle.loads(pickle.dumps(layer.bfloat16()))  # a cast leaves codes and scales alone
    torch.testing.assert_close(again[0].dequantized_weight(), values, rtol=1e-6, atol=1e-7)
    layer[0].dequantize()
    assert type(layer[0]) is nn.Linear
    torch.testing.assert_close(layer[0].weight, values, rtol=1e-6, atol=1e-7)


def test_memory_and_merge() -> None:
    """Weights that stay beside their codes; a merge that leaves codes, or rounds the sum once more."""
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(nn.Linear(256, 256, bias=False), Conv1D(64, 256), nn.Linear(64, 2))
    quantize_layers(model, ["*"], 4)
    num_bytes = sum(p.numel() * p.element_size() for p in model[0].parameters())
    assert num_bytes == 256 * 256 // 2 + 1024 + 4 * 4 + 4
    assert [p.requires_grad for name, p in model.named_parameters() if "bias" not in name] == [False] * 12
    adapters = LoRA(["0", "1"], rank=2)
    for layer in adapters.inject(model).values():
        nn.init.normal_(layer.lora_B)
    inputs = torch.randn(3, 256)
    before = model(inputs)
    adapters.merge(model)
    assert [type(layer) for layer in model] == [nn.Linear, Conv1D, nn.Linear]
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model(inputs), before, rtol=1e-5, atol=1e-4)


def _resumed(devices: int, settings: dict[str, Any], bits: int, **options: Any) -> dict[str, Any]:
    return lora_runs.fit(_callbacks(bits), devices, settings, kind=Wide, **options)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("parameters", ["all", "trainable"])
def test_checkpoints_between_layouts(parameters: str, tmp_path: Path) -> None:
    """Codes that are cut or cast on the way; a base that is not the module's where it was left out."""
    path, bits = str(tmp_path / "saved.ckpt"), 4 if parameters == "all" else 8
    straight = run_ranks(_resumed, 1, 1, {}, bits, max_epochs=2)[0]["weights"]
    run_ranks(_resumed, 2, 2, {"zero_stage": 3, "checkpoint_parameters": parameters}, bits, save=path)
    settings = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    for result in run_ranks(_resumed, 2, 2, settings, bits, max_epochs=2, resume=path):
        assert_same(result["weights"], straight)


class Theirs(lora_runs.Tuned):
    """With a layer of bitsandbytes' own."""

    trained = False

    def build(self) -> None:
        """Make the layers."""
        import bitsandbytes

        super().build()
        if self.trained:
            self.enter = bitsandbytes.nn.Linear8bitLt(lora_runs.WIDTH, lora_runs.WIDTH)
        else:
            self.enter = bitsandbytes.nn.Linear4bit(lora_runs.WIDTH, lora_runs.WIDTH, quant_type="nf4")


class TheirsTrained(Theirs):
    """One that is trained."""

    trained = True


def _theirs(kind: type[Theirs], settings: dict[str, Any]) -> None:
    lora_runs.fit([], 2, settings, kind=kind)


def test_layers_of_bitsandbytes_are_refused_where_their_scales_are_lost() -> None:
    """Other numbers in silence, or an error of the trace that names no layer."""
    cases: list[tuple[type[Theirs], dict[str, Any], str]] = [
        (TheirsTrained, {"zero_stage": 3}, "'enter' is a `Linear8bitLt` that is trained"),
        (
            Theirs,
            {"pipeline_parallel_size": 2},
            r"'enter' is bitsandbytes' `Linear4bit`.*`lightning_bigmodel.Quantize`",
        ),
    ]
    for kind, settings, message in cases:
        with pytest.raises(RanksFailedError, match=message):
            run_ranks(_theirs, 2, kind, settings)


def _without_values() -> None:
    with pytest.raises(ValueError, match=r"'blocks.0.up' is on the meta device"):
        lora_runs.fit([Quantize(["up"])], 1, {}, {"on_meta": True})


def test_a_module_without_values_is_refused_and_the_reason_seen() -> None:
    """An error on the way out, about what the first one was about, in its place."""
    run_ranks(_without_values, 1)


def test_what_cannot_be_right_is_refused_by_name() -> None:
    """Codes for a weight that another module reads, or that is not there."""
    tied = TinyTransformer(tied_head=True)
    module = lora_runs.Tuned()
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 4))
    quantized = nn.Sequential(nn.Linear(4, 4))
    Quantize(["0"], bits=8).convert(quantized)
    cases: list[tuple[nn.Module, Quantize, str]] = [
        (module, Quantize(["upp"]), "'upp', which matches no module"),
        (tied, Quantize(["head"]), "'head', whose weight is also 'embedding.weight'"),
        (empty, Quantize(["0"]), "'0' is on the meta device"),
        (quantized, Quantize(["0"]), "'0' has 8 bits already"),
        (nn.Sequential(nn.Linear(3, 3)), Quantize(["0"]), "'0' has 9 elements"),
    ]
    for root, callback, message in cases:
        before = {name: id(p) for name, p in root.named_parameters()}
        with pytest.raises(ValueError, match=message):
            callback.convert(root)
        assert {name: id(p) for name, p in root.named_parameters()} == before
    with pytest.raises(ValueError, match="'0'.*quantised and cannot be trained"):
        LoRA(["0"], rank=2, also_train=["0"]).inject(quantized)
    with pytest.raises(ValueError, match="double_quantization=True.*bits=8"):
        Quantize(["0"], bits=8, double_quantization=True)
    assert list(quantized_layers(quantized)) == ["0"]
