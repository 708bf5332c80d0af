"""Check a module of your own: does it train in parallel to the numbers of one process?"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_bigmodel.pipeline.microbatch import split_batch
from lightning_bigmodel.testing.ranks import run_ranks

__all__ = ["EquivalenceReport", "assert_parallel_equivalent"]


@dataclass(frozen=True)
class EquivalenceReport:
    """What `assert_parallel_equivalent` compared.

    Attributes:
        worst_parameter: Name and largest absolute difference over all ranks, after all steps.
        worst_metric: Name and largest absolute difference over all ranks of a logged metric.
        num_parameters: Parameters compared.
        num_metrics: Logged metrics compared.
        world_size: Ranks of the parallel run.
    """

    worst_parameter: tuple[str, float]
    worst_metric: tuple[str, float]
    num_parameters: int
    num_metrics: int
    world_size: int


def assert_parallel_equivalent(
    module: Any,
    batch: Any,
    strategy: Any,
    *,
    world_size: int | None = None,
    num_steps: int = 4,
    absolute_tolerance: float = 1e-5,
    relative_tolerance: float = 1e-5,
    timeout_seconds: float = 300.0,
    **trainer_options: Any,
) -> EquivalenceReport:
    """Train `module` on `batch` in one process and under `strategy` on CPU ranks, and compare everything.

    Compared after `num_steps` optimizer steps: every parameter on every rank, and every metric the module logged. Give
    a small copy of your model (same classes, few and narrow blocks) and a batch of a few samples. Dropout modules are
    switched off in both runs, as no two layouts can draw equal masks. Data replicas each take their part of `batch`.

    Args:
        module: A LightningModule; it is copied, not changed.
        batch: One batch as its loader would give it, with all samples of one step of the one-process run.
        strategy: A `BigModelStrategy` that was not used yet.
        world_size: Ranks to start. Default: the strategy's `pipeline_parallel_size` times its `tensor_parallel_size`.
        num_steps: Optimizer steps to take (times `accumulate_grad_batches`, where given, batches).
        absolute_tolerance: Largest difference allowed near zero.
        relative_tolerance: Largest difference allowed relative to the one-process value.
        timeout_seconds: Longest time for the parallel run.
        **trainer_options: Further arguments of both Trainers, such as `accumulate_grad_batches=3`,
            `gradient_clip_val=0.5`.

    Raises:
        AssertionError: Where a parameter or metric differs; the message names the worst ones.
        TypeError: Where the module, batch or strategy cannot be sent to other processes.
        ValueError: Where `world_size` is left out and the strategy does not tell it (`pipeline_parallel_size="all"`).
        RanksFailedError: Where the parallel run fails; with the traceback of every rank.

    Cost: two short trainings on the CPU; `world_size` processes.

    Example:
        >>> from lightning_bigmodel import BigModelStrategy
        >>> from lightning_bigmodel.testing import TinyChain, assert_parallel_equivalent
        >>> module = TinyChain(num_blocks=4)
        >>> strategy = BigModelStrategy(pipeline_parallel_size=2, num_microbatches=4)
        >>> report = assert_parallel_equivalent(module, module.example_batch(8, seed=0), strategy)
        >>> report.worst_parameter[1] < 1e-5
        True
    """
    if world_size is None:
        world_size = strategy._pipeline_parallel_size
        if not isinstance(world_size, int):
            raise ValueError('`pipeline_parallel_size="all"` does not tell how many ranks to start: give `world_size`.')
        world_size *= strategy._tensor_parallel_size
    module = copy.deepcopy(module)
    for inner in module.modules():
        if isinstance(inner, nn.modules.dropout._DropoutNd):
            inner.p = 0.0
        elif isinstance(inner, nn.MultiheadAttention):
            inner.dropout = 0.0  # a plain number there
    try:
        payload = pickle.dumps((module, batch, strategy))
    except Exception as error:
        raise TypeError(
            f"The module, batch and strategy are sent to other processes, but do not pickle: {error}. Define the "
            "module's class at the top level of an importable file, and give functions by name instead of as lambdas."
        ) from error
    num_batches = num_steps * int(trainer_options.get("accumulate_grad_batches", 1))
    reference, metrics = _train(module, batch, "auto", 1, num_batches, trainer_options)
    results = run_ranks(_on_rank, world_size, payload, num_batches, trainer_options, timeout_seconds=timeout_seconds)
    return _compare(reference, metrics, results, absolute_tolerance, relative_tolerance, world_size)


class _Repeated(Dataset[Any]):
    """The same batch again and again."""

    def __init__(self, batch: Any, num_batches: int) -> None:
        self._batch, self._num_batches = batch, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self._batch)


def _unchanged(batch: Any) -> Any:
    return batch


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    # A newcomer's own check should show its result, not the host's hints about loggers and accelerators.
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _train(
    module: Any, batch: Any, strategy: Any, devices: int, num_batches: int, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    from lightning.pytorch import Trainer

    settings: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "use_distributed_sampler": False,  # each rank is given its part of the batch
    }
    loader = DataLoader(_Repeated(batch, num_batches), batch_size=None, collate_fn=_unchanged)
    with _quiet_lightning():
        trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, **{**settings, **options})
        trainer.fit(module, loader)
    parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return parameters, {name: float(value) for name, value in trainer.callback_metrics.items()}


def _on_rank(payload: bytes, num_batches: int, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    import torch.distributed as dist

    module, batch, strategy = pickle.loads(payload)
    world_size = dist.get_world_size()
    size, tensor_size = strategy._pipeline_parallel_size, strategy._tensor_parallel_size
    data_size = world_size // (world_size if isinstance(size, str) else size * tensor_size)
    part = split_batch(batch, data_size)[dist.get_rank() // tensor_size % data_size] if data_size > 1 else batch
    parameters, metrics = _train(module, part, strategy, world_size, num_batches, options)
    return {name: parameter.numpy() for name, parameter in parameters.items()}, metrics


def _compare(
    reference: dict[str, torch.Tensor],
    metrics: dict[str, float],
    results: list[tuple[dict[str, Any], dict[str, float]]],
    absolute: float,
    relative: float,
    world_size: int,
) -> EquivalenceReport:
    differences: dict[str, float] = {}
    metric_differences: dict[str, float] = {}
    problems: list[str] = []
    for rank, (parameters, logged) in enumerate(results):
        if set(parameters) != set(reference):
            problems.append(f"rank {rank} has other parameters: {sorted(set(parameters) ^ set(reference))}")
        for name, expected in reference.items():
            found = (
                torch.from_numpy(parameters[name]) if name in parameters else torch.full_like(expected, float("nan"))
            )
            worst = float((found - expected).abs().max()) if expected.numel() else 0.0
            differences[name] = max(differences.get(name, 0.0), worst if worst == worst else float("inf"))
            if not torch.allclose(found, expected, rtol=relative, atol=absolute):
                problems.append(f"rank {rank}: `{name}` differs by up to {worst:.3g}")
        for name, value in metrics.items():
            distance = abs(logged.get(name, float("nan")) - value)
            metric_differences[name] = max(
                metric_differences.get(name, 0.0), distance if distance == distance else float("inf")
            )
            if not distance <= absolute + relative * abs(value):
                problems.append(f"rank {rank}: metric `{name}` is {logged.get(name, 'missing')} instead of {value}")
        if set(logged) - set(metrics):
            problems.append(f"rank {rank} logged more than one process: {sorted(set(logged) - set(metrics))}")
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise AssertionError(f"The parallel run differs from one process on {world_size} ranks:\n  {shown}")
    nothing = ("", 0.0)
    return EquivalenceReport(
        max(differences.items(), key=lambda pair: pair[1], default=nothing),
        max(metric_differences.items(), key=lambda pair: pair[1], default=nothing),
        len(reference),
        len(metrics),
        world_size,
    )
