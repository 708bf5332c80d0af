"""What training sends: calls and bytes a step by mesh axis and collective, compression, drift between replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._held import held_tensors
from lightning_bigmodel.callbacks._settings import check_flag, is_count
from lightning_bigmodel.mesh import RankMesh
from lightning_bigmodel.mesh.communication import CommunicationCounter, Traffic, axes_of, sent_share
from lightning_bigmodel.replicas.all_reduce import sum_dtype
from lightning_bigmodel.replicas.sync import mean_of
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["CommunicationMonitor"]

_Totals = dict[tuple[str, str], Traffic]


class CommunicationMonitor(Callback):
    """Measure what each optimizer step sends, over which axis of the mesh, and how far replicas are apart.

    Calls and bytes are those of this rank between the ends of two steps, loading included, evaluation not; what a
    checkpoint exchanges counts for the step after it. Bytes are what a rank sends by ring algorithms for the tensors it
    hands over (n ranks): all-reduce 2 (n - 1) / n of them, all-gather n - 1, messages all, others (n - 1) / n. What the
    library sends, and what compression of the wire saves, is not known. An axis is one of `pipe`, `data_replicate`,
    `data_shard` and `tensor`; `data`, `model` and `all` are messages over several at once, and where these are the same
    ranks, the axis has them.

    Logged at each step: `communication_bytes/<axis>`, `communication_calls/<axis>`, and both for each collective, as in
    `communication_bytes/<axis>/all_reduce`; `communication_compression`: what dense gradients, all-reduced in each step
    so far, would have sent between replicas over what was sent between them; `replica_drift`. Loggers have the numbers
    of rank 0. At the end of training a table shows rank 0 and the largest of all ranks.

    `replica_drift` is the distance of replicas' weights w_i from their mean m, relative to it, over all ranks:
    sqrt(mean_i |w_i - m|^2 / |m|^2). 0 just after replicas have agreed: choose a number of steps that is no multiple of
    their period.

    Under `DDPStrategy` buckets of gradients are counted as DDP reports them, the broadcast of buffers is not. Not seen
    anywhere: collectives of DTensor and of compiled code. Do not use it for times: it tells bytes.

    Communication: one exchange of small objects at the end; all weights once each time drift is measured. Overhead:
    about 4 microseconds a collective. Memory: with drift the weights in fp32, for a moment.

    Args:
        drift_every_num_steps: Optimizer steps between measurements of drift. None: never.
        print_table: Whether rank 0 prints the table.

    Attributes:
        totals: (axis, kind) -> `Traffic` of this rank in all steps so far.
        num_steps: Optimizer steps so far.
        compression: As logged; None without replicas, or while nothing was sent.
        drift: As measured last; None before.

    Raises:
        ValueError: For settings out of range, for drift without replicas, and under strategies whose collectives cannot
            be seen.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import CommunicationMonitor
        >>> monitor = CommunicationMonitor(drift_every_num_steps=10)
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="bigmodel", callbacks=[monitor], logger=False)
    """

    def __init__(self, drift_every_num_steps: int | None = None, print_table: bool = True) -> None:
        super().__init__()
        if drift_every_num_steps is not None and not is_count(drift_every_num_steps, 1):
            raise ValueError(
                f"`drift_every_num_steps={drift_every_num_steps!r}` must be a whole number of at least 1, or None."
            )
        check_flag("print_table", print_table)
        self.drift_every_num_steps, self.print_table = drift_every_num_steps, print_table
        self._counter: CommunicationCounter | None = None
        self._forget()

    def _forget(self) -> None:
        self.totals: _Totals = {}
        self.num_steps = 0
        self.drift: float | None = None
        self._dense_bytes = 0.0
        self._buckets: list[int] | None = None
        self._is_new = False

    # -- a run ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        strategy = trainer.strategy
        if not isinstance(strategy, (BigModelStrategy, DDPStrategy)):
            raise ValueError(
                f"`CommunicationMonitor` does not see all that `{type(strategy).__name__}` sends. Use "
                "`BigModelStrategy` (any layout) or `DDPStrategy`, or leave the callback out."
            )
        if self.drift_every_num_steps is not None and self._num_replicas(trainer) == 1:
            raise ValueError(
                f"`drift_every_num_steps={self.drift_every_num_steps}` measures how far replicas are apart, and here "
                "there is one. Leave it out, or give the run more replicas."
            )
        self._forget()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        mesh = self._mesh(trainer)
        axes = {"data_replicate": frozenset(range(trainer.world_size))} if mesh is None else axes_of(mesh)
        self._last_step = trainer.global_step
        self._counter = CommunicationCounter(axes)
        self._counter.start()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = trainer.strategy.model
        if self._counter is None or not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return
        buckets = _host.ddp_buckets(model) if model.require_backward_grad_sync else None
        if buckets is not None:
            self._counter.add("data_replicate", "all_reduce", trainer.world_size, sum(buckets), len(buckets))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._counter is not None:
            self._counter.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._counter is not None:
            self._counter.resume()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        num_new = trainer.global_step - self._last_step
        if self._counter is None or num_new == 0:
            return
        self._last_step += num_new
        taken = self._counter.take()
        self.totals = _sum(self.totals, taken)
        self._dense_bytes += num_new * self._dense_bytes_a_step(trainer, pl_module)
        before = self.num_steps
        self.num_steps += num_new
        every = self.drift_every_num_steps
        if every is not None and self.num_steps // every > before // every:
            with self._counter.paused():
                self.drift = self._measured_drift(trainer, pl_module)
            pl_module.log("replica_drift", self.drift, on_step=True, on_epoch=False)  # the same on all ranks already
        self._log(pl_module, taken, num_new)

    def _log(self, pl_module: pl.LightningModule, taken: _Totals, num_steps: int) -> None:
        values: dict[str, float] = {}
        for axis, kind in self.totals:  # also what was sent in earlier steps only
            traffic = taken.get((axis, kind), Traffic())
            for name, value in (("bytes", traffic.sent_bytes), ("calls", float(traffic.calls))):
                values[f"communication_{name}/{axis}/{kind}"] = value / num_steps
                whole = f"communication_{name}/{axis}"
                values[whole] = values.get(whole, 0.0) + value / num_steps
        if self.compression is not None:
            values["communication_compression"] = self.compression
        for name, value in values.items():
            pl_module.log(name, value, on_step=True, on_epoch=False)

    @property
    def compression(self) -> float | None:
        """Dense bytes over sent bytes, between replicas."""
        sent = sum(traffic.sent_bytes for (axis, _), traffic in self.totals.items() if axis == "data_replicate")
        return self._dense_bytes / sent if sent and self._dense_bytes else None

    # -- replicas ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _mesh(trainer: pl.Trainer) -> RankMesh | None:
        strategy = trainer.strategy
        return strategy.mesh if isinstance(strategy, BigModelStrategy) else None

    def _num_replicas(self, trainer: pl.Trainer) -> int:
        mesh = self._mesh(trainer)
        return trainer.world_size if mesh is None else mesh.layout.data_replicate

    def _dense_bytes_a_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        trained = {name for name, parameter in pl_module.named_parameters() if parameter.requires_grad}
        held = held_tensors(trainer, pl_module, with_buffers=False)
        num_bytes = sum(
            value.numel() * sum_dtype(value.dtype, None).itemsize for name, value in held.items() if name in trained
        )
        return num_bytes * sent_share("all_reduce", self._num_replicas(trainer))

    @torch.no_grad()
    def _measured_drift(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        mesh = self._mesh(trainer)
        group = None if mesh is None else mesh.device_mesh.get_group("data_replicate")
        held = held_tensors(trainer, pl_module, with_buffers=False)
        means = mean_of({n: v.to(sum_dtype(v.dtype, None)) for n, v in held.items()}, group, 1.0)
        squares = torch.zeros(2, dtype=torch.float64, device=trainer.strategy.root_device)
        for name, mean in means.items():
            squares[0] += (held[name].to(mean.dtype) - mean).double().square().sum().to(squares.device)
            squares[1] += mean.double().square().sum().to(squares.device)
        dist.all_reduce(squares)
        distance, size = squares.tolist()
        return float((distance / size) ** 0.5) if size else 0.0

    # -- the end -------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        everyone: list[_Totals] = _host.all_objects(self.totals)
        if trainer.is_global_zero and self.print_table and self.num_steps:
            Console().print(self._table(everyone))

    def _table(self, everyone: list[_Totals]) -> Table:
        keys = sorted({key for totals in everyone for key in totals})
        table = Table(title=f"Communication in {self.num_steps} steps: rank 0 (largest of {len(everyone)} ranks)")
        for column in ("axis", "collective", "calls a step", "bytes sent a step"):
            table.add_column(column, justify="left" if column in ("axis", "collective") else "right")
        for axis, kind in keys:
            found = [totals.get((axis, kind), Traffic()) for totals in everyone]
            calls = [traffic.calls / self.num_steps for traffic in found]
            sent = [traffic.sent_bytes / self.num_steps for traffic in found]
            table.add_row(axis, kind, f"{calls[0]:.2f} ({max(calls):.2f})", f"{sent[0]:,.0f} ({max(sent):,.0f})")
        notes = [] if self.compression is None else [f"{self.compression:.1f}x fewer bytes than dense gradients"]
        if self.drift is not None:
            notes.append(f"replicas {self.drift:.2e} apart when last measured")
        table.caption = "; ".join(notes) or None
        return table

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.stop()


def _sum(first: Mapping[tuple[str, str], Traffic], second: Mapping[tuple[str, str], Traffic]) -> _Totals:
    keys = {**first, **second}
    return {key: first.get(key, Traffic()) + second.get(key, Traffic()) for key in keys}
