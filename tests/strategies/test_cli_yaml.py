"""LightningCLI and YAML: every setting by its name, overrides, configs that load again, typos that are named."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import TinyChain, run_ranks

# Lightning calls what newer jsonargparse deprecates.
pytestmark = pytest.mark.filterwarnings(r"ignore:(?s).*(was deprecated in v4|JsonargparseDeprecationWarning)")

_EXAMPLE = Path(__file__).parents[2] / "examples" / "yaml_only"
_BOTH = ("config.yaml", "short_name.yaml")
_STRATEGY = "--trainer.strategy.init_args"


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns where the process has arguments too."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


def cli(*arguments: str, config: str | Path = "config.yaml") -> LightningCLI:
    """The command line as `LightningCLI()` would take it, without running anything."""
    return LightningCLI(run=False, args=["--config", str(_EXAMPLE / config), *arguments])


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, config: str | Path = "config.yaml") -> str:
    """What `--print_config` writes."""
    with pytest.raises(SystemExit) as end:
        cli(*arguments, "--print_config", config=config)
    assert end.value.code == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command line says to bad arguments."""
    with pytest.raises(SystemExit) as end:
        cli(*arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def parsed(found: LightningCLI) -> dict[str, Any]:
    """Everything that was parsed, whichever file it came from."""
    return {name: value for name, value in found.config.as_dict().items() if name != "config"}


def settings(strategy: Any) -> dict[str, Any]:
    """Settings of a strategy as it keeps them."""
    names = ("pipeline_parallel_size", "num_microbatches", "schedule", "blocks", "microbatch_weight", "batch_source")
    return {name: getattr(strategy, f"_{name}") for name in (*names, "process_group_backend", "timeout")}


def weigh_by_rows(batch: Any) -> int:
    """A `microbatch_weight` of a user's own."""
    return len(batch[0])


def test_every_setting_reaches_the_strategy():
    """A setting that is parsed as another type, or dropped, trains otherwise than its file says."""
    strategy = cli().trainer.strategy
    assert type(strategy) is BigModelStrategy
    assert settings(strategy) == {
        "pipeline_parallel_size": 2,
        "num_microbatches": 4,
        "schedule": "1F1B",
        "blocks": ["blocks.*"],
        "microbatch_weight": "samples",
        "batch_source": "broadcast",
        "process_group_backend": None,
        "timeout": timedelta(minutes=10),
    }


@pytest.mark.parametrize(("name", "size"), [("bigmodel", 1), ("bigmodel_pipeline", "all")])
def test_a_short_name_builds_its_preset(name, size):
    """A name that stands for other settings than it says trains another layout."""
    strategy = cli(f"--trainer.strategy={name}", config="short_name.yaml").trainer.strategy
    assert type(strategy) is BigModelStrategy
    assert settings(strategy)["pipeline_parallel_size"] == size


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("num_microbatches=8", "num_microbatches", 8),
        ("num_microbatches=null", "num_microbatches", None),
        ("pipeline_parallel_size=all", "pipeline_parallel_size", "all"),
        ("schedule=GPipe", "schedule", "GPipe"),
        ("blocks=auto", "blocks", "auto"),
        ("blocks=blocks.*", "blocks", "blocks.*"),
        ("blocks=[blocks.0,blocks.3]", "blocks", ["blocks.0", "blocks.3"]),
        ("blocks+=blocks.1", "blocks", ["blocks.*", "blocks.1"]),
        ("microbatch_weight=equal", "microbatch_weight", "equal"),
        ("microbatch_weight=len", "microbatch_weight", None),
        ("batch_source=replicated", "batch_source", "replicated"),
        ("process_group_backend=gloo", "process_group_backend", "gloo"),
        ("timeout=1:30:00", "timeout", timedelta(hours=1, minutes=30)),
        ("timeout=2 days, 0:00:05", "timeout", timedelta(days=2, seconds=5)),
        ("timeout=null", "timeout", None),
    ],
)
def test_the_command_line_overrides_the_file(argument, name, value, monkeypatch):
    """An override that is ignored, or kept as text, is noticed hours later."""
    if argument == "microbatch_weight=len":  # stands for a function by its import path
        monkeypatch.setitem(sys.modules, "my_weights", sys.modules[__name__])
        argument, value = "microbatch_weight=my_weights.weigh_by_rows", weigh_by_rows
    found = cli(f"{_STRATEGY}.{argument}").trainer.strategy
    expected = {**settings(cli().trainer.strategy), name: value}
    assert settings(found) == expected


def test_settings_without_a_file():
    """The short form with the bare class name is what people type."""
    model = "--model=lightning_bigmodel.testing.tiny.TinyChain"
    strategy = ["--trainer.strategy=BigModelStrategy", "--trainer.strategy.pipeline_parallel_size=2"]
    others = ["--trainer.devices=2", "--trainer.accelerator=cpu", "--seed_everything=0"]
    trainer = LightningCLI(run=False, args=[model, *strategy, *others]).trainer
    assert settings(trainer.strategy)["pipeline_parallel_size"] == 2


@pytest.mark.parametrize("config", _BOTH)
def test_what_print_config_writes_loads_again(config, capsys, tmp_path):
    """A config with types YAML cannot hold (a timedelta, a list of one) would be lost with the run that wrote it."""
    text = printed(capsys, config=config)
    path = tmp_path / "printed.yaml"
    path.write_text(text)
    first, again = cli(config=config), cli(config=path)
    assert parsed(again) == parsed(first)
    assert settings(again.trainer.strategy) == settings(first.trainer.strategy)
    assert printed(capsys, config=path) == text


@pytest.mark.parametrize("config", _BOTH)
def test_a_saved_config_loads_again(config, tmp_path):
    """The `config.yaml` beside a checkpoint is how a run is repeated."""
    first = cli(f"{_STRATEGY}.num_microbatches=8" if config == "config.yaml" else "--trainer.devices=4", config=config)
    path = tmp_path / "saved.yaml"
    first.parser.save(first.config, path, skip_none=False)  # as Lightning's SaveConfigCallback does
    again = cli(config=path)
    assert parsed(again) == parsed(first)
    saved = yaml.safe_load(path.read_text())["trainer"]
    if config == "config.yaml":
        assert saved["strategy"]["init_args"]["num_microbatches"] == 8
        assert saved["strategy"]["init_args"]["timeout"] == "0:10:00"
        assert settings(again.trainer.strategy)["num_microbatches"] == 8
    else:
        assert saved["strategy"] == "bigmodel_pipeline"
        assert again.trainer.num_devices == 4
    assert settings(again.trainer.strategy) == settings(first.trainer.strategy)


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("num_microbatch=4", "num_microbatch"),
        ("stages=2", "stages"),
        ("num_microbatches=four", "num_microbatches"),
        ("pipeline_parallel_size=al", "Literal['all']"),
        ("microbatch_weight=sample", "'samples', 'tokens', 'equal', 'sum'"),
        ("batch_source=broadcasted", "'broadcast', 'replicated'"),
        ("timeout=600", "h:m:s"),
    ],
)
def test_a_typo_is_named(argument, named, capsys):
    """A setting that is dropped in silence, or refused without its name, costs the user the search."""
    message = refused(capsys, f"{_STRATEGY}.{argument}")
    assert named in message
    assert argument.split("=")[0] in message


def test_a_typo_in_the_file_is_named(capsys, tmp_path):
    """The same in the file, where it is harder to see."""
    text = (_EXAMPLE / "config.yaml").read_text()
    path = tmp_path / "typo.yaml"
    path.write_text(text.replace("num_microbatches:", "num_microbatchs:"))
    with pytest.raises(SystemExit):
        cli(config=path)
    assert "num_microbatchs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "hint"), [("schedule=1f1b", "Did you mean '1F1B'?"), ("num_microbatches=1", "num_microbatches=2")]
)
def test_a_value_the_strategy_refuses_says_the_nearest_legal_one(argument, hint):
    """The strategy's own reason must not be lost among the parser's."""
    with pytest.raises(ValueError, match="Does not validate") as error:
        cli(f"{_STRATEGY}.{argument}")
    assert hint in str(error.value)


def test_a_typo_in_a_short_name_is_named():
    """Lightning says which name it does not know."""
    with pytest.raises(ValueError, match="bigmodel_pipelin'"):
        cli("--trainer.strategy=bigmodel_pipelin", config="short_name.yaml")


def test_help_describes_every_setting(capsys):
    """`--help` is made of the docstring; a setting that it does not describe is not found."""
    with pytest.raises(SystemExit):
        cli("--trainer.strategy.help=lightning_bigmodel.BigModelStrategy")
    text = " ".join(capsys.readouterr().out.split())
    for name in settings(BigModelStrategy()):
        assert f"--trainer.strategy.init_args.{name}" in text or f"--trainer.strategy.{name}" in text, name
    assert "Ranks the model is cut over" in text
    assert "Longest wait in a collective" in text


def losses(strategy: str, devices: int, batch_size: int, folder: str) -> list[float]:
    """Trains a chain and returns what was logged in each step, on this rank."""
    torch.manual_seed(0)
    module = TinyChain()
    logged: list[float] = []
    module.on_train_batch_end = lambda *_: logged.append(float(module.trainer.callback_metrics["train_loss"]))
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, torch.utils.data.DataLoader(module.dataset(32), batch_size=batch_size))
    assert type(trainer.strategy).__name__ == ("SingleDeviceStrategy" if strategy == "auto" else "BigModelStrategy")
    return logged


@pytest.mark.parametrize(("strategy", "batch_size"), [("bigmodel", 4), ("bigmodel_pipeline", 8)])
def test_a_short_name_trains_to_the_numbers_of_one_process(strategy, batch_size, tmp_path):
    """A name that is registered, but whose preset cannot run, would pass every test of parsing."""
    expected = losses("auto", 1, 8, str(tmp_path))
    assert len(expected) == 4
    for found in run_ranks(losses, 2, strategy, 2, batch_size, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)


_SYNC = "--trainer.strategy.init_args.replica_sync"


def test_ways_to_agree_are_named_in_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    """A class that YAML cannot build, or a typo that is taken."""
    plain = ["--trainer.strategy.init_args.pipeline_parallel_size=1", "--trainer.strategy.init_args.blocks=auto"]
    found = cli(*plain, f"{_SYNC}=lightning_bigmodel.DGC", f"{_SYNC}.sparsity=0.99", f"{_SYNC}.exempt=['head.*']")
    assert found.trainer.strategy._replica_sync.densities == [0.01]  # type: ignore[attr-defined]
    options = f"{_SYNC}.outer_options={{'lr': 0.5}}"
    found = cli(*plain, f"{_SYNC}=lightning_bigmodel.DiLoCo", f"{_SYNC}.period=20", options)
    assert found.trainer.strategy._replica_sync.period == 20  # type: ignore[attr-defined]
    said = refused(capsys, *plain, f"{_SYNC}=lightning_bigmodel.LocalSGD", f"{_SYNC}.perod=4")
    assert "perod" in said
    found = cli("--trainer.strategy=lightning_bigmodel.LocalSGDStrategy", "--trainer.strategy.init_args.period=4")
    assert found.trainer.strategy._replica_sync.period == 4  # type: ignore[attr-defined]
