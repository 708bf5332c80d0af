from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from lightning_bigmodel.checkpoint import (
    LoadedCheckpoint,
    load_model_state,
    load_optimizer_state,
    load_sharded,
    model_state_by_name,
    optimizer_state_by_name,
    read_index,
    read_rank_state,
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

METADATA = {"epoch": 1, "global_step": 3, "lr_schedulers": [{"last_epoch": 3}], "hyper_parameters": {"width": 4}}
LAYOUT = {"pipe": 2, "data_replicate": 2}


def trained(steps: int = 3, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    net = make_net(seed)
    optimizer = make_optimizer(net)
    train(net, optimizer, range(steps))
    return net, optimizer


def save_from_one_process(directory: Path, steps: int = 3, **changed: Any) -> None:
    net, optimizer = trained(steps)
    given: dict[str, Any] = {
        "model_state": model_state_by_name(net),
        "optimizer_states": [optimizer_state_by_name(optimizer, names_of(net))],
        "metadata": METADATA,
        "rank_state": {"random": 5},
    }
    save_sharded(directory, **{**given, **changed})


def save_on_rank(directory: Path, num_stages: int, steps: int = 3, **changed: Any) -> list[str]:
    """Train this rank's stage and save it; returns the tensor keys it owns."""
    warnings_are_errors()
    num_replicas = dist.get_world_size() // num_stages
    owned = owned_by(dist.get_rank() // num_replicas, num_stages)
    net = make_net()
    optimizer = make_optimizer(net)
    keep_only(net, owned)
    train(net, optimizer, range(steps), owned)
    given: dict[str, Any] = {
        "model_state": model_state_by_name(net, owned),
        "optimizer_states": [optimizer_state_by_name(optimizer, names_of(net), owned)],
        "metadata": METADATA,
        "rank_state": {"rank": dist.get_rank()},
        "layout": {"pipe": num_stages, "data_replicate": num_replicas},
    }
    given.update(changed)
    save_sharded(directory, **given)
    return sorted(given["model_state"])


def check_loaded(loaded: LoadedCheckpoint, owned: set[str] | None = None, steps: int = 3) -> None:
    """Values equal those of one process bit for bit, in the checkpoint and after loading into a fresh module."""
    net, optimizer = trained(steps)
    assert same(loaded.model_state, model_state_by_name(net, owned))
    expected = optimizer_state_by_name(optimizer, names_of(net), owned)
    assert same(loaded.optimizer_states, [expected])
    fresh = make_net(1)
    fresh_optimizer = make_optimizer(fresh)
    load_model_state(fresh, loaded.model_state, owned)
    load_optimizer_state(fresh_optimizer, loaded.optimizer_states[0], names_of(fresh), owned)
    train(net, optimizer, range(steps, steps + 2), owned)
    train(fresh, fresh_optimizer, range(steps, steps + 2), owned)
    assert same(model_state_by_name(fresh, owned), model_state_by_name(net, owned))


def load_on_rank(directory: Path, num_stages: int) -> dict[str, Any] | None:
    warnings_are_errors()
    owned = owned_by(dist.get_rank() % num_stages, num_stages)
    loaded = load_sharded(directory, model_names=owned, optimizer_names=owned, layout={"pipe": num_stages})
    check_loaded(loaded, owned)
    assert loaded.metadata == METADATA
    return loaded.rank_state


def test_two_stages_and_two_replicas_read_by_any_layout(tmp_path: Path) -> None:
    """Values tied to the layout that wrote them could not be read by another, or would be those of another rank."""
    directory = tmp_path / "last.ckpt"
    run_ranks(save_on_rank, 4, directory, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]

    loaded = load_sharded(directory)
    check_loaded(loaded)
    assert loaded.metadata == METADATA
    assert loaded.rank_state is None
    assert [read_rank_state(directory, rank) for rank in range(4)] == [{"rank": rank} for rank in range(4)]

    # Four stages on as many ranks as wrote it: rank states belong to other stages now.
    assert run_ranks(load_on_rank, 4, directory, 4) == [None] * 4
    assert run_ranks(load_on_rank, 2, directory, 2) == [None] * 2


def load_own_rank_state(directory: Path) -> list[Any]:
    same_layout = load_sharded(directory, model_names=(), optimizer_names=(), layout=LAYOUT)
    assert same_layout.model_state == {}
    assert same_layout.optimizer_states[0]["state"] == {}
    no_layout = load_sharded(directory, model_names=(), optimizer_names=())
    return [same_layout.rank_state, no_layout.rank_state]


def test_each_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    """Rank 0's random generators and loader positions handed to all repeat and skip samples."""
    run_ranks(save_on_rank, 4, tmp_path / "last.ckpt", 2)
    found = run_ranks(load_own_rank_state, 4, tmp_path / "last.ckpt")
    assert found == [[{"rank": rank}, {"rank": rank}] for rank in range(4)]


def test_replicas_write_each_tensor_once_and_share_the_work(tmp_path: Path) -> None:
    """Every replica writing its copy multiplies the checkpoint; one writing all makes the others wait."""
    directory = tmp_path / "last.ckpt"
    owned = run_ranks(save_on_rank, 4, directory, 2)
    table = FileSystemReader(directory).read_metadata()
    writers = {entry.fqn: info.relative_path for entry, info in table.storage_data.items()}
    # One chunk per key, so no tensor is there twice.
    assert len(table.storage_data) == len(table.state_dict_metadata)
    ranks_by_name: dict[str, set[int]] = {}
    for rank, names in enumerate(owned):
        for name in names:
            ranks_by_name.setdefault(name, set()).add(rank)
    for name, ranks in ranks_by_name.items():
        assert writers[f"state_dict.{name}"] in {f"__{rank}_0.distcp" for rank in ranks}
    assert set(writers.values()) == {f"__{rank}_0.distcp" for rank in range(4)}


def test_one_process_without_a_group(tmp_path: Path) -> None:
    """Saving and loading must not need a process group, nor warn that there is none."""
    directory = tmp_path / "deep" / "last.ckpt"
    save_from_one_process(directory)
    loaded = load_sharded(directory, weights_only=True)
    check_loaded(loaded)
    assert loaded.rank_state == {"random": 5}


def test_saved_before_the_first_step_and_weights_only(tmp_path: Path) -> None:
    """An empty optimizer state must load as one; no optimizer states at all is something else."""
    save_from_one_process(tmp_path / "start.ckpt", steps=0)
    check_loaded(load_sharded(tmp_path / "start.ckpt"), steps=0)
    save_from_one_process(tmp_path / "weights.ckpt", optimizer_states=None)
    assert load_sharded(tmp_path / "weights.ckpt").optimizer_states == []
    assert read_index(tmp_path / "weights.ckpt").num_optimizers is None


class WithStateDict:
    """An extra state that torch would take for something to save by its `state_dict()`."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = -1


def test_values_that_are_no_tensors_and_keys_with_dots(tmp_path: Path) -> None:
    """Numbers, nested state and keys with dots must come back as they were, of the optimizer they belong to."""
    state = {"a.b": {"count": 3, "history.0": [1.5, None], "mean%2E": torch.tensor(2.0, dtype=torch.float64)}}
    groups = [{"params": ["a.b"], "lr": torch.tensor(0.1), "betas": (0.9, 0.99)}]
    second = {"state": {"a.b": {"count": 4}}, "param_groups": groups}
    save_from_one_process(
        tmp_path / "last.ckpt",
        model_state={"_extra_state": WithStateDict(3)},
        optimizer_states=[{"state": state, "param_groups": groups}, second],
    )
    loaded = load_sharded(tmp_path / "last.ckpt", weights_only=False)
    assert loaded.model_state["_extra_state"].value == 3
    assert same(loaded.optimizer_states, [{"state": state, "param_groups": groups}, second])
    with pytest.raises(ValueError, match="`state_dict._extra_state` holds more than tensors .* `weights_only=True`"):
        load_sharded(tmp_path / "last.ckpt")


@pytest.mark.parametrize("before", ["checkpoint", "file", "link to a file", "link to a folder"])
def test_overwriting_the_same_name(tmp_path: Path, before: str) -> None:
    """A directory that exists must neither stop the save nor leave parts of the old checkpoint in the new one."""
    directory = tmp_path / "last.ckpt"
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    if before == "checkpoint":
        run_ranks(save_on_rank, 2, directory, 2, 1)
        (directory / "of the old one").touch()
    elif before == "file":
        directory.write_text("old")
    else:
        directory.symlink_to(other / "kept" if before == "link to a file" else other)
    save_from_one_process(directory, steps=2)
    check_loaded(load_sharded(directory), steps=2)
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "other"}
    assert not directory.is_symlink()
    assert "of the old one" not in {path.name for path in directory.iterdir()}
    assert [path.name for path in other.iterdir()] == ["kept"]


def test_metadata_with_tensors_of_the_model_is_refused(tmp_path: Path) -> None:
    """A whole state dict in rank 0's metadata would be written twice and win over the sharded one."""
    with pytest.raises(ValueError, match="`metadata` has `state_dict`"):
        save_from_one_process(tmp_path / "last.ckpt", metadata={"state_dict": {}})


def test_crash_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    """Two renames replace a directory; a run that dies between them must not lose old and new checkpoint."""
    directory = tmp_path / "last.ckpt"
    save_from_one_process(directory, steps=2)
    replaced = tmp_path / ".last.ckpt.replaced-1" / "last.ckpt"
    replaced.parent.mkdir()
    directory.rename(replaced)
    with pytest.warns(UserWarning, match="last.ckpt` is gone: a run died while it was replaced. Using .*replaced-1"):
        check_loaded(load_sharded(directory), steps=2)
    save_from_one_process(tmp_path / "new", steps=3)
    (tmp_path / "new").rename(tmp_path / ".last.ckpt.writing-1")
    with pytest.warns(UserWarning, match="Using .*writing-1"):
        check_loaded(load_sharded(directory), steps=3)
    with pytest.raises(RuntimeError, match="refuses to be saved"):
        save_from_one_process(directory, rank_state={"mine": Unsavable()})
    with pytest.warns(UserWarning, match="Using .*writing-1"):
        check_loaded(load_sharded(directory), steps=3)
    save_from_one_process(directory, steps=1)
    check_loaded(load_sharded(directory), steps=1)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_half_written_rest_of_a_dead_run_is_removed_before_writing(tmp_path: Path) -> None:
    """Rests of killed runs would fill the disk, most of all when the save that follows fails for lack of space."""
    directory = tmp_path / "last.ckpt"
    save_from_one_process(directory)
    (tmp_path / ".last.ckpt.writing-1").mkdir()
    (tmp_path / ".last.ckpt.writing-1" / "__0_0.distcp").touch()
    with pytest.raises(RuntimeError, match="refuses to be saved"):
        save_from_one_process(directory, rank_state={"mine": Unsavable()})
    assert list(tmp_path.iterdir()) == [directory]


class Unsavable:
    def __reduce__(self) -> Any:
        raise RuntimeError("refuses to be saved")
