"""Private API of Lightning around a run that goes on from a checkpoint: what was still due when that was saved.

A part of `_host`, with the same rules: each entry says what it stands for; checked with Lightning 2.6.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_bigmodel import _host, _host_last_hook

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "end_restart_of_file",
    "finish_batch",
    "finish_epoch",
    "logged_row",
    "metrics_of_file",
    "stay_stopped",
]


def finish_batch(trainer: pl.Trainer, row: dict[str, Any] | None, due: dict[str, Any] | None = None) -> None:
    """Let a run that a checkpoint of `on_train_batch_end` resumes do what was still due, before its next batch.

    That is the module's own hook of that name, the validation after that batch, schedulers that follow a metric by
    step, and the end of the epoch. Lightning 2.6 takes all of it for done (`_TrainingEpochLoop.reset` and `advance`,
    `_FitLoop.reset`). Call it when training starts; does nothing for checkpoints of other moments.

    Args:
        trainer: It resumes.
        row: What the batch logged (`logged_row`), for the loggers; None where the checkpoint has no metrics. Then
            schedulers that follow a metric go on with what the validation gives.
        due: What the module's hook is called with (`_host_last_hook.due_hook`). Default: ``None``, it is not due.
    """
    outer, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    progress: Any = outer.epoch_progress
    if not (outer.restarted_mid_epoch and loop.restarted_on_train_batch_end):
        return
    if loop.batch_progress.is_last_batch:  # for which `_FitLoop.reset` has counted the epoch
        for tracker in (progress.total, progress.current):
            tracker.processed -= 1
            tracker.completed -= 1
    advance_end = loop.on_advance_end

    def reset() -> None:
        del loop.__dict__["reset"]
        loop.batch_progress.increment_completed()

    def advance(_: Any) -> None:
        del loop.__dict__["advance"]
        loop.val_loop.restarting = False
        loop.val_loop._has_run = False
        if due is not None:
            _host_last_hook.call_due_hook(trainer, due)
            if row is not None:
                row.update(logged_row(trainer))
        if row and trainer._logger_connector.should_update_logs and not loop._should_accumulate():
            trainer._logger_connector.log_metrics(row)

    def on_advance_end(fetcher: Any) -> None:
        del loop.__dict__["on_advance_end"]
        if row is not None:
            advance_end(fetcher)
            return
        before = dict(trainer.callback_metrics)
        with _lenient_schedulers(trainer) as following:
            advance_end(fetcher)
        fresh = {name for name, value in trainer.callback_metrics.items() if value is not before.get(name)}
        if all(config.monitor in fresh for config in following):
            _host.end_restart(trainer)

    loop.__dict__.update(reset=reset, advance=advance, on_advance_end=on_advance_end)


def logged_row(trainer: pl.Trainer) -> dict[str, Any]:
    """What the training batch that ends now gives to the loggers."""
    connector = trainer._logger_connector
    if not (trainer.training and trainer._results) or connector._first_loop_iter is None:
        return {}
    row = connector.metrics["log"].items()
    return {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in row}


def metrics_of_file(trainer: pl.Trainer) -> dict[str, Any]:
    """`_host.shown_metrics` without means of an epoch that is not over, which one file alone cannot go on with."""
    found = _host.shown_metrics(trainer)
    if not (trainer.training and trainer._logger_connector._first_loop_iter is None):
        metas = [entry.meta for entry in trainer.fit_loop.epoch_loop._results.values()]
        unfinished = {name for meta in metas if meta.on_epoch for name in (meta.name, f"{meta.name}_epoch")}
        found = {kind: {k: v for k, v in values.items() if k not in unfinished} for kind, values in found.items()}
    return found


def end_restart_of_file(trainer: pl.Trainer) -> None:
    """`_host.end_restart` where the metrics of a file, of a save after the last validation of an epoch, suffice."""
    outer, latest = trainer.fit_loop, trainer.callback_metrics
    following = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if outer.restarted_mid_epoch and outer.epoch_loop.restarted_on_last and all(name in latest for name in following):
        _host.end_restart(trainer)


def stay_stopped(trainer: pl.Trainer) -> None:
    """Let a run that `EarlyStopping` had stopped when the checkpoint was saved be stopped still.

    Lightning 2.6 keeps the reason in the callback's state, and trains an epoch more. Within an epoch its end comes
    first. A run without the callback goes on.
    """
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

    own = [callback for callback in _host.callbacks(trainer) if isinstance(callback, EarlyStopping)]
    if all(callback.stopping_reason == EarlyStoppingReason.NOT_STOPPED for callback in own):
        return
    loop = trainer.fit_loop.epoch_loop
    if not trainer.fit_loop.restarted_mid_epoch:
        trainer.should_stop = True
        return
    reset = loop.reset

    def reset_and_stop() -> None:
        loop.__dict__.pop("reset", None)
        loop.__dict__.update({} if reset == type(loop).reset.__get__(loop) else {"reset": reset})
        reset()
        trainer.should_stop = True

    loop.__dict__["reset"] = reset_and_stop


def finish_epoch(trainer: pl.Trainer) -> None:
    """The same for a checkpoint of `on_train_epoch_end`: schedulers that follow a metric by epoch make their step.

    Lightning 2.6 makes it after those hooks, and not in a run that is resumed; and with `max_steps` it ends the epoch
    once more. The latest metrics must be there again; without the one that a scheduler follows it waits.
    """
    from lightning.pytorch.loops.loop import _Loop

    outer = trainer.fit_loop
    if outer.restarted_on_epoch_end:
        outer.epoch_progress.increment_completed()
        loops: list[Any] = [outer]
        for loop in loops:
            loop._restarting = False  # its own setter keeps it with `max_steps`
            loop.reset_restart_stage()
            loops += [child for child in vars(loop).values() if isinstance(child, _Loop)]
    elif not outer.resumed_on_epoch_end:
        return
    if not outer.epoch_loop._num_ready_batches_reached():
        return
    current: Any = outer.epoch_progress.current
    completed, current.completed = current.completed, current.processed - 1
    try:
        with _lenient_schedulers(trainer):
            outer.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    finally:
        current.completed = completed


@contextmanager
def _lenient_schedulers(trainer: pl.Trainer) -> Iterator[list[Any]]:
    """Schedulers that follow a metric; within, one whose metric is not there is left alone with a warning."""
    following = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    strict = [config.strict for config in following]
    for config in following:
        config.strict = False
    try:
        yield following
    finally:
        for config, value in zip(following, strict, strict=True):
            config.strict = value
