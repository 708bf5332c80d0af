"""From one kind of checkpoint to another: sharded directory, Lightning file, safetensors."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lightning_bigmodel.checkpoint import _replace
from lightning_bigmodel.checkpoint._pickle import write_pickled
from lightning_bigmodel.checkpoint._place import is_remote, local_path
from lightning_bigmodel.checkpoint.convert import convert_to_single_file
from lightning_bigmodel.checkpoint.index import (
    SAME_TENSOR,
    is_foreign,
    is_sharded_checkpoint,
)
from lightning_bigmodel.checkpoint.mapped_content import Content, Progress, lightning_metadata, weights_file
from lightning_bigmodel.checkpoint.regions import RegionLayout, TensorRegions
from lightning_bigmodel.checkpoint.remote_formats import convert_remotely
from lightning_bigmodel.checkpoint.safetensors_files import (
    INDEX_FILE,
    WEIGHTS_FILE,
)
from lightning_bigmodel.checkpoint.store import save_sharded
from lightning_bigmodel.checkpoint.weights_plan import WeightsPlan, put_in_place, write_safetensors

__all__ = ["Kind", "convert_checkpoint", "kind_of"]

Kind = Literal["sharded", "ckpt", "safetensors"]

_FILE_ENDINGS = (".ckpt", ".pt", ".pth", ".bin")


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """What kind of checkpoint there is at a path.

    Returns:
        ``"sharded"`` for a directory of ours or of Lightning's ``ModelParallelStrategy``, ``"safetensors"`` for such a
        file, its index, or a folder with either, ``"ckpt"`` for any other file.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: For a folder that holds none of these.

    Example:
        >>> kind_of("no/such.ckpt")
        Traceback (most recent call last):
        FileNotFoundError: There is no checkpoint `no/such.ckpt`.
    """
    found = _replace.find(Path(path))
    if not found.exists():
        raise FileNotFoundError(f"There is no checkpoint `{path}`.")
    if found.is_file():
        return "safetensors" if found.suffix == ".safetensors" or found.name.endswith(INDEX_FILE) else "ckpt"
    if is_sharded_checkpoint(found):
        return "sharded"
    if (found / INDEX_FILE).is_file() or (found / WEIGHTS_FILE).is_file():
        return "safetensors"
    raise ValueError(
        f"`{path}` is a folder without a checkpoint: it has neither `bigmodel.json` nor `{WEIGHTS_FILE}` nor"
        f" `{INDEX_FILE}`."
    )


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Kind | None = None,
    overwrite: bool = False,
    weights_only: bool = True,
    weights_from: str | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    max_shard_size: str | int | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the checkpoint at ``source`` as another kind at ``target``.

    safetensors has weights alone: what is made of it can be evaluated and loaded by ``load_from_checkpoint``, and
    ``Trainer.fit(ckpt_path=...)`` refuses it for the optimizer states that it lacks. A Lightning file keeps its
    optimizer states in a sharded directory by the places of the parameters, as only the module knows their names; they
    get their names when the directory is loaded.

    Runs in one process, without communication and without the module's code. Memory: that of one tensor, as a rank
    wrote it; whole tensors stay in files mapped into memory, which the system can drop. Disk: the target's size, and
    once more if ``source`` is a directory and ``target`` is none of safetensors. Tied tensors are written once where
    the kind can say so. The target has its name when it is complete; interrupted or failed, nothing is left.

    Either path may be a URL of fsspec's, such as ``"s3://bucket/last.ckpt"``: it is fetched to, or put up from, a
    folder of this machine (where ``TMPDIR`` says), whose disk needs room for it.

    Args:
        source: A sharded directory (ours, or of Lightning's ``ModelParallelStrategy``), a Lightning file, a file of
            safetensors or a folder with its index.
        target: Where to write.
        to: The kind to write. Default: ``None``, by the path: safetensors for ``*.safetensors``; otherwise of a
            directory a file, of a file a directory, and of safetensors a file for ``*.ckpt``, else a directory.
        overwrite: Replace what is there. Default: ``False``.
        weights_only: As for :func:`~lightning_bigmodel.checkpoint.loading.load_sharded`. Default: ``True``.
        weights_from: A further set of tensors to take as the weights, such as ``"ema"``. Default: ``None``.
        strip_prefix: What to take from the beginning of the names that have it, to or from safetensors, such as
            ``"model."`` for ``AutoModel.from_pretrained``. Default: ``""``.
        add_prefix: What to put before all names, to or from safetensors. Default: ``""``.
        max_shard_size: Most bytes of a file in a folder of safetensors, such as ``"5GB"``; where one file is not
            enough there is an index. Default: ``None``, 5GB in a folder and no limit for a file.
        progress: Called as ``progress(num_done, num_values, key)`` after each value. Default: ``None``.

    Returns:
        Names of values that safetensors has no place for and that were left out: extra states that are no tensors.

    Raises:
        FileNotFoundError: If there is nothing at ``source``, or no folder to write the target in.
        FileExistsError: If the target exists and ``overwrite`` is not set.
        ValueError: If the source is incomplete, damaged or has what ``weights_only`` refuses, and for settings that
            cannot take effect.

    Example::

        convert_checkpoint("checkpoints/last.ckpt", "hub", to="safetensors", strip_prefix="model.")
        transformers.AutoModelForCausalLM.from_pretrained("hub")
    """
    if is_remote(source) or is_remote(target):
        return convert_remotely(
            source,
            target,
            overwrite,
            lambda source, target: convert_checkpoint(
                source,
                target,
                to=to,
                overwrite=overwrite,
                weights_only=weights_only,
                weights_from=weights_from,
                strip_prefix=strip_prefix,
                add_prefix=add_prefix,
                max_shard_size=max_shard_size,
                progress=progress,
            ),
        )
    source, target = local_path(source), local_path(target)
    found, kind = _replace.find(source), kind_of(source)
    output, wanted = Path(target), to or _kind_for(kind, Path(target))
    _check(found, kind, output, wanted, overwrite, strip_prefix, add_prefix, weights_from, max_shard_size)
    if (kind, wanted) == ("sharded", "ckpt"):
        convert_to_single_file(
            source,
            target,
            overwrite=overwrite,
            weights_only=weights_only,
            weights_from=weights_from,
            progress=progress,
        )
        return []

    def rename(name: str) -> str:
        return add_prefix + name.removeprefix(strip_prefix)

    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.converting-", dir=output.absolute().parent))
    try:
        if (kind, wanted) == ("sharded", "safetensors"):
            plan = WeightsPlan.of_directory(found, weights_from, weights_only, progress)
        else:
            content = _content(found, kind, scratch, weights_only, progress if wanted == "sharded" else None)
            if weights_from is not None:
                content.model_state.update(_chosen(content, weights_from, found))
                content.optimizer_states, content.extra_states = None, {}
            if kind == "safetensors":
                _check_prefix(content.model_state, strip_prefix, found)
                content = content.with_names(rename)
            if wanted == "ckpt":
                write_pickled(weights_file(content), scratch / "checkpoint")
                put_in_place(scratch / "checkpoint", output)
                return []
            if wanted == "sharded":
                _write_directory(content, output, progress)
                return []
            plan = WeightsPlan.of_content(content, progress)
        if kind != "safetensors":
            _check_prefix(plan.entries, strip_prefix, found)
            plan.rename(rename)
        write_safetensors(plan, scratch / "new", output, max_shard_size)
        return plan.left_out
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _kind_for(kind: Kind, target: Path) -> Kind:
    if target.suffix == ".safetensors":
        return "safetensors"
    if kind == "safetensors":
        return "ckpt" if target.suffix in _FILE_ENDINGS else "sharded"
    return "ckpt" if kind == "sharded" else "sharded"


def _check(
    source: Path,
    kind: Kind,
    target: Path,
    wanted: Kind,
    overwrite: bool,
    strip_prefix: str,
    add_prefix: str,
    weights_from: str | None,
    max_shard_size: str | int | None,
) -> None:
    if kind == wanted and kind != "safetensors" and not is_foreign(source):
        raise ValueError(f"`{source}` is of the kind `{kind}` already. Say with `to` what `{target}` is to be.")
    if (strip_prefix or add_prefix) and "safetensors" not in (kind, wanted):
        raise ValueError(
            "`strip_prefix` and `add_prefix` are for safetensors: other kinds have the module's own names."
        )
    if max_shard_size is not None and wanted != "safetensors":
        raise ValueError(f"`max_shard_size` is for safetensors, and `{target}` is to be of the kind `{wanted}`.")
    if weights_from is not None and kind == "safetensors":
        raise ValueError(f"`{source}` has weights alone, and no tensors of `{weights_from}`.")
    if target.name in ("", ".."):
        raise ValueError(f"`{target}` has no last part to be the checkpoint's name.")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"There is no directory `{target.parent}` to write `{target.name}` in: make it first.")
    if not target.exists():
        return
    if target.resolve() == source.resolve() or source.resolve().is_relative_to(target.resolve()):
        raise FileExistsError(f"`{target}` is what is converted. Give another target.")
    if not overwrite:
        raise FileExistsError(f"`{target}` exists. Give another target, or set `overwrite`.")
    if target.is_dir() != (wanted == "sharded" or (wanted == "safetensors" and target.suffix != ".safetensors")):
        raise FileExistsError(
            f"`{target}` is {'a directory' if target.is_dir() else 'a file'}, and what is written is not."
            " Give another target."
        )
    if target.is_dir() and any(target.iterdir()) and not _is_checkpoint(target):
        raise FileExistsError(f"`{target}` is a folder of other things than a checkpoint. Give another target.")


def _is_checkpoint(folder: Path) -> bool:
    try:
        return bool(kind_of(folder))
    except ValueError:
        return False


def _check_prefix(names: Mapping[str, Any], prefix: str, source: Path) -> None:
    if prefix and not any(name.startswith(prefix) for name in names):
        first = next(iter(names), "none")
        raise ValueError(
            f"`strip_prefix` is {prefix!r}, and no name in `{source}` begins with it: the first is `{first}`."
        )


def _content(found: Path, kind: Kind, scratch: Path, weights_only: bool, progress: Progress | None) -> Content:
    if kind == "ckpt":
        return Content.of_file(found, scratch, weights_only=weights_only)
    if kind == "safetensors":
        return Content.of_safetensors(found)
    return Content.of_directory(found, scratch, weights_only=weights_only, progress=progress)


def _chosen(content: Content, set_name: str, source: Path) -> dict[str, Tensor]:
    if set_name not in content.extra_states:
        raise ValueError(
            f"`{source}` has no tensors of `{set_name}`; beside the weights it has {sorted(content.extra_states)}."
        )
    return {name: value.to(content.model_state[name].dtype) for name, value in content.extra_states[set_name].items()}


def _write_directory(content: Content, output: Path, progress: Progress | None) -> None:
    metadata = lightning_metadata(content.metadata)
    if content.same_tensor:
        metadata[SAME_TENSOR] = content.same_tensor
    optimizers = content.optimizer_states
    counted = _Counted(progress)
    save_sharded(
        output,
        model_state=counted.wrap(content.model_state),
        optimizer_states=None
        if optimizers is None
        else [
            {**state, "state": {name: counted.wrap(entries) for name, entries in state["state"].items()}}
            for state in optimizers
        ],
        metadata=metadata,
        rank_state={},
        extra_states={name: counted.wrap(tensors) for name, tensors in content.extra_states.items()},
    )


class _Counted:
    """Wraps tensors to report each one as it is written."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._num_values, self._num_done = progress, 0, 0

    def wrap(self, values: Mapping[str, Any]) -> OrderedDict[str, Any]:
        found: OrderedDict[str, Any] = OrderedDict(values)
        if hasattr(values, "_metadata"):
            found._metadata = values._metadata  # type: ignore[attr-defined]  # as torch's state dicts carry it
        for name, value in values.items():
            # One without elements would not be written at all.
            if isinstance(value, Tensor) and value.numel() and self._progress is not None:
                found[name] = _CountedTensor(value.detach(), self, name)
                self._num_values += 1
        return found

    def report(self, name: str) -> None:
        self._num_done += 1
        if self._progress is not None:
            self._progress(self._num_done, self._num_values, name)


class _CountedTensor(TensorRegions):
    def __init__(self, tensor: Tensor, counted: _Counted, name: str) -> None:
        super().__init__(tensor, RegionLayout.of_whole(tensor.shape))
        self._counted, self._name = counted, name

    def part(self, index: Any) -> Tensor:
        self._counted.report(self._name)
        return super().part(index)
