"""Batch normalisation over micro-batches: running statistics of whole batches.

    forward of a micro-batch:   normalise by its own statistics, note (count, sum, sum of squares) of the layer's input
    end of the training batch:  add these up over micro-batches and data ranks, move the running statistics once

GPipe (arXiv 1811.06965, section 2.2) and torchgpipe (arXiv 2004.09910), whose `DeferredBatchNorm` pools the
micro-batches of one pipeline; here data ranks, layers called several times in a step and recomputation are right too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel import _host
from lightning_bigmodel.pipeline.ownership import broadcast_tensors

__all__ = [
    "DeferredStatistics",
    "check_deferral",
    "deferred_layers",
    "refuse_batch_statistics",
]

_BatchNorm = nn.modules.batchnorm._BatchNorm


def deferred_layers(root: nn.Module) -> dict[str, _BatchNorm]:
    """Name -> layer of all batch normalisation whose running statistics can be deferred, trained or frozen."""
    return {
        name: module
        for name, module in root.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats and not isinstance(module, nn.SyncBatchNorm)
    }


def refuse_batch_statistics(root: nn.Module, num_microbatches: int, *, is_deferred: bool) -> None:
    """Refuse batch normalisation that micro-batches would change without leave.

    Raises:
        ValueError: For a layer in training mode, where batches are split, that is not deferred or cannot be.
    """
    if num_microbatches == 1:
        return
    for name, module in root.named_modules():
        if not isinstance(module, _BatchNorm) or not module.training:
            continue
        what = f"`{name}` ({type(module).__name__})"
        if is_deferred and isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{what} waits for all ranks at each call, but under `num_microbatches={num_microbatches}` ranks call "
                "it at different times and not equally often. Use BatchNorm: `deferred_batch_norm=True` makes its "
                "running statistics those of all data ranks."
            )
        if is_deferred and not module.track_running_stats:
            raise ValueError(
                f"{what} has `track_running_stats=False`: it normalises by the micro-batch in training and by the "
                "whole batch in evaluation, and has no running statistics that `deferred_batch_norm=True` could "
                "make right. Set `track_running_stats=True`, or use GroupNorm or LayerNorm."
            )
        if not is_deferred:
            raise ValueError(
                f"{what} normalises by statistics of the whole batch, but `num_microbatches={num_microbatches}` shows "
                "it one micro-batch at a time; its results would differ from one process. Use GroupNorm or LayerNorm, "
                "freeze it with `.eval()`, set `num_microbatches=1` (with `schedule='GPipe'` in a pipeline), or accept "
                "statistics of micro-batches in training with `deferred_batch_norm=True`, which keeps the running "
                "statistics of whole batches."
            )


def check_deferral(root: nn.Module, num_microbatches: int, data_size: int) -> None:
    """Refuse to defer where nothing would change.

    Raises:
        ValueError: Where no layer keeps running statistics, or each rank sees whole batches anyway.
    """
    if not deferred_layers(root):
        raise ValueError(
            f"`deferred_batch_norm=True`, but `{type(root).__name__}` has no BatchNorm that keeps running statistics "
            "(SyncBatchNorm and `track_running_stats=False` do not count). Leave `deferred_batch_norm` out."
        )
    if num_microbatches == 1 and data_size == 1:
        raise ValueError(
            "`deferred_batch_norm=True`, but `num_microbatches=1` does not split batches and there is one data rank: "
            "every BatchNorm sees whole batches. Leave `deferred_batch_norm` out."
        )


class _Layer:
    """What one layer has seen of the training batch in progress.

    Attributes:
        num_slots: Calls in one forward that all ranks know of; each is a batch of its own, as in one process.
        is_loose: Whether code of every stage may call it.
        sums: For each call in a forward, (count, sums, sums of squares) over micro-batches: `(1 + 2 channels,)`.
    """

    def __init__(self, name: str, module: _BatchNorm, is_open: Callable[[_Layer], bool | None]) -> None:
        self.name, self.module, self.is_loose = name, module, False
        self.num_slots, self.num_calls = 0, 0
        self.sums: list[Tensor] = []
        self._is_open = is_open
        # Compiled code that notes statistics has to write something, or the compiler drops it.
        self.token = torch.zeros(1)
        self.key = id(self)
        _layers[self.key] = self

    @property
    def num_channels(self) -> int:
        """Mean and variance are kept for each."""
        return self.module.num_features

    def note(self, inputs: Tensor) -> bool:
        """Note the input of one call, `(samples, channels, ...)`; whether running statistics must be left alone."""
        if _host.in_backward():
            return True  # recomputation: this call was noted in the forward
        is_open = self._is_open(self)
        if is_open:
            self._add(inputs)
        return is_open is not None

    @torch.no_grad()
    def _add(self, inputs: Tensor) -> None:
        count = inputs.numel() // max(self.num_channels, 1)
        if count == 1:
            raise ValueError(
                f"`{self.name}` ({type(self.module).__name__}) got one value a channel (an input of shape "
                f"{tuple(inputs.shape)}) in a micro-batch, which has no variance. Use fewer `num_microbatches`, larger "
                "batches, or `drop_last=True` where the last batch is short."
            )
        if self.num_calls == len(self.sums):
            self.sums.append(torch.zeros(1 + 2 * self.num_channels, dtype=torch.float64, device=inputs.device))
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if not count:
            return
        wide = inputs if inputs.dtype == torch.float64 else inputs.float()
        # Two passes: as exact as `torch.var_mean`, which took 14 times as long on images on a CPU (torch 2.13).
        dims = [dim for dim in range(inputs.ndim) if dim != 1]
        mean = wide.mean(dims, keepdim=True)
        variance = (wide - mean).square_().mean(dims)
        mean = mean.reshape(-1).double()
        self.sums[call][0] += count
        self.sums[call][1:] += torch.cat([mean, variance.double() + mean.square()]) * count

    def begin_microbatch(self) -> None:
        """The next call is the first of a forward."""
        self.num_calls = 0

    def take(self, device: torch.device) -> list[Tensor]:
        """The sums of all slots, and forget them."""
        missing = self.num_slots - len(self.sums)
        empty = torch.zeros(1 + 2 * self.num_channels, dtype=torch.float64, device=device)
        taken, self.sums = [*self.sums, *[empty] * missing], []
        return taken

    @torch.no_grad()
    def move_alone(self, inputs: Tensor) -> None:
        """Move the running statistics by one call outside of a training step, where compiled code cannot do it."""
        kept, self.sums, self.num_calls = self.sums, [], 0
        self._add(inputs)
        self.move(self.sums[0])
        self.sums = kept

    def move(self, sums: Tensor) -> None:
        """Move the running statistics as one process would at one call; not at all where the count is zero.

        The count is read by arithmetic only: a branch on it would wait for the device.
        """
        module, count = self.module, sums[0]
        is_called = count > 0
        mean, square = sums[1:].div(count.clamp(min=1)).chunk(2)
        variance = (square - mean.square()).clamp(min=0) * (count / (count - 1).clamp(min=1))
        tracked = module.num_batches_tracked
        if tracked is not None:
            tracked.add_(is_called)
        if module.momentum is not None:
            share = is_called * module.momentum
        else:  # the mean of all batches so far
            share = is_called / tracked.clamp(min=1) if tracked is not None else is_called * 0.0
        for running, value in ((module.running_mean, mean), (module.running_var, variance)):
            if running is not None:
                wide = running.double()
                running.copy_(wide + share * (value - wide))


# Compiled code finds a layer by number; a layer that is no longer deferred is not found.
_layers: weakref.WeakValueDictionary[int, _Layer] = weakref.WeakValueDictionary()


# Opaque to the compiler: whether a call counts is known only when it runs (in backward it is recomputation), and a
# captured graph that is replayed would not run Python at all.
@torch.library.custom_op("lightning_bigmodel::note_batch", mutates_args=("token",), tags=(torch.Tag.cudagraph_unsafe,))
def _note_batch(inputs: Tensor, token: Tensor, key: int) -> None:
    layer = _layers.get(key)
    if layer is not None and not layer.note(inputs):
        layer.move_alone(inputs)


@_note_batch.register_fake
def _(inputs: Tensor, token: Tensor, key: int) -> None:
    return None


def _deferring_forward(layer: _Layer, before: Any) -> Callable[..., Tensor]:
    """A `forward` that notes its input and leaves running statistics alone within training steps."""

    def native(self: Any, *args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs) if before is not None else type(self).forward(self, *args, **kwargs)

    # Named as what it stands for: so a module that is pickled with it comes back with its class's own.
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        defers = self is layer.module and self.training and self.track_running_stats  # a copy of the module does not
        if defers and torch.compiler.is_compiling():
            _note_batch(input.detach(), layer.token, layer.key)
        elif defers:
            defers = layer.note(input.detach())
        if not defers:
            return native(self, input, *args, **kwargs)
        # Without it torch, and layers derived from torch's, normalise by the batch and write nothing.
        self.track_running_stats = False
        try:
            return native(self, input, *args, **kwargs)
        finally:
            self.track_running_stats = True

    return forward


class DeferredStatistics:
    """Moves running statistics of batch normalisation once a training batch, by the whole batch over all data ranks.

    Within a training step layers in training mode normalise each micro-batch by its own mean and variance, so outputs
    and gradients **differ from one process**; evaluation then uses running statistics that are those of whole batches:
    for equal inputs of the layer `running_mean`, `running_var` (unbiased) and `num_batches_tracked` are what one
    process stores, with any `momentum` (None: the mean over all batches). Of a layer called several times in a forward
    the first calls are one batch, the second calls another, and so on. Recomputation in backward (activation
    checkpointing) counts nothing, where torch by itself counts twice. Layers in `.eval()` mode, and calls outside of
    training steps, are as always. Do not use it where micro-batches have few samples: use GroupNorm.

    Args:
        layers: Name -> layer, on every rank alike and in the same order.
        owned: Names of the layers of this rank's stages.
        loose: Names of the layers outside of all units, whose code every stage may run: the last stage counts.
        device: Where this rank computes.
        data_group: The data ranks.
        pipe_group: This rank's pipeline.
        last_pipe_rank: The rank in it that has the last stage.

    Memory: 8 (1 + 2 channels) bytes a layer and call, and at each call for a moment one more copy of the layer's input
    (in half precision two, of single precision). Communication a step: the former in one all-reduce over the data
    ranks, if there are several; and the running statistics of `loose` once from the last stage.
    """

    def __init__(
        self,
        layers: Mapping[str, _BatchNorm],
        *,
        owned: Collection[str],
        loose: Collection[str],
        device: torch.device,
        data_group: dist.ProcessGroup | None,
        pipe_group: dist.ProcessGroup | None,
        last_pipe_rank: int,
    ) -> None:
        self._device, self._data_group, self._pipe_group = device, data_group, pipe_group
        self._last_pipe_rank = last_pipe_rank
        self._is_training, self._is_last_stage = False, False
        self._layers = [_Layer(name, module, self._counts) for name, module in layers.items()]
        self._owned = [layer for layer in self._layers if layer.name in owned]
        self._loose = [layer for layer in self._layers if layer.name in loose]
        for layer in self._loose:
            layer.is_loose = True
        self._before = [layer.module.__dict__.get("forward") for layer in self._layers]
        for layer, before in zip(self._layers, self._before, strict=True):
            layer.module.__dict__["forward"] = MethodType(_deferring_forward(layer, before), layer.module)

    def close(self) -> None:
        """Give the layers their own `forward` back."""
        for layer, before in zip(self._layers, self._before, strict=True):
            layer.module.__dict__.pop("forward", None)
            if before is not None:
                layer.module.__dict__["forward"] = before
            _layers.pop(layer.key, None)
        self._layers, self._owned, self._loose, self._before = [], [], [], []

    def _counts(self, layer: _Layer) -> bool | None:
        """Whether a call of a layer counts now; None outside of a training step."""
        if not self._is_training:
            return None
        return self._is_last_stage or not layer.is_loose

    @contextmanager
    def collecting(self, *, is_last_stage: bool) -> Iterator[None]:
        """The forward of one micro-batch on one stage."""
        for layer in self._layers:
            layer.begin_microbatch()
        self._is_training, self._is_last_stage = True, is_last_stage
        try:
            yield
        finally:
            self._is_training = False

    def news(self) -> dict[int, int]:
        """Index of a layer -> its calls in a forward, where they are more than the ranks have agreed on."""
        return {index: len(layer.sums) for index, layer in enumerate(self._layers) if len(layer.sums) > layer.num_slots}

    def forget(self) -> None:
        """The training batch will run again."""
        for layer in self._layers:
            layer.sums = []

    @torch.no_grad()
    def finish(self, news: Sequence[Mapping[int, int]], *, counts: bool) -> None:
        """The training batch is over: move the running statistics. Collective over data ranks and pipeline.

        Args:
            news: What `news` gave on the ranks, of all data ranks.
            counts: False on a rank whose batch only keeps it in step with the others.
        """
        for more in news:
            for index, num_calls in more.items():
                self._layers[index].num_slots = max(self._layers[index].num_slots, num_calls)
        called = [bool(layer.sums) for layer in self._owned]
        if any(layer.num_slots for layer in self._owned):
            parts = [part for layer in self._owned for part in layer.take(self._device)]
            flat = torch.cat(parts)
            if not counts:
                flat.zero_()
            if dist.get_world_size(self._data_group) > 1:
                dist.all_reduce(flat, group=self._data_group)
            sums = iter(flat.split([part.numel() for part in parts]))
            for layer, was_called in zip(self._owned, called, strict=True):
                for _ in range(layer.num_slots):
                    total = next(sums)
                    # Frozen since, it may have been called in `.eval()` mode: what backward needs must not be written.
                    if was_called or layer.module.training:
                        layer.move(total)
        if self._loose and dist.get_world_size(self._pipe_group) > 1:
            buffers = [buffer for layer in self._loose for buffer in layer.module.buffers()]
            broadcast_tensors([(self._last_pipe_rank, buffer) for buffer in buffers], self._pipe_group)
