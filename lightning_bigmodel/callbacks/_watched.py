"""Brings the squares of micro-batches' gradients to a callback, once a step and alike on all ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, optim
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._held import check_strategy
from lightning_bigmodel.callbacks._noise import WindowSquares
from lightning_bigmodel.pipeline.gradient_watch import MicrobatchSquares, WatchedMicrobatch, square_sums
from lightning_bigmodel.pipeline.microbatch import batch_size
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["WatchingCallback"]


class _Watch(MicrobatchSquares):
    """Tells its callback when a window is complete."""

    def __init__(self, callback: WatchingCallback, *args: Any) -> None:
        super().__init__(*args)
        self._callback = callback

    @override
    def end_window(self) -> None:
        self._callback._end_window()

    @override
    def drop_window(self) -> None:
        self._callback._num_batches = 0
        self.start_window()


class WatchingCallback(Callback):
    """A callback that learns, at each optimizer step, the squares of small gradients and of the whole one.

    Under `BigModelStrategy` small gradients are those of micro-batches; under Lightning's own strategies those of each
    rank's batches. Where a window has only one, there is nothing to compare, and `_window_ends` is told of
    `WindowSquares` that do not `compares`.

    Communication a step: one all-reduce of a few numbers over all ranks. The device is waited for once a batch.
    """

    # `on_before_optimizer_step` is for Lightning's own strategies: nothing has to be shown for it.
    sees_parameter_grads = False

    _watch: _Watch | None = None

    @abstractmethod
    def _window_ends(self, window: WindowSquares) -> None:
        """The gradients of a step are complete and not clipped yet. Called within `optimizer.step`."""

    def _groups(self) -> Sequence[Sequence[Tensor]]:
        """Parameters by group, as an optimizer holds them; by default all in one."""
        return [self._parameters]

    # -- a run ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        name, strategy = type(self).__name__, trainer.strategy
        check_strategy(strategy, name)
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"`{name}` cannot tell which backwards of `{type(pl_module).__name__}` belong to one step: it uses "
                "manual optimization. Set `automatic_optimization=True`, or leave the callback out."
            )
        if isinstance(strategy, BigModelStrategy) and strategy.weighs_by == "sum":
            raise ValueError(
                f"`{name}` compares gradients of means, but with `microbatch_weight='sum'` losses are sums, which grow "
                "with the batch. Return the mean over samples and use `microbatch_weight='samples'`, or leave the "
                "callback out."
            )
        precision = trainer.precision_plugin
        scales = getattr(precision, "scaler", None) or getattr(precision, "loss_scale", None)
        if scales is not None and not isinstance(strategy, BigModelStrategy):
            raise ValueError(
                f"`{name}` would see gradients times the loss scale of `precision='16-mixed'`. Use `BigModelStrategy`, "
                "or `'bf16-mixed'`."
            )
        if self._parts_a_batch(trainer) * self._largest_window(trainer) == 1:
            raise ValueError(
                f"`{name}` compares gradients of parts of a step's batch with that of the whole, but here a step has "
                "one part: one data rank, one micro-batch and no accumulation. Set `accumulate_grad_batches=2`, or "
                "`num_microbatches=2` of `BigModelStrategy`, or use two data ranks."
            )

    @staticmethod
    def _parts_a_batch(trainer: pl.Trainer) -> int:
        strategy = trainer.strategy
        return strategy.num_parts_a_batch if isinstance(strategy, BigModelStrategy) else trainer.world_size

    @staticmethod
    def _largest_window(trainer: pl.Trainer) -> int:
        windows = [getattr(callback, "largest_window", 1) for callback in _host.callbacks(trainer)]
        return max([trainer.accumulate_grad_batches, *windows])

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self._close()
        self._trainer = trainer
        if any(isinstance(optimizer, optim.LBFGS) for optimizer in trainer.optimizers):
            raise ValueError(
                f"`{type(self).__name__}` needs one backward a batch, but LBFGS runs the step several times. Use a "
                "first-order optimizer such as AdamW."
            )
        if isinstance(strategy, BigModelStrategy):
            names, hidden = strategy.watched_parameters()
            if hidden:
                rank_zero_warn(
                    f"`{type(self).__name__}` leaves out {_listed(hidden)}: several stages or tensor ranks have parts "
                    "of their gradients, and none the whole of a micro-batch's."
                )
        else:
            names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        self._names = names
        self._parameters = [p for p in pl_module.parameters() if id(p) in names]
        self._held: tuple[int, ...] = ()
        self._group_of: dict[int, int] = {}
        self._num_groups = 0
        self._read_groups()
        self._watch = _Watch(self, names, self._group_of, lambda: self._num_groups)
        self._num_batches, self._batch_size = 0, 1.0
        self._pending = False
        if isinstance(strategy, BigModelStrategy):
            strategy.watch_gradients(self._watch)

    def rank_state_dict(self) -> dict[str, Any]:
        """What this rank has seen of a window that is not over."""
        watch = self._watch
        if watch is None:
            return {}
        shares = (watch.weight, watch.small_share, watch.big_share)
        return {"shares": shares, "small": watch.small.clone(), "num_batches": self._num_batches}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that window."""
        if state and self._watch is not None:
            self._watch.weight, self._watch.small_share, self._watch.big_share = state["shares"]
            self._watch.small, self._num_batches = state["small"].clone(), state["num_batches"]

    def _read_groups(self) -> None:
        """Which parameter is in which group; asked before each batch, as callbacks may add groups."""
        groups = self._groups()
        sizes = tuple(len(group) for group in groups)
        if sizes == self._held:
            return
        self._held, self._num_groups = sizes, len(groups)
        strategy = self._trainer.strategy
        self._group_of.clear()
        for number, group in enumerate(groups):
            for held in group:
                own = strategy.parameter_of(held) if isinstance(strategy, BigModelStrategy) else held
                if id(own) in self._names:
                    self._group_of[id(own)] = number

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._watch is not None
        self._read_groups()
        self._watch.follow(self._parameters)
        self._num_batches += 1
        self._batch_size = float(batch_size(batch) or 1)

    def _end_window(self) -> None:
        """What all ranks saw, put together. Collective."""
        watch, strategy = self._watch, self._trainer.strategy
        assert watch is not None
        size = self._num_groups
        if isinstance(strategy, BigModelStrategy):
            big, factor = strategy.complete_squares(self._group_of, size), 1.0
            speaks, device = strategy.speaks_first, strategy.device_for_numbers()
        else:
            # Lightning divides by the whole of `accumulate_grad_batches`, also where a window is shorter.
            factor = self._trainer.accumulate_grad_batches / (watch.weight or 1.0)
            big, speaks, device = self._own_squares(size), True, strategy.root_device
        shares = [watch.weight, watch.small_share, watch.big_share] if speaks else [0.0] * 3
        numbers = torch.cat([torch.tensor(shares, dtype=torch.float64), watch.small, big * factor**2])
        if self._trainer.world_size > 1:
            numbers = numbers.to(device)
            dist.all_reduce(numbers)
        weight, small_share, big_share, *squares = numbers.tolist()
        num_batches, self._num_batches = self._num_batches, 0
        watch.start_window()
        if weight:
            self._window_ends(
                WindowSquares(
                    small=tuple(square / weight for square in squares[:size]),
                    big=tuple(squares[size:]),
                    small_share=small_share / weight,
                    big_share=big_share / weight**2,
                    num_batches=num_batches,
                )
            )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    # -- Lightning's own strategies ------------------------------------------------------------------------------------

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if not isinstance(trainer.strategy, BigModelStrategy):
            assert self._watch is not None
            self._settle()
            self._watch.begin_backward(0)
            self._pending = True

    def _settle(self) -> None:
        """The last backward is over."""
        if self._pending:
            assert self._watch is not None
            self._watch.end_backward()
            seed = 1.0 / self._trainer.accumulate_grad_batches
            self._watch.end_batch([WatchedMicrobatch(index=0, weight=1.0, size=self._batch_size, seed=seed)])
        self._pending = False

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: optim.Optimizer
    ) -> None:
        if not isinstance(trainer.strategy, BigModelStrategy):
            self._settle()
            self._end_window()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._settle()

    def _own_squares(self, num_groups: int) -> Tensor:
        groups: list[list[Tensor]] = [[] for _ in range(num_groups)]
        if self._trainer.global_rank == 0:
            for parameter in self._parameters:
                if id(parameter) in self._group_of and parameter.grad is not None:
                    groups[self._group_of[id(parameter)]].append(parameter.grad)
        return square_sums(groups)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
