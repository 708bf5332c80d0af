"""From a layout to process groups: the mesh as one rank sees it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_bigmodel.mesh.axes import AXES, Layout

__all__ = ["RankMesh", "build_pipe_subgroups", "build_rank_mesh", "build_replica_levels"]


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """Where one rank stands in the mesh, and the process groups it is a member of.

    Args:
        layout: Sizes of the axes.
        device_mesh: The torch mesh with the axes of `AXES`; it also answers to `"data_parallel"` (all data ranks,
            flattened) and `"tensor_parallel"` (the tensor axis), the names modules for other strategies use.
        rank: Global rank.
        coordinates: Index of this rank along each axis.
        pipe_rank: Index along the pipe axis.
        pipe_size: Ranks of the pipe line.
        pipe_group: This rank's pipe line.
        pipe_global_ranks: Global ranks of this rank's pipe line, in order.
        data_rank: Index among the data ranks: `data_replicate index * data_shard size + data_shard index`.
        data_size: Number of data ranks.
        data_group: Ranks with this rank's pipe and tensor index. Carries CPU tensors on every device type.
        tensor_group: Ranks that split this rank's layers.
        model_group: Ranks that must see the same batch: those with this rank's data index, pipe index slowest.
            Carries CPU tensors on every device type.
        model_rank: Index within `model_group`; rank 0 of it loads the data.
        line_group: This rank's pipe line, as a group that carries CPU tensors on every device type.
        tensor_rank: Index along the tensor axis.
    """

    layout: Layout
    device_mesh: DeviceMesh
    rank: int
    coordinates: dict[str, int]
    pipe_rank: int
    pipe_size: int
    pipe_group: dist.ProcessGroup
    pipe_global_ranks: tuple[int, ...]
    data_rank: int
    data_size: int
    data_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    model_rank: int
    line_group: dist.ProcessGroup
    tensor_rank: int


def build_rank_mesh(layout: Layout, device_type: str) -> RankMesh:
    """Create the torch mesh and the groups of a layout. Collective over the world: every rank must call it.

    Args:
        layout: Its `world_size` must be the number of ranks of the default process group.
        device_type: `"cpu"`, `"cuda"`, ...: where the model lives.

    Returns:
        The mesh as this rank sees it.

    Raises:
        RuntimeError: If the default process group is not initialised.
        ValueError: If the layout is for another number of ranks.

    Example:
        >>> rank_mesh = build_rank_mesh(Layout.resolve(8, pipeline_parallel_size=2), "cuda")  # doctest: +SKIP
        >>> rank_mesh.device_mesh["data_parallel"].size()  # doctest: +SKIP
        4
    """
    if not dist.is_initialized():
        raise RuntimeError("`build_rank_mesh` needs the default process group: call `init_process_group` before it.")
    if layout.world_size != dist.get_world_size():
        raise ValueError(
            f"The layout {layout.shape} of {AXES} is for {layout.world_size} ranks, but the default process group has "
            f"{dist.get_world_size()}: resolve the layout with the real number of ranks."
        )
    device_mesh = init_device_mesh(device_type, layout.shape, mesh_dim_names=AXES)
    data_mesh, _ = _add_alias_axes(device_mesh)
    rank = dist.get_rank()
    coordinates = dict(zip(AXES, _coordinates(layout, rank), strict=True))
    pipe, replicate, shard, tensor = (coordinates[axis] for axis in AXES)
    data_rank = replicate * layout.data_shard + shard
    ranks = _ranks_by_axis(layout)
    backend = _backend_with_cpu(device_type)
    # On a CPU mesh the flattened axis' own group will do; elsewhere it speaks the device's backend only, and the
    # loaders exchange CPU tensors over this group.
    data_group = data_mesh.get_group() if backend is None else _enumerated_group(_data_lines(ranks), backend)
    model_group = _enumerated_group([part.flatten().tolist() for part in ranks.unbind(1)], backend)
    # Without tensor ranks a model is one pipe line.
    line_group = model_group
    if layout.tensor > 1:
        lines = ranks.permute(1, 2, 0).reshape(-1, layout.pipe).tolist()
        line_group = device_mesh.get_group("pipe") if backend is None else _enumerated_group(lines, backend)
    return RankMesh(
        layout=layout,
        device_mesh=device_mesh,
        rank=rank,
        coordinates=coordinates,
        pipe_rank=pipe,
        pipe_size=layout.pipe,
        pipe_group=device_mesh.get_group("pipe"),
        pipe_global_ranks=tuple(ranks[:, data_rank, tensor].tolist()),
        data_rank=data_rank,
        data_size=layout.data_size,
        data_group=data_group,
        tensor_group=device_mesh.get_group("tensor"),
        model_group=model_group,
        model_rank=pipe * layout.tensor + tensor,
        line_group=line_group,
        tensor_rank=tensor,
    )


def build_pipe_subgroups(
    rank_mesh: RankMesh, owner_sets: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """Create a group for each set of pipe indices, on every pipe line. Collective over the world.

    Meant for parameters with several owners (tied weights): the owners of one line sum their gradients in it. All
    ranks must pass the same sets in the same order. The whole line re-uses `rank_mesh.pipe_group`.

    Args:
        rank_mesh: This rank's mesh.
        owner_sets: Pipe indices, each set strictly increasing. A set given twice is built once.

    Returns:
        For each set this pipe line's group, or None where this rank is not among the owners.

    Raises:
        ValueError: If a set is empty, not strictly increasing, or names an index outside the pipe axis.

    Example:
        >>> build_pipe_subgroups(rank_mesh, [(0, 3)])[0, 3]  # group of the first and last of 4 stages  # doctest: +SKIP
    """
    whole_line = tuple(range(rank_mesh.pipe_size))
    for owners in owner_sets:
        if not owners or list(owners) != sorted(set(owners)) or not set(owners) <= set(whole_line):
            raise ValueError(
                f"The owner set {tuple(owners)} must hold strictly increasing pipe indices in 0..{len(whole_line) - 1}."
            )
    ranks = _ranks_by_axis(rank_mesh.layout)
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for owners in map(tuple, owner_sets):
        if owners in groups:
            continue
        if owners == whole_line:
            groups[owners] = rank_mesh.pipe_group
            continue
        lines = ranks[list(owners)].flatten(1).T.tolist()
        group = _enumerated_group(lines, None)
        groups[owners] = group if rank_mesh.pipe_rank in owners else None
    return groups


def build_replica_levels(rank_mesh: RankMesh, num_inside: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Divide the replicas into sets of neighbours. Collective over the world.

    Args:
        rank_mesh: This rank's mesh.
        num_inside: Neighbouring replicas a set, such as those of one machine.

    Returns:
        The group of this rank's set, and the group of the ranks that have its place in theirs. Both have only ranks
        that hold this rank's part of the model, and carry tensors of the device.

    Raises:
        ValueError: If the replicas do not divide into such sets.
    """
    layout = rank_mesh.layout
    if num_inside < 1 or layout.data_replicate % num_inside:
        raise ValueError(
            f"{layout.data_replicate} replicas do not divide into sets of {num_inside}. "
            f"Use one of {[n for n in range(1, layout.data_replicate + 1) if layout.data_replicate % n == 0]}."
        )
    ranks = torch.arange(layout.world_size).view(layout.shape)
    sets = ranks.unflatten(1, (layout.data_replicate // num_inside, num_inside)).movedim(2, -1)
    inside = _enumerated_group(sets.reshape(-1, num_inside).tolist(), None)
    across = _enumerated_group(sets.movedim(1, -1).reshape(-1, layout.data_replicate // num_inside).tolist(), None)
    return inside, across


def _coordinates(layout: Layout, rank: int) -> tuple[int, ...]:
    indices = []
    for size in reversed(layout.shape):
        indices.append(rank % size)
        rank //= size
    return tuple(reversed(indices))


def _ranks_by_axis(layout: Layout) -> torch.Tensor:
    """Global ranks, of shape (pipe, data, tensor)."""
    return torch.arange(layout.world_size).view(layout.pipe, layout.data_size, layout.tensor)


def _data_lines(ranks: torch.Tensor) -> list[list[int]]:
    return [ranks[pipe, :, tensor].tolist() for pipe in range(ranks.shape[0]) for tensor in range(ranks.shape[2])]


def _enumerated_group(rank_lists: list[list[int]], backend: str | None) -> Any:
    """Create every group of the list and return the one this rank is in (or torch's marker of a non-member).

    All ranks walk all lists in the same order: creating a group is collective over the world, and two ranks that
    create groups in different orders wait for each other for good.
    """
    mine: Any = None
    for members in rank_lists:
        group = dist.new_group(members, backend=backend)
        if dist.get_rank() in members:
            mine = group
    return mine


def _backend_with_cpu(device_type: str) -> str | None:
    """Backend string that serves CPU tensors beside the device's; None where the default group serves them."""
    if device_type == "cpu":
        return None
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def _add_alias_axes(device_mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Make `device_mesh["data_parallel"]` and `device_mesh["tensor_parallel"]` answer.

    `DeviceMesh._flatten` is private in torch 2.5 to 2.13 and has no public equal: only a mesh derived from the same
    root may be mixed with the root's other axes (FSDP over tensor-parallel layers needs that).
    """
    data_mesh = device_mesh["data_replicate", "data_shard"]._flatten("data_parallel")
    tensor_mesh = device_mesh["tensor"]._flatten("tensor_parallel")
    # torch warns of the look-up by these names at each use (2.11 to 2.13); the user has no other spelling to turn to.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh", category=UserWarning)
    return data_mesh, tensor_mesh
