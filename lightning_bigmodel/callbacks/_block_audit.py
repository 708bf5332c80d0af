"""Blocks in 16 bits against the same blocks in fp32: one call of each is kept, and run again once gradients came."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._block_twin import as_full, make_twin
from lightning_bigmodel.mesh.rng import RngState, capture_rng, restore_rng
from lightning_bigmodel.pipeline.tree import map_tensors, tensor_leaves
from lightning_bigmodel.scaling.audit import OperatorAudit
from lightning_bigmodel.scaling.casting import run_full
from lightning_bigmodel.scaling.comparison import Comparison, PairSums
from lightning_bigmodel.scaling.op_lists import OpPrecision

__all__ = ["BlockAudit", "BlockNumbers", "Call", "Ran"]

_NUM_SMALLER_SCALES = 3  # each a sixteenth of the one before

_Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class Call:
    """One forward of a block, and the gradients that came back to it.

    Attributes:
        inputs: Arguments, in memory of their own.
        kept: id of a parameter or buffer -> its value in that forward.
        rng: Random state before it.
        autocast: Whether autocast was on, and its type.
        gradients: Index among the tensors put out -> gradient.
    """

    inputs: tuple[Any, Any]
    kept: dict[int, Tensor]
    rng: RngState
    autocast: tuple[bool, torch.dtype]
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BlockNumbers:
    """What one block, or one of it in several steps, loses.

    Attributes:
        output: Of what it puts out.
        gradient: Of the gradients of its inputs and parameters, given the same gradients of what it puts out.
        note: Why something is missing.
    """

    output: Comparison = Comparison()
    gradient: Comparison = Comparison()
    note: str = ""

    def __add__(self, other: BlockNumbers) -> BlockNumbers:
        """Of both."""
        return BlockNumbers(
            output=self.output + other.output,
            gradient=self.gradient + other.gradient,
            note=self.note or other.note,
        )

    @property
    def rank(self) -> tuple[bool, float]:
        """To sort by, the worse of both."""
        return max(self.output.rank, self.gradient.rank)

    def exceeds(self, tolerance: float) -> bool:
        """Whether one of both does."""
        return self.output.exceeds(tolerance) or self.gradient.exceeds(tolerance)


@dataclass(frozen=True)
class Ran:
    """What a run of a block gave: tensors put out, and gradients of its inputs and parameters."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]


class BlockAudit:
    """Keeps the first call of each block in a step and compares it later; the step itself is not touched.

    Args:
        blocks: Name -> module, none inside another.
        half_dtype: What the blocks compute in.
        device_type: Where.
        keeps_parameters: Whether parameters are copied to the host in each call, as they are gone later (ZeRO 3).
        half_context: What a step runs within.
        backward_context: What a backward runs within.
        operators: Watches operators; paused within blocks, whose operators it sees when they are run again.

    Memory: inputs and gradients of outputs of every block until they are compared, for one micro-batch.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        *,
        half_dtype: torch.dtype,
        device_type: str,
        keeps_parameters: bool,
        half_context: _Context,
        backward_context: _Context,
        operators: OperatorAudit,
    ) -> None:
        self.blocks = dict(blocks)
        self.calls: dict[str, Call] = {}
        self._half_dtype, self._device_type = half_dtype, device_type
        self._keeps_parameters = keeps_parameters
        self._half_context, self._backward_context = half_context, backward_context
        self._operators = operators
        self._hooks: list[Any] = []
        self._current: Call | None = None

    # -- in the step ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to keep calls."""
        self.calls.clear()
        for name, block in self.blocks.items():
            self._hooks += [
                # After those of ZeRO, which make parameters whole.
                block.register_forward_pre_hook(functools.partial(self._before, name), with_kwargs=True),
                block.register_forward_hook(functools.partial(self._after, name), with_kwargs=True, always_call=True),
            ]

    def stop(self) -> None:
        """Take the hooks off, and forget the calls."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.calls.clear()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._operators.paused += 1
        tensors = tensor_leaves((args, kwargs))
        if name in self.calls or _host.in_backward() or any(map(_host.is_fake, tensors)):
            return
        kept = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
        if self._keeps_parameters:
            kept |= {id(p): p.detach().to("cpu", copy=True) for p in module.parameters()}
        memo: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            # What is given twice is one tensor again: attention asks whether its key is its value.
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]

        self.calls[name] = Call(
            inputs=map_tensors(own, (args, kwargs)),
            kept=kept,
            rng=capture_rng(),
            autocast=(torch.is_autocast_enabled(self._device_type), torch.get_autocast_dtype(self._device_type)),
        )
        self._current = self.calls[name]

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._operators.paused -= 1
        call, self._current = self._current, None
        if call is None or call is not self.calls.get(name) or output is None:
            return
        for index, tensor in enumerate(tensor_leaves(output)):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(_arrived, call, index))

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def compare(self, name: str, scale: float) -> tuple[BlockNumbers, Ran | None]:
        """Run a kept call twice.

        Args:
            name: The block.
            scale: What its gradients are multiplied by.

        Returns:
            The numbers, and the run in fp32.
        """
        note = _judge(self.calls[name])
        try:
            full = self._run(name, None)
            numbers = self._numbers(self._run(name, self._half_context, scale=scale), full, scale)
            for _ in range(_NUM_SMALLER_SCALES if scale > 1 else 0):
                if not numbers.gradient.num_overflows:
                    break
                note = note or f"gradients overflow at a loss scale of {scale:g}"
                self._shrink(name)
                full = self._run(name, None)
                numbers = self._numbers(self._run(name, self._half_context), full, scale)
        except Exception as error:  # a block may be one that cannot run twice
            return BlockNumbers(note=f"cannot run again: {type(error).__name__}: {error}"), None
        return replace(numbers, note=note), full

    def _shrink(self, name: str) -> None:
        """What a smaller loss scale would give: one that moves is often too large in the first steps."""
        call = self.calls[name]
        call.gradients = {index: gradient / 16 for index, gradient in call.gradients.items()}

    def retry(self, name: str, full: Ran, ops: Sequence[str]) -> BlockNumbers:
        """The numbers with some operators in full precision.

        Args:
            name: The block.
            full: From `compare`.
            ops: Names for `full_precision_ops`.
        """
        lists = OpPrecision(full_precision_ops=ops)
        return self._numbers(self._run(name, self._half_context, lists.active), full, 1.0)

    def _run(
        self, name: str, context: _Context | None, lists: _Context = nullcontext, scale: float | None = None
    ) -> Ran:
        """A call again; without a context in fp32, with a scale under the eyes of `operators`."""
        call, block = self.calls[name], self.blocks[name]
        convert = as_full if context is None else _same
        device = next((t.device for t in tensor_leaves(call.inputs)), None)
        twin = make_twin(block, {key: v if device is None else v.to(device) for key, v in call.kept.items()}, convert)
        leaves: dict[int, Tensor] = {}
        memo: dict[int, Tensor] = {}

        def given(tensor: Tensor) -> Tensor:
            if id(tensor) not in memo:
                leaf = convert(tensor.detach())
                if tensor.requires_grad:
                    leaf.requires_grad_()
                    leaves[id(tensor)] = leaf
                # A leaf could not be written in place, as the block may do with what it is given.
                memo[id(tensor)] = leaf.clone()
            return memo[id(tensor)]

        args, kwargs = map_tensors(given, call.inputs)
        wanted = [*leaves.values(), *(p for p in twin.parameters() if p.requires_grad)]
        restore_rng(call.rng)
        with torch.enable_grad():
            if context is None:
                output = run_full(twin, args, kwargs)
            else:
                enabled, dtype = call.autocast
                autocast = torch.autocast(self._device_type, dtype=dtype, enabled=enabled, cache_enabled=False)
                with context(), autocast, lists(), self._watching(name, "forward", scale):
                    output = twin(*args, **kwargs)
        outputs = tensor_leaves(output)
        pairs = [(outputs[i], g) for i, g in call.gradients.items() if outputs[i].requires_grad]
        gradients: list[Tensor | None] = []
        if pairs and wanted:
            backward = nullcontext if context is None else self._backward_context
            with backward(), lists(), self._watching(name, "backward", scale):
                gradients = list(
                    torch.autograd.grad(
                        [output for output, _ in pairs],
                        wanted,
                        [gradient.to(output.dtype) for output, gradient in pairs],
                        allow_unused=True,
                    )
                )
        return Ran([tensor.detach() for tensor in outputs], gradients)

    def _watching(self, name: str, phase: str, scale: float | None) -> AbstractContextManager[Any]:
        if scale is None:
            return nullcontext()
        return self._operators.watching(name, phase, scale if phase == "backward" else 1.0)

    def _numbers(self, half: Ran, full: Ran, scale: float) -> BlockNumbers:
        output, gradient = PairSums(self._half_dtype), PairSums(self._half_dtype)
        for value, reference in zip(half.outputs, full.outputs, strict=True):
            if value.is_floating_point():
                output.add(value, reference)
        for found, reference_gradient in zip(half.gradients, full.gradients, strict=True):
            if found is not None and reference_gradient is not None:
                gradient.add(found, reference_gradient, scale)
        return BlockNumbers(output=output.read(), gradient=gradient.read())


def _arrived(call: Call, index: int, gradient: Tensor) -> None:
    # In memory of its own: the engine may add to it later.
    call.gradients.setdefault(index, gradient.detach().clone())


def _judge(call: Call) -> str:
    """What to note of the gradients that came; those that have overflowed elsewhere say nothing of this block."""
    if not call.gradients:
        return "no gradient came"
    if all(bool(torch.isfinite(gradient).all()) for gradient in call.gradients.values()):
        return ""
    call.gradients.clear()
    return "the gradient that came had overflowed, at least once"


def _same(tensor: Tensor) -> Tensor:
    return tensor
