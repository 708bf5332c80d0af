"""Bytes go from a file to where they are wanted, and over memory in use only if all of them are sound."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.checkpoint import (
    LiveTensors,
    Region,
    RegionLayout,
    TensorRegions,
    convert_checkpoint,
    load_sharded,
    save_sharded,
)
from lightning_bigmodel.checkpoint._stored import find_tensor
from lightning_bigmodel.testing import run_ranks
from tests.checkpoint.pipe_model import same

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
)


def _state() -> dict[str, Tensor]:
    found = {str(dtype): torch.arange(24).view(6, 4).to(dtype) for dtype in DTYPES}
    found["transposed"] = torch.arange(24.0).view(4, 6).t()
    found["part of a larger one"] = torch.arange(48.0).view(6, 8)[:, 2:6]
    found["backwards"] = torch.arange(24.0, dtype=torch.float64).view(6, 4).flip(0)
    found["number"] = torch.tensor(3.0)
    found["nothing"] = torch.empty(0, 4)
    found["odd"] = torch.arange(7, dtype=torch.int8)  # what follows it begins anywhere
    return found


def _save(path: Path, state: dict[str, Tensor], moments: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
    states = None
    if moments is not None:
        entries = {name: {"exp_avg": value} for name, value in moments.items()}
        states = [{"state": entries, "param_groups": [{"params": list(moments)}]}]
    save_sharded(path, model_state=state, optimizer_states=states, metadata={}, rank_state={}, **kwargs)


def test_each_type_and_layout(tmp_path: Path) -> None:
    """A stride or a type that is taken for another."""
    state = _state()
    _save(tmp_path / "all.ckpt", state)
    assert same(dict(load_sharded(tmp_path / "all.ckpt").model_state), state)


def test_rows_of_each_type_and_layout(tmp_path: Path) -> None:
    """The first rows in place of those asked for."""
    state = {name: value for name, value in _state().items() if value.dim() == 2 and value.numel()}
    _save(tmp_path / "all.ckpt", state)
    rows = RegionLayout.of_rows((6, 4), 3, 2)
    loaded = load_sharded(tmp_path / "all.ckpt", regions=dict.fromkeys(state, rows))
    assert same(dict(loaded.model_state), {name: value[3:5] for name, value in state.items()})


def test_rows_that_were_saved_become_a_whole(tmp_path: Path) -> None:
    """One of two pieces in the place of the other."""
    whole = torch.arange(40.0).view(10, 4)
    run_ranks(_save_rows, 2, tmp_path / "rows.ckpt")
    assert same(load_sharded(tmp_path / "rows.ckpt").model_state["w"], whole)
    columns = RegionLayout((10, 4), (10, 2), (Region((0, 1), (0, 0), (10, 2)),))
    part = load_sharded(tmp_path / "rows.ckpt", regions={"w": columns}).model_state["w"]
    assert torch.equal(part, whole[:, 1:3])


def _save_rows(path: Path) -> None:
    rank = dist.get_rank()
    layout = RegionLayout.of_rows((10, 4), 0 if rank == 0 else 7, 7 if rank == 0 else 3)
    local = torch.arange(40.0).view(10, 4)[:7] if rank == 0 else torch.arange(40.0).view(10, 4)[7:]
    _save(path, {"w": TensorRegions(local, layout)}, layout={"data_replicate": 2})  # type: ignore[dict-item]


def test_what_torch_save_wrote_is_found() -> None:
    """Reading all of it to memory first, though it is plain."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.arange(6).view(2, 3).to(dtype)
        content = io.BytesIO()
        torch.save(tensor, content)
        found = find_tensor(content, 0, len(content.getvalue()))
        assert found is not None
        assert found.is_plain
        raw = bytearray(content.getvalue()[found.offset : found.offset + found.num_bytes])
        assert torch.equal(found.of_bytes(torch.frombuffer(raw, dtype=torch.uint8)), tensor)


def test_what_is_no_plain_tensor_is_left_to_torch() -> None:
    """A pickle's own functions that are called."""
    for value in ((torch.ones(2),), torch.nn.Parameter(torch.ones(2)), {"a": 1}, torch.ones(2).to_sparse(), print):
        content = io.BytesIO()
        torch.save(value, content)
        assert find_tensor(content, 0, len(content.getvalue())) is None
    assert find_tensor(io.BytesIO(b"no archive"), 0, 10) is None


def _live(like: dict[str, Tensor]) -> LiveTensors:
    model = {name: torch.full_like(value, 7) for name, value in like.items()}
    return LiveTensors(model, [{name: {"exp_avg": torch.full_like(value, 8)} for name, value in like.items()}])


def test_read_into_memory_in_use(tmp_path: Path) -> None:
    """Memory for a second model, and moments that are left where they were."""
    state = {"a": torch.arange(24.0).view(6, 4), "b": torch.arange(4.0)}
    moments = {name: -value for name, value in state.items()}
    _save(tmp_path / "x.ckpt", state, moments)
    live = _live(state)
    loaded = load_sharded(tmp_path / "x.ckpt", into=live)
    assert same(dict(live.model), state)
    for name, value in state.items():
        assert loaded.model_state[name] is live.model[name]
        assert loaded.optimizer_states[0]["state"][name]["exp_avg"] is live.optimizers[0][name]["exp_avg"]
        assert torch.equal(live.optimizers[0][name]["exp_avg"], -value)


@pytest.mark.parametrize(
    "other",
    [
        torch.full((6, 4), 7.0, dtype=torch.float64),
        torch.full((4, 6), 7.0).t(),
        torch.full((1, 1), 7.0).expand(6, 4),
        torch.full((6, 4), 7.0, device="meta"),
        torch.nn.Parameter(torch.full((6, 4), 7.0)),
    ],
    ids=["type", "strides", "expanded", "meta", "parameter"],
)
def test_memory_of_another_kind_is_left_alone(other: Tensor, tmp_path: Path) -> None:
    """An expanded parameter whose one element gets the last of many, or a type that loses digits."""
    state = {"a": torch.arange(24.0).view(6, 4)}
    _save(tmp_path / "x.ckpt", state)
    loaded = load_sharded(tmp_path / "x.ckpt", into=LiveTensors({"a": other}, []))
    assert same(dict(loaded.model_state), state)
    if other.device.type != "meta":
        assert bool((other == 7).all())


def _load_damaged(path: Path) -> str:
    rank = dist.get_rank()
    state = {name: torch.arange(24.0).view(6, 4) for name in "abcdefgh"}
    _save(path, state, {name: -value for name, value in state.items()}, layout={"data_replicate": 2})
    if rank == 0:
        file = path / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[content.rindex(torch.arange(24.0).neg().numpy().tobytes()) + 9] ^= 1
        file.write_bytes(bytes(content))
    dist.barrier()
    live = _live(state)
    mine = list("abcdefgh")[:1] if rank == 0 else None  # of which no part is damaged
    with pytest.raises(ValueError, match=r"(?s)on rank 1: .*__1_0\.distcp` is damaged.*the sum") as caught:
        load_sharded(path, model_names=mine, optimizer_names=mine, into=live)
    assert all(bool((value == 7).all()) for value in live.model.values())
    assert all(bool((state["exp_avg"] == 8).all()) for state in live.optimizers[0].values())
    return str(caught.value)


def test_nothing_is_overwritten_if_a_byte_is_wrong_anywhere(tmp_path: Path) -> None:
    """Half a model from the checkpoint and half from before, on the rank of the damage or on another one."""
    said = run_ranks(_load_damaged, 2, tmp_path / "x.ckpt")
    assert said[0] == said[1]


def test_what_is_converted_is_compared_with_its_sum(tmp_path: Path) -> None:
    """A wrong weight that is written to a new file, with a sum of its own."""
    _save(tmp_path / "x.ckpt", {"a": torch.arange(24.0).view(6, 4)})
    (file,) = (tmp_path / "x.ckpt").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(24.0).numpy().tobytes()) + 9] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"__0_0\.distcp` is damaged.*the sum"):
        convert_checkpoint(tmp_path / "x.ckpt", tmp_path / "y.safetensors")
    assert not (tmp_path / "y.safetensors").exists()


class _Unreadable:
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be pickled")


def test_the_collector_rests_while_a_checkpoint_is_written_and_read(tmp_path: Path) -> None:
    """A quarter of a second of looking at all objects, and a collector that stays off after an error."""
    state = {f"layer.{number}": torch.ones(1) for number in range(2000)}
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(info["generation"])

    gc.callbacks.append(note)
    try:
        _save(tmp_path / "x.ckpt", state)
        load_sharded(tmp_path / "x.ckpt")
    finally:
        gc.callbacks.remove(note)
    assert len(collected) < 60  # before and after it; they were hundreds
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        _save(tmp_path / "x.ckpt", {"a": _Unreadable()})  # type: ignore[dict-item]
    assert gc.isenabled()
