import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_bigmodel.mesh import AXES, Layout, RankMesh, build_pipe_subgroups, build_rank_mesh
from lightning_bigmodel.testing import fake_world, run_ranks

_BIG = Layout(pipe=4, data_replicate=2, data_shard=8, tensor=8)


@pytest.mark.parametrize("rank", [0, 37, 300, 511])
def test_coordinates_in_a_large_world(rank: int) -> None:
    """Guards against index arithmetic that only fits small or square meshes."""
    with fake_world(512, rank=rank):
        mesh = build_rank_mesh(_BIG, "cpu")
        assert tuple(mesh.coordinates[axis] for axis in AXES) == mesh.device_mesh.get_coordinate()
        pipe, replicate, shard, tensor = mesh.device_mesh.get_coordinate()
        grid = torch.arange(512).view(4, 16, 8)
        data = replicate * 8 + shard
        assert (mesh.pipe_rank, mesh.pipe_size, mesh.data_rank, mesh.data_size) == (pipe, 4, data, 16)
        assert mesh.model_rank == pipe * 8 + tensor
        assert list(mesh.pipe_global_ranks) == grid[:, data, tensor].tolist() == _ranks(mesh.pipe_group)
        assert _ranks(mesh.data_group) == grid[pipe, :, tensor].tolist()
        assert _ranks(mesh.tensor_group) == grid[pipe, data].tolist()
        assert _ranks(mesh.model_group) == grid[:, data].flatten().tolist()
        assert mesh.model_rank == dist.get_rank(mesh.model_group)
        assert mesh.data_rank == dist.get_rank(mesh.data_group)
        owners = build_pipe_subgroups(mesh, [(0, 3), (0, 1, 2, 3), (1,), (0, 3)])
        assert list(owners) == [(0, 3), (0, 1, 2, 3), (1,)]
        assert owners[0, 1, 2, 3] is mesh.pipe_group
        assert (owners[0, 3] is not None) == (pipe in (0, 3))
        if pipe in (0, 3):
            assert _ranks(owners[0, 3]) == grid[[0, 3], data, tensor].tolist()
        assert (owners[1,] is not None) == (pipe == 1)


def test_wrong_world_and_wrong_owners_are_refused() -> None:
    """Guards against groups built for another world, which would hang at the first collective."""
    with pytest.raises(RuntimeError, match="needs the default process group"):
        build_rank_mesh(_BIG, "cpu")
    with fake_world(8):
        with pytest.raises(ValueError, match=r"for 512 ranks.*has 8"):
            build_rank_mesh(_BIG, "cpu")
        mesh = build_rank_mesh(Layout.resolve(8, pipeline_parallel_size=2), "cpu")
        for owners in [(), (1, 0), (0, 0), (0, 2)]:
            with pytest.raises(ValueError, match=r"strictly increasing pipe indices in 0\.\.1"):
                build_pipe_subgroups(mesh, [owners])


def test_mesh_is_frozen() -> None:
    """Guards against code that moves a rank after its groups were made."""
    with fake_world(8):
        mesh = build_rank_mesh(Layout.resolve(8), "cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh.rank = 3  # type: ignore[misc]


def test_groups_carry_the_right_ranks() -> None:
    """Guards against groups created in different orders on different ranks: they hang, or sum over wrong ranks."""
    results = run_ranks(_sum_over_groups, 4)
    # Ranks by (pipe, data): 0=(0,0) 1=(0,1) 2=(1,0) 3=(1,1); each group sums global ranks.
    assert [result["pipe"] for result in results] == [2, 4, 2, 4]
    assert [result["data"] for result in results] == [1, 1, 5, 5]
    assert [result["tensor"] for result in results] == [0, 1, 2, 3]
    assert [result["model"] for result in results] == [2, 4, 2, 4]
    assert [result["owners"] for result in results] == [0, 1, None, None]
    assert [result["model_rank"] for result in results] == [0, 0, 1, 1]


def test_other_names_of_axes_build_parallel_layers() -> None:
    """Guards a module written for `data_parallel` and `tensor_parallel`, which shards tensor-parallel layers."""
    results = run_ranks(_tensor_and_data_parallel, 4)
    expected = _plain_output()
    for output, names in results:
        assert names == [("data_parallel",), ("tensor_parallel",)]
        torch.testing.assert_close(output, expected)


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def _sum_over_groups() -> dict[str, Any]:
    mesh: RankMesh = build_rank_mesh(Layout.resolve(4, pipeline_parallel_size=2), "cpu")
    owners = build_pipe_subgroups(mesh, [(0,), (0, 1)])

    def total(group: Any) -> int:
        value = torch.tensor(mesh.rank)
        dist.all_reduce(value, group=group)
        return int(value)

    groups = {"pipe": mesh.pipe_group, "data": mesh.data_group, "tensor": mesh.tensor_group, "model": mesh.model_group}
    sums: dict[str, Any] = {name: total(group) for name, group in groups.items()}
    assert total(owners[0, 1]) == sums["pipe"]
    sums["owners"] = total(owners[0,]) if owners[0,] is not None else None
    return {**sums, "model_rank": mesh.model_rank}


def _linear() -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4), torch.randn(2, 8)


def _plain_output() -> torch.Tensor:
    layer, batch = _linear()
    return layer(batch).detach()


def _tensor_and_data_parallel() -> tuple[torch.Tensor, list[Any]]:
    layout = Layout.resolve(4, tensor_parallel_size=2, zero_stage=3)
    mesh = build_rank_mesh(layout, "cpu").device_mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
        layer, batch = _linear()
        parallelize_module(layer, tensor, ColwiseParallel(output_layouts=None))
        fully_shard(layer, mesh=data)
    output = layer(batch).detach()
    parts = [torch.empty_like(output) for _ in range(2)]
    dist.all_gather(parts, output.contiguous(), group=tensor.get_group())
    return torch.cat(parts, dim=1), [data.mesh_dim_names, tensor.mesh_dim_names]
