"""Checkpoints in one file, and checkpoints of what is trained only."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.checkpoint import is_sharded_checkpoint
from lightning_bigmodel.testing import run_ranks as run_ranks_for

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)

WIDTH = 32
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero3": (2, {"zero_stage": 3}),
    "pipe": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "zero1": (2, {"zero_stage": 1}),
}


class Adapted(LightningModule):
    """Frozen layers, each with a small one beside it that is trained."""

    def __init__(self, base_seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(base_seed)
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).requires_grad_(False)
        torch.manual_seed(1)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Regression."""
        (x,) = batch
        for layer, adapter in zip(self.base, self.adapters, strict=True):
            x = torch.tanh(layer(x)) + adapter(x)
        loss = x.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Of what is trained."""
        return torch.optim.AdamW(self.adapters.parameters(), lr=0.01)


def fit(
    layout: str, path: str, settings: dict[str, Any], resumes: bool = False, epochs: int = 1, **options: Any
) -> dict[str, Any]:
    """Save at the end, or resume."""
    devices, own = LAYOUTS[layout]
    module = options.pop("module", None) or Adapted()
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=BigModelStrategy(**own, **settings),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )
    data_ranks = 1 if "pipeline_parallel_size" in own else devices
    loader = DataLoader(TensorDataset(x), batch_size=4 // data_ranks)
    trainer.fit(module, loader, ckpt_path=path if resumes else None)
    if not resumes:
        trainer.save_checkpoint(path)
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def size_of(path: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


@pytest.mark.parametrize("kind", ["sharded", "single"])
@pytest.mark.parametrize(("layout", "other"), [("zero3", "pipe"), ("pipe", "zero1"), ("one", "zero3")])
def test_checkpoints_of_what_is_trained(layout: str, other: str, kind: str, tmp_path: Path) -> None:
    """A checkpoint as large as the model; a resumed run that needs a flag, or misses what was left out."""
    settings = {"checkpoint_parameters": "trainable", "checkpoint_format": kind}
    path, whole = tmp_path / "small.ckpt", tmp_path / "whole.ckpt"
    run_ranks(fit, LAYOUTS[layout][0], layout, str(path), settings)
    run_ranks(fit, LAYOUTS[layout][0], layout, str(whole), {"checkpoint_format": kind})
    assert size_of(whole) - size_of(path) > 0.9 * 4 * 4 * WIDTH * (WIDTH + 1)
    straight = run_ranks(fit, 1, "one", str(tmp_path / "straight.ckpt"), {}, False, 2)[0]
    for found in run_ranks(fit, LAYOUTS[other][0], other, str(path), {}, True, 2):
        for name, value in straight.items():
            assert found[name] == pytest.approx(value, abs=1e-5), name


class Wider(Adapted):
    """One more layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(1))


def _fit_wider(path: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        fit("zero3", path, {}, True, 2, module=Wider())
    return str(caught.value)


def test_a_trained_parameter_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """A layer that silently keeps its first values."""
    path = str(tmp_path / "small.ckpt")
    run_ranks(fit, 2, "zero3", path, {"checkpoint_parameters": "trainable"})
    for message in run_ranks(_fit_wider, 2, path):
        assert "more" in message


def _fit_unfrozen(layout: str, path: str) -> str:
    module = Adapted()
    module.base[1].requires_grad_(True)
    with pytest.raises(ValueError, match="frozen") as caught:
        fit(layout, path, {}, True, 2, module=module)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["sharded", "single"])
def test_a_parameter_that_was_unfrozen_since_is_an_error(kind: str, tmp_path: Path) -> None:
    """A message of names alone, or of one rank alone."""
    path = str(tmp_path / "small.ckpt")
    run_ranks(fit, 2, "zero3", path, {"checkpoint_parameters": "trainable", "checkpoint_format": kind})
    for layout in ("zero3", "pipe"):
        said = run_ranks(_fit_unfrozen, 2, layout, path)
        assert said[0] == said[1]
        assert "`base.1.weight`" in said[0]
        assert 'checkpoint_parameters="trainable"' in said[0]


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "Adamax": torch.optim.Adamax,
    "plain SGD": torch.optim.SGD,
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
}


class Optimized(Adapted):
    """With the optimizer it is told."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.make = OPTIMIZERS[optimizer]

    def configure_optimizers(self) -> Any:
        """Of what is trained."""
        return self.make(self.adapters.parameters(), lr=0.01)


def _save_all(folder: str, settings: dict[str, Any]) -> None:
    for name in OPTIMIZERS:
        fit("zero3", f"{folder}/{name}.ckpt", settings, module=Optimized(name))


def _go_on(layout: str, path: str, optimizer: str) -> str | None:
    try:
        fit(layout, path, {}, True, 2, module=Optimized(optimizer))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["sharded", "single"])
def test_states_of_another_optimizer_are_an_error(kind: str, tmp_path: Path) -> None:
    """A bare KeyError in the first step, or in one rank alone."""
    run_ranks(_save_all, 2, str(tmp_path), {"checkpoint_format": kind})
    for layout, saved, here in [
        ("zero3", "SGD", "AdamW"),
        ("pipe", "plain SGD", "AdamW"),
        ("pipe", "AdamW", "SGD"),
        ("zero3", "AdamW", "plain SGD"),
        ("zero3", "Adamax", "Adam"),
    ]:
        said = run_ranks(_go_on, 2, layout, str(tmp_path / f"{saved}.ckpt"), here)
        assert said[0] == said[1], (saved, here)
        assert f"Optimizer 0 is {here.split()[-1]}" in str(said[0]), (saved, here)
        assert "another class" in str(said[0])
    # The states are the same.
    assert run_ranks(_go_on, 2, "pipe", str(tmp_path / "Adam.ckpt"), "AdamW") == [None, None]


def _fit_single(path: str) -> list[str]:
    keep = ModelCheckpoint(dirpath=path, save_top_k=1, monitor="loss", save_last="link")
    fit(
        "zero3",
        f"{path}/own.ckpt",
        {"checkpoint_format": "single"},
        False,
        3,
        callbacks=[keep],
        enable_checkpointing=True,
    )
    return sorted(file.name for file in Path(path).iterdir())


# Plain Lightning misses the callback of the saved run.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_single_files_under_model_checkpoint(tmp_path: Path) -> None:
    """Directories, parts that stay, files that are not removed; a file that plain Lightning cannot read."""
    for names in run_ranks(_fit_single, 2, str(tmp_path)):
        assert len(names) == 3
        assert {"last.ckpt", "own.ckpt"} < set(names)
    assert not any(is_sharded_checkpoint(file) for file in tmp_path.iterdir())
    loaded = Adapted.load_from_checkpoint(tmp_path / "own.ckpt")
    assert loaded.adapters[0].weight.shape == (1, WIDTH)
    plain = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    plain.fit(
        Adapted(), DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=4), ckpt_path=tmp_path / "own.ckpt"
    )
    assert plain.current_epoch == 4


def test_settings_that_do_not_go_together_are_refused() -> None:
    """A setting that nothing looks at."""
    with pytest.raises(ValueError, match="async_checkpoint.*single"):
        BigModelStrategy(checkpoint_format="single", async_checkpoint=True)
    with pytest.raises(ValueError, match="checkpoint_parameters='some'"):
        BigModelStrategy(checkpoint_parameters="some")  # type: ignore[arg-type]


def _save_over_folder(path: str) -> str:
    with pytest.raises(Exception, match="no checkpoint") as caught:
        fit("zero1", path, {"checkpoint_format": "single"})
    return str(caught.value)


def test_a_folder_of_the_users_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Data that a name happened to belong to."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.txt").write_text("x")
    for message in run_ranks(_save_over_folder, 2, str(tmp_path / "data")):
        assert str(tmp_path / "data") in message
    assert (tmp_path / "data" / "precious.txt").read_text() == "x"


def _fail_to_join(path: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_bigmodel.checkpoint.single.convert_to_single_file", fail)
        with pytest.raises(RuntimeError, match="No space left"):
            fit("zero1", path, {"checkpoint_format": "single"})


def test_a_file_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """An old checkpoint that goes before the new one is complete."""
    path = tmp_path / "last.ckpt"
    run_ranks(fit, 2, "zero1", str(path), {})
    run_ranks(_fail_to_join, 2, str(path))
    assert is_sharded_checkpoint(path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    run_ranks(fit, 2, "zero1", str(path), {"checkpoint_format": "single"})
    assert path.is_file()
