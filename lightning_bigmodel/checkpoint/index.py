"""What a sharded checkpoint directory holds, read from its completion mark alone.

The directory::

    bigmodel.json     the completion mark, written last: format, layout, step, names, shapes, dtypes, files
    metadata.pt       everything of a Lightning checkpoint but tensors by name; optimizer groups
    rank_00000.pt     one per rank: its own state (random generators, loader positions, ...)
    .metadata         the table of torch.distributed.checkpoint, whose own tools read the directory too
    __0_0.distcp      tensors, one file per rank that wrote any

Tensor keys are ``state_dict.<name>``, ``optimizer_<i>.state.<name>.<key>`` and, for what callbacks keep of parameters
(such as ``ema``, their averages), ``extra.<set>.<name>``.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

__all__ = [
    "CheckpointIndex",
    "DCP_METADATA_FILE",
    "LEFT_OUT",
    "METADATA_FILE",
    "SAME_TENSOR",
    "TensorEntry",
    "extra_key",
    "flush_to_disk",
    "is_complete",
    "is_foreign",
    "is_sharded_checkpoint",
    "make_index",
    "model_key",
    "optimizer_key",
    "rank_file",
    "read_index",
    "write_mark",
]

FORMAT_VERSION = 1
MARK_FILE = "bigmodel.json"
METADATA_FILE = "metadata.pt"
DCP_METADATA_FILE = ".metadata"
MODEL_PREFIX = "state_dict."
EXTRA_PREFIX = "extra."
LEFT_OUT = "bigmodel_left_out"  # in the metadata: names of frozen parameters, which are what the module is built with
SAME_TENSOR = "bigmodel_same_tensor"  # in the metadata: sets of names of one tensor, each in the order of the module


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Shape and dtype of one saved tensor.

    Args:
        shape: Sizes of the whole tensor, whatever ranks wrote it.
        dtype: Name of the torch dtype, such as ``"bfloat16"``.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"This torch ({torch.__version__}) has no dtype `{self.dtype}`: use the torch that wrote it."
            )
        return dtype

    @property
    def num_elements(self) -> int:
        """Product of the sizes."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.num_elements * self.torch_dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """Uninitialised memory on the CPU for the tensor."""
        return torch.empty(self.shape, dtype=self.torch_dtype)


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The completion mark of a sharded checkpoint.

    Args:
        format_version: Version of the directory's format.
        torch_version: torch that wrote it.
        num_ranks: How many ranks wrote it.
        layout: Mesh axis to its size when it was written, such as ``{"pipe": 2, "data_replicate": 2}``.
        global_step: Optimizer steps done, if the metadata said so.
        epoch: Epoch, if the metadata said so.
        num_optimizers: How many optimizers; ``None`` if only weights were saved.
        tensors: Key to shape and dtype of every tensor.
        objects: Keys of the values that are not tensors.
        files: File name to its size in bytes, the mark itself left out.
    """

    format_version: int
    torch_version: str
    num_ranks: int
    layout: dict[str, int]
    global_step: int | None
    epoch: int | None
    num_optimizers: int | None
    tensors: dict[str, TensorEntry]
    objects: tuple[str, ...] = ()
    files: dict[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all saved values."""
        return (*self.tensors, *self.objects)

    @property
    def model_names(self) -> tuple[str, ...]:
        """State-dict names of the model's saved values."""
        return tuple(key[len(MODEL_PREFIX) :] for key in self.keys if key.startswith(MODEL_PREFIX))

    def optimizer_keys(self, number: int) -> dict[str, dict[str, str]]:
        """For optimizer ``number``: parameter name to {state key such as ``exp_avg``: key in the checkpoint}."""
        prefix = optimizer_prefix(number)
        found: dict[str, dict[str, str]] = {}
        for key in self.keys:
            if key.startswith(prefix):
                name, state_key = key[len(prefix) :].rsplit(".", 1)
                found.setdefault(name, {})[state_key.replace("%2E", ".").replace("%25", "%")] = key
        return found

    @property
    def extra_names(self) -> dict[str, list[str]]:
        """Name of a further set to the names it has tensors of."""
        found: dict[str, list[str]] = {}
        for key in self.keys:
            if key.startswith(EXTRA_PREFIX):
                set_name, name = key[len(EXTRA_PREFIX) :].split(".", 1)
                found.setdefault(set_name, []).append(name)
        return found


def model_key(name: str) -> str:
    """Checkpoint key of a state-dict entry."""
    return MODEL_PREFIX + name


def extra_key(set_name: str, name: str) -> str:
    """Checkpoint key of one tensor of a further set, whose name has no dot."""
    return f"{EXTRA_PREFIX}{set_name}.{name}"


def optimizer_prefix(number: int) -> str:
    """What the checkpoint keys of one optimizer begin with."""
    return f"optimizer_{number}.state."


def optimizer_key(number: int, name: str, state_key: str) -> str:
    """Checkpoint key of one value of a parameter's optimizer state."""
    if not isinstance(state_key, str):
        raise TypeError(f"Optimizer {number} keeps state under {state_key!r} for `{name}`: its keys must be strings.")
    # A dot would make it unclear where the parameter's name ends.
    return f"{optimizer_prefix(number)}{name}.{state_key.replace('%', '%25').replace('.', '%2E')}"


def rank_file(rank: int) -> str:
    """File of a rank's own state."""
    return f"rank_{rank:05d}.pt"


def make_index(
    table: Metadata,
    files: dict[str, int],
    metadata: Mapping[str, Any],
    layout: Mapping[str, int],
    num_ranks: int,
    num_optimizers: int | None,
) -> CheckpointIndex:
    """The completion mark for what the ranks have written; ``table`` is torch's own table of the entries."""
    entries = table.state_dict_metadata
    tensors = {
        key: TensorEntry(shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch."))
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    step, epoch = metadata.get("global_step"), metadata.get("epoch")
    return CheckpointIndex(
        format_version=FORMAT_VERSION,
        torch_version=str(torch.__version__),
        num_ranks=num_ranks,
        layout={axis: int(size) for axis, size in layout.items()},
        global_step=None if step is None else int(step),
        epoch=None if epoch is None else int(epoch),
        num_optimizers=num_optimizers,
        tensors=tensors,
        objects=tuple(key for key in entries if key not in tensors),
        files=files,
    )


def write_mark(directory: Path, index: CheckpointIndex) -> None:
    """Write the completion mark and flush it to the disk."""
    path = directory / MARK_FILE
    path.write_text(json.dumps(asdict(index), indent=1), encoding="ascii")
    flush_to_disk(path)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or a directory's list of names, survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory's list of names, and say so in this way.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory written as a sharded checkpoint, complete or not. Reads no file."""
    directory = Path(path)
    return directory.is_dir() and any(
        (directory / name).is_file() for name in (MARK_FILE, DCP_METADATA_FILE, METADATA_FILE)
    )


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a sharded directory of Lightning's own ``ModelParallelStrategy``. Reads no file."""
    directory = Path(path)
    names = {MARK_FILE: False, METADATA_FILE: False, DCP_METADATA_FILE: True, "meta.pt": True}
    return directory.is_dir() and all((directory / name).is_file() == wanted for name, wanted in names.items())


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a sharded checkpoint whose writing was completed and whose files are all there."""
    try:
        read_index(path)
    except (ValueError, FileNotFoundError):
        return False
    return True


def read_index(path: str | os.PathLike[str], *, check_files: bool = True) -> CheckpointIndex:
    """Names, shapes, dtypes, layout and step of a sharded checkpoint. Runs no pickled code and reads no tensor.

    Args:
        path: The directory.
        check_files: Look whether every file is there in its full size. Default: ``True``.

    Raises:
        FileNotFoundError: If there is nothing at ``path``.
        ValueError: If it is not a sharded checkpoint, is incomplete, or has a newer format.
    """
    directory = Path(path)
    if not directory.exists():
        raise FileNotFoundError(f"There is no checkpoint `{directory}`.")
    if not is_sharded_checkpoint(directory):
        kind = "a directory without checkpoint files" if directory.is_dir() else "a single file"
        raise ValueError(f"`{directory}` is {kind}, not a sharded checkpoint (a directory with `{MARK_FILE}`).")
    if is_foreign(directory):
        from lightning_bigmodel.checkpoint.foreign import read_foreign_index  # it builds on this module

        foreign = read_foreign_index(directory)
        if check_files:
            raise_incomplete(directory, wrong_files(directory, foreign.files, at_least=True))
        return foreign
    mark = directory / MARK_FILE
    try:
        content: Any = json.loads(mark.read_text(encoding="ascii"))
        version = content["format_version"]
    except FileNotFoundError:
        raise ValueError(
            f"`{directory}` is incomplete: it has no completion mark `{MARK_FILE}`, so its writing was interrupted or"
            " something else wrote it. Use an earlier checkpoint."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`{directory}` is incomplete: its completion mark `{MARK_FILE}` is damaged ({error})."
        ) from None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"`{directory}` has checkpoint format {version}; this version of lightning_bigmodel reads up to"
            f" {FORMAT_VERSION}. Update lightning_bigmodel."
        )
    try:
        tensors = {
            key: TensorEntry(shape=tuple(entry["shape"]), dtype=entry["dtype"])
            for key, entry in content.pop("tensors").items()
        }
        for entry in tensors.values():
            entry.torch_dtype  # noqa: B018  # raises
        index = CheckpointIndex(**{**content, "objects": tuple(content["objects"])}, tensors=tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`{mark}` is damaged ({type(error).__name__}: {error}). Copy it again.") from None
    if check_files:
        raise_incomplete(directory, wrong_files(directory, index.files))
    return index


def wrong_files(directory: Path, files: Mapping[str, int], *, at_least: bool = False) -> list[str]:
    """What is wrong with the files that a checkpoint should have, by their sizes; ``at_least``: they may be larger."""
    wrong = []
    for name, num_bytes in files.items():
        path = directory / name
        if not path.is_file():
            wrong.append(f"`{name}` is missing")
        elif (found := path.stat().st_size) < num_bytes or (found > num_bytes and not at_least):
            wrong.append(f"`{name}` has {found} bytes instead of {num_bytes}")
    return wrong


def raise_incomplete(directory: Path, wrong: list[str]) -> None:
    """Raise a ValueError that names what `wrong_files` found; nothing if it found nothing."""
    if wrong:
        raise ValueError(f"`{directory}` is incomplete: {', '.join(wrong)}. Copy the whole directory again.")
