"""One pipeline stage: the module that runs the user's step, and its side of torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel.mesh.rng import RngState, capture_rng, restore_rng, seed_all
from lightning_bigmodel.pipeline.backward import SplitBackward
from lightning_bigmodel.pipeline.backward import full_backward as full_backward_pass
from lightning_bigmodel.pipeline.gate import StageBoundary, StagePlan, StageRun, active
from lightning_bigmodel.pipeline.gradient_watch import GradientWatch
from lightning_bigmodel.pipeline.memory_limit import MemoryLimit, is_out_of_memory
from lightning_bigmodel.pipeline.microbatch import RETURNED_WEIGHT, returned_weight
from lightning_bigmodel.pipeline.passes import Passes
from lightning_bigmodel.pipeline.trace import LeafSpec

__all__ = ["MicrobatchStage", "MicrobatchTask", "StageModule", "loss_of"]


@dataclass
class MicrobatchTask:
    """One micro-batch on one stage: what goes in, and what came out.

    Attributes:
        step: Runs the user's step on this micro-batch.
        plan: The stage's plan for its shape.
        seed: By what the gradient of this micro-batch's loss is multiplied. Zero: there is no backward, as the loss may
            be no number (a mean over no tokens).
        reference: What a weight that the step returns is divided by for that (last stage); None if it must not return
            one.
        shared_seed: Random state of code outside of units; the same on every stage.
        stage_seed: Random state of this stage's units.
        result: What the user's step returned (last stage).
        loss: The loss in it, a 0-dim tensor with graph, or None if the step returned None (last stage).
        returned: The weight in it, if any (last stage).
    """

    step: Callable[[], Any]
    plan: StagePlan
    seed: float
    reference: float | None
    shared_seed: int
    stage_seed: int
    result: Any = None
    loss: Tensor | None = None
    returned: float | None = None

    def keep(self, result: Any, *, has_backward: bool) -> None:
        """Take what the step returned on the last stage.

        Raises:
            ValueError: For a weight that is none, or that another setting leaves no room for.
        """
        self.result, self.loss = result, loss_of(result) if has_backward else None
        self.returned = returned_weight(result) if has_backward else None
        if self.returned is None:
            return
        if self.reference is None:
            raise ValueError(
                f'`training_step` returns `{RETURNED_WEIGHT}`, but the strategy was given `microbatch_weight` "equal" '
                'or "sum", which take no weights. Leave one of them out.'
            )
        if self.seed:  # else the batch only keeps this data rank in step
            self.seed = self.returned / self.reference


class StageModule(nn.Module):
    """Registers what one stage owns; its forward runs the user's whole step and ends at the stage's border.

    Sharding wraps this module, never one between it and the blocks: the cut unwinds through those.
    """

    def __init__(self, owned: Iterable[nn.Module], loose: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.owned = nn.ModuleList(owned)
        self.loose = nn.ParameterList(loose)

    def forward(self, run: StageRun, step: Callable[[], Any]) -> Any:
        """Run `step` with `run` deciding what computes. Returns its result, or None at the stage's border.

        Raises:
            RuntimeError: Where the step returned without reaching the border.
        """
        with active(run):
            try:
                result = step()
            except StageBoundary:
                return None
        if run.plan.is_last:
            return result
        border = run.plan.trace.units[run.plan.stop - 1].name
        if run.reached_end:
            raise RuntimeError(
                f"The pipeline stage ended after `{border}`, but the step returned normally: a bare `except:` or a "
                "`finally: return` swallowed the signal that ends a stage. Catch `Exception` instead."
            )
        raise RuntimeError(
            f"The step returned before `{border}` was called, although it was called when the step was traced. A "
            "pipelined step must call its blocks in the same way for every micro-batch."
        )


@contextmanager
def _random_streams(task: MicrobatchTask) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Code outside of units draws equal numbers on every stage; units draw from a stream of their stage."""
    ambient = capture_rng()
    seed_all(task.shared_seed)
    switches = task.plan.trace.flow.draws_between_units
    of_stage: RngState | None = None
    is_entered = False

    @contextmanager
    def computing() -> Iterator[None]:
        nonlocal of_stage, is_entered
        if not switches:  # nobody draws from the shared stream any more: stay in the stage's, without saving either
            if not is_entered:
                seed_all(task.stage_seed)
                is_entered = True
            yield
            return
        shared = capture_rng()
        if of_stage is None:
            seed_all(task.stage_seed)
        else:
            restore_rng(of_stage)
        yield
        of_stage = capture_rng()
        restore_rng(shared)

    try:
        yield computing
    finally:
        restore_rng(ambient)


@dataclass
class _Flight:
    """State of one micro-batch between its forward and its backward."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # with graph; a value passing through is the input itself
    sending: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)  # of the outputs, from the next stage
    input_gradients: list[Tensor | None] = field(default_factory=list)
    split: SplitBackward | None = None


class MicrobatchStage:
    """What torch's pipeline schedules call: forward, backward and the operations to send and receive.

    torch's own `PipelineStage` fixes one shape for all micro-batches and steps, and learns it by running the stage on
    uninitialised memory. Here each micro-batch has its own plan: shapes may change freely, nothing is run extra, and
    slots without a micro-batch (fewer samples than slots) neither compute nor communicate.

    Communication a micro-batch: the tensors of `plan.sent` forward, a gradient for each that requires one backward.
    """

    def __init__(
        self,
        module: StageModule,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.submod = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = device
        self.group = group
        self.group_rank = dist.get_rank(group)
        self.group_size = dist.get_world_size(group)
        self.has_backward = False
        self.stage_index_to_group_rank: dict[int, int] = {i: i % self.group_size for i in range(num_stages)}
        self.output_chunks: list[Any] = []
        self.tasks: Sequence[MicrobatchTask] = ()
        self.passes = Passes()
        self.limit: MemoryLimit | None = None
        self.recovers = False  # from running out of memory, by going on with zeros to the end of the step
        self.ran_out = False
        self.watches: Sequence[GradientWatch] = ()
        self.backward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._flights: dict[int, _Flight] = {}
        self._in_flight: set[int] = set()  # micro-batches between their forward and their backward
        self.most_in_flight = 0

    @property
    def is_first(self) -> bool:
        """Whether the step begins here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the step ends here."""
        return self.stage_index == self.num_stages - 1

    def _peer(self, stage_index: int) -> int:
        return dist.get_global_rank(
            self.group or dist.group.WORLD,  # type: ignore[arg-type]  # initialised by the time stages exist
            self.stage_index_to_group_rank[stage_index],
        )

    def _flight(self, index: int) -> _Flight:
        return self._flights.setdefault(index, _Flight())

    def _is_absent(self, index: int) -> bool:
        return index >= len(self.tasks)

    # -- forward -------------------------------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Forget the previous step."""
        self._flights.clear()
        self._in_flight.clear()
        self.ran_out = False

    def get_fwd_recv_ops(self, index: int) -> list[dist.P2POp]:
        """Operations that receive the inputs of one micro-batch."""
        if self.is_first or self._is_absent(index):
            return []
        plan = self.tasks[index].plan
        specs = [plan.spec(key) for key in plan.received]
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]
        self._flight(index).inputs = buffers
        return [dist.P2POp(dist.irecv, buffer, self._peer(self.stage_index - 1), self.group) for buffer in buffers]

    def set_local_fwd_input(self, previous_outputs: Any, index: int) -> None:
        """Inputs from the previous stage where it is on this rank too (V schedules)."""
        if not self._is_absent(index):
            self._flight(index).inputs = [tensor.detach() for tensor in previous_outputs]

    def forward_one_chunk(
        self, index: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = False
    ) -> Any:
        """Run the forward of one micro-batch; its inputs have arrived."""
        with self.passes.forward(index):
            if self._is_absent(index):
                return torch.zeros((), device=self.device) if self.is_last else ()
            task, flight = self.tasks[index], self._flight(index)
            self._in_flight.add(index)
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
            if not self.ran_out:
                try:
                    with nullcontext() if self.limit is None else self.limit.watching():
                        return self._forward(task, flight)
                except BaseException as error:
                    self._run_out(error)
            return self._forward_zeros(task, flight)

    def _run_out(self, error: BaseException) -> None:
        """Give up what the step holds, if memory ran out. The peers wait for messages: they get zeros from here on.

        At the end of the step all ranks learn of it, undo the step and run it again in smaller parts.
        """
        if not self.recovers or not is_out_of_memory(error):
            raise error
        self.ran_out = True
        error.__traceback__ = error.__context__ = None  # whose frames hold activations
        for flight in self._flights.values():
            flight.inputs, flight.outputs, flight.gradients, flight.split = [], [], [], None
        for task in self.tasks:
            task.result = task.loss = None

    def _forward_zeros(self, task: MicrobatchTask, flight: _Flight) -> Any:
        flight.inputs = []
        if self.is_last:
            return torch.zeros((), device=self.device)
        flight.sending = [self._zeros(task.plan.spec(key)) for key in task.plan.sent]
        return tuple(flight.sending)

    def _zeros(self, spec: LeafSpec) -> Tensor:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)

    def _forward(self, task: MicrobatchTask, flight: _Flight) -> Any:
        plan = task.plan
        for key, tensor in zip(plan.received, flight.inputs, strict=True):
            tensor.requires_grad_(plan.spec(key).requires_grad and self.has_backward)
        run, result = self._run(task, flight.inputs)
        if self.is_last:
            task.keep(result, has_backward=self.has_backward)
            return torch.zeros((), device=self.device)
        flight.outputs = run.sent_tensors()
        flight.sending = [tensor.detach().contiguous() for tensor in flight.outputs]
        return tuple(flight.sending)

    def _run(self, task: MicrobatchTask, inputs: Sequence[Tensor]) -> tuple[StageRun, Any]:
        with _random_streams(task) as computing:
            run = StageRun(task.plan, inputs, self.device, computing)
            return run, self.submod(run, task.step)

    def get_fwd_send_ops(self, index: int) -> list[dist.P2POp]:
        """Operations that send the outputs of one micro-batch."""
        if self.is_last or self._is_absent(index):
            return []
        flight = self._flight(index)
        tensors, flight.sending = flight.sending, []
        return [dist.P2POp(dist.isend, tensor, self._peer(self.stage_index + 1), self.group) for tensor in tensors]

    # -- backward ------------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, index: int) -> list[dist.P2POp]:
        """Operations that receive the gradients of one micro-batch's outputs."""
        if not self.has_backward or self.is_last or self._is_absent(index):
            return []
        plan, flight = self.tasks[index].plan, self._flight(index)
        specs = [plan.spec(key) for key in plan.sent]
        flight.gradients = [
            torch.empty(spec.shape, dtype=spec.dtype, device=self.device) if spec.requires_grad else None
            for spec in specs
        ]
        peer = self._peer(self.stage_index + 1)
        return [
            dist.P2POp(dist.irecv, gradient, peer, self.group) for gradient in flight.gradients if gradient is not None
        ]

    def set_local_bwd_input(self, next_input_gradients: Any, index: int) -> None:
        """Gradients from the next stage where it is on this rank too (V schedules)."""
        if self.has_backward and not self._is_absent(index):
            self._flight(index).gradients = list(next_input_gradients)

    def get_local_bwd_output(self, index: int) -> list[Tensor | None]:
        """Gradients for the previous stage where it is on this rank too (V schedules)."""
        if not self.has_backward or self._is_absent(index):
            return []
        gradients, self._flight(index).input_gradients = self._flight(index).input_gradients, []
        return gradients

    def backward_one_chunk(
        self, index: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch, or its input half; the gradients of its outputs have arrived."""
        if not self.has_backward:
            return
        self.passes.begin_backward(index)
        if not self._is_absent(index):
            with self._watched(index), self.backward_context():
                self._try_backward(self.tasks[index], self._flight(index), full_backward)
        if full_backward:
            self._in_flight.discard(index)
        (self.passes.end_backward if full_backward else self.passes.pause_backward)(index)

    def _try_backward(self, task: MicrobatchTask, flight: _Flight, full_backward: bool) -> None:
        if not self.ran_out:
            try:
                self._backward(task, flight, full_backward)
                return
            except BaseException as error:
                self._run_out(error)
        specs = [task.plan.spec(key) for key in task.plan.received]
        flight.gradients = []
        flight.input_gradients = [self._zeros(spec) if spec.requires_grad else None for spec in specs]

    @contextmanager
    def _watched(self, index: int) -> Iterator[None]:
        for watch in self.watches:
            watch.begin_backward(index)
        try:
            yield
        finally:
            for watch in self.watches:
                watch.end_backward()

    def _backward(self, task: MicrobatchTask, flight: _Flight, full_backward: bool) -> None:
        outputs, gradients, passing = self._roots(task, flight)
        inputs, flight.inputs, flight.outputs, flight.gradients = flight.inputs, [], [], []
        if full_backward:
            found: list[Tensor | None] = full_backward_pass(outputs, gradients, inputs)
        else:
            flight.split = SplitBackward(outputs, gradients, inputs, list(self.submod.parameters()))
            found = [None] * len(inputs) if self.is_first else flight.split.inputs()
        flight.input_gradients = [
            _sum_or_zeros(tensor, gradient, passing.get(id(tensor))) if tensor.requires_grad else None
            for tensor, gradient in zip(inputs, found, strict=True)
        ]

    def _roots(
        self, task: MicrobatchTask, flight: _Flight
    ) -> tuple[list[Tensor], list[Tensor | None], dict[int, Tensor]]:
        """What to differentiate, with which gradients; and the gradients of values that only pass through."""
        if self.is_last:
            if task.loss is None or not task.seed:
                return [], [], {}
            return [task.loss], [torch.full_like(task.loss, task.seed)], {}
        passing: dict[int, Tensor] = {}
        outputs: list[Tensor] = []
        gradients: list[Tensor | None] = []
        arrived = {id(tensor) for tensor in flight.inputs}
        for output, gradient in zip(flight.outputs, flight.gradients, strict=True):
            if id(output) not in arrived:
                outputs.append(output)
                gradients.append(gradient)
            elif gradient is not None:
                passing[id(output)] = gradient
        return outputs, gradients, passing

    def backward_weight_one_chunk(self, index: int, last_backward: bool = False) -> None:
        """The weight half of the backward of one micro-batch."""
        if not self.has_backward:
            return
        self.passes.begin_backward(index)
        if not self._is_absent(index) and not self.ran_out:
            split = self._flight(index).split
            assert split is not None, "the input half of a backward comes before its weight half"
            with self._watched(index), self.backward_context():
                split.weights()
            self._flight(index).split = None
        self._in_flight.discard(index)
        self.passes.end_backward(index)

    def get_bwd_send_ops(self, index: int) -> list[dist.P2POp]:
        """Operations that send the gradients of one micro-batch's inputs."""
        if not self.has_backward or self.is_first or self._is_absent(index):
            return []
        peer = self._peer(self.stage_index - 1)
        return [
            dist.P2POp(dist.isend, gradient, peer, self.group)
            for gradient in self.get_local_bwd_output(index)
            if gradient is not None
        ]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called after the last backward: nothing to do, gradients of replicas are summed once a step."""


def loss_of(result: Any) -> Tensor | None:
    """The loss in what a step returned.

    Raises:
        TypeError: Where it is neither a tensor of one element, nor a mapping with one under "loss", nor None.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if loss is None:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"`training_step` returned {type(result).__name__} without a scalar loss tensor. Return the loss, a dict "
            'with the loss under "loss", or None to skip the batch.'
        )
    return loss if loss.ndim == 0 else loss.reshape(())


def _sum_or_zeros(like: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
    # The previous stage waits for a gradient of every value that requires one, used on this stage or not; and only
    # contiguous memory can be sent, which neither a gradient nor a sum of two need be.
    found = [gradient for gradient in (first, second) if gradient is not None]
    if not found:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return (found[0] if len(found) == 1 else found[0] + found[1]).contiguous()
