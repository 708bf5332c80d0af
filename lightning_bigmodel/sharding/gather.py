"""ZeRO stage 3 (arXiv 1910.02054): whole parameters exist only while their unit computes.

A unit is a set of parameters that is gathered in one message: a block of the model, a large outer layer, or the small
rest. Hooks on the unit's modules gather before its forward and before its backward, and give the memory up after them.

    forward of a micro-batch:   for each unit in order: gather (the next one's message is under way), compute, give up
    backward of a micro-batch:  for each unit in reverse: gather, compute, reduce gradients to rows, give up

`passes` decides when; here is how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel import _host
from lightning_bigmodel.sharding.flat import FlatRows, Pending
from lightning_bigmodel.sharding.guard import mark_absent, mark_present
from lightning_bigmodel.sharding.offload import HostCopies
from lightning_bigmodel.sharding.tensor_guard import refuse_slice
from lightning_bigmodel.sharding.zero import ComputeDtype, ZeroShards

if TYPE_CHECKING:
    from lightning_bigmodel.sharding.passes import GatherPasses

__all__ = ["ParameterShards", "Unit"]


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        name: For messages.
        modules: Modules whose calls use the parameters; none for a unit that is gathered for whole passes.
        parameters: The parameters.
    """

    name: str
    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    messages: list[tuple[list[nn.Parameter], FlatRows, Tensor]] = field(default_factory=list, repr=False)
    waiting: list[Pending] = field(default_factory=list, repr=False)
    versions: dict[int, int] = field(default_factory=dict, repr=False)  # of parameters, when they became whole
    is_present: bool = False
    stays: bool = False  # for whole passes: no call of one module announces its use


class ParameterShards(ZeroShards):
    """Row shards of stage 3: the rows are all that is kept.

    Args:
        units: Every parameter in exactly one unit; whole, on any device.
        names: id(parameter) -> its name.
        group: The ranks the rows are spread over; at least two.
        device: Where the module computes, and rows are kept unless there are `copies`.
        compute_dtype: Type of gathered parameters, or a rule that tells it for each; None leaves the type they have.
            Rows, and sums of gradients, keep that one.
        keep_gathered: Keep parameters from their first use until the optimizer step: one gather a step instead of two
            a micro-batch, for the memory of the whole parameters.
        prepare: Called with a unit's parameters before their rows are taken; makes parameters on the meta device real.
        copies: Keeps rows and their gradients on the host; each gather then copies this rank's rows to the device.

    Memory kept: the rows; while computing, the unit at work and the next one. Communication a micro-batch: each unit's
    parameters once in forward and once in backward, and a reduce-scatter of its gradients; besides two bytes a unit at
    the end of a forward, by which ranks whose branches differ ask for more.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        names: Mapping[int, str],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        compute_dtype: ComputeDtype = None,
        keep_gathered: bool = False,
        prepare: Callable[[Sequence[nn.Parameter]], None] | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        self.units, self.keep_gathered = list(units), keep_gathered
        self._prepare = prepare
        self.device = device
        self.unit_of = {id(parameter): unit for unit in units for parameter in unit.parameters}
        self.active: GatherPasses | None = None
        self._hooks: list[Any] = []
        parameters = {names[id(parameter)]: parameter for unit in units for parameter in unit.parameters}
        super().__init__(parameters, stage=3, group=group, compute_dtype=compute_dtype, copies=copies)
        self._install_hooks()

    def _place(self) -> None:
        for unit in self.units:
            if self._prepare is not None:
                self._prepare(unit.parameters)
            by_type: dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]] = {}
            for parameter in unit.parameters:
                by_type.setdefault((parameter.dtype, self.used_dtype(parameter)), []).append(parameter)
            for (dtype, used), parameters in by_type.items():
                rows = self.rows_of(parameters)
                flat = (
                    torch.zeros(rows.numel, dtype=dtype, device=self.device)
                    if self.copies is None
                    else self.copies.zeros(rows.numel, dtype)
                )
                for parameter, view in zip(parameters, rows.own(flat), strict=True):
                    view.copy_(self.records[id(parameter)].rows(parameter.data))
                    parameter.data = torch.empty(parameter.shape, dtype=used, device=self.device)
                    self.wholes[id(parameter)] = parameter.data
                    self.shards[id(parameter)] = nn.Parameter(view, requires_grad=parameter.requires_grad)
                unit.messages.append((parameters, rows, flat))
            self._drop(unit)

    # -- presence ------------------------------------------------------------------------------------------------------

    def start_gather(self, unit: Unit) -> None:
        """Send a unit's rows on their way. Collective."""
        if unit.is_present or unit.waiting:
            return
        for parameters, rows, flat in unit.messages:
            unit.waiting.append(rows.gather(self._on_device(flat, self.wholes[id(parameters[0])].dtype)))

    def _on_device(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        return flat.to(dtype) if self.copies is None else self.copies.to_device(flat, dtype)

    @torch.no_grad()
    def finish_gather(self, unit: Unit) -> None:
        """Make a unit's parameters whole."""
        if unit.is_present:
            return
        self.start_gather(unit)
        for (parameters, rows, _), pending in zip(unit.messages, unit.waiting, strict=True):
            wholes = [self.wholes[id(parameter)] for parameter in parameters]
            for whole in wholes:
                whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            rows.unpack(pending.wait(), wholes)
        unit.waiting.clear()
        unit.is_present = True
        for parameter in unit.parameters:
            mark_present(parameter)
            unit.versions[id(parameter)] = parameter._version

    def gather_again(self, unit: Unit, *, keep: bool) -> None:
        """Send a unit's rows once more, whether or not it is whole here. Collective.

        Args:
            unit: The unit.
            keep: Whether it is to be whole here afterwards; else it is as before.
        """
        if unit.is_present:
            self._take_written(unit)
        elif keep:
            self.finish_gather(unit)
            return
        for parameters, rows, flat in unit.messages:
            rows.gather(self._on_device(flat, self.wholes[id(parameters[0])].dtype)).wait()

    @torch.no_grad()
    def _take_written(self, unit: Unit) -> None:
        """Rows take over what a step has written into whole parameters in place, as it may in one process."""
        for parameter in unit.parameters:
            key = id(parameter)
            if parameter._version != unit.versions[key]:
                self.shards[key].copy_(self.records[key].rows(self.wholes[key]))
                unit.versions[key] = parameter._version

    @torch.no_grad()
    def _take_all(self) -> None:
        """Rows take over all values, also of memory that was put in the place of parameters."""
        for parameter in self.parameters:
            key, data = id(parameter), parameter.data
            if data.data_ptr() != self.wholes[key].data_ptr():
                self.wholes[key].copy_(data)
                parameter.data = self.wholes[key]
            self.shards[key].copy_(self.records[key].rows(self.wholes[key]))

    def take_changes(self) -> None:
        """Rows take over what steps have written into parameters that are whole at the moment. No communication."""
        self.land()
        for unit in self.units:
            if unit.is_present:
                self._take_written(unit)

    def drop(self, unit: Unit) -> None:
        """Give up a unit's whole parameters. No communication."""
        if unit.is_present or unit.waiting:
            self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        if unit.is_present:
            self._take_written(unit)
        for pending in unit.waiting:
            pending.wait()
        unit.waiting.clear()
        unit.is_present = False
        for parameter in unit.parameters:
            # By its storage: tensors that autograd has saved for backward find their values there again.
            self.wholes[id(parameter)].untyped_storage().resize_(0)
            mark_absent(parameter, self._fetch, self.shards[id(parameter)])

    def drop_all(self) -> None:
        """Give up all whole parameters. No communication."""
        for unit in self.units:
            self.drop(unit)

    def _fetch(self, parameter: nn.Parameter) -> None:
        """Code reads a parameter that is not here."""
        unit = self.unit_of[id(parameter)]
        if self.active is None or unit not in self.active.units:
            record = self.records[id(parameter)]
            raise RuntimeError(
                f"`{record.name}` is read outside of a step, while its rows are spread over {self.num_ranks} ranks "
                "(`zero_stage=3`). Only in a training, validation, test or predict step parameters are put together by "
                "themselves. Read it there, or on all ranks within `with trainer.strategy.whole_parameters():`, or use "
                "`zero_stage=2`."
            )
        refuse_slice(parameter)
        self.active.pin(unit)

    @contextmanager
    def gathered(self, *, write: bool = True) -> Iterator[None]:
        """All parameters whole within; with `write`, changes made to them are kept. Collective."""
        before = [unit for unit in self.units if unit.is_present]
        for unit in self.units:
            self.finish_gather(unit)
        try:
            yield
            if write:
                self.land()
                self._take_all()
        finally:
            for unit in self.units:
                unit.versions = {id(parameter): parameter._version for parameter in unit.parameters}
                if unit not in before:
                    self._drop(unit)

    def publish(self, parameters: Any = None) -> None:
        """After the rows have changed: whole parameters are old. No communication."""
        self.drop_all()

    def restore(self) -> None:
        """Ordinary whole parameters again, in the type of the rows. Collective; memory of the whole model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for unit in self.units:
            if self.keep_gathered:
                self.drop(unit)
            for parameters, rows, flat in unit.messages:
                for parameter in parameters:
                    mark_present(parameter)
                    parameter.data = torch.empty(parameter.shape, dtype=flat.dtype, device=self.device)
                    self.wholes[id(parameter)] = parameter.data
                own = self._on_device(flat, flat.dtype)
                rows.unpack(rows.gather(own).wait(), [parameter.data for parameter in parameters])
            unit.is_present = True
            unit.versions = {id(parameter): parameter._version for parameter in unit.parameters}

    def give_up(self) -> None:
        """After a failure: ordinary parameters of the right shape that hold one NaN. No communication."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self.parameters:
            mark_present(parameter)
            fill = float("nan") if parameter.is_floating_point() else 0
            parameter.data = torch.full((), fill, dtype=parameter.dtype, device=self.device).expand(parameter.shape)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _install_hooks(self) -> None:
        users: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            unit.stays = len(unit.modules) != 1
            for module in unit.modules:
                users.setdefault(module, []).append(unit)
        for module, used in users.items():
            self._hooks += [
                module.register_forward_pre_hook(_Before(self, used), with_kwargs=True, prepend=True),
                module.register_forward_hook(_After(self, used), with_kwargs=True),
            ]


class _Before:
    def __init__(self, shards: ParameterShards, units: list[Unit]) -> None:
        self._shards, self._units = shards, units

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        passes = self._shards.active
        if passes is None:
            return
        units = [unit for unit in self._units if unit in passes.units]
        for unit in units:
            passes.need(unit)
        if torch.is_grad_enabled() and not _host.in_backward():
            inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
            passes.note_call(units, inputs)


class _After:
    def __init__(self, shards: ParameterShards, units: list[Unit]) -> None:
        self._shards, self._units = shards, units

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        passes = self._shards.active
        if passes is None or _host.in_backward():  # recomputed: backward needs it next
            return
        units = [unit for unit in self._units if unit in passes.units]
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(passes.before_backward(units))
        for unit in units:
            passes.after_call(unit)


def _tensors(value: Any) -> list[Tensor]:
    """Tensors in tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for item in fields(value) for tensor in _tensors(getattr(value, item.name))]
    return []
