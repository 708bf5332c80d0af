"""Row shards on the host and optimizer state in files, in plain torch: numbers, copies, memory and full disks."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_bigmodel.pipeline.gradients import clip_by_norm
from lightning_bigmodel.sharding.disk_states import DiskStates
from lightning_bigmodel.sharding.offload import OffloadPolicy
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.sharding.offload_boundary import Boundary, groups_refuse_the_host
from tests.sharding.test_zero import Equal, assert_same
from tests.sharding.zero_models import Sharded, reference

run_ranks = functools.partial(run_ranks_for, timeout_seconds=40.0)

# -- host --------------------------------------------------------------------------------------------------------------


def nothing_sent(copies: Boundary) -> None:
    assert not copies.sent


def _train(stage: int, options: dict[str, Any], per_rank: int) -> tuple[dict[str, Any], list[dict[str, int]], int]:
    copies = Boundary()
    with groups_refuse_the_host(copies):
        run = Sharded(stage, copies=copies, **options)
        rank, size = dist.get_rank(), dist.get_world_size()
        assert all(copies.is_on_host(shard) for shard in run.shards.shards.values() if shard.numel())
        # Rows change next: none of them may be on its way.
        run.optimizer.register_step_pre_hook(lambda *_: nothing_sent(copies))
        crossed = []
        for step in range(3):
            run.optimizer.zero_grad()
            copies.reset()
            for part in range(rank * per_rank, (rank + 1) * per_rank):
                run.microbatch(step, part, per_rank * size, True)
            run.finish_step()
            crossed.append(dict(copies.num_bytes))
        assert all(copies.is_on_host(shard.grad) for shard in run.shards.shards.values() if shard.numel())
        num_bytes = sum(record.padded_numel * 4 for record in run.shards.records.values())
        run.shards.restore()
    values = {name: value.detach().numpy().copy() for name, value in run.model.named_parameters()}
    return values, crossed, num_bytes


@pytest.mark.parametrize(
    ("stage", "options", "per_rank", "to_host", "to_device"),
    [
        (1, {}, 1, 1, 1),
        (1, {}, 3, 1, 1),
        (2, {}, 1, 1, 1),
        (2, {}, 3, 3, 1),
        (2, {"every_microbatch": False}, 3, 1, 1),
        (3, {"keep_gathered": True}, 1, 1, 1),
        (3, {"keep_gathered": True, "every_microbatch": False}, 3, 1, 1),
        (3, {}, 2, 2, None),
    ],
)
def test_everything_crosses_once(
    stage: int, options: dict[str, Any], per_rank: int, to_host: int, to_device: int | None
) -> None:
    """A copy made twice, read before it has arrived, or overwritten on its way; a group that is handed host memory."""
    expected = reference(2 * per_rank, [True] * 2 * per_rank)
    for values, crossed, num_bytes in run_ranks(_train, 2, stage, options, per_rank):
        assert_same(values, expected)
        for found in crossed:
            assert found["to_host"] == to_host * num_bytes
            if to_device is not None:
                assert found["to_device"] == to_device * num_bytes
            else:  # each block in forward and in backward, what is used throughout once
                assert per_rank * num_bytes < found["to_device"] <= 2 * per_rank * num_bytes


def _half() -> tuple[dict[str, int], int]:
    copies = Boundary()
    run = Sharded(3, model=Equal(), compute_dtype=torch.bfloat16, keep_gathered=True, copies=copies)
    assert run.passes is not None
    with run.passes.forward(0):
        loss = run.model(torch.ones(2, 32, dtype=torch.bfloat16)).float().sum()
    run.backward(loss, 0)
    assert {shard.grad.dtype for shard in run.shards.shards.values()} == {torch.float32}
    return copies.num_bytes, sum(record.padded_numel for record in run.shards.records.values())


def test_the_smaller_type_crosses() -> None:
    """Twice the bytes over the bus for weights that are rounded on arrival; sums of gradients keep their precision."""
    for found, count in run_ranks(_half, 2):
        assert found == {"to_host": 4 * count, "to_device": 2 * count}


class FakeDevice(TorchFunctionMode):
    """What is asked for on `meta` is computed on the CPU, and marked; both kinds in one operation are an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.pop("device", None)
        if func is Tensor.to and isinstance(args[1], torch.device):
            result = args[0].clone()
            result.is_device = args[1].type == "meta"
            return result
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]  # a descriptor
            return torch.device("meta" if is_marked(args[0]) else "cpu")
        given = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
        marks = {is_marked(tensor) for tensor in given}
        assert len(marks) < 2, f"{func} mixes host and device"
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor):
                tensor.is_device = True in marks or (wanted is not None and wanted.type == "meta")
        return result


def is_marked(tensor: Any) -> bool:
    return bool(tensor.__dict__.get("is_device", False))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("mixed", [False, True])
def test_clipping_where_groups_know_the_device_only(
    norm_type: float, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients on the host and a group that speaks NCCL: the norm must go by way of the device."""
    others = 5.0
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]

    def all_reduce(total: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        assert is_marked(total), "No backend type associated with device type cpu"
        if op is dist.ReduceOp.MAX:
            total.copy_(total.clamp(min=others))
        else:
            total += others**norm_type

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    expected = max(3.0, 4.0, others) if norm_type == math.inf else math.sqrt(3.0**2 + 4.0**2 + others**2)
    with FakeDevice():
        if mixed:  # parameters without dimensions stay on the device
            gradients[1] = gradients[1].to(torch.device("meta"))
        total = clip_by_norm(gradients, gradients, 1.0, [None], norm_type, torch.device("meta"))
    assert float(total) == pytest.approx(expected)
    assert torch.cat(gradients).tolist() == pytest.approx([3 / expected, 0.0, 4 / expected], rel=1e-5)


# -- disk --------------------------------------------------------------------------------------------------------------


def parameters_of(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 3), (7,), (0, 3), (2, 3, 4), (6, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def build(kind: Any, options: dict[str, Any]) -> tuple[Any, list[nn.Parameter]]:
    """Two groups of options, one parameter that is frozen, one without elements."""
    parameters = parameters_of()
    parameters[3].requires_grad_(False)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.03}]
    return kind(groups, **{"lr": 0.01, **options}), parameters


def take_steps(optimizer: Any, parameters: list[nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            # One parameter is not used in the first step.
            parameter.grad = gradient if parameter.requires_grad and (index or step) else None
        optimizer.step()


def on_disk(optimizer: Any, path: Any, chunk_bytes: int = 1, **options: Any) -> DiskStates:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    policy = OffloadPolicy("disk", path=path, chunk_bytes=chunk_bytes)
    return DiskStates([optimizer], held, policy, rank=0, **options)


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as many packages' optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                    moment.lerp_(parameter.grad, 0.1)
                    parameter.add_(moment / (1 - 0.9 ** group["step"]), alpha=-group["lr"])


KINDS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "sgd": (torch.optim.SGD, {}, 0),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, 1),
    "adam": (torch.optim.Adam, {}, 2),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}, 3),
    "foreach": (torch.optim.AdamW, {"foreach": True}, 2),
    "fused": (torch.optim.AdamW, {"fused": True}, 2),
    "adamax": (torch.optim.Adamax, {}, 2),
    "nadam": (torch.optim.NAdam, {}, 2),
    "radam": (torch.optim.RAdam, {}, 2),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, 3),
    "rprop": (torch.optim.Rprop, {}, 2),
    "asgd": (torch.optim.ASGD, {}, 1),
    "adagrad": (torch.optim.Adagrad, {}, 1),
    "adadelta": (torch.optim.Adadelta, {}, 2),
    "counting": (Counting, {}, 1),
}


@pytest.mark.parametrize("chunk_bytes", [1, 10**9])
@pytest.mark.parametrize("name", KINDS)
def test_steps_in_pieces_equal_whole_steps(name: str, chunk_bytes: int, tmp_path: Path) -> None:
    """A count that goes up with every piece, a piece left out, state that stays in memory or a hook that runs often."""
    kind, options, num_tensors = KINDS[name]
    plain, expected = build(kind, options)
    optimizer, parameters = build(kind, options)
    states = on_disk(optimizer, tmp_path, chunk_bytes)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    plain_scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(5):
        take_steps(plain, expected, step, step + 1)
        take_steps(optimizer, parameters, step, step + 1)
        scheduler.step()
        plain_scheduler.step()
    assert calls == ["pre", "post"] * 5
    for one, other in zip(parameters, expected, strict=True):
        assert torch.equal(one, other)
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    trained = [p for p in parameters if p.requires_grad and p.numel()]
    if num_tensors:
        files = list((tmp_path / "rank_0").glob("*.bin"))
        assert len(files) == (len(trained) if chunk_bytes == 1 else 1)
        content = b"".join(file.read_bytes() for file in files)
        for one, other in zip(parameters, expected, strict=True):
            values = [v for v in optimizer.state.get(one, {}).values() if v.dim() and v.shape == one.shape]
            assert len(values) == (num_tensors if one.requires_grad or name == "adagrad" else 0)
            for key, value in optimizer.state.get(one, {}).items():
                assert torch.equal(value, plain.state[other][key])
            assert not one.requires_grad or all(value.numpy().tobytes() in content for value in values)
    states.close()
    assert list(tmp_path.iterdir()) == []
    take_steps(plain, expected, 5, 7)
    take_steps(optimizer, parameters, 5, 7)
    for one, other in zip(parameters, expected, strict=True):
        assert torch.equal(one, other)


def test_loaded_state_goes_into_the_files(tmp_path: Path) -> None:
    """A resumed run whose state is in memory again, or whose files keep what they had."""
    plain, expected = build(torch.optim.AdamW, {})
    take_steps(plain, expected, 0, 2)
    optimizer, parameters = build(torch.optim.AdamW, {})
    states = on_disk(optimizer, tmp_path, 10**9)
    take_steps(optimizer, parameters, 7, 8)
    moment = optimizer.state[parameters[0]]["exp_avg"]
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.state[parameters[0]]["exp_avg"] is moment
    content = b"".join(file.read_bytes() for file in (tmp_path / "rank_0").glob("*.bin"))
    assert plain.state[expected[0]]["exp_avg"].numpy().tobytes() in content
    with torch.no_grad():
        for one, other in zip(parameters, expected, strict=True):
            one.copy_(other)
    take_steps(plain, expected, 2, 4)
    take_steps(optimizer, parameters, 2, 4)
    for one, other in zip(parameters, expected, strict=True):
        assert torch.equal(one, other)
    for value in optimizer.state[parameters[0]].values():  # what `torch.save` writes of a tensor is its storage
        assert value.untyped_storage().nbytes() == value.nbytes
    states.close()


class CountsItself(Counting):
    """Counts where nobody looks."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / self.num_steps)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (torch.optim.Adafactor, {}, "does not treat each element by itself"),
        (CountsItself, {}, "one parameter at a time it gives other values"),
    ],
)
def test_what_cannot_be_stepped_in_pieces_is_refused(
    kind: Any, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Another model, quietly."""
    optimizer, _ = build(kind, options)
    with pytest.raises(ValueError, match=said) as caught:
        on_disk(optimizer, tmp_path)
    assert 'Use `offload="cpu"`' in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# -- folders and full disks --------------------------------------------------------------------------------------------


def test_what_a_crashed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """A disk that fills up with every crash, or somebody's data gone."""
    optimizer, parameters = build(torch.optim.AdamW, {})
    states = on_disk(optimizer, tmp_path)
    folder = tmp_path / "rank_0"
    with pytest.raises(ValueError, match="in use by another run"):
        on_disk(build(torch.optim.AdamW, {})[0], tmp_path)
    assert list(folder.glob("*.bin"))
    crashed = tmp_path / "crashed"
    shutil.copytree(folder, crashed / "rank_0")  # a copy holds no lock
    (crashed / "rank_0" / "states_77.bin").write_bytes(b"old")
    (crashed / "rank_0" / "notes.txt").write_text("mine")
    (crashed / "data.bin").write_text("mine")
    states.close()
    second = on_disk(optimizer_again := build(torch.optim.AdamW, {})[0], crashed)
    assert not (crashed / "rank_0" / "states_77.bin").exists()
    take_steps(optimizer_again, optimizer_again.param_groups[0]["params"], 0, 1)
    second.close()
    assert sorted(p.name for p in crashed.rglob("*")) == ["data.bin", "notes.txt", "rank_0"]
    with pytest.raises(ValueError, match=r"files of somebody else \(notes.txt\)"):
        on_disk(build(torch.optim.AdamW, {})[0], crashed)
    assert (crashed / "rank_0" / "notes.txt").read_text() == "mine"
    assert parameters[0].isfinite().all()


def _full_disk(path: str, what: str) -> tuple[str, int | None, list[str]]:
    """The second rank's disk is full; what this rank hears of it, and leaves behind."""
    rank = dist.get_rank()
    optimizer, _ = build(torch.optim.AdamW, {})
    allocate = os.posix_fallocate

    def fail(descriptor: int, offset: int, size: int) -> None:
        if rank == 1 and size > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    if what == "allocate":
        os.posix_fallocate = fail  # type: ignore[assignment]  # this process is the test's own
    else:
        usage = shutil.disk_usage(path)
        shutil.disk_usage = lambda _: usage._replace(free=500)  # type: ignore[assignment, misc]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with pytest.raises(OSError, match="disk") as caught:
        DiskStates([optimizer], held, OffloadPolicy("disk", path=path, chunk_bytes=1), rank=rank)
    dist.barrier()
    return str(caught.value), caught.value.errno, sorted(p.name for p in Path(path).rglob("*"))


@pytest.mark.parametrize("what", ["usage", "allocate"])
def test_a_full_disk_is_an_error_on_every_rank(what: str, tmp_path: Path) -> None:
    """A bus error in the middle of a step, or ranks that wait for the one that failed."""
    results = run_ranks(_full_disk, 2, str(tmp_path), what)
    # 34 elements in two moments, each tensor in multiples of 64 bytes, on two ranks
    expected = 2 * 2 * (64 + 64 + 64)
    for text, _, left in results:
        assert left == []
        if what == "usage":
            assert f"ranks [0, 1] needs {expected} bytes" in text
            assert "has 500 bytes" in text
        else:
            assert "No space left on device" in text
            assert f"{expected // 2} bytes in 3 files" in text


def test_a_failing_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes happen in the background, where an error is easily lost."""
    optimizer, parameters = build(torch.optim.AdamW, {})
    states = on_disk(optimizer, tmp_path)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        take_steps(optimizer, parameters, 0, 3)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    states.close()


def resident_bytes() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kinds = ("RssAnon", "RssFile", "RssShmem")
    return {kind: int(fields[kind].split()[0]) * 1024 for kind in kinds}


def _memory(path: str | None) -> tuple[int, int]:
    """Growth of resident memory by three steps of Adam with 192 MiB of state: the largest, and that after them."""
    torch.set_num_threads(1)
    parameters = [nn.Parameter(torch.zeros(1024, 1024)) for _ in range(24)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    gc.collect()
    before = sum(resident_bytes().values())
    states = None if path is None else on_disk(optimizer, path, 16 * 2**20)
    largest = 0

    def look() -> None:
        nonlocal largest
        largest = max(largest, sum(resident_bytes().values()) - before)

    if states is not None:
        assert states.num_bytes == 192 * 2**20
        adopt = states._adopt

        def looking(*args: Any) -> None:
            look()
            adopt(*args)
            look()

        states._adopt = looking  # type: ignore[method-assign]  # between the pieces of a step
    for _ in range(3):
        optimizer.step()
        look()
    after = sum(resident_bytes().values()) - before
    assert float(parameters[-1].detach()[0, 0]) == pytest.approx(-3e-3, rel=1e-3)
    if states is not None:
        states.close()
    return largest, after


def test_resident_memory_is_bounded(tmp_path: Path) -> None:
    """Files that are mapped, and stay in memory all the same."""
    ((in_memory, kept_in_memory),) = run_ranks(_memory, 1, None)
    ((on_files, kept_on_files),) = run_ranks(_memory, 1, str(tmp_path))
    print(*(f"{count / 2**20:.0f} MiB" for count in (in_memory, kept_in_memory, on_files, kept_on_files)))
    assert kept_in_memory > 190 * 2**20
    assert on_files < 96 * 2**20  # four chunks of 16, what a step of one takes, and the libraries it loads
    assert kept_on_files < 80 * 2**20


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gpu", "`offload='gpu'` is not known"),
        (True, "`offload=True` is not known"),
        ("disk", "needs a folder"),
        ({"kind": "disk"}, "needs a folder"),
        ({"kind": "tape", "path": "/x"}, "kind='tape'. is not known"),
        ({"kind": "cpu", "path": "/x"}, "`path='/x'` is for"),
        ({"kind": "cpu", "chunk_bytes": 5}, "`chunk_bytes=5` is for"),
        ({"kind": "disk", "path": "/x", "chunk_bytes": 0}, "`chunk_bytes=0` must be"),
    ],
)
def test_bad_policies(given: Any, said: str) -> None:
    """A run that starts with what cannot take effect."""
    with pytest.raises(ValueError, match=said):
        OffloadPolicy(**given) if isinstance(given, dict) else OffloadPolicy.of(given)


def test_policies() -> None:
    """Short forms mean what they say."""
    assert OffloadPolicy.of("cpu") == OffloadPolicy("cpu")
    assert OffloadPolicy.of(None) is None
    policy = OffloadPolicy("disk", path="/x")
    assert OffloadPolicy.of(policy) is policy
    assert np.isclose(policy.bytes_a_chunk, 64 * 2**20)
