"""Checkpoints that Lightning's own sharded strategy wrote, taken over by ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.checkpoint import load_sharded, read_index
from lightning_bigmodel.cli import main
from lightning_bigmodel.testing import RanksFailedError, run_ranks
from tests.strategies.test_checkpoints import train
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.test_zero_checkpoints import _pairs
from tests.strategies.trainer_modules import Classifier, loader, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


class FullySharded(Classifier):
    """As users of Lightning's strategy write it."""

    def configure_model(self) -> None:
        """Shard layer by layer."""
        for layer in [self.embed, *self.blocks, self.head]:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def _train_with_lightning(directory: str) -> None:
    keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(strategy, 2, max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    run.fit(FullySharded(), loader(32, 4), loader(10, 4))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Lightning's strategy after one epoch."""
    directory = tmp_path_factory.mktemp("lightning")
    run_ranks(_train_with_lightning, 2, str(directory))
    path = directory / "epoch=0.ckpt"
    assert {".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp"} == {file.name for file in path.iterdir()}
    return path


@pytest.fixture(scope="module")
def expected(saved: Path) -> dict[str, Any]:
    """The second epoch in plain Lightning, from a file that torch's own tool and the module's names make of it."""
    dcp_to_torch_save(saved, saved.parent / "torch.pt")
    content = torch.load(saved.parent / "torch.pt")
    module = Classifier()
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    order = [names[parameter] for group in groups for parameter in group["params"]]
    moments = content["optimizer_0"]["state"]  # none of the last block, whose parameters have no gradient
    state = {number: moments[name] for number, name in enumerate(order) if name in moments}
    counts = iter(range(len(order)))
    options = [
        {**group, "params": [next(counts) for _ in group["params"]]} for group in content["optimizer_0"]["param_groups"]
    ]
    checkpoint = {
        **torch.load(saved / "meta.pt"),
        "state_dict": content["state_dict"],
        "optimizer_states": [{"state": state, "param_groups": options}],
    }
    torch.save(checkpoint, saved.parent / "plain.ckpt")
    return train("auto", 1, 8, 2, resume=str(saved.parent / "plain.ckpt"))


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    """Two epochs of one process."""
    return train("auto", 1, 8, 2)


def _resume(devices: int, batch_size: int, strategy: dict[str, Any], path: str) -> dict[str, Any]:
    return train(BigModelStrategy(**strategy), devices, batch_size, 2, resume=path)


@pytest.mark.parametrize(
    ("devices", "batch_size", "strategy"),
    [(1, 8, {}), (2, 4, {"zero_stage": 3}), (2, 8, {"pipeline_parallel_size": 2, "num_microbatches": 2})],
)
def test_resume_from_fsdp2(
    devices: int, batch_size: int, strategy: dict[str, Any], saved: Path, expected: dict[str, Any]
) -> None:
    """Moments, group options, schedules or loop counters lost on the way from Lightning's strategy to ours."""
    for result in run_ranks(_resume, devices, devices, batch_size, strategy, str(saved)):
        assert_same_weights(result["weights"], expected["weights"])
        assert len(result["losses"]) == 4  # the second epoch alone


def test_fsdp2_as_one_file_and_as_a_directory_of_ours(saved: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint that only a Trainer with our strategy could read would bind its owner to it."""
    assert main(["convert", str(saved), str(tmp_path / "one.ckpt")]) == 0
    assert_same_weights(train("auto", 1, 8, 2, resume=str(tmp_path / "one.ckpt"))["weights"], expected["weights"])
    assert main(["convert", str(saved), str(tmp_path / "ours.ckpt"), "--to", "sharded"]) == 0
    assert read_index(tmp_path / "ours.ckpt").optimizer_keys(0).keys() == read_index(saved).optimizer_keys(0).keys()
    (result,) = run_ranks(_resume, 1, 1, 8, {}, str(tmp_path / "ours.ckpt"))
    assert_same_weights(result["weights"], expected["weights"])


def test_a_truncated_file_of_lightnings_directory_is_named(saved: Path, tmp_path: Path) -> None:
    """There is no completion mark: without a look at the table, half a file is found in the middle of reading."""
    import shutil

    copy = tmp_path / "copy.ckpt"
    shutil.copytree(saved, copy)
    with (copy / "__1_0.distcp").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match=r"is incomplete: `__1_0.distcp` has 100 bytes instead of \d+"):
        load_sharded(copy)
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match="is incomplete: `__1_0.distcp` is missing"):
        load_sharded(copy)


def _train_plainly(directory: Path) -> Path:
    keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    run = trainer("auto", 1, max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    run.fit(Classifier(), loader(32, 8), loader(10, 4))
    return directory / "epoch=0.ckpt"


@pytest.mark.parametrize(
    ("devices", "batch_size", "strategy"),
    [(2, 4, {"zero_stage": 3}), (2, 8, {"pipeline_parallel_size": 2, "num_microbatches": 2})],
)
def test_a_file_made_a_directory_resumes_sharded(
    devices: int, batch_size: int, strategy: dict[str, Any], uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    """Optimizer states of a file have numbers for names: put to the wrong parameters, the second epoch differs."""
    directory = tmp_path / "sharded.ckpt"
    assert main(["convert", str(_train_plainly(tmp_path)), str(directory)]) == 0
    assert directory.is_dir()
    for result in run_ranks(_resume, devices, devices, batch_size, strategy, str(directory)):
        assert_same_weights(result["weights"], uninterrupted["weights"])


def test_statistics_of_rows_find_their_place_from_a_file(tmp_path: Path) -> None:
    """Adafactor's row statistics have another shape than the parameter: taken whole, they do not fit the rows."""
    saved = run_ranks(_pairs, 1, str(tmp_path), 1, 8, "auto", "Adafactor", False)[0]
    assert main(["convert", str(tmp_path / "epoch=0.ckpt"), str(tmp_path / "dir")]) == 0
    (tmp_path / "epoch=0.ckpt").unlink()
    (tmp_path / "dir").rename(tmp_path / "epoch=0.ckpt")
    for result in run_ranks(_pairs, 2, str(tmp_path), 2, 4, {"zero_stage": 3}, "Adafactor", True):
        assert_same_weights(result, saved)


def _evaluate(path: str | None, strategy: dict[str, Any], devices: int, start: str | None = None) -> dict[str, float]:
    module = Classifier() if start is None else Classifier.load_from_checkpoint(start)
    run = trainer(BigModelStrategy(**strategy), devices)
    (found,) = run.test(module, loader(8, 4), ckpt_path=path, verbose=False)
    return dict(found)


def test_weights_of_safetensors_are_evaluated(tmp_path: Path) -> None:
    """Weights from a hub, without loops and optimizers, evaluated by one process and sharded."""
    plain = _train_plainly(tmp_path)
    assert main(["convert", str(plain), str(tmp_path / "w.safetensors")]) == 0
    expected = run_ranks(_evaluate, 1, str(plain), {}, 1)[0]
    for name in ("w.ckpt", "dir"):
        assert main(["convert", str(tmp_path / "w.safetensors"), str(tmp_path / name)]) == 0
        for result in run_ranks(_evaluate, 2, str(tmp_path / name), {"zero_stage": 3}, 2):
            assert result == pytest.approx(expected, abs=1e-5)
    assert run_ranks(_evaluate, 1, None, {}, 1, str(tmp_path / "w.ckpt"))[0] == pytest.approx(expected, abs=1e-5)


def _resume_another_model(path: str, devices: int, strategy: dict[str, Any]) -> None:
    module = Classifier(num_blocks=5)
    before = weights(module)
    run = trainer(BigModelStrategy(**strategy), devices, max_epochs=2)
    try:
        run.fit(module, loader(32, 4), loader(10, 4), ckpt_path=path)
    except ValueError:
        if not strategy:  # sharded, the module holds no weights after a run that failed
            assert_same_weights(weights(module), before)
        raise


@pytest.mark.parametrize("strategy", [{}, {"zero_stage": 3}])
@pytest.mark.parametrize("kind", ["lightning", "ours", "numbered"])
def test_a_checkpoint_of_another_model_is_named(
    kind: str, strategy: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    """Half of another model's weights loaded would train on as if nothing had been."""
    path = saved
    if kind == "ours":
        path = tmp_path / "ours"
        assert main(["convert", str(saved), str(path), "--to", "sharded"]) == 0
    elif kind == "numbered":
        path = tmp_path / "numbered"
        assert main(["convert", str(_train_plainly(tmp_path)), str(path)]) == 0
    # The last block has no gradient, and is missing among the weights.
    with pytest.raises(RanksFailedError, match=r"lacks .*`blocks\.4\.|Optimizer 0 has groups of") as error:
        run_ranks(_resume_another_model, 2, str(path), 2, strategy)
    assert set(error.value.failures) == {0, 1}
    assert not any("AssertionError" in text for text in error.value.failures.values())
