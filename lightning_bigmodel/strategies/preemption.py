"""Signals of one rank that all ranks follow at the same step: they travel with what ranks tell each other anyway."""

from __future__ import annotations

import signal

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_bigmodel.strategies.base import StrategyBase

__all__ = ["PreemptedExit", "PreemptionSignals"]

_STOP, _PREEMPT = 1, 2


class PreemptedExit(SIGTERMException):
    """All ranks have saved and end, because a signal asked one of them to.

    Args:
        signal_number: The signal. The exit code is 128 more, as shells have it, unless given.
        path: The checkpoint.
        exit_code: What the process ends with where nobody catches this. Default: None, see above.
    """

    def __init__(self, signal_number: int, path: str, exit_code: int | None = None) -> None:
        super().__init__(128 + signal_number if exit_code is None else exit_code)
        self.signal = signal.Signals(signal_number)
        self.path = path

    def __str__(self) -> str:
        return f'{self.signal.name} asked this run to stop: saved to {self.path}; start again with `ckpt_path="last"`.'


class PreemptionSignals(StrategyBase):
    """The flags of a step's message: `trainer.should_stop`, and that a rank is to be preempted."""

    _is_asked = False
    is_preempted = False
    """Whether some rank was asked to end; all ranks see it with the same training batch."""

    def ask_for_preemption(self) -> None:
        """This rank was asked to end. May be called in a signal handler."""
        self._is_asked = True

    @property
    def shares_signals(self) -> bool:
        """Whether every training batch has a message between all ranks for the signals to travel with.

        Not where only tensor ranks share a model, without pipeline or data ranks.
        """
        return self.world_size == 1 or self.engine.is_pipelined or self.mesh.data_size > 1

    def _own_signals(self) -> int:
        return _STOP * bool(self._trainer().should_stop) | _PREEMPT * self._is_asked

    def _follow_signals(self, signals: int) -> None:
        trainer = self._trainer()
        if signals & _STOP:
            trainer.should_stop = True
        if signals & _PREEMPT and trainer.training:  # an evaluation step's message is for some ranks only
            self.is_preempted = True

    def _forget_signals(self) -> None:
        self._is_asked = self.is_preempted = False
