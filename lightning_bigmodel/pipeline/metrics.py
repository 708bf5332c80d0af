"""torchmetrics objects under a pipeline: updated on one stage, read on every rank."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel._plain import copied, is_plain
from lightning_bigmodel.pipeline.gate import current_run
from lightning_bigmodel.pipeline.trace import is_metric
from lightning_bigmodel.pipeline.tree import map_tensors

__all__ = ["MetricLink", "merged_value"]


class MetricLink:
    """Makes every metric of a module behave under a pipeline as in one process.

    A metric is updated where its operands are: on the stage whose code updates it. `compute` outside of a step first
    hands the state to the other ranks of the pipeline, then synchronises over data replicas only, so no sample counts
    twice.

    Communication: at each `compute`, one object all-gather and one object broadcast of the state along the pipeline.
    """

    def __init__(
        self, root: nn.Module, pipe_group: dist.ProcessGroup | None, data_group: dist.ProcessGroup | None
    ) -> None:
        self._root, self._pipe_group = root, pipe_group
        self._of_batch: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._updated_here: set[int] = set()  # ids: a metric's hash changes with its state
        self._as_built = {id(metric): _beside_states(metric) for metric in root.modules() if is_metric(metric)}
        for metric in root.modules():
            if is_metric(metric) and not hasattr(metric, "items"):
                self._link(metric, data_group)

    def _link(self, metric: Any, data_group: dist.ProcessGroup | None) -> None:
        update, compute, process_group = metric.update, metric.compute, metric.process_group
        forward = metric.forward
        template = copy.deepcopy(metric)
        template.reset()

        def linked_update(*args: Any, **kwargs: Any) -> None:
            run = current_run()
            if run is None or run.is_live:
                self._updated_here.add(id(metric))
                update(*args, **kwargs)

        def linked_compute(*args: Any, **kwargs: Any) -> Any:
            if current_run() is None:
                self._share_state(metric)
            return compute(*args, **kwargs)

        def linked_forward(*args: Any, **kwargs: Any) -> Any:
            run = current_run()
            if run is None or run.is_live:
                of_batch = self._of_batch.setdefault(id(metric), None)
                if of_batch is None:
                    of_batch = self._of_batch[id(metric)] = copy.deepcopy(template)
                of_batch.update(*args, **kwargs)
            return forward(*args, **kwargs)

        def undo() -> None:
            del metric.__dict__["forward"]
            metric.update, metric.compute, metric.process_group = update, compute, process_group

        metric.update, metric.compute, metric.forward = linked_update, linked_compute, linked_forward
        if metric.process_group is None:
            metric.process_group = data_group
        self._undo.append(undo)

    def _share_state(self, metric: Any) -> None:
        if self._pipe_group is None or dist.get_world_size(self._pipe_group) == 1:
            return
        holders: list[bool | None] = [None] * dist.get_world_size(self._pipe_group)
        dist.all_gather_object(
            holders, id(metric) in self._updated_here and metric.update_count > 0, group=self._pipe_group
        )
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

    def saved_states(self) -> dict[str, dict[str, Any]]:
        """Name -> what each metric of the module has seen on this rank, as copies on the CPU.

        That is its states, and of its other attributes those that have changed since it was linked: some metrics
        (`MinMaxMetric`, `Running`) keep there what they have seen, while settings stay those of the code.
        """
        found = {}
        for name, metric in self._root.named_modules():
            if is_metric(metric) and not hasattr(metric, "items"):
                built = self._as_built.get(id(metric), {})
                rest = {k: v for k, v in _beside_states(metric).items() if k not in built or not _same(v, built[k])}
                if metric._update_count or rest:
                    state = copied(metric.metric_state)
                    found[name] = {"count": metric._update_count, "state": state, "rest": rest}
        return found

    def load_states(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `saved_states` gave: the metrics are as if they had been updated here."""
        for name, metric in self._root.named_modules():
            if is_metric(metric) and name in saved:
                move = functools.partial(Tensor.to, device=metric.device)
                values = {**saved[name]["state"], **saved[name].get("rest", {})}
                for key, value in values.items():
                    setattr(metric, key, map_tensors(move, value))
                metric._update_count, metric._computed = saved[name]["count"], None
                self._updated_here.add(id(metric))

    def begin_step(self) -> None:
        """Forget the values of the previous batch."""
        self._of_batch.clear()

    def batch_values(self, names: Collection[str]) -> dict[str, Any]:
        """What the named metrics saw of this batch on this rank: a metric each, to be merged by `merged_value`."""
        return {name: self._of_batch.get(id(module)) for name, module in self._root.named_modules() if name in names}

    def close(self) -> None:
        """Give the metrics their own methods back."""
        while self._undo:
            self._undo.pop()()


# What torch and torchmetrics themselves keep in a metric and change.
_BOOKKEEPING = {
    *vars(nn.Module()),
    *("_cache", "_computed", "_defaults", "_dtype", "_dtype_convert", "_enable_grad", "_forward_cache", "_is_synced"),
    *("_persistent", "_reductions", "_should_unsync", "_to_sync", "_update_called", "_update_count", "process_group"),
}


def _beside_states(metric: Any) -> dict[str, Any]:
    """Copies of attributes of a metric that are no states, as far as they are numbers, tensors and such."""
    hidden = _BOOKKEEPING | metric._defaults.keys()
    return {key: copied(value) for key, value in vars(metric).items() if key not in hidden and is_plain(value)}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        both = isinstance(first, Tensor) and isinstance(second, Tensor) and first.dtype == second.dtype
        return both and torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def merged_value(parts: Sequence[Any], device: Any) -> Any:
    """The value over several ranks' parts of one batch; None where no rank had the metric called on it.

    Metrics that torchmetrics cannot merge (`full_state_update`) give the last rank's value.
    """
    present = [part.to(device) for part in parts if part is not None]
    if not present:
        return None
    whole = present[0]
    for part in present[1:]:
        try:
            whole.merge_state(part)
        except RuntimeError:  # noqa: PERF203 - only merging tells whether a metric can merge; few ranks, once a step
            whole = part
    # `sync_on_compute` is read at construction only; and in evaluation ranks have different numbers of batches.
    whole.distributed_available_fn = _alone
    return whole.compute()


def _alone() -> bool:
    """The parts are those of all ranks already: there is nobody to synchronise with."""
    return False
