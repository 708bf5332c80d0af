"""ZeRO with states on the host or in files under the Trainer: the numbers of one process."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry

from lightning_bigmodel import BigModelStrategy, OffloadPolicy
from lightning_bigmodel.checkpoint import read_index
from lightning_bigmodel.strategies import sharded
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.sharding.offload_boundary import Boundary, groups_refuse_the_host
from tests.strategies.test_manual import Gan, data
from tests.strategies.test_manual import fit as fit_gan
from tests.strategies.test_trainer import assert_same_numbers, assert_same_weights, fit
from tests.strategies.trainer_modules import Classifier, loader, trainer, weights


def run_ranks(*args: Any) -> list[Any]:
    return run_ranks_for(*args, timeout_seconds=40.0)


def _strategy(settings: dict[str, Any], path: str) -> BigModelStrategy:
    policy = OffloadPolicy("disk", path=path, chunk_bytes=2048) if settings["offload"] == "disk" else "cpu"
    return BigModelStrategy(**{**settings, "offload": policy})


def _fit(devices: int, batch_size: int, settings: dict[str, Any], path: str, options: dict[str, Any]) -> dict[str, Any]:
    return fit(_strategy(settings, path), devices, batch_size, **options)


PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}
# name: (ranks, data ranks, strategy, Trainer options)
CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "one_rank": (1, 1, {"zero_stage": 3}, {}),
    "zero1": (2, 2, {"zero_stage": 1}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "zero2": (2, 2, {"zero_stage": 2, "num_microbatches": 2}, {"gradient_clip_val": 0.05}),
    "zero3": (2, 2, {"zero_stage": 3}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "zero3_keeps": (2, 2, {"zero_stage": 3, "keep_gathered": True}, {"max_epochs": 2}),
    "hybrid": (4, 4, {"zero_stage": 2, "data_replicate_size": 2}, {"gradient_clip_val": 0.05}),
    "pipeline": (4, 2, {**PIPE, "zero_stage": 3}, {"gradient_clip_val": 0.05}),
}


@pytest.mark.parametrize("name", CASES)
def test_fit_equals_one_process(name: str, tmp_path: Path) -> None:
    """A step on old rows, a gradient that has not arrived, state that is lost between two steps."""
    world_size, data_size, settings, options = CASES[name]
    expected = fit("auto", 1, 8, **options)
    for kind in ("cpu", "disk"):
        chosen = {**settings, "offload": kind}
        results = run_ranks(_fit, world_size, world_size, 8 // data_size, chosen, str(tmp_path / kind), options)
        for result in results:
            assert_same_weights(result["weights"], expected["weights"])
            own = {"val_mean"} if data_size > 2 else set()  # a mean of means over different numbers of samples
            assert_same_numbers(
                *({k: v for k, v in m.items() if k not in own} for m in (result["metrics"], expected["metrics"]))
            )
            assert result["global_step"] == expected["global_step"]
    assert list((tmp_path / "disk").iterdir()) == []


class Halves(Callback):
    """Looks at gradients and changes them."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5 + 0.5 * bool(parameter.grad.norm() < 0))


class Looks(Gan):
    """Computes between a backward and the optimizer step: parameters are gathered while rows are about to change."""

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            assert self.critic(self.generator(torch.ones(2, 3))).isfinite().all()
        super().clip_gradients(*args, **kwargs)


def _gan(strategy: Any, devices: int) -> dict[str, Any]:
    module = Looks(accumulate=True)
    trainer(strategy, devices, max_epochs=2).fit(module, data(4 // devices))
    return weights(module)


def _at_boundary(stage: int, manual: bool) -> tuple[dict[str, Any], dict[str, int]]:
    copies = Boundary()
    sharded.HostCopies = lambda device: copies  # type: ignore[assignment, misc]  # this process is the test's own
    strategy = BigModelStrategy(zero_stage=stage, offload="cpu")
    with groups_refuse_the_host(copies):
        if manual:
            found = _gan(strategy, 2)
        else:
            found = fit(strategy, 2, 4, callbacks=[Halves()], gradient_clip_val=0.05)["weights"]
    return found, copies.num_bytes


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_host_and_device_keep_apart(stage: int, manual: bool) -> None:
    """A hook, a clip or a step by hand that takes the host's memory for the device's, or writes what is being sent."""
    options: dict[str, Any] = {"callbacks": [Halves()], "gradient_clip_val": 0.05}
    expected = _gan("auto", 1) if manual else fit("auto", 1, 8, **options)["weights"]
    for found, num_bytes in run_ranks(_at_boundary, 2, stage, manual):
        assert_same_weights(found, expected)
        assert min(num_bytes.values()) > 0


def _gan_on_disk(path: str) -> dict[str, Any]:
    return fit_gan(_strategy({"zero_stage": 2, "offload": "disk"}, path), 2, 2, False)["weights"]


def test_two_optimizers_on_one_disk(tmp_path: Path) -> None:
    """States of one in the files of the other."""
    expected = fit_gan("auto", 1, 4, False)["weights"]
    for found in run_ranks(_gan_on_disk, 2, str(tmp_path)):
        assert_same_weights(found, expected)


class Clamps(Callback):
    """Writes into the parameters after each step, past autograd."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for index, parameter in enumerate(pl_module.parameters()):
            if index % 2:
                parameter.data.clamp_(-0.05, 0.05)
            else:
                with torch.no_grad():
                    parameter.mul_(0.99)


def _clamped(devices: int, batch_size: int, settings: dict[str, Any] | None) -> dict[str, Any]:
    strategy = "auto" if settings is None else BigModelStrategy(**settings)
    return fit(strategy, devices, batch_size, callbacks=[Clamps()])["weights"]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_user_code_writes_into_parameters_is_kept(stage: int) -> None:
    """Weights that a callback clamps between steps, put back by the rows on the host."""
    expected = _clamped(1, 8, None)
    for result in run_ranks(_clamped, 2, 2, 4, {"zero_stage": stage, "offload": "cpu"}):
        assert_same_weights(result, expected)


def _save(devices: int, batch_size: int, directory: str, settings: dict[str, Any]) -> dict[str, Any]:
    module = Classifier()
    keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    strategy = _strategy(settings, f"{directory}/files")
    run = trainer(strategy, devices, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, loader(32, batch_size), loader(10, 4))
    run.save_checkpoint(f"{directory}/after.ckpt")  # the files are gone by then
    return weights(module)


class OnFiles(Callback):
    """Looks where moments are, after loading."""

    found = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        states = trainer.strategy._sharded._states
        if states is not None:
            places = [
                t for chunk in states._chunks[id(trainer.optimizers[0])] if chunk.file for t in chunk.file.tensors
            ]
            held = {id(value) for state in trainer.optimizers[0].state.values() for value in state.values()}
            OnFiles.found = sum(id(place) in held for place in places)


def _resume(devices: int, batch_size: int, directory: str, settings: dict[str, Any], file: str) -> dict[str, Any]:
    module = Classifier()
    strategy = BigModelStrategy(**settings) if "offload" not in settings else _strategy(settings, f"{directory}/again")
    run = trainer(strategy, devices, max_epochs=2, callbacks=[OnFiles()])
    run.fit(module, loader(32, batch_size), loader(10, 4), ckpt_path=f"{directory}/{file}")
    if settings.get("offload") == "disk":
        assert OnFiles.found > 10
    return weights(module)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("stage", [1, 3])
def test_resume(stage: int, tmp_path: Path) -> None:
    """Moments that are not in the checkpoint, or loaded beside the files; on a disk, on the host, on the device."""
    directory = str(tmp_path)
    saved = run_ranks(_save, 2, 2, 4, directory, {"zero_stage": stage, "offload": "disk"})
    for settings in ({"zero_stage": stage, "offload": "disk"}, {"zero_stage": 2, "offload": "cpu"}, {"zero_stage": 3}):
        for result in run_ranks(_resume, 2, 2, 4, directory, settings, "epoch=0.ckpt"):
            assert_same_weights(result, saved[0])
    during, after = (read_index(tmp_path / name) for name in ("epoch=1.ckpt", "after.ckpt"))
    assert {k: v.num_bytes for k, v in during.tensors.items()} == {k: v.num_bytes for k, v in after.tensors.items()}


def _full(devices: int, batch_size: int, directory: str) -> list[str]:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = os.posix_fallocate
    os.posix_fallocate = fail  # type: ignore[assignment]  # this process is the test's own
    with pytest.raises(OSError, match="No space for the optimizer state") as caught:
        _resume(devices, batch_size, directory, {"zero_stage": 2, "offload": "disk"}, "epoch=0.ckpt")
    os.posix_fallocate = before
    return [str(caught.value), *(p.name for p in Path(f"{directory}/again").iterdir())]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_full_disk_leaves_checkpoints_alone(tmp_path: Path) -> None:
    """A run that dies of a full disk, and takes what it could have been resumed from with it."""
    directory = str(tmp_path)
    saved = run_ranks(_save, 2, 2, 4, directory, {"zero_stage": 2, "offload": "cpu"})
    for said, *left in run_ranks(_full, 2, 2, 4, directory):
        assert "checkpoints are as they were" in said
        assert left == []
    for result in run_ranks(_resume, 2, 2, 4, directory, {"zero_stage": 2, "offload": "disk"}, "epoch=0.ckpt"):
        assert_same_weights(result, saved[0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"offload": "cpu"}, "set `zero_stage=1`"),
        ({"zero_stage": 3, "offload": "nvme"}, "`offload='nvme'` is not known"),
        ({"zero_stage": 3, "offload": "disk"}, "needs a folder"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    """A setting that is ignored."""
    with pytest.raises(ValueError, match=said):
        BigModelStrategy(**settings)


def _file_for_folder(path: str) -> str:
    run = trainer(_strategy({"zero_stage": 1, "offload": "disk"}, path), 2)
    with pytest.raises(OSError, match=r"The folder .* cannot be made: .*a `path` that is a folder") as caught:
        run.fit(Classifier(), loader(8, 4), loader(8, 4))
    return str(caught.value)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    """An error of the system that does not say which setting, on one rank."""
    with pytest.raises(ValueError, match="`path=3` must be the name of a folder"):
        OffloadPolicy("disk", path=3)  # type: ignore[arg-type]  # what is tested
    (tmp_path / "file").touch()
    assert len(run_ranks(_file_for_folder, 2, str(tmp_path / "file"))) == 2


def test_short_name() -> None:
    """A name that is listed, and means something else."""
    strategy = StrategyRegistry.get("bigmodel_zero3_offload")
    assert strategy._sharding.zero_stage == 3
    assert strategy._sharding.policy == OffloadPolicy("cpu")


def _adafactor(path: str) -> str:
    module = Classifier()
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters())  # type: ignore[method-assign]
    run = trainer(_strategy({"zero_stage": 1, "offload": "disk"}, path), 2)
    with pytest.raises(ValueError, match="does not treat each element by itself") as caught:
        run.fit(module, loader(8, 4), loader(8, 4))
    return str(caught.value)


def test_optimizers_that_need_more_are_refused(tmp_path: Path) -> None:
    """Factored statistics over a piece of the rows."""
    for said in run_ranks(_adafactor, 2, str(tmp_path)):
        assert "`Adafactor` cannot keep its state on a disk" in said
