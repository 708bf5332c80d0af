"""Checkpoints of a model cut over ranks: one directory written by all of them, readable under any other layout.

Plain torch. ``state`` gathers what a rank owns by name, ``store`` writes and reads the directory, ``convert`` makes
one ordinary Lightning file of it.
"""

from lightning_bigmodel.checkpoint.convert import convert_to_single_file, describe
from lightning_bigmodel.checkpoint.eight_bit import portable_entries, quantized_entries
from lightning_bigmodel.checkpoint.index import CheckpointIndex, TensorEntry
from lightning_bigmodel.checkpoint.optimizer_rows import marked_state
from lightning_bigmodel.checkpoint.regions import Region, RegionLayout, TensorRegions
from lightning_bigmodel.checkpoint.state import (
    OptimizerState,
    load_model_state,
    load_optimizer_state,
    model_state_by_name,
    optimizer_state_by_name,
)
from lightning_bigmodel.checkpoint.store import (
    LoadedCheckpoint,
    is_complete,
    is_sharded_checkpoint,
    load_sharded,
    read_index,
    read_rank_state,
    save_sharded,
)

__all__ = [
    "CheckpointIndex",
    "LoadedCheckpoint",
    "OptimizerState",
    "Region",
    "RegionLayout",
    "TensorEntry",
    "TensorRegions",
    "convert_to_single_file",
    "describe",
    "is_complete",
    "is_sharded_checkpoint",
    "load_model_state",
    "load_optimizer_state",
    "load_sharded",
    "marked_state",
    "model_state_by_name",
    "optimizer_state_by_name",
    "portable_entries",
    "quantized_entries",
    "read_index",
    "read_rank_state",
    "save_sharded",
]
