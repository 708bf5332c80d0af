"""One save of all ranks and a clean end when a scheduler takes the machine away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_bigmodel import _host, _host_checkpoints
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy
from lightning_bigmodel.strategies.preemption import PreemptedExit

__all__ = ["PreemptionCheckpoint"]

_UNCATCHABLE = {"SIGKILL", "SIGSTOP"}


class PreemptionCheckpoint(Callback):
    """Save once and end on all ranks when a signal reaches any of them, at the end of the optimizer step under way.

    Schedulers say so some time before they kill: SLURM with `--signal=SIGUSR1@90`, others with SIGTERM, which
    torchrun hands on to its ranks and follows up after 30 seconds. All ranks save together to `filename`, log where,
    and raise `PreemptedExit`, a SystemExit with 128 and the signal's number. `ckpt_path="last"` finds the checkpoint
    if nothing newer is complete, and the run goes on as if it had not been interrupted.

    On SLURM, with Lightning's `SLURMEnvironment(auto_requeue=True)`, the requeue signal (SIGUSR1) saves to
    `hpc_ckpt_<n>.ckpt` and requeues the job as Lightning does, but on all ranks at the same step; the new job goes on
    from it with or without `ckpt_path="last"`. Lightning's own handlers save wherever each rank is, and its handler of
    SIGTERM sends a message from there: the callback takes their place while training, and puts back what was there.

    With accumulated batches the end is that of the window. A signal during a validation is followed after the next
    training step. After the last batch of an epoch, or one that a validation follows, the resumed run goes through
    those first. (Strategies other than `BigModelStrategy` have Lightning's way to resume, which leaves them out: there
    the run saves, goes through them, and saves again and ends after the next step.) After the last batch of all the run
    saves and goes through what is left: it has ended.

    Memory: none. Communication: with `BigModelStrategy` none beyond a bit in the message that its ranks send with every
    batch (where only tensor ranks share a model, and under other strategies, one all-reduce of a number a batch); then
    that of one checkpoint.

    Args:
        signals: Names of the signals to follow.
        dirpath: Folder of the checkpoint, that all ranks see. Default: the Trainer's `default_root_dir`. Give the next
            start the same.
        filename: Name of the checkpoint, without `.ckpt`. What has the name is replaced.

    Raises:
        ValueError: For names that are no signals, or that cannot be caught.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import PreemptionCheckpoint
        >>> callback = PreemptionCheckpoint(signals=["SIGTERM"], dirpath="checkpoints")
        >>> trainer = Trainer(accelerator="cpu", callbacks=[callback], logger=False)
        >>> # trainer.fit(module, ckpt_path="last")
    """

    def __init__(
        self,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        dirpath: str | os.PathLike[str] | None = None,
        filename: str = "preempted",
    ) -> None:
        super().__init__()
        known = sorted(s.name for s in signal.Signals if s.name not in _UNCATCHABLE)
        if not isinstance(signals, (list, tuple)) or not signals or any(name not in known for name in signals):
            raise ValueError(
                f"`signals={signals!r}` must be a list of one or more names of signals that can be caught, such as "
                f"'SIGTERM' and 'SIGUSR1'. Here there are: {', '.join(known)}."
            )
        if dirpath is not None and not isinstance(dirpath, (str, os.PathLike)):
            raise ValueError(f"`dirpath={dirpath!r}` must be a path, or None for the Trainer's `default_root_dir`.")
        if not isinstance(filename, str) or not filename or Path(filename).name != filename:
            raise ValueError(f"`filename={filename!r}` must be a name without a folder, such as 'preempted'.")
        self.signals, self.dirpath, self.filename = tuple(signals), dirpath, filename
        self._received: int | None = None
        self._saved_early = False
        self._previous: dict[int, Any] = {}
        self._strategy: BigModelStrategy | None = None

    def resume_path(self, trainer: pl.Trainer) -> str:
        """Where the checkpoint is, or will be."""
        folder = trainer.default_root_dir if self.dirpath is None else self.dirpath
        return os.path.join(folder, f"{self.filename}.ckpt")  # a URL keeps its slashes

    # -- handlers ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._received, self._saved_early = None, False
        # The last of all: what others do at the end of the batch belongs to the checkpoint. (Lightning's `Checkpoint`
        # class would see to that, but takes the place of the Trainer's default ModelCheckpoint.)
        others = [callback for callback in _host.callbacks(trainer) if callback is not self]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]  # as Lightning sets it
        self._strategy = trainer.strategy if isinstance(trainer.strategy, BigModelStrategy) else None

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _install(self) -> None:
        """Not earlier: Lightning puts its own handlers in place just before, and there is nothing to save yet."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for name in self.signals:
            number = signal.Signals[name]
            self._previous[number] = signal.signal(number, self._receive)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # Lightning may have put back already what was there before the run.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _receive(self, number: int, _: Any) -> None:
        # No message from here: the rank may be in the middle of one.
        self._received = number
        if self._strategy is not None:
            self._strategy.ask_for_preemption()

    # -- the end of a step ---------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not self._is_agreed(trainer) or _host_checkpoints.is_accumulating(trainer):
            return
        is_made_up = self._strategy is not None and not _host_checkpoints.is_last_of_all(trainer)
        if is_made_up or not _host_checkpoints.is_followed_by_more(trainer):
            self._save_and_end(trainer)
        elif not self._saved_early:
            # For the case that the time does not suffice.
            self._save(trainer)
            self._saved_early = True

    def _is_agreed(self, trainer: pl.Trainer) -> bool:
        if self._strategy is not None and self._strategy.shares_signals:
            return self._strategy.is_preempted
        return bool(trainer.strategy.reduce_boolean_decision(self._received is not None, all=False))

    def _save_and_end(self, trainer: pl.Trainer) -> None:
        number = next(number for number in _host.all_objects(self._received) if number is not None)
        if _host_checkpoints.requeues_on(trainer, number):
            path = str(trainer.strategy.broadcast(str(_host_checkpoints.requeue(trainer, number))))
        else:
            path = self._save(trainer)
        exit_code = 0 if _host_checkpoints.is_script_child(trainer) else None
        ending = PreemptedExit(number, path, exit_code)
        rank_zero_info(str(ending))
        raise ending

    def _save(self, trainer: pl.Trainer) -> str:
        path = str(trainer.strategy.broadcast(self.resume_path(trainer)))
        trainer.save_checkpoint(path)
        if self._strategy is not None:
            self._strategy.finish_saving()
        return path
