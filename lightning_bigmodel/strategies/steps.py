"""Steps, logging and gradients: what happens to one batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.mesh import MeshLoader
from lightning_bigmodel.pipeline.engine import StepOutcome
from lightning_bigmodel.pipeline.gradients import clip_by_norm
from lightning_bigmodel.pipeline.scheduled_loss import run_as_one_node, scaled_backward, without_backward
from lightning_bigmodel.strategies.preemption import PreemptionSignals
from lightning_bigmodel.strategies.run_state import RunState

__all__ = ["StepHooks"]


class StepHooks(PreemptionSignals, RunState):
    """The hooks that run a user's steps and make gradients complete."""

    def _step(self, name: str, args: Sequence[Any]) -> Callable[[Any], Any]:
        """The user's step as a function of the (micro-)batch alone, under the precision plugin's context."""
        module = self.lightning_module
        contexts = {
            "training_step": self.precision_plugin.train_step_context,
            "validation_step": self.precision_plugin.val_step_context,
            "test_step": self.precision_plugin.test_step_context,
            "predict_step": self.precision_plugin.predict_step_context,
        }
        method = getattr(module, name)
        rest = _host.step_arguments(method, args[1:])

        def step(batch: Any) -> Any:
            with contexts[name](), self._guarding_slices():
                return method(batch, *rest)

        return step

    def _guarding_slices(self) -> AbstractContextManager[None]:
        # Optimizers step within a manual step; compiled code cannot change classes; ZeRO 3 tells by itself.
        if self._tensor is None or self._is_manual or self._compiled is not None:
            return nullcontext()
        if self._sharded is not None and not self._sharded.is_whole:
            return nullcontext()
        return self._tensor.watching()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, batch_index = args[0], args[1] if len(args) > 1 else 0
        loader = _host.train_loader(self._trainer())
        counts = not (isinstance(loader, MeshLoader) and loader.is_padding(batch_index))
        step = self._step("training_step", (*args, *kwargs.values()))
        window = self._window
        assert window is not None
        if self._sharded is not None:
            self._sharded.hide()
        with self._phase("training_step"):
            if not self.engine.is_pipelined:
                result, weight, self._finish_observing = self.engine.observe(batch, step, counts=counts)
                if self._is_manual or self.mesh.data_size == 1:
                    self._replay_observed()
                if self._is_manual:
                    return result
                if result is None:
                    return self._skip_batch()
                scale = self._scale(weight, loss_scale=self.engine.loss_scale())
                # A loss that weighs nothing may be no number, a mean over no tokens.
                loss = _loss(result)
                self._note_loss(weight, loss)
                loss = scaled_backward(loss, scale) if weight else without_backward(loss)
                self._watched_batch = (batch, weight, self._factor / self._trainer().accumulate_grad_batches)
            else:
                outcomes: list[StepOutcome] = []
                scale_later: list[Callable[[Tensor], Tensor | float]] = []

                def schedule() -> Tensor | None:
                    outcomes.append(self.engine.train(batch, step, counts=counts))
                    return outcomes[0].loss

                accumulating = self.engine.places.accumulating(self.engine.trained_parameters())
                scheduled = run_as_one_node(
                    schedule, accumulating, lambda outer: scale_later[0](outer), self._owed_gradients.extend
                )
                outcome = outcomes[0]
                self._replay(outcome)
                self._note_loss(outcome.weight, outcome.loss)
                if scheduled is None:
                    return self._skip_batch()
                scale_later.append(self._scale(outcome.weight, is_weighted=self.engine.weighs_in_schedule))
                result, loss = outcome.result, scheduled
        if isinstance(result, Mapping):
            return {**result, "loss": loss}
        return loss

    def _replay_observed(self) -> None:
        """Log what a batch without a schedule gave. To wait for others before the backward would cost their delays.

        Afterwards, with sums of gradients complete, this is at one place among the messages of all ranks, also of one
        that had no loss.
        """
        finish, self._finish_observing = self._finish_observing, None
        if finish is not None:
            module = self.lightning_module
            assert module is not None
            with self._phase("training_step"), _host.logging_from(module, "training_step"):
                self._replay(finish())

    def _skip_batch(self) -> None:
        """No loss, as in one process: nothing is added to the gradients, but other data ranks may add theirs."""
        assert self._window is not None
        self._window.add(0.0)
        self._skipped_batch = True
        self._owes_backward = not self.engine.is_pipelined

    def _pay(self) -> None:
        """After a batch without a loss here, once the host has erased old gradients: what other ranks' losses gave."""
        if self._owes_backward:
            self._owes_backward = False
            self.engine.passes.begin_backward(0)
            self.engine.passes.end_backward(0)
        owed, self._owed_gradients = self._owed_gradients, []
        if self.engine.places.sums_early:
            for holder, gradient in owed:
                holder.grad = gradient if holder.grad is None else holder.grad.add_(gradient)

    @override
    def post_training_step(self) -> None:
        # Lightning asks for the world size right after this hook, only to refuse a step without a loss on several ranks
        # (its own strategies would wait for each other). Here all ranks of a pipeline skip together, and data ranks
        # that skip still take part in the sum.
        self._hides_world_size, self._skipped_batch = self._skipped_batch, False

    @property
    @override
    def world_size(self) -> int:
        if self._hides_world_size:
            self._hides_world_size = False
            return 1
        return super().world_size

    def _scale(
        self, weight: float, *, is_weighted: bool = False, loss_scale: float = 1.0
    ) -> Callable[[Tensor], Tensor | float]:
        """How the incoming gradient of a batch's loss scales its gradients.

        Those of a schedule have the loss scale in them already, and mostly the weight too (`is_weighted`). Lightning
        divides the loss by `accumulate_grad_batches`; the window divides by the weights that really came.
        """
        window = self._window
        assert window is not None
        factor = window.add(weight)
        if is_weighted:
            factor = 1.0
        factor *= self._trainer().accumulate_grad_batches * loss_scale
        self._factor = factor

        def scale(outer: Tensor) -> Tensor | float:
            return float(outer) * factor if outer.device.type == "cpu" else outer * factor

        return scale

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._own_evaluation_step("validation_step", (*args, *kwargs.values()))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._own_evaluation_step("test_step", (*args, *kwargs.values()))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", (*args, *kwargs.values()))

    def _own_evaluation_step(self, name: str, args: tuple[Any, ...]) -> Any:
        """Nothing for a batch that only keeps this data rank in step with the others."""
        loader = _host.evaluation_loader(self._trainer(), args[2] if len(args) > 2 else 0)
        if isinstance(loader, MeshLoader) and len(args) > 1 and loader.is_padding(args[1]):
            with self._phase(name):
                self._idle(1)
            return None
        return self._evaluation_step(name, args)

    def _evaluation_step(self, name: str, args: tuple[Any, ...]) -> Any:
        with self._phase(name):
            outcome = self.engine.evaluate(name, args[0], self._step(name, args))
            self._replay(outcome)
            if self._sharded is not None:
                here, more = self._idle_passes
                self._idle_passes = (here - 1, more)
                if here == 1:
                    self._idle(more)
            return outcome.result

    def _keep_pace(self) -> None:
        """Before an evaluation: data ranks with fewer batches than others still gather parameters with them."""
        if self._sharded is None or self._sharded.is_whole or self.mesh.data_size == 1:
            return
        own = _host.num_evaluation_batches(self._trainer())
        numbers = torch.tensor([own, -own], dtype=torch.float64)
        with self._phase("evaluation start"):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.mesh.data_group)
        most, fewest = float(numbers[0]), -float(numbers[1])
        if most != fewest and most == float("inf"):
            raise ValueError(
                "Evaluation loaders without a length give data ranks different numbers of batches, but with "
                "`zero_stage=3` all ranks put parameters together batch by batch. Give the loaders a length, set "
                "`limit_val_batches` (or its like) to a number, or use `zero_stage=2`."
            )
        if most == float("inf"):
            self._idle_passes = (0, 0)  # the user sees to it that ranks have equally many
            return
        self._idle_passes = (int(own), int(most - own))
        if not own:
            self._idle(int(most))

    def _idle(self, num_passes: int) -> None:
        assert self._sharded is not None
        for _ in range(num_passes):
            self._sharded.idle_pass()

    def _replay(self, outcome: StepOutcome) -> None:
        """Log on every rank, once, what one process would have logged.

        In training the values are those of all data ranks already. In evaluation data ranks may have different numbers
        of batches: a value logged by step stays with its rank, and only the epoch's end is a collective.
        """
        module = self.lightning_module
        assert module is not None
        self._follow_signals(outcome.signal)
        modules = dict(module.named_modules()) if outcome.metric_values else {}
        self._is_replaying = True
        try:
            with self.precision_plugin.forward_context():  # whose default type the means over an epoch take
                self._log_again(outcome, modules)
        finally:
            self._is_replaying = False

    def _log_again(self, outcome: StepOutcome, modules: Mapping[str, Any]) -> None:
        training, module = self._trainer().training, self.lightning_module
        assert module is not None
        for entry, value, num_samples in outcome.logs:
            if value is None:
                assert entry.metric is not None
                metric: Any = modules[entry.metric]
                metric._forward_cache = outcome.metric_values.get(entry.metric)
                module.log(entry.name, metric, **entry.options)
                continue
            if not num_samples and training:
                continue  # the mean over no tokens on any rank: the mean over the epoch must not become NaN by it
            summed_already = training and self.mesh.data_size > 1 and entry.reduction == "sum"
            if summed_already:
                _host.silence_sync_advice(entry.name)
            options = {**entry.options, "sync_dist": not summed_already}
            module.log(entry.name, value.to(self.root_device), batch_size=max(num_samples, 1), **options)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        # As the host does it, but gradients are complete before `on_after_backward`, which the precision plugin calls.
        self.pre_backward(closure_loss)
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.post_backward(closure_loss)
        return precision.post_backward(closure_loss, module)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self.engine.is_pipelined:
            if not self._blocks_sync:
                self.engine.places.begin()
            self.engine.passes.begin_backward(0)
            for watch in self.engine.watches:
                watch.begin_backward(0)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if not self.engine.is_pipelined:
            for watch in self.engine.watches:
                watch.end_backward()
            if self.engine.watches and self._watched_batch is not None:
                self.engine.tell_batch([self._watched_batch])
            self._watched_batch = None
            with self._phase("gradient reduction"):
                self.engine.passes.end_backward(0)
        if not self._blocks_sync:
            self._synchronize_gradients()
        elif self._sharded is not None:
            self._sharded.show_gradients()
        self._replay_observed()

    def _synchronize_gradients(self) -> None:
        if self._window is not None:
            with self._phase("gradient synchronisation"):
                if self._window.synchronize():
                    overflowed = self._unscale()
                    if self.engine.watches and self._sharded is not None:
                        self._sharded.shards.land()  # rows may still be on their way to the host
                    for watch in self.engine.watches:
                        watch.drop_window() if overflowed else watch.end_window()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._blocks_sync = True
        try:
            yield
            self._pay()
            self._replay_observed()
        finally:
            self._blocks_sync = False

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def synchronized_closure() -> Any:
            result = closure()
            self._pay()
            self._synchronize_gradients()  # where the window's last batch had no loss, backward did not come by
            self._replay_observed()
            if self._sharded is not None:
                self._sharded.shards.land()  # the optimizer changes rows next
                self._sharded.shards.take_changes()
            self._before_replica_step(optimizer)
            return result

        with self._phase("optimizer_step"):
            try:
                result = super().optimizer_step(optimizer, synchronized_closure, model, **kwargs)
            finally:
                self._give_back_options()
            if not self._skips_step:
                self._after_replica_step(optimizer)
            self._losses.clear()  # those of a step that is skipped too
            if self._sharded is not None and not self._skips_step:
                self._sharded.shards.published_by(optimizer)
            return result

    def _is_own(self, parameters: Sequence[Any]) -> bool:
        """Whether gradients are those of a run whose parts lie on several ranks."""
        if self._engine is None or not (
            self.mesh.pipe_size > 1 or self._sharded is not None or self._tensor is not None
        ):
            return False
        own = {id(parameter) for parameter in self.engine.root.parameters()}
        own |= self._sharded.records.keys() if self._sharded is not None else set()
        return any(id(parameter) in own for parameter in parameters)

    def clip_norm(
        self,
        parameters: Sequence[Any],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """In the place of `torch.nn.utils.clip_grad_norm_`, wherever the user calls it: over all ranks. Collective."""
        if not self._is_own(parameters):
            return NotImplemented
        total = self._clip(self._holders(parameters), float(max_norm), float(norm_type))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(f"The total norm of order {norm_type} of the gradients is {float(total)}, not finite.")
        return total

    def clip_value(self, parameters: Sequence[Any], clip_value: float, foreach: bool | None = None) -> Any:
        """In the place of `torch.nn.utils.clip_grad_value_`."""
        if not self._is_own(parameters):
            return NotImplemented
        for holder in self._holders(parameters):
            if holder.grad is not None:
                holder.grad.clamp_(-float(clip_value), float(clip_value))
        return None

    def _take_gradients(self) -> None:
        """What hooks have put in the place of gradients is what counts."""
        if self._sharded is not None:
            self._sharded.take_gradients()

    def _holders(self, parameters: Any) -> list[Any]:
        """What has the gradients of parameters, or of the row shards of an optimizer."""
        self._take_gradients()
        given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return [self.engine.places.holder(parameter) for parameter in given]

    def _clip(self, parameters: Sequence[Any], max_norm: float, norm_type: float = 2.0) -> Tensor:
        share, sharded = self.engine.share, self._sharded
        assert share is not None
        places, tensor = self.engine.places, self._tensor
        counted = {id(places.holder(parameter)) for parameter in share.counted if self._answers_for(parameter)}
        groups = [self.mesh.pipe_group]
        groups += [self.mesh.tensor_group] if tensor is not None else []
        groups += sharded.clipping_groups() if sharded is not None else []
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        return clip_by_norm(
            [parameter.grad for parameter in parameters],
            [parameter.grad for parameter in parameters if id(parameter) in counted],
            max_norm,
            groups,
            norm_type,
            self.root_device,
        )

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._take_gradients()
        self._clip([p for group in optimizer.param_groups for p in group["params"]], float(clip_val))


def _loss(result: Any) -> Tensor:
    loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
    return loss
