"""What the parts of the strategy share: this rank's place, its engine, and the guard around every hook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy

from lightning_bigmodel.mesh import RankMesh
from lightning_bigmodel.mesh.failures import FailureGuard
from lightning_bigmodel.pipeline.engine import PipelineEngine, StepOutcome
from lightning_bigmodel.pipeline.gradients import GradientWindow
from lightning_bigmodel.pipeline.microbatch import MicrobatchWeight
from lightning_bigmodel.pipeline.ownership import ParameterShare
from lightning_bigmodel.sharding.materialize import Materializer
from lightning_bigmodel.strategies.compiled import CompiledBlocks
from lightning_bigmodel.strategies.sharded import ShardedRun
from lightning_bigmodel.strategies.tensor import TensorRun

__all__ = ["StrategyBase"]


class StrategyBase(ParallelStrategy):
    """State of one run; every part of the strategy reads it, `BigModelStrategy` sets it up and takes it down."""

    _microbatch_weight: MicrobatchWeight

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mesh: RankMesh | None = None
        self._engine: PipelineEngine | None = None
        self._window: GradientWindow | None = None
        self._tensor: TensorRun | None = None
        self._compiled: CompiledBlocks | None = None
        self._materializer: Materializer | None = None
        self._sharded: ShardedRun | None = None  # outlives the run too
        self._idle_passes: tuple[int, int] = (0, 0)  # evaluation batches to come here, and more on other data ranks
        self._share: ParameterShare | None = None  # outlives the run: checkpoints may be saved after it
        self._num_steps = 0
        self._guard: FailureGuard | None = None
        self._seed = 0
        self._num_batches_moved = 0
        self._is_replaying = False
        self._blocks_sync = False
        self._is_manual = False
        self._owed_gradients: list[Any] = []  # of a batch without a loss here
        self._finish_observing: Callable[[], StepOutcome] | None = None
        self._owes_backward = False
        self._factor = 1.0  # of the batch's gradient in the window's sum
        self._watched_batch: tuple[Any, float, float] | None = None
        self._shards_data = True
        self._skipped_batch = self._hides_world_size = False
        self._failed = False

    @property
    def mesh(self) -> RankMesh:
        """This rank's place in the mesh.

        Raises:
            RuntimeError: Before the processes have started.
        """
        if self._mesh is None:
            raise RuntimeError("The mesh exists only while the Trainer runs, after its processes have started.")
        return self._mesh

    @property
    def engine(self) -> PipelineEngine:
        """What runs the steps.

        Raises:
            RuntimeError: Before the model is set up.
        """
        if self._engine is None:
            raise RuntimeError("The pipeline exists only while the Trainer runs, after the model was set up.")
        return self._engine

    def _phase(self, name: str) -> AbstractContextManager[Any]:
        return self._guard.phase(name) if self._guard is not None else nullcontext()

    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _answers_for(self, parameter: Any) -> bool:
        """Whether this rank counts its part of the complete gradient, within one replica of the model."""
        sharded, tensor = self._sharded, self._tensor
        is_first = self.mesh.coordinates["data_shard"] == 0
        return (is_first or (sharded is not None and sharded.is_sharded(parameter))) and (
            tensor is None or tensor.counts(parameter)
        )
