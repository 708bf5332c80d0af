"""Which later code consumes what a unit produced: dataflow of one step, tracked at operator level.

Every tensor carries tags saying which unit's output it derives from. Between units, tags spread from operands to
results; a unit's outputs get a fresh tag each. The positions at which a tag is consumed say how far the value must
travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_bigmodel._host import is_fake
from lightning_bigmodel.pipeline.tree import leaves, map_tensors, tensor_leaves

__all__ = ["Dataflow", "FlowRecord", "PythonReads", "Tag"]

# ("out", unit, leaf) a unit's output; ("in", unit, 0) a value inside a unit; ("param", id, 0) a parameter used outside
# its unit; ("random", n, 0) the result of a random operator between units.
Tag = tuple[str, int, int]

_MAX_OPERATORS = 300_000  # of one step; a model of a thousand layers has fewer
_SIZED_BY_DATA = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
_READS = (Tensor.numpy, Tensor.tolist, Tensor.__array__)


@dataclass
class FlowRecord:
    """What one traced step did with the values that cross unit borders."""

    consumers: dict[Tag, set[int]] = field(default_factory=lambda: defaultdict(set))
    leaks: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    edited_in_place: dict[Tag, set[int]] = field(default_factory=lambda: defaultdict(set))
    flops: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    draws_between_units: bool = False
    data_sized_at: int | None = None


class Dataflow(TorchDispatchMode):
    """Dispatch mode that spreads tags and records who consumes them.

    Args:
        parameters: id of each (fake or real) parameter tensor -> its key; used to notice use outside the owning unit.
    """

    def __init__(self, parameters: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = FlowRecord()
        self.position = 0  # number of units entered so far; between units, the index of the next one
        self.inside: int | None = None
        self._owned: frozenset[int] = frozenset()
        self._parameters = dict(parameters)
        self._tags: Any = WeakTensorKeyDictionary()
        self._outputs: Any = WeakTensorKeyDictionary()
        self._num_random = 0
        self._num_operators = 0
        # Storages written in place, by address, with the tags of what went in: a tensor sees what was written through
        # a view of it. Holding the storages keeps their addresses theirs.
        self._written: dict[int | None, tuple[Any, set[Tag]]] = {}
        self._written_inside: dict[int, Any] = {}
        self._numbers: set[Tag] = set()
        self._all_true: Any = WeakTensorKeyDictionary()

    def tags(self, tensors: Iterable[Tensor]) -> set[Tag]:
        """All tags the given tensors carry."""
        found: set[Tag] = set()
        for tensor in tensors:
            found.update(self._tags.get(tensor, ()))
            if self._written:
                found.update(self._written.get(_address(tensor), (None, ()))[1])
            key = self._parameters.get(id(tensor))
            if key is not None and key not in self._owned:
                found.add(("param", key, 0))
        return found

    def consume(self, value: Any, position: int) -> None:
        """Note that code at `position` reads every tensor in `value`."""
        for tag in self.tags(tensor_leaves(value)):
            self._note(tag, position)

    def note_number(self, tensor: Tensor) -> None:
        """A value is read into Python."""
        if self.inside is None:
            self._numbers |= self.tags([tensor])

    def finish(self, result: Any) -> None:
        """The step returned `result`."""
        self.consume(result, self.position)
        # What became a Python number may have steered any later code, so every stage that repeats the code needs it.
        for tag in self._numbers:
            self._note(tag, self.position)

    def _note(self, tag: Tag, position: int) -> None:
        if tag[0] == "in" and tag[1] != self.inside:
            self.record.leaks[tag[1]].add(position)
        else:
            self.record.consumers[tag].add(position)

    def enter(self, unit: int, module: nn.Module, arguments: Any) -> None:
        """A unit is called: everything handed to it is consumed there."""
        self.consume(arguments, unit)
        self.inside = unit
        self._owned = frozenset(
            self._parameters[id(parameter)] for parameter in module.parameters() if id(parameter) in self._parameters
        )

    def leave(self, unit: int, arguments: Any, output: Any) -> list[int | None]:
        """A unit returned: tag its outputs. Returns, per tensor leaf, the index of the argument it is (or None)."""
        self.inside, self._owned, self.position = None, frozenset(), unit + 1
        arguments = tensor_leaves(arguments)
        self._leave_written(unit, arguments)
        given = {id(tensor): index for index, tensor in enumerate(arguments)}
        aliases: list[int | None] = []
        for index, tensor in enumerate(tensor_leaves(output)):
            aliases.append(given.get(id(tensor)))
            if aliases[-1] is None:
                self._tags[tensor] = {("out", unit, index)}
                self._outputs[tensor] = ("out", unit, index)
        return aliases

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._num_operators += 1
        if self._num_operators > _MAX_OPERATORS:
            raise RuntimeError(
                f"the step ran more than {_MAX_OPERATORS} operators: a loop in it (such as text generation) ends by a "
                "computed value, which a trace does not know"
            )
        operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        tags = self.tags(operands)
        where = self.position if self.inside is None else self.inside
        for tag in tags:
            if self.inside is None or tag != ("in", self.inside, 0):
                self._note(tag, where)
        self._note_edits(func, args, kwargs, tags, where)
        output = self._run(func, args, kwargs, operands)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.record.flops[where] += int(formula(*args, **kwargs, out_val=output))
        if self.inside is not None:
            tags = {("in", self.inside, 0)}
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.record.draws_between_units |= self.position > 0
            if tags:
                tags = tags | {("random", self._num_random, 0)}
                self._num_random += 1
        elif isinstance(output, (bool, int, float)):
            self._numbers |= tags
        elif func._schema.name in ("aten::all", "aten::_is_all_true"):
            self._all_true[output] = True
        for tensor in tensor_leaves(output):
            if id(tensor) not in self._parameters:
                self._tags[tensor] = tags | self._tags.get(tensor, set()) if self.inside is None else set(tags)
        return output

    def _leave_written(self, unit: int, arguments: list[Tensor]) -> None:
        """What the unit wrote into memory it shares with others is a value from its inside that was not returned."""
        shared = {_address(tensor) for tensor in [*arguments, *self._outputs]} | set(self._written)
        for address, storage in self._written_inside.items():
            if address in shared:
                known = self._written.get(address, (storage, set()))[1]
                self._written[address] = (storage, known | {("in", unit, 0)})
        self._written_inside.clear()

    def _note_edits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tags: set[Tag], where: int) -> None:
        if not func._schema.is_mutable:
            return
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for value in tensor_leaves(args[index] if index < len(args) else kwargs.get(argument.name)):
                address = _address(value)
                if address is None:
                    continue
                if self.inside is not None:
                    self._written_inside[address] = value.untyped_storage()
                    continue
                known = self._written.get(address, (None, set()))[1]
                self._written[address] = (value.untyped_storage(), known | tags)
                for tensor, tag in list(self._outputs.items()):
                    if _address(tensor) == address:
                        self.record.edited_in_place[tag].add(where)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        fake = any(is_fake(operand) for operand in operands)
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            if not fake:
                if not operands[0].dtype.is_floating_point and operands[0].dtype != torch.bool:
                    self._sized_by_data()
                return func(*args, **kwargs)
            # An intermediate's value is unknown here; a number that is neither zero nor special keeps user code going.
            # Checks are taken to pass: `x.all()` is true, other conditions (`x.any()`) are not.
            if operands[0].dtype == torch.bool:
                return operands[0] in self._all_true
            return 1.0 if operands[0].dtype.is_floating_point else 1
        if fake and name == "aten::index":
            args = (args[0], self._concrete_masks(args[1]), *args[2:])
        elif fake and name == "aten::masked_select":
            source, mask = torch.broadcast_tensors(args[0], args[1])
            self._sized_by_data()
            count = int(mask.sum()) if not is_fake(mask) else mask.numel()
            return source.reshape(-1)[:1].expand(count).clone()
        elif name in _SIZED_BY_DATA:
            self._sized_by_data()
        if not fake:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except Exception:  # the shape rule of this operator is stricter than its kernel, or there is none
            output = _run_on_zeros(func, args, kwargs)
            if name == "aten::_pack_padded_sequence":  # the second output holds lengths, which the batch gives
                return output[0], _run_on_zeros(func, args, kwargs, fake=False)[1]
            return output

    def _concrete_masks(self, indices: Any) -> list[Any]:
        """Boolean masks made from the batch become index lists, whose sizes a fake operator can use."""
        concrete: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                self._sized_by_data()
                real = torch.ones(index.shape, dtype=torch.bool) if is_fake(index) else index
                concrete.extend(real.nonzero().unbind(1))
            else:
                concrete.append(index)
        return concrete

    def _sized_by_data(self) -> None:
        if self.record.data_sized_at is None:
            self.record.data_sized_at = self.position


class PythonReads(TorchFunctionMode):
    """Lets a step read values by `.numpy()` and `.tolist()`, which no dispatch mode sees; fake values read as ones."""

    def __init__(self, flow: Dataflow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            tensor = args[0]
            self._flow.note_number(tensor)
            if is_fake(tensor):
                args = (torch.ones(tensor.shape, dtype=tensor.dtype), *args[1:])
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int | None:
    """Identifies the memory of a tensor, which views of it share; None for sparse layouts."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None


def _run_on_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, fake: bool = True) -> Any:
    """Run one operator for real, on zeros of the right shapes, and forget the values (if `fake`)."""
    mode: Any = None

    def real(tensor: Tensor) -> Tensor:
        nonlocal mode
        if not is_fake(tensor):
            return tensor
        mode = tensor.fake_mode  # type: ignore[attr-defined]  # FakeTensor's
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    output = func(*map_tensors(real, args), **map_tensors(real, kwargs))
    if not fake:
        return output
    given = {id(tensor) for tensor in tensor_leaves((args, kwargs))}  # what was written into stays itself
    return map_tensors(lambda t: t if id(t) in given else mode.from_tensor(t.detach()), output)
