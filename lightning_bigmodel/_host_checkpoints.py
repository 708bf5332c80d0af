"""Private API of Lightning around checkpoints: which one a run goes on from, and ModelCheckpoint's files.

A part of `_host`, with the same rules: each entry says what it stands for; checked with Lightning 2.6.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_bigmodel import _host

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "follow_saves",
    "is_accumulating",
    "is_followed_by_more",
    "is_last_of_all",
    "is_requeue_path",
    "is_script_child",
    "requeue",
    "requeues_on",
    "share_resume_path",
    "take_up_links",
    "unfollow_saves",
    "use_complete_checkpoints",
    "use_saved_hyper_parameters",
]

_KEYWORDS = ("best", "last", "hpc", "registry")
_REQUEUE = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


def use_complete_checkpoints(
    strategy_class: type, newest: Callable[[list[str]], Path | str | None], lost: Callable[[str], Iterable[Path | str]]
) -> None:
    """Let `ckpt_path="last"` and SLURM's "hpc" look at complete checkpoints only, with a strategy of this class.

    Lightning 2.6 takes the newest by the folder's time, complete or not, and for "hpc" the largest number it finds in
    any name with "hpc_ckpt_" in it, which hidden directories of a save that was interrupted have too.

    Args:
        strategy_class: Others keep Lightning's way.
        newest: The newest complete of some paths.
        lost: Checkpoints of a folder that can be loaded though nothing has their name.
    """
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    parse = _CheckpointConnector._parse_ckpt_path
    hpc_path: Any = _CheckpointConnector.__dict__["_hpc_resume_path"]

    def candidates(trainer: pl.Trainer) -> list[str]:
        from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

        found: set[str] = set()
        for callback in _host.callbacks(trainer):
            if isinstance(callback, ModelCheckpoint):
                paths = callback._find_last_checkpoints(trainer)
                folder = os.fspath(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
                if "://" in folder:  # which Lightning 2.6 leaves out of what it finds
                    paths = {str(callback._fs.unstrip_protocol(path)) for path in paths}
                last = callback.CHECKPOINT_NAME_LAST
                found |= paths | {str(path) for path in lost(folder) if Path(path).name.startswith(last)}
            elif isinstance(callback, OnExceptionCheckpoint):
                found.add(str(callback.ckpt_path))
            elif hasattr(callback, "resume_path"):  # a callback of ours
                found.add(str(callback.resume_path(trainer)))
        return sorted(found)

    @wraps(parse)
    def parse_ckpt_path(self: Any, state_fn: Any, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        if ckpt_path == "last" and isinstance(self.trainer.strategy, strategy_class):
            path = newest([*candidates(self.trainer), *map(str, requeue_paths(self.trainer))])
            if path is not None:
                return str(path)
            _warn_of_none(state_fn.value)
            return None
        return parse(self, state_fn, ckpt_path, model_provided, model_connected)

    def requeue_paths(trainer: pl.Trainer) -> list[Path]:
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        return _requeue_saves(Path(trainer.default_root_dir)) if SLURMEnvironment.detect() else []

    def hpc_resume_path(self: Any) -> str | None:
        if not isinstance(self.trainer.strategy, strategy_class):
            return hpc_path.fget(self)  # type: ignore[no-any-return]
        path = newest([str(path) for path in _requeue_saves(Path(self.trainer.default_root_dir))])
        return None if path is None else str(path)

    _CheckpointConnector._parse_ckpt_path = parse_ckpt_path  # type: ignore[method-assign]
    _CheckpointConnector._hpc_resume_path = property(hpc_resume_path)  # type: ignore[assignment, method-assign]


def use_saved_hyper_parameters(read: Callable[[str], dict[str, Any] | None]) -> None:
    """Let LightningCLI's `--ckpt_path` take the module's hyper-parameters from what `read` knows, as from a file.

    Lightning 2.6 looks into files alone, in a private method that it calls once the arguments are parsed. It is handed
    a small file that has them.

    Args:
        read: The hyper-parameters that a checkpoint holds; None for what Lightning reads itself.
    """
    from lightning.pytorch.cli import LightningCLI

    parse = LightningCLI._parse_ckpt_path

    @wraps(parse)
    def parse_ckpt_path(self: Any) -> None:
        subcommand = self.config.get("subcommand")
        given = self.config[subcommand].get("ckpt_path") if subcommand else None
        found = read(os.fspath(given)) if given and given not in _KEYWORDS else None
        if not found:
            parse(self)
            return
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "hyper_parameters.ckpt")
            torch.save({"hyper_parameters": found}, path)
            self.config[subcommand]["ckpt_path"] = path
            try:
                parse(self)
            finally:
                self.config[subcommand]["ckpt_path"] = given

    LightningCLI._parse_ckpt_path = parse_ckpt_path  # type: ignore[method-assign]


def _requeue_path(folder: Path) -> Path:
    """Where the next save before a requeue by SLURM goes; Lightning counts hidden directories too."""
    numbers = [int(match[1]) for path in _requeue_saves(folder) if (match := _REQUEUE.fullmatch(path.name))]
    return folder / f"hpc_ckpt_{max(numbers, default=0) + 1}.ckpt"


def requeues_on(trainer: pl.Trainer, signal_number: int) -> bool:
    """Whether this signal is the one on which Lightning saves and asks SLURM to run the job once more."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return False
    return signal_number == (environment.requeue_signal or signal.SIGUSR1)


def requeue(trainer: pl.Trainer, signal_number: int) -> Path:
    """Save and ask SLURM to run the job once more, as Lightning's handler does, on all ranks at one place.

    Returns:
        The checkpoint.
    """
    path = _requeue_path(Path(trainer.default_root_dir))
    frame: Any = None  # which it does not look at
    trainer._signal_connector._slurm_sigusr_handler_fn(signal_number, frame)
    return path


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the batch that ends now was not the last one of its accumulation window."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def is_followed_by_more(trainer: pl.Trainer) -> bool:
    """Whether a validation or the end of the epoch belongs to the batch that ends now.

    With other strategies than ours a run that goes on from a checkpoint of this moment does not make up for them.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    is_last = loop.batch_progress.is_last_batch or loop._num_ready_batches_reached()
    return bool(is_last or loop._should_check_val_fx(fetcher))


def is_last_of_all(trainer: pl.Trainer) -> bool:
    """Whether the batch that ends now is the last one of the run."""
    outer, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    progress: Any = outer.epoch_progress
    if 0 <= outer.max_steps <= loop.global_step:
        return True
    is_last = loop.batch_progress.is_last_batch or loop._num_ready_batches_reached()
    return bool(is_last and 0 <= (outer.max_epochs or 0) <= progress.current.processed + 1)


def is_script_child(trainer: pl.Trainer) -> bool:
    """Whether Lightning's own launcher started this process; it ends all ranks once one exits with an error."""
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    return isinstance(trainer._accelerator_connector.cluster_environment, LightningEnvironment) and (
        trainer.local_rank > 0
    )


def is_requeue_path(path: Path) -> bool:
    """Whether Lightning asks SLURM to end the job as soon as this save has returned."""
    return _REQUEUE.fullmatch(path.name) is not None


def _requeue_saves(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if is_requeue_path(path)] if folder.is_dir() else []


def _warn_of_none(function_name: str) -> None:
    from lightning_utilities.core.rank_zero import rank_zero_warn

    rank_zero_warn(
        f'`.{function_name}(ckpt_path="last")` is set, but there is no complete last checkpoint. No checkpoint will be '
        "loaded. HINT: Set `ModelCheckpoint(..., save_last=True)`."
    )


def share_resume_path(trainer: pl.Trainer, broadcast: Callable[[Any], Any]) -> None:
    """Let all ranks go on from the checkpoint that rank 0 has found, or all from none.

    Lightning 2.6 looks for it on each rank, before the ranks can talk (Lightning#19932): on shared storage some may
    not see yet what others see. Must be called in each run before the checkpoint is read.
    """
    connector = trainer._checkpoint_connector
    resume_start = type(connector).resume_start

    def resume(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        del connector.__dict__["resume_start"]
        path = broadcast(None if checkpoint_path is None else str(checkpoint_path))
        resume_start(connector, path, weights_only=weights_only)

    connector.__dict__["resume_start"] = resume


def follow_saves(trainer: pl.Trainer, exists: Callable[[str], bool | None], link: Callable[[str, str], None]) -> None:
    """Let ModelCheckpoint callbacks know of a save in flight, and of links that must not lead to one.

    The same for the numbers of saves before a requeue, which hidden directories must not count for.

    Args:
        trainer: Its callbacks are meant.
        exists: Whether a path is taken, where that cannot be seen on the disk yet; None to look there.
        link: Put a link (its second argument) to a checkpoint. Called on all ranks.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    for callback in _host.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint):
            callback.__dict__["file_exists"] = _knowing(callback.file_exists, exists)
            callback.__dict__["_link_checkpoint"] = lambda _, path, place: link(os.fspath(path), os.fspath(place))
    trainer._checkpoint_connector.__dict__["hpc_save_path"] = lambda folder: str(_requeue_path(Path(folder)))


def take_up_links(trainer: pl.Trainer, broadcast: Callable[[Any], Any]) -> None:
    """Let a resumed ModelCheckpoint go on with the link that leads to the checkpoint it resumes from.

    Lightning 2.6 makes the first link after that checkpoint's own state was saved, so that a run killed before the
    second one links under another name, and the first link leads nowhere once its checkpoint is removed.

    Args:
        trainer: It resumes, or not.
        broadcast: The first rank's value, for all. Called where a callback makes links and knows of none.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    for callback in _host.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint) and callback.save_last == "link" and not callback.last_model_path:
            found = ""
            if trainer.ckpt_path and "://" not in str(trainer.ckpt_path):
                source = Path(trainer.ckpt_path)
                folder = Path(callback.dirpath) if callback.dirpath else source.parent
                links = [entry for entry in folder.iterdir() if entry.is_symlink()] if folder.is_dir() else []
                found = next((str(link) for link in links if link.resolve() == source.resolve()), "")
            callback.last_model_path = broadcast(found)


def unfollow_saves(trainer: pl.Trainer) -> None:
    """Undo `follow_saves`; does nothing where it was not called."""
    for callback in _host.callbacks(trainer):
        for name in ("file_exists", "_link_checkpoint"):
            callback.__dict__.pop(name, None)
    trainer._checkpoint_connector.__dict__.pop("hpc_save_path", None)


def _knowing(file_exists: Callable[..., bool], exists: Callable[[str], bool | None]) -> Callable[..., bool]:
    def look(filepath: Any, trainer: Any) -> bool:
        known = exists(os.fspath(filepath))
        return file_exists(filepath, trainer) if known is None else known

    return look
