import resource
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel.checkpoint import (
    convert_to_single_file,
    load_sharded,
    model_state_by_name,
    optimizer_state_by_name,
    read_index,
    save_sharded,
)
from lightning_bigmodel.testing import run_ranks
from tests.checkpoint.pipe_model import (
    Net,
    keep_only,
    make_net,
    make_optimizer,
    names_of,
    owned_by,
    same,
    train,
    warnings_are_errors,
)


class Words(pl.LightningModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = Net()
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        words, targets = batch
        hidden = self.net.body(self.net.norm(self.net.frozen(self.net.embedding(words)))) * self.net.scale
        hidden = self.net.low(hidden.to(torch.bfloat16)).float() + hidden
        loss = cross_entropy(self.net.head(hidden), targets)
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.net)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(6, (20,), generator=generator)
    return DataLoader(TensorDataset(words, (words * 3 + 1) % 6), batch_size=4)


def trainer(directory: Path, max_epochs: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EarlyStopping("train_loss", patience=50, check_on_train_epoch_end=True)],
    )


def owned_of_words(stage: int, num_stages: int) -> set[str]:
    return {f"net.{name}" for name in owned_by(stage, num_stages)}


def save_stage(plain_path: Path, directory: Path) -> None:
    """What a rank of two stages would save in the place of a plain checkpoint."""
    warnings_are_errors()
    checkpoint = torch.load(plain_path, weights_only=False)
    owned = owned_of_words(torch.distributed.get_rank(), 2)
    module = Words()
    optimizer = make_optimizer(module.net)
    module.load_state_dict(checkpoint.pop("state_dict"))
    optimizer.load_state_dict(checkpoint.pop("optimizer_states")[0])
    keep_only(module, owned)
    save_sharded(
        directory,
        model_state=model_state_by_name(module, owned),
        optimizer_states=[optimizer_state_by_name(optimizer, names_of(module), owned)],
        metadata=checkpoint,
        rank_state={},
    )


def saved_by_two_stages(directory: Path) -> Path:
    """Train two epochs in plain Lightning and save them as `plain.ckpt` and, by two stages, as `sharded.ckpt`."""
    first = trainer(directory, 2)
    first.fit(Words(), loader())
    first.save_checkpoint(directory / "plain.ckpt")
    run_ranks(save_stage, 2, directory / "plain.ckpt", directory / "sharded.ckpt")
    return directory / "sharded.ckpt"


def test_converted_file_is_what_one_process_would_have_saved(tmp_path: Path) -> None:
    """A tied, frozen or never-stepped weight left out, or a dtype changed, breaks the strict load or the numbers."""
    sharded = saved_by_two_stages(tmp_path)
    seen: list[tuple[int, int, str]] = []
    convert_to_single_file(sharded, tmp_path / "single.ckpt", progress=lambda *report: seen.append(report))
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=False)
    single = torch.load(tmp_path / "single.ckpt", weights_only=False)
    assert single.keys() == plain.keys()
    assert {"pytorch-lightning_version", "hyper_parameters", "loops", "callbacks", "lr_schedulers"} <= single.keys()
    for key in plain:
        assert same(single[key], plain[key]), key
    assert single["state_dict"]._metadata == plain["state_dict"]._metadata
    assert [number for number, _, _ in seen] == list(range(1, len(read_index(sharded).keys) + 1))
    assert {key for _, _, key in seen} == set(read_index(sharded).keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.ckpt", "sharded.ckpt", "single.ckpt"]


def test_converted_file_in_plain_lightning(tmp_path: Path) -> None:
    """The file must load strictly and resume to the numbers of a run that was never interrupted."""
    convert_to_single_file(saved_by_two_stages(tmp_path), tmp_path / "single.ckpt")
    restored = Words.load_from_checkpoint(tmp_path / "single.ckpt", strict=True, weights_only=False)
    assert restored.hparams.lr == 0.05
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=False)
    assert same(dict(restored.state_dict()), dict(plain["state_dict"]))

    uninterrupted = Words()
    trainer(tmp_path, 4).fit(uninterrupted, loader())
    resumed = Words()
    second = trainer(tmp_path, 4)
    second.fit(resumed, loader(), ckpt_path=tmp_path / "single.ckpt", weights_only=False)
    assert second.global_step == 20
    assert resumed.losses == pytest.approx(uninterrupted.losses[10:], abs=1e-6)
    assert len(resumed.losses) == 10
    for name, value in uninterrupted.state_dict().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=1e-6)
    expected = uninterrupted.optimizers().optimizer.state_dict()
    found = resumed.optimizers().optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, entries in expected["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(found["state"][number][key], value, rtol=0, atol=1e-6)


def save_plainly(directory: Path, **changed: Any) -> None:
    net = make_net()
    optimizer = make_optimizer(net)
    train(net, optimizer, range(2))
    given: dict[str, Any] = {
        "model_state": model_state_by_name(net),
        "optimizer_states": [optimizer_state_by_name(optimizer, names_of(net))],
        "metadata": {"epoch": 0},
        "rank_state": {},
    }
    save_sharded(directory, **{**given, **changed})


def test_weights_alone_stay_weights_alone(tmp_path: Path) -> None:
    """An empty list of optimizer states would let a resume pass that lacks them."""
    save_plainly(tmp_path / "sharded", optimizer_states=None)
    convert_to_single_file(tmp_path / "sharded", tmp_path / "single.ckpt", weights_only=True)
    assert torch.load(tmp_path / "single.ckpt").keys() == {"epoch", "state_dict"}


def test_output_is_never_lost_or_half_written(tmp_path: Path) -> None:
    """A conversion that fails must leave the file of that name, and no rest of its own."""
    save_plainly(tmp_path / "sharded")
    output = tmp_path / "single.ckpt"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match="single.ckpt` exists. .* set `overwrite`"):
        convert_to_single_file(tmp_path / "sharded", output)
    with pytest.raises(FileExistsError, match="a directory"):
        convert_to_single_file(tmp_path / "sharded", tmp_path / "sharded", overwrite=True)
    with pytest.raises(FileNotFoundError, match="There is no directory .*/nowhere"):
        convert_to_single_file(tmp_path / "sharded", tmp_path / "nowhere" / "single.ckpt")
    with pytest.raises(ValueError, match="is a single file, not a sharded checkpoint"):
        convert_to_single_file(output, tmp_path / "other.ckpt")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        convert_to_single_file(tmp_path / "nothing", tmp_path / "other.ckpt")

    def stop(num_read: int, num_values: int, key: str) -> None:
        if num_read == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_to_single_file(tmp_path / "sharded", output, overwrite=True, progress=stop)
    assert output.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sharded", "single.ckpt"]
    convert_to_single_file(tmp_path / "sharded", output, overwrite=True)
    assert same(dict(torch.load(output)["state_dict"]), load_sharded(tmp_path / "sharded").model_state)


MEBIBYTE = 2**20


def convert_in_little_memory(directory: Path, output: Path) -> int:
    """Allow 96 MiB of memory beyond what the process has; returns that allowance."""
    allowance = 96 * MEBIBYTE
    convert_to_single_file(directory / "small", output.with_name("small.ckpt"))  # what is allocated but once
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowance, used + allowance))
    convert_to_single_file(directory / "large", output)
    return allowance


def test_memory_for_a_few_tensors_is_enough(tmp_path: Path) -> None:
    """A checkpoint of many ranks does not fit into the memory of the one process that converts it."""
    tensors = {f"layer_{number}": torch.full((4 * MEBIBYTE,), float(number)) for number in range(16)}
    for name, state in (("large", tensors), ("small", {"a": torch.ones(2)})):
        save_plainly(tmp_path / name, model_state=state, optimizer_states=None)
    output = tmp_path / "single.ckpt"
    (allowance,) = run_ranks(convert_in_little_memory, 1, tmp_path, output)
    assert sum(value.nbytes for value in tensors.values()) > 2 * allowance
    found = torch.load(output, mmap=True)["state_dict"]
    assert all(found[name][-1] == value[-1] for name, value in tensors.items())
    # Pytest keeps the folders of the last runs, and these are large.
    output.unlink()
    shutil.rmtree(tmp_path / "large")
