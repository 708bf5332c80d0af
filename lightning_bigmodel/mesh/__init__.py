"""The rank mesh: axes, process groups, random states, and how data reaches each rank."""

from lightning_bigmodel.mesh.axes import AXES, Layout
from lightning_bigmodel.mesh.build import RankMesh, build_pipe_subgroups, build_rank_mesh, build_replica_levels
from lightning_bigmodel.mesh.loader import MeshLoader
from lightning_bigmodel.mesh.rng import RngState, capture_rng, derive_seed, restore_rng, seed_all, seeded_rng
from lightning_bigmodel.mesh.samplers import ShardedBatchSampler, ShardedSampler

__all__ = [
    "AXES",
    "Layout",
    "MeshLoader",
    "RankMesh",
    "RngState",
    "ShardedBatchSampler",
    "ShardedSampler",
    "build_pipe_subgroups",
    "build_rank_mesh",
    "build_replica_levels",
    "capture_rng",
    "derive_seed",
    "restore_rng",
    "seed_all",
    "seeded_rng",
]
