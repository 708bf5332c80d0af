"""Tensor parallelism: the layers of a module are cut over ranks, and its code stays as it is.

Method: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"
(https://arxiv.org/abs/1909.08053, section 3): the first layer of a pair is cut by output features (`colwise`), the
second by input features (`rowwise`), and what lies between is computed on a rank's share of features or heads. Sequence
styles: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198, section 4.2.2).

What differs: the module is the user's own. Parameters remain the same objects under the same names and hold a plain
local slice; hooks on modules exchange activations; attributes such as `num_heads` are divided. So ZeRO, optimizers and
pipelines see ordinary, smaller parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_bigmodel.sharding.tensor_hooks import UnlistedModuleError, install_hooks
from lightning_bigmodel.sharding.tensor_layout import TensorLayout, lay_out
from lightning_bigmodel.sharding.tensor_ops import Exchange, GroupExchange
from lightning_bigmodel.sharding.tensor_slices import Region, SlicedParameter
from lightning_bigmodel.sharding.tensor_styles import STYLES, Target, layer_of

__all__ = [
    "STYLES",
    "Region",
    "SlicedParameter",
    "TensorSlices",
    "UnlistedModuleError",
    "apply_tensor_plan",
    "check_tensor_plan",
    "cut_module",
]


class TensorSlices:
    """What a module's tensor-parallel parameters are slices of, and the way back.

    Attributes:
        records: `id(parameter)` -> its record, for each parameter that is cut and held here.
        partial_gradients: Whole parameters whose gradient each rank has in part: sum it over the tensor group before
            the optimizer steps. All other whole parameters have the same gradient on every rank.
        checks_after_step: To be called when a step is over; they raise where its use of cut layers was wrong.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.records: dict[int, SlicedParameter] = {}
        self.partial_gradients: list[nn.Parameter] = []
        self.checks_after_step: list[Callable[[], None]] = []
        self._exchange = exchange
        self._parameters: list[nn.Parameter] = []
        self._handles: list[RemovableHandle] = []
        self._attributes: list[tuple[nn.Module, str, Any]] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of which this rank holds a slice."""
        return list(self._parameters)

    def is_sliced(self, parameter: nn.Parameter) -> bool:
        """Whether this rank holds a slice of `parameter`."""
        return id(parameter) in self.records

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of the whole parameter; that of `parameter` itself if it is not cut."""
        record = self.records.get(id(parameter))
        return parameter.shape if record is None else record.full_shape

    def slice_full(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's slice of a tensor shaped like the whole parameter: weights, a gradient, an optimizer state.

        Raises:
            ValueError: If `full` has another shape.
        """
        record = self.records.get(id(parameter))
        return full if record is None else record.take(full)

    def gather_full(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """The whole tensor from each rank's slice. Collective: one all-gather of `local`; needs the whole twice."""
        record = self.records.get(id(parameter))
        if record is None:
            return local
        if local.shape != record.local_shape:
            raise ValueError(
                f"A tensor of shape {tuple(local.shape)} was given to be joined like parameter {record.name!r}, whose "
                f"slices have shape {tuple(record.local_shape)}."
            )
        return record.merge(list(self._exchange.all_gather(local.detach().unsqueeze(0), 0)))

    def remove(self) -> None:
        """Take off hooks and give attributes their values back; parameters stay cut."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._attributes:
            owner, name, value = self._attributes.pop()
            setattr(owner, name, value)

    def restore(self) -> None:
        """Put whole parameters, and gradients, back on every rank and undo hooks and attributes. Collective."""
        self.remove()
        for parameter in self._parameters:
            gradient = parameter.grad
            whole = self.gather_full(parameter, parameter.data)
            whole_gradient = None if gradient is None else self.gather_full(parameter, gradient)
            _replace(parameter, whole, whole_gradient)
        self.records.clear()
        self._parameters.clear()
        self.partial_gradients.clear()

    def _cut(self, layout: TensorLayout) -> None:
        for parameter, record in layout.slices:
            record = record.of_rank(self._exchange.rank)
            gradient = None if parameter.grad is None else record.take(parameter.grad)
            _replace(parameter, record.take(parameter.data), gradient)
            self.records[id(parameter)] = record
            self._parameters.append(parameter)
        self.partial_gradients.extend(layout.partial)
        for owner, name, value in layout.attributes:
            self._set(owner, name, value)
        for target in layout.targets:
            self._set_sizes(target)
        handles, checks = install_hooks(layout, self._exchange)
        self._handles += handles
        self.checks_after_step += checks

    def _set_sizes(self, target: Target) -> None:
        """What a layer says of its own size; Conv1D's forward reads it."""
        style, module, layer = target.style.name, target.owner, layer_of(target.owner)
        if layer is None or not style.startswith(("colwise", "rowwise")):
            return
        name = layer.out_attribute if style.startswith("colwise") else layer.in_attribute
        num_rows = getattr(module, name)
        self._set(module, name, num_rows // self._exchange.size)
        padding = getattr(module, "padding_idx", None)
        if layer.kind == "embedding" and style == "rowwise" and padding is not None:
            # The row without a gradient is one rank's only.
            own = padding - self._exchange.rank * getattr(module, name)
            self._set(module, "padding_idx", own if 0 <= own < getattr(module, name) else None)

    def _set(self, owner: nn.Module, name: str, value: Any) -> None:
        self._attributes.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def apply_tensor_plan(
    module: nn.Module, plan: Mapping[str, str], group: dist.ProcessGroup | None, rank: int, size: int
) -> TensorSlices:
    """Cut a module's parameters over the ranks of a group, in place, and make its forward compute this rank's share.

    The module then gives the outputs and gradients that it gives whole, in other memory: each rank holds `1 / size` of
    the parameters that the plan cuts. A pair of `colwise` and `rowwise` layers costs one all-reduce of the rowwise
    output in the forward and one of the colwise input in the backward (layers that share an input share it), each
    `2 (size - 1) / size` times those bytes over the wire. With `sequence` styles each is an all-gather and a
    reduce-scatter of the same bytes together, and activations between pairs take `1 / size` of the memory; the
    backward then gathers nothing anew, because the gathered input is kept.

    Dropout between the layers of a pair draws different masks on each rank, as it acts on different heads and features;
    elsewhere ranks draw alike. That needs equal states of the generators on all ranks at the start of a step. Masks are
    not those of one process.

    Parameters that are one number expanded are left alone, as are their modules: another pipeline stage holds them.
    No graph of an earlier forward may be alive: it keeps the old shape of a parameter's gradient.

    When not to use it: over a slow network, as the exchange stands in the way of every layer; for layers so small that
    their share no longer fills a device.

    Args:
        module: The module; its parameters whole, and alike on all ranks.
        plan: Pattern -> style. A pattern is a module's name in which `*` stands for any text within one component
            (`model.layers.*.mlp.up_proj`); one that fits no whole name may fit the last components (`up_proj`). Of two
            patterns that match one module, the later counts. Styles, which `STYLES` lists: `colwise` and `rowwise` as a
            pair; `colwise_gather` and `rowwise_split` for a layer alone; `replicate`; `replicate_partial` for a module
            such as a norm of each head, that is whole and runs between the two of a pair; `sequence`, `sequence_split`
            and `sequence_gather` for activations cut along the sequence between pairs. `colwise:3` cuts each of
            three equal parts side by side (q|k|v), `colwise:64,16,16` parts of these widths.
        group: The ranks that share layers.
        rank: This rank in the group.
        size: Number of its ranks.

    Returns:
        The record of what was cut.

    Raises:
        ValueError: If a pattern matches nothing, a style does not exist or a module cannot take it; if heads or widths
            do not divide by `size`; if a layer has no partner; if a parameter is shared with a module that the plan
            does not cut alike. All of it before anything has changed.

    Example::

        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        slices = apply_tensor_plan(model, plan, group, dist.get_rank(group), dist.get_world_size(group))
        model(inputs).sum().backward()
        for parameter in slices.partial_gradients:
            dist.all_reduce(parameter.grad, group=group)
    """
    return cut_module(module, plan, GroupExchange(group, rank, size))


def check_tensor_plan(module: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Raise what `apply_tensor_plan` would, without a group and without changing anything.

    Raises:
        ValueError: As `apply_tensor_plan`.
    """
    lay_out(module, plan, size)


def cut_module(module: nn.Module, plan: Mapping[str, str], exchange: Exchange) -> TensorSlices:
    """`apply_tensor_plan` over any way of exchanging tensors.

    Raises:
        ValueError: As `apply_tensor_plan`.
    """
    size, rank = operator.index(exchange.size), operator.index(exchange.rank)
    if not 0 <= rank < size:
        raise ValueError(f"`rank={rank}` must be at least 0 and less than `size={size}`.")
    layout = lay_out(module, plan, size)
    slices = TensorSlices(exchange)
    if size > 1:
        slices._cut(layout)
    return slices


def _replace(parameter: nn.Parameter, data: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter another shape, and a gradient of that shape."""
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient
