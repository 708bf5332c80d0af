"""Saving in the background: the values of the call, one save at a time, errors on all ranks, nothing removed early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel.checkpoint import (
    BackgroundSaver,
    RegionLayout,
    TensorRegions,
    is_complete,
    load_sharded,
    model_state_by_name,
    optimizer_state_by_name,
    read_rank_state,
)
from lightning_bigmodel.testing import run_ranks
from tests.checkpoint.pipe_model import Net, keep_only, make_net, make_optimizer, names_of, owned_by, train
from tests.checkpoint.slow_writer import writer
from tests.checkpoint.test_store import METADATA, check_loaded


def stage_of(steps: int) -> tuple[Net, torch.optim.Optimizer, set[str]]:
    """This rank's stage after some steps."""
    owned = owned_by(dist.get_rank(), 2)
    net = make_net()
    optimizer = make_optimizer(net)
    keep_only(net, owned)
    train(net, optimizer, range(steps), owned)
    return net, optimizer, owned


def content(net: Net, optimizer: torch.optim.Optimizer, owned: set[str], **changed: Any) -> dict[str, Any]:
    given = {
        "model_state": model_state_by_name(net, owned),
        "optimizer_states": [optimizer_state_by_name(optimizer, names_of(net), owned)],
        "metadata": dict(METADATA),
        "rank_state": {"rank": dist.get_rank()},
        "layout": {"pipe": 2},
    }
    return {**given, **changed}


def make_saver() -> BackgroundSaver:
    return BackgroundSaver(dist.new_group(backend="gloo"))


def save_and_train_on(directory: Path) -> bool:
    net, optimizer, owned = stage_of(3)
    saver = make_saver()
    metadata, mine = {**METADATA, "callbacks": {"best": [1.0]}}, {"position": [dist.get_rank()]}
    with writer() as held:
        held.may_write.clear()
        saver.save(directory, **content(net, optimizer, owned, metadata=metadata, rank_state=mine))
        was_there = directory.exists()
        # Everything that was given changes, collectives of training go on, and only then is anything written.
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if name in owned:
                    parameter.add_(1)
        net.norm.running_mean.add_(1) if "norm.running_mean" in owned else None
        train(net, optimizer, range(3, 6), owned)
        optimizer.param_groups[0]["lr"] = 7.0
        net.seen["words"] = -1
        metadata["callbacks"]["best"].append(2.0)
        mine["position"].append(-1)
        for _ in range(20):
            dist.all_reduce(torch.ones(1))
        held.may_write.set()
        for _ in range(20):
            dist.all_reduce(torch.ones(1))
        saver.finish()
    return was_there


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    """A thread that reads live tensors, options or metadata writes layer A of one step beside layer B of the next."""
    directory = tmp_path / "last.ckpt"
    assert run_ranks(save_and_train_on, 2, directory) == [False, False]
    loaded = load_sharded(directory)
    check_loaded(loaded, steps=3)
    assert loaded.metadata["callbacks"] == {"best": [1.0]}
    assert [read_rank_state(directory, rank) for rank in range(2)] == [{"position": [0]}, {"position": [1]}]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def save_regions(directory: Path) -> None:
    rank, saver = dist.get_rank(), make_saver()
    weight = torch.arange(6.0).view(3, 2)[2 * rank : 2 + rank].clone()
    tied = torch.ones(2)
    given = {"a": TensorRegions(weight, RegionLayout.of_rows((3, 2), 2 * rank, 2 - rank)), "b": tied, "c": tied}
    for number in range(2):  # the memory of the first copy is used again
        saver.save(directory, model_state=given, optimizer_states=None, metadata={}, rank_state={})
        weight.add_(100)
        tied.add_(number)
    saver.finish()
    assert sorted(saver._copies._buffers) == ["state_dict.a", "state_dict.b"]  # tied values share one copy


def test_rows_and_tied_values(tmp_path: Path) -> None:
    """Rows of a rank are live memory too; copies kept from the save before must be filled anew."""
    run_ranks(save_regions, 2, tmp_path / "a.ckpt")
    state = load_sharded(tmp_path / "a.ckpt").model_state
    assert state["a"].tolist() == [[100.0, 101.0], [102.0, 103.0], [104.0, 105.0]]
    assert state["b"].tolist() == state["c"].tolist() == [1.0, 1.0]


def fail_in_background(directory: Path, asks: str) -> tuple[str, bool, int]:
    net, optimizer, owned = stage_of(3)
    saver = make_saver()
    with writer() as held:
        held.fail_at, held.fail_on_rank = {2}, 1
        saver.save(directory, **content(net, optimizer, owned))
        train(net, optimizer, range(3, 4), owned)
        saver.save(directory, **content(net, optimizer, owned))
        removed: list[int] = []
        saver.then(lambda: removed.append(1))
        try:
            saver.finish() if asks == "finish" else saver.save(directory, **content(net, optimizer, owned))
        except RuntimeError as error:
            said = str(error)
        # What was to happen after the save that failed must not, and the next one is a new start.
        saver.finish()
        train(net, optimizer, range(4, 5), owned)
        saver.save(directory.with_name("next.ckpt"), **content(net, optimizer, owned))
        saver.then(lambda: removed.append(2))
        saver.finish()
        saver.then(lambda: removed.append(3))
        return said, removed == [2, 3], held.most_in_flight


@pytest.mark.parametrize("asks", ["save", "finish"])
def test_an_error_is_raised_on_all_ranks_by_the_next_call(tmp_path: Path, asks: str) -> None:
    """An error in a thread is printed and lost; an old checkpoint removed for a new one that failed is lost too."""
    for said, only_later_ones, most in run_ranks(fail_in_background, 2, tmp_path / "last.ckpt", asks):
        assert "Writing tensors failed on rank 1: OSError: [Errno 28] No space left on device" in said
        assert only_later_ones
        assert most == 1
    check_loaded(load_sharded(tmp_path / "last.ckpt"), steps=3)
    check_loaded(load_sharded(tmp_path / "next.ckpt"), steps=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "next.ckpt"]


def save_two(directory: Path) -> list[bool]:
    net, optimizer, owned = stage_of(3)
    saver = make_saver()
    seen = []
    with writer() as held:
        saver.save(directory / "a.ckpt", **content(net, optimizer, owned))
        saver.finish()
        held.may_write.clear()
        saver.save(directory / "b.ckpt", **content(net, optimizer, owned))
        saver.then(lambda: seen.append(is_complete(directory / "b.ckpt")))
        seen.append(len(seen) == 0)
        held.may_write.set()
        saver.save(directory / "c.ckpt", **content(net, optimizer, owned))
        seen.append(held.most_in_flight == 1)
        seen.append(is_complete(directory / "b.ckpt"))
        saver.finish()
    return seen


def test_one_save_at_a_time_and_what_follows_it(tmp_path: Path) -> None:
    """Two saves at once need twice the memory; a removal before the new one is complete may leave none."""
    # What runs on rank 1 then may find the rename, which is rank 0's, done or not.
    found = run_ranks(save_two, 2, tmp_path)
    assert found[0] == [True, True, True, True]
    assert found[1][0] is True
    assert found[1][2:] == [True, True]
    assert all(is_complete(tmp_path / name) for name in ("a.ckpt", "b.ckpt", "c.ckpt"))


class Uncopyable:
    def __reduce__(self) -> Any:
        raise ValueError("cannot be copied")


def give_uncopyable(directory: Path) -> str:
    net, optimizer, owned = stage_of(3)
    saver = make_saver()
    changed = {"rank_state": {"mine": Uncopyable()}} if dist.get_rank() == 1 else {}
    with pytest.raises(ValueError, match="cannot be copied") as caught:
        saver.save(directory, **content(net, optimizer, owned, **changed))
    return str(caught.value)


def test_what_cannot_be_copied_is_an_error_at_the_call(tmp_path: Path) -> None:
    """A rank that starts its thread alone waits in it for the others."""
    for said in run_ranks(give_uncopyable, 2, tmp_path / "last.ckpt"):
        assert "Copying what is to be saved failed on rank 1: cannot be copied" in said
    assert list(tmp_path.iterdir()) == []
