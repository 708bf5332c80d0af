"""torchmetrics objects under a pipeline: updated on one stage, read on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_bigmodel.pipeline.gate import current_run
from lightning_bigmodel.pipeline.trace import is_metric
from lightning_bigmodel.pipeline.tree import map_tensors

__all__ = ["MetricLink"]


class MetricLink:
    """Makes every metric of a module behave under a pipeline as in one process.

    A metric is updated where its operands are: on the stage whose code updates it. `compute` outside of a step first hands the
    state to the other ranks of the pipeline, then synchronises over data replicas only, so no sample counts twice.

    Communication: at each `compute`, one object all-gather and one object broadcast of the state along the pipeline.
    """

    def __init__(self, root: nn.Module, pipe_group: dist.ProcessGroup | None, data_group: dist.ProcessGroup | None) -> None:
        self._pipe_group = pipe_group
        self._undo: list[Callable[[], None]] = []
        self._updated_here: set[nn.Module] = set()
        for metric in root.modules():
            if is_metric(metric) and not hasattr(metric, "items"):
                self._link(metric, data_group)

    def _link(self, metric: Any, data_group: dist.ProcessGroup | None) -> None:
        update, compute, process_group = metric.update, metric.compute, metric.process_group

        def linked_update(*args: Any, **kwargs: Any) -> None:
            run = current_run()
            if run is None or run.is_live:
                self._updated_here.add(metric)
                update(*args, **kwargs)

        def linked_compute(*args: Any, **kwargs: Any) -> Any:
            if current_run() is None:
                self._share_state(metric)
            return compute(*args, **kwargs)

        def undo() -> None:
            metric.update, metric.compute, metric.process_group = update, compute, process_group

        metric.update, metric.compute = linked_update, linked_compute
        if metric.process_group is None:
            metric.process_group = data_group
        self._undo.append(undo)

    def _share_state(self, metric: Any) -> None:
        if self._pipe_group is None or dist.get_world_size(self._pipe_group) == 1:
            return
        holders: list[bool | None] = [None] * dist.get_world_size(self._pipe_group)
        dist.all_gather_object(holders, metric in self._updated_here and metric.update_count > 0, group=self._pipe_group)
        if not any(holders):
            return
        source = max(index for index, holds in enumerate(holders) if holds)
        names = list(metric._defaults)
        payload: list[Any] = [None]
        if dist.get_rank(self._pipe_group) == source:
            state = {name: map_tensors(lambda tensor: tensor.detach().cpu(), getattr(metric, name)) for name in names}
            payload = [(state, metric.update_count)]
        dist.broadcast_object_list(payload, group_src=source, group=self._pipe_group)
        if dist.get_rank(self._pipe_group) != source:
            state, count = payload[0]
            for name in names:
                setattr(metric, name, map_tensors(lambda tensor: tensor.to(metric.device), state[name]))
            metric._update_count, metric._computed = count, None

    def forward_cache(self, metric: Any) -> Any:
        """The value of the last batch, which loggers show for a metric logged by step."""
        return map_tensors(lambda tensor: tensor.detach().cpu(), metric._forward_cache)

    def close(self) -> None:
        """Give the metrics their own methods back."""
        while self._undo:
            self._undo.pop()()
