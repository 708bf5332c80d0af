"""Record what a step logs on every stage and micro-batch, and combine it into what one process would have logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.pipeline.gate import current_run
from lightning_bigmodel.pipeline.microbatch import weighted_mean

__all__ = ["LogEntry", "StepLog", "combine_logs"]

# The order in which `LightningModule.log` takes what follows the value.
_LOG_ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
_PARTS_OF_A_WEIGHT = 1024  # the host takes whole numbers
_REDUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


@dataclass
class LogEntry:
    """All values logged under one name by one rank in one step.

    Attributes:
        name: The metric's name.
        options: Keyword arguments of the user's call (`prog_bar`, `on_step`, ...), `batch_size` left out.
        values: One tensor a call, on the CPU; empty for a metric object.
        weights: Weight of each value in a mean.
        batch_sizes: Samples behind each value.
        metric: Module name of a logged torchmetrics object.
        is_loss: Whether the value logged is the loss the step returned.
    """

    name: str
    options: dict[str, Any]
    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    metric: str | None = None
    is_loss: bool = False

    @property
    def reduction(self) -> str:
        """`"mean"`, `"sum"`, `"max"` or `"min"`: the user's `reduce_fx`."""
        reduce_fx = self.options.get("reduce_fx", "mean")
        name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        return {"amax": "max", "amin": "min"}.get(name, name)


class StepLog:
    """Stands in for a module's `log` during a schedule.

    Only calls in code that a stage owns are kept: code before the first block on the first stage, code between two
    blocks on the stage of the later one, code after the last block on the last stage. So each call is kept once, with
    real values.
    """

    def __init__(self, root: nn.Module) -> None:
        self.entries: dict[str, LogEntry] = {}
        self.weight = 1.0
        self.num_samples = 1
        self._last_values: dict[str, Any] = {}
        self._has_batch_size: set[str] = set()  # those whose weight the user gave
        self._root = root
        self._metric_names: dict[int, str] | None = None

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Keep one logged value; positional arguments are those of the host's `log(name, value, prog_bar, ...)`.

        Raises:
            ValueError: For a tensor of several elements, or a metric that is not a submodule of the module.
        """
        run = current_run()
        if run is not None and not run.is_live:
            return
        if args:
            options.update(zip(_LOG_ARGUMENTS, args, strict=False))
        batch_size = options.pop("batch_size", None)
        entry = self.entries.setdefault(name, LogEntry(name, options))
        if isinstance(value, nn.Module):
            if self._metric_names is None:  # by id: a metric's hash changes with its state
                self._metric_names = {id(module): known for known, module in self._root.named_modules()}
            entry.metric = self._metric_names.get(id(value))
            if entry.metric is None:
                raise ValueError(
                    f"`self.log({name!r}, ...)` was given a metric that is not a submodule of the LightningModule; "
                    "assign it to an attribute in `__init__`."
                )
            return
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        if not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())  # as the host does; a mean of integers must not be floored
        if tensor.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` was given a tensor of shape {tuple(tensor.shape)}; log a single value."
            )
        self._last_values[name] = value
        if batch_size is not None:
            self._has_batch_size.add(name)
        entry.values.append(tensor.reshape(()).cpu())
        entry.weights.append(float(batch_size) if batch_size is not None else self.weight)
        entry.batch_sizes.append(int(batch_size) if batch_size is not None else self.num_samples)

    def note_loss(self, loss: Tensor | None, weight: float | None = None) -> None:
        """Tell which of the values just logged is the step's loss, and the weight of all of them if it was returned."""
        for name, value in self._last_values.items():
            entry = self.entries[name]
            if loss is not None and value is loss:
                entry.is_loss = True
            if weight is not None and name not in self._has_batch_size:
                entry.weights[-1] = weight
        self._last_values.clear()
        self._has_batch_size.clear()


def combine_logs(
    parts: Sequence[Sequence[LogEntry]], *, losses_are_sums: bool = False, counts_weights: bool = False
) -> list[tuple[LogEntry, Tensor | None, int]]:
    """Combine the entries of several ranks, in order.

    Means are weighted by `batch_size` where the user gave it, else by the micro-batch weights; `reduce_fx="sum"`,
    `"max"` and `"min"` apply to the micro-batches too. With `losses_are_sums`, a logged loss is summed as the loss
    itself is.

    Returns:
        (entry, value, batch size) for each name; the value is None for a metric object. The batch size is what the host
        weighs the value with in the mean over an epoch: samples, or with `counts_weights` a fixed multiple of weights.
    """
    merged: dict[str, LogEntry] = {}
    for entry in (entry for part in parts for entry in part):
        known = merged.setdefault(entry.name, LogEntry(entry.name, entry.options, metric=entry.metric))
        known.values += entry.values
        known.is_loss = known.is_loss or entry.is_loss
        known.weights += entry.weights
        known.batch_sizes += entry.batch_sizes
    return [
        (
            entry,
            None if entry.metric is not None else _reduced(entry, losses_are_sums),
            round(_PARTS_OF_A_WEIGHT * sum(entry.weights)) if counts_weights else sum(entry.batch_sizes),
        )
        for entry in merged.values()
        if entry.metric is not None or entry.values
    ]


def _reduced(entry: LogEntry, losses_are_sums: bool) -> Tensor:
    if entry.is_loss and losses_are_sums and entry.reduction == "mean":
        return torch.stack(entry.values).sum(0)
    reducer = _REDUCERS.get(entry.reduction)
    if reducer is not None:
        return reducer(torch.stack(entry.values))
    return weighted_mean(entry.values, entry.weights)
