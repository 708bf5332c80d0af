"""Which type what is computed, sent and kept in, under every layout."""

from __future__ import annotations

import functools
import tempfile
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_bigmodel import BigModelPrecision, BigModelStrategy
from lightning_bigmodel.checkpoint import convert_to_single_file
from lightning_bigmodel.testing import CollectiveCounter
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.scaled_modules import BATCH, WIDTH, Overflowing, assert_close, batches, run, trainer

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)

PIPE = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true"])
def test_the_trainers_setting_brings_the_plugin(name: Any) -> None:
    """Lightning's own plugin; fp16 that has become bf16 on the way."""
    made = Trainer(accelerator="cpu", devices=1, strategy=BigModelStrategy(), precision=name, logger=False)
    assert isinstance(made.precision_plugin, BigModelPrecision)
    assert made.precision == name
    by_name = Trainer(accelerator="cpu", devices=1, strategy="bigmodel_zero1", precision=name, logger=False)
    assert isinstance(by_name.precision_plugin, BigModelPrecision)
    own = Trainer(accelerator="cpu", devices=1, precision="32-true", logger=False)
    assert not isinstance(own.precision_plugin, BigModelPrecision)


def test_a_scaler_of_one_rank_is_refused() -> None:
    """Ranks that disagree whether to step."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="one rank.*BigModelPrecision"):
        Trainer(accelerator="cpu", devices=1, strategy=BigModelStrategy(), plugins=[plugin], logger=False)
    with pytest.raises(ValueError, match="one rank.*BigModelPrecision"):
        BigModelStrategy(precision_plugin=plugin)


class Dtypes(LightningModule):
    """Keeps the types that linear layers give, in training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.found: dict[str, set[str]] = {}
        self.losses: list[float] = []

    def on_fit_start(self) -> None:
        """Look at what layers give."""
        self.hooks = [
            layer.register_forward_hook(functools.partial(self._note, name))
            for name, layer in [*self.layers.named_children(), ("norm", self.norm)]
        ]

    def _note(self, name: str, layer: nn.Module, args: Any, output: Tensor) -> None:
        if isinstance(output, Tensor) and output.device.type != "meta":
            self.found.setdefault(name, set()).add(str(output.dtype))

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return nn.functional.mse_loss(self.norm(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Regression."""
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same."""
        self.log("val_loss", self._loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """As logged."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _fit_dtypes(
    name: Any, settings: dict[str, Any] | None, devices: int, data_ranks: int, kind: type[Dtypes] = Dtypes
) -> dict[str, Any]:
    module = kind()
    strategy = BigModelStrategy(**settings) if settings is not None else None
    fit = trainer(strategy or "auto", devices, name if settings is not None else BigModelPrecision(name))
    with CollectiveCounter() as sent:
        fit.fit(module, batches(BATCH // data_ranks), batches(BATCH, 16))
    return {
        "found": {k: sorted(v) for k, v in module.found.items()},
        "losses": [*module.losses, float(fit.callback_metrics["val_loss"])],
        "kept": sorted({str(p.dtype) for p in module.parameters()}),
        "sent": sent.as_dict(),
    }


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"])
def test_types_and_losses_are_those_of_one_process(name: str) -> None:
    """Autocast that stages do not see; a border of another type than what is sent; evaluation in another type."""
    expected = run_ranks(_fit_dtypes, 1, name, None, 1, 1)[0]
    tolerance = 1e-6 if name == "64-true" else 1e-3
    for devices, data_ranks, settings in ((2, 1, PIPE), (2, 2, {"zero_stage": 3}), (4, 2, {**PIPE, "zero_stage": 1})):
        results = run_ranks(_fit_dtypes, devices, name, settings, devices, data_ranks)
        merged: dict[str, set[str]] = {}
        for result in results:
            assert result["losses"] == pytest.approx(expected["losses"], rel=tolerance)
            assert result["kept"] == expected["kept"]
            for layer, found in result["found"].items():
                merged.setdefault(layer, set()).update(found)
        assert {layer: sorted(found) for layer, found in merged.items()} == expected["found"]


class Rotary(LightningModule):
    """Angles by a buffer that is not saved, a mask by an integer one, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)
        self.register_buffer("order", torch.arange(WIDTH))
        self.register_buffer("table", torch.linspace(0.0, 1.0, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.LayerNorm(WIDTH)
        self.error = 0.0
        self.types: dict[str, str] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Far positions."""
        x, y = batch
        positions = torch.arange(4096 - len(x), 4096, device=x.device)
        angles = positions[:, None].float() * self.inv_freq.float()
        true = positions[:, None].double() / 10000 ** (torch.arange(0, WIDTH, 2).double() / WIDTH)
        self.error = max(self.error, float((angles.double() - true).abs().max()))
        turned = torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype)
        x = (x + turned + self.table.to(x.dtype))[:, self.order]
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        x = self.last(self.norm(x))
        self.types["step"] = str(x.dtype)
        return nn.functional.mse_loss(x.float(), y.float())

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_end(self) -> None:
        """Types within the run."""
        self.types.update(
            {name: str(tensor.dtype) for name, tensor in [*self.named_parameters(), *self.named_buffers()]}
        )


def _fit_rotary(settings: dict[str, Any], devices: int, **knobs: Any) -> dict[str, Any]:
    module = Rotary()
    with tempfile.TemporaryDirectory() as path:
        fit = trainer(
            BigModelStrategy(**settings),
            devices,
            BigModelPrecision(**{"precision": "bf16-true", **knobs}),
            enable_checkpointing=True,
            default_root_dir=path,
        )
        fit.fit(module, batches(BATCH))
        saved = {}
        if devices == 1:
            fit.save_checkpoint(f"{path}/one.ckpt")
            convert_to_single_file(f"{path}/one.ckpt", f"{path}/file.ckpt")
            state = torch.load(f"{path}/file.ckpt", weights_only=False)["state_dict"]
            saved = {name: str(tensor.dtype) for name, tensor in state.items()}
            again = Rotary()
            other = trainer(
                BigModelStrategy(), 1, BigModelPrecision(**{"precision": "bf16-true", **knobs}), max_epochs=2
            )
            other.fit(again, batches(BATCH), ckpt_path=f"{path}/one.ckpt")
            assert again.types == module.types
            assert again.error == module.error
    return {"error": module.error, "types": module.types, "saved": saved}


HALF, FULL = "torch.bfloat16", "torch.float32"


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3}])
def test_frequencies_and_statistics_stay_in_full_precision(settings: dict[str, Any]) -> None:
    """Angles off by turns at far positions; integers cast; statistics that stand still; a reload that casts again."""
    devices = 2 if settings else 1
    for found in run_ranks(_fit_rotary, devices, settings, devices):
        assert found["error"] < 1e-2
        types = found["types"]
        assert (types["inv_freq"], types["table"], types["order"]) == (FULL, HALF, "torch.int64")
        assert {types[f"norm.{name}"] for name in ("weight", "bias", "running_mean", "running_var")} == {FULL}
        assert {types[name] for name in ("layers.0.weight", "last.weight", "step")} == {HALF}
        assert all(types[name] == kind for name, kind in found["saved"].items())


def test_the_lists_say_what_stays_in_full_precision() -> None:
    """A list that is not followed; frequencies that stay although the list leaves them out."""
    found = run_ranks(_fit_rotary, 1, {}, 1, full_precision_buffers=["table"], full_precision_modules=["LayerNorm"])[0]
    types = found["types"]
    assert (types["inv_freq"], types["table"]) == (HALF, FULL)
    assert found["error"] > 0.1
    assert (types["norm.running_mean"], types["last.weight"]) == (HALF, FULL)


def _fit_fused(name: Any, settings: dict[str, Any], devices: int, data_ranks: int, fused: bool) -> dict[str, Any]:
    module = Overflowing()
    module.configure_optimizers = lambda: torch.optim.AdamW(  # type: ignore[method-assign]
        module.parameters(), lr=1e-2, fused=fused or None, eps=1e-4
    )
    return run(module, name, BigModelStrategy(**settings), devices, data_ranks, gradient_clip_val=0.05)


@pytest.mark.parametrize(("devices", "settings"), [(2, {"zero_stage": 3}), (2, PIPE), (1, {})])
def test_fused_optimizers_clip_with_a_loss_scale(devices: int, settings: dict[str, Any]) -> None:
    """Lightning's refusal; a norm of scaled gradients, which would clip all of them."""
    data_ranks = 2 if "zero_stage" in settings else 1
    expected = run_ranks(_fit_fused, 1, "32-true", {}, 1, 1, False)[0]
    for found in run_ranks(_fit_fused, devices, "16-mixed", settings, devices, data_ranks, True):
        assert_close(found["weights"], expected["weights"], 2e-2)


def _fit_reduced(reduce_dtype: Any, name: Any, settings: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    with CollectiveCounter() as sent:
        found = run(
            Overflowing(), BigModelPrecision(name, reduce_dtype=reduce_dtype), BigModelStrategy(**settings), 2, 2
        )
    kinds = ("reduce_scatter",) if settings else ("all_reduce",)
    return sum(num_bytes for kind, (_, num_bytes) in sent.as_dict().items() if kind.startswith(kinds)), found


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_gradients_are_sent_in_the_type_asked_for(settings: dict[str, Any]) -> None:
    """Sums in 16 bits that nobody asked for; a setting without effect."""
    full, expected = run_ranks(_fit_reduced, 2, None, "32-true", settings)[0]
    half, rounded = run_ranks(_fit_reduced, 2, "bfloat16", "32-true", settings)[0]
    of_half, _ = run_ranks(_fit_reduced, 2, None, "bf16-true", settings)[0]
    assert half == pytest.approx(full / 2, rel=0.01)
    assert of_half == pytest.approx(full, rel=0.01)
    assert_close(rounded["weights"], expected["weights"], 2e-2)
    assert any((rounded["weights"][name] != value).any() for name, value in expected["weights"].items())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "16"}, "'16'. is not known.*16-mixed"),
        ({"precision": "bf16-mixed", "init_scale": 2.0}, "`init_scale` steers a loss scale"),
        ({"precision": "bf16-mixed", "loss_scale": "torch"}, "`loss_scale` steers a loss scale"),
        ({"precision": "16-mixed", "loss_scale": "apex"}, "apex"),
        ({"precision": "16-mixed", "loss_scale": 8.0, "growth_interval": 2}, "stays.*growth_interval"),
        ({"precision": "16-mixed", "growth_factor": 0.5}, "growth_factor"),
        ({"precision": "32-true", "full_precision_ops": ["softmax"]}, "`full_precision_ops`.*32-true"),
        ({"precision": "bf16-true", "half_precision_ops": ["bmm"]}, "`half_precision_ops`.*bf16-true"),
        ({"precision": "bf16-mixed", "full_precision_ops": "softmax"}, "must be a list"),
        ({"precision": "bf16-mixed", "full_precision_ops": ["sofmax"]}, "sofmax.*softmax"),
        ({"precision": "32-true", "full_precision_modules": ["LayerNorm"]}, "no effect"),
        ({"precision": "bf16-mixed", "full_precision_buffers": ["x"]}, "casts no buffers"),
        ({"precision": "bf16-true", "full_precision_buffers": "inv_freq"}, "list of patterns"),
        ({"precision": "32-true", "reduce_dtype": "int8"}, "int8"),
        ({"precision": "32-true", "matmul_precision": "low"}, "low"),
        ({"precision": "bf16-mixed", "fp8_modules": ["*"]}, "fp8_modules"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], words: str) -> None:
    """A typo, or a setting that nothing looks at."""
    with pytest.raises((ValueError, TypeError), match=words):
        BigModelPrecision(**settings)


def test_products_may_use_tensor_cores_while_the_trainer_runs() -> None:
    """A process-wide flag that stays behind, or that is not set."""
    before = torch.get_float32_matmul_precision()
    module = Overflowing()
    seen = []
    module.on_train_epoch_start = lambda: seen.append(torch.get_float32_matmul_precision())  # type: ignore[method-assign]
    run(module, BigModelPrecision("32-true", matmul_precision="high"))
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == before


def _fit_fp8(settings: dict[str, Any] | None, devices: int, data_ranks: int) -> dict[str, Any]:
    module = Overflowing()
    strategy = BigModelStrategy(**settings) if settings is not None else None
    found = run(module, BigModelPrecision("fp8", fp8_emulate=True), strategy, devices, data_ranks)
    kinds = {name: type(layer).__name__ for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    return {**found, "kinds": kinds}


def test_linear_layers_compute_in_fp8() -> None:
    """Layers that stay in bf16, or that lose their names or their optimizer; stages that scale by other values."""
    expected = run_ranks(_fit_fp8, 1, None, 1, 1)[0]
    kinds = list(expected["kinds"].values())
    assert kinds == ["Float8Linear"] * 7 + ["Linear"]
    in_bf16 = run_ranks(run, 1, Overflowing(), "bf16-mixed")[0]
    assert any((in_bf16["weights"][name] != value).any() for name, value in expected["weights"].items())
    assert_close(in_bf16["weights"], expected["weights"], 5e-2)
    pipe = {"pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "GPipe"}
    for devices, data_ranks, settings in ((2, 1, pipe), (2, 2, {"zero_stage": 3})):
        for found in run_ranks(_fit_fp8, devices, settings, devices, data_ranks):
            assert found["kinds"] == expected["kinds"]
            # Data ranks scale by the largest value of their own samples.
            assert_close(found["weights"], expected["weights"], 1e-6 if data_ranks == 1 else 5e-2)


def _refuse_fp8(settings: dict[str, Any], knobs: dict[str, Any], devices: int) -> str:
    with pytest.raises(ValueError, match="fp8") as caught:
        run(Overflowing(), BigModelPrecision("fp8", **knobs), BigModelStrategy(**settings), devices)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "knobs", "words"),
    [
        ({}, {}, ["8.9", "'cpu'", "fp8_emulate=True"]),
        ({}, {"fp8_emulate": True, "fp8_modules": ["blocks.9.*"]}, ["'blocks.9.*'", "blocks.0.up"]),
        (
            {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
            {"fp8_emulate": True},
            ["fp8", "tensor_parallel_size=2"],
        ),
    ],
)
def test_fp8_says_what_it_needs(settings: dict[str, Any], knobs: dict[str, Any], words: list[str]) -> None:
    """A run that goes on in another precision, or ends in a message from inside torch."""
    devices = 2 if settings else 1
    for message in run_ranks(_refuse_fp8, devices, settings, knobs, devices):
        assert all(word in message for word in words), message


def test_fp8_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import error in the middle of a run."""
    monkeypatch.setattr("lightning_bigmodel.precision.fp8.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchao"):
        BigModelPrecision("fp8")


# Lightning calls what newer jsonargparse deprecates.
@pytest.mark.filterwarnings(r"ignore:(?s).*(was deprecated in v4|JsonargparseDeprecationWarning)")
def test_yaml_sets_every_knob(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that LightningCLI cannot make from names."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = tmp_path / "config.yaml"
    config.write_text(
        """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy: {class_path: lightning_bigmodel.BigModelStrategy}
  plugins:
    - class_path: lightning_bigmodel.BigModelPrecision
      init_args:
        precision: 16-mixed
        loss_scale: megatron
        init_scale: 1024
        hysteresis: 3
        full_precision_ops: [softmax]
        full_precision_modules: [LayerNorm]
        reduce_dtype: bfloat16
"""
    )
    cli = LightningCLI(
        Dtypes, args=["--config", str(config)], run=False, save_config_callback=None, seed_everything_default=False
    )
    precision = cli.trainer.precision_plugin
    assert isinstance(precision, BigModelPrecision)
    assert precision.loss_scale is not None
    assert (precision.scale, precision.loss_scale.hysteresis, precision.loss_scale.min_scale) == (1024.0, 3, 1.0)
    assert precision.reduce_dtype == torch.bfloat16
    config.write_text(config.read_text().replace("hysteresis", "hysterisis"))
    with pytest.raises(SystemExit):
        LightningCLI(
            Dtypes, args=["--config", str(config)], run=False, save_config_callback=None, seed_everything_default=False
        )


class Chain(Dtypes):
    """What crosses the cut is what a linear layer gives."""

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.norm(x).float(), y.float())


def _sent(name: Any) -> int:
    with CollectiveCounter() as sent:
        run(Chain(), name, BigModelStrategy(**PIPE), 2)  # type: ignore[arg-type]
    counts = sent.as_dict()
    return sum(num_bytes for kind, (_, num_bytes) in counts.items() if "send" in kind or "recv" in kind)


def test_what_crosses_a_cut_is_sent_in_the_type_it_has() -> None:
    """A border that is always fp32, or that rounds what is not."""
    full = run_ranks(_sent, 2, "32-true")[0]
    assert full > 0
    for name in ("16-mixed", "bf16-mixed", "bf16-true"):
        assert run_ranks(_sent, 2, name)[0] == full // 2


def _fit_compiled(compiled: bool) -> dict[str, Any]:
    precision = BigModelPrecision("bf16-mixed", full_precision_modules=["blocks.1.down"])
    module = Overflowing()
    types: set[str] = set()
    module.blocks[1].down.register_forward_hook(lambda layer, args, output: types.add(str(output.dtype)))  # type: ignore[union-attr]
    found = run(module, precision, BigModelStrategy(compile_blocks=compiled))
    return {**found, "types": types}


def test_modules_keep_full_precision_in_compiled_blocks() -> None:
    """A layer that compiled code runs in 16 bits."""
    plain, compiled = (run_ranks(_fit_compiled, 1, compiled)[0] for compiled in (False, True))
    assert plain["types"] == {"torch.float32"}
    assert_close(compiled["weights"], plain["weights"], 1e-2)  # compiled code rounds less often
    assert run_ranks(run, 1, Overflowing(), "bf16-mixed")[0]["seen"] != plain["seen"]


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"])
def test_where_sums_have_one_order_the_bits_are_those_of_one_process(name: str) -> None:
    """A stage that rounds once more, or once less. Residual branches would be summed in another order."""
    whole = {"pipeline_parallel_size": 2, "num_microbatches": 1, "schedule": "GPipe"}
    expected = run_ranks(_fit_dtypes, 1, name, None, 1, 1, Chain)[0]
    for found in run_ranks(_fit_dtypes, 2, name, whole, 2, 1, Chain):
        assert found["losses"] == expected["losses"]


class Late(LightningModule):
    """Built in `configure_model`, on the meta device where asked for; statistics, frequencies and a table."""

    def __init__(self, meta: bool) -> None:
        super().__init__()
        self.meta = meta
        self.layers: nn.ModuleList | None = None
        self.types: dict[str, str] = {}
        self.frequencies: list[float] = []

    def configure_model(self) -> None:
        """Once."""
        if self.layers is None:
            with torch.device("meta") if self.meta else nullcontext():
                self.layers = nn.ModuleList(Turning() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Regression."""
        x, y = batch
        assert self.layers is not None
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x.float(), y.float())

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_end(self) -> None:
        """Types within the run."""
        assert self.layers is not None
        layer = self.layers[0]
        if not layer.inv_freq.isnan().any():  # of this stage
            self.frequencies = layer.inv_freq.tolist()
            self.types = {
                name: str(tensor.dtype) for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]
            }


class Turning(nn.Module):
    """Makes its buffers anew when it gets its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("inv_freq", torch.empty(WIDTH // 2))
        self.register_buffer("table", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of the type they were asked for."""
        self.inv_freq = 1.0 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.table = torch.linspace(0.0, 1.0, WIDTH, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """The table has the type of the run."""
        angles = torch.cat([self.inv_freq.sin(), self.inv_freq.cos()]).to(x.dtype)
        out: Tensor = x + self.norm(self.linear(x + self.table + angles))
        return out


def _fit_late(settings: dict[str, Any], devices: int, meta: bool, name: Any) -> dict[str, Any]:
    module = Late(meta)
    modules = ["LayerNorm"] if "bf16" in name else []
    run(module, BigModelPrecision(name, full_precision_modules=modules), BigModelStrategy(**settings), devices, devices)
    return {"types": module.types, "frequencies": module.frequencies}


@pytest.mark.parametrize("name", ["bf16-true", "64-true"])
@pytest.mark.parametrize(("devices", "settings", "meta"), [(1, {}, False), (2, {"zero_stage": 3}, True)])
def test_what_configure_model_builds_has_the_types_of_the_run(
    devices: int, settings: dict[str, Any], meta: bool, name: str
) -> None:
    """Frequencies made of 16 bits; buffers that are made later and stay in the type they were written with."""
    other = {"bf16-true": "torch.bfloat16", "64-true": "torch.float64"}[name]
    full = FULL if name == "bf16-true" else other
    exact = 1.0 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    for found in run_ranks(_fit_late, devices, settings, devices, meta, name):
        types = found["types"]
        assert (types["inv_freq"], types["table"], types["linear.weight"]) == (full, other, other)
        assert types["norm.weight"] == full
        assert found["frequencies"] == pytest.approx(exact.tolist(), rel=1e-6)


class Tied(Overflowing):
    """An embedding whose weight the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The embedding takes no numbers with a fraction."""
        x = self.embed((batch[0][:, 0] > 0).long())
        loss = nn.functional.mse_loss(self.head(self.blocks[0](x)).float(), batch[1][:, :10].float())
        self.log("loss", loss)
        return loss


def _fit_tied(modules: list[str]) -> str:
    module = Tied()
    run(module, BigModelPrecision("bf16-true", full_precision_modules=modules), BigModelStrategy())
    return str(module.embed.weight.dtype)


def test_tied_weights_are_kept_together_or_not_at_all() -> None:
    """A weight that one of its modules casts; an embedding whose output is fp32 among layers of 16 bits."""
    assert run_ranks(_fit_tied, 1, ["embed", "head"])[0] == FULL
    with pytest.raises(Exception, match=r"`embed.weight` in fp32, but `head` shares it"):
        run_ranks(_fit_tied, 1, ["embed"])
