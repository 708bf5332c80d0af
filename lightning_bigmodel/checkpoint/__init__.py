"""Checkpoints of a model cut over ranks: one directory written by all of them, readable under any other layout.

Plain torch. ``state`` gathers what a rank owns by name, ``store`` writes the directory, ``loading`` reads it,
``background`` writes it while training goes on, ``newest`` finds the one to go on from, ``formats`` converts it from
and to Lightning files and safetensors, ``remote`` and ``local_copy`` write to and read from object stores,
``inspection`` says what there is.
"""

from lightning_bigmodel.checkpoint._names import why_left_out
from lightning_bigmodel.checkpoint._pickle import read_guarded
from lightning_bigmodel.checkpoint._place import is_remote, local_path
from lightning_bigmodel.checkpoint.background import BackgroundSaver
from lightning_bigmodel.checkpoint.convert import convert_to_single_file, describe
from lightning_bigmodel.checkpoint.eight_bit import portable_entries, quantized_entries, requantization_error
from lightning_bigmodel.checkpoint.formats import convert_checkpoint, kind_of
from lightning_bigmodel.checkpoint.index import LEFT_OUT, SAME_TENSOR, CheckpointIndex, TensorEntry
from lightning_bigmodel.checkpoint.inspection import inspect_checkpoint, saved_hyper_parameters
from lightning_bigmodel.checkpoint.loading import LiveTensors, LoadedCheckpoint, load_sharded, read_rank_state
from lightning_bigmodel.checkpoint.local_copy import LocalCopy, local_copy
from lightning_bigmodel.checkpoint.newest import (
    find_checkpoint,
    interrupted_names,
    link_checkpoint,
    newest_complete,
    remove_checkpoint,
)
from lightning_bigmodel.checkpoint.optimizer_rows import marked_state
from lightning_bigmodel.checkpoint.regions import Region, RegionLayout, TensorRegions
from lightning_bigmodel.checkpoint.single import save_single
from lightning_bigmodel.checkpoint.state import (
    OptimizerState,
    load_model_state,
    load_optimizer_state,
    model_state_by_name,
    optimizer_state_by_name,
)
from lightning_bigmodel.checkpoint.store import (
    is_complete,
    is_sharded_checkpoint,
    read_index,
    save_sharded,
)

__all__ = [
    "BackgroundSaver",
    "CheckpointIndex",
    "LEFT_OUT",
    "LiveTensors",
    "LoadedCheckpoint",
    "LocalCopy",
    "OptimizerState",
    "Region",
    "RegionLayout",
    "SAME_TENSOR",
    "TensorEntry",
    "TensorRegions",
    "convert_checkpoint",
    "convert_to_single_file",
    "describe",
    "find_checkpoint",
    "inspect_checkpoint",
    "interrupted_names",
    "is_complete",
    "is_remote",
    "is_sharded_checkpoint",
    "kind_of",
    "link_checkpoint",
    "load_model_state",
    "load_optimizer_state",
    "load_sharded",
    "local_copy",
    "local_path",
    "marked_state",
    "model_state_by_name",
    "newest_complete",
    "optimizer_state_by_name",
    "portable_entries",
    "quantized_entries",
    "requantization_error",
    "read_guarded",
    "read_index",
    "read_rank_state",
    "remove_checkpoint",
    "save_sharded",
    "save_single",
    "saved_hyper_parameters",
    "why_left_out",
]
