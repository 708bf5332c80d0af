"""Private API of Lightning around the module's own `on_train_batch_end`, which comes after the callbacks that save.

A part of `_host`, with the same rules: each entry says what it stands for; checked with Lightning 2.6.
"""

from __future__ import annotations

import dis
import inspect
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_bigmodel._plain import copied, is_plain, num_bytes

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["call_due_hook", "due_hook"]

_HOOK = "on_train_batch_end"
_MOST_BYTES = 16 * 2**20


def due_hook(trainer: pl.Trainer) -> dict[str, Any] | None:
    """What the module's hook is going to be called with, if a checkpoint is saved by a callback just before it.

    Returns:
        ``outputs``, ``batch`` (each None if the hook does not use it) and ``batch_idx``; instead of them the names that
        are ``missing``, of what is larger than 16 MiB or more than tensors, numbers and plain containers. None if the
        hook is not due.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    progress: Any = loop.batch_progress.total
    is_at_end = progress.ready == progress.processed == progress.completed + 1
    if not (trainer.training and is_at_end and is_overridden(_HOOK, module)):
        return None
    hook = inspect.unwrap(getattr(type(module), _HOOK))
    if _running(hook) is not None:
        return None  # the module itself saves in it
    # What is handed to hooks are local variables there, which nothing else may keep alive.
    advance = _running(_TrainingEpochLoop.advance)
    local = {} if advance is None else advance.f_locals
    used, given = _used_arguments(hook), {}
    missing = []
    for name, variable in (("outputs", "batch_output"), ("batch", "batch")):
        value = given[name] = local.get(variable) if name in used else None
        if name in used and variable not in local or not is_plain(value) or num_bytes(value) > _MOST_BYTES:
            missing.append(name)
    if missing:
        return {"missing": missing}
    return {**{name: copied(value) for name, value in given.items()}, "batch_idx": loop.batch_idx}


def call_due_hook(trainer: pl.Trainer, due: dict[str, Any]) -> None:
    """Call the hook with what `due_hook` gave."""
    connector = trainer._logger_connector
    outputs, batch = move_data_to_device((due["outputs"], due["batch"]), trainer.strategy.root_device)
    before = connector._first_loop_iter
    connector.on_batch_start(batch)
    connector._first_loop_iter = due["batch_idx"] == 0
    call._call_lightning_module_hook(trainer, _HOOK, outputs, batch, due["batch_idx"])
    connector.on_batch_end()
    connector._first_loop_iter = before


def _running(function: Any) -> FrameType | None:
    """The innermost call of a function that is going on; None without one."""
    code, frame = getattr(function, "__code__", None), inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _used_arguments(function: Any) -> set[str]:
    """Of the hook's arguments those that its code reads, by the names that Lightning has for them."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {"outputs", "batch"}
    names = code.co_varnames[1 : code.co_argcount]
    takes_more = bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
    if takes_more or len(names) < 2:
        return {"outputs", "batch"}
    read = set(code.co_cellvars)  # of functions within it
    for step in dis.get_instructions(code):
        if "LOAD" in step.opname:  # from Python 3.13 on two at once
            read.update(step.argval if isinstance(step.argval, tuple) else (step.argval,))
    return {given for given, name in zip(("outputs", "batch"), names, strict=False) if name in read or "locals" in read}
