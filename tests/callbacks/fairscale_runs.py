"""What `fairscale.optim.AdaScale` does on the problem of these tests."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.callbacks.noise_runs import Noisy, batch_of, parts_of, weights

NUM_SAMPLES, BATCH_SIZE, ACCUMULATE = 48, 4, 3
# Settings of fairscale's optimizer, and of ours.
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "scaled": {"scale": 5.0, "smoothing": 0.6},
}


def run_fairscale(**settings: Any) -> dict[str, Any]:
    """One process that accumulates, with fairscale's optimizer.

    Returns:
        The gains of both groups, and of all, at each step; the sum of all weights at the end.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairscale.optim import AdaScale

    module = Noisy()
    optimizer = AdaScale(module.configure_optimizers(), num_gradients_to_accumulate=ACCUMULATE, **settings)
    gains = []
    for window in parts_of(NUM_SAMPLES, BATCH_SIZE, 1, 1, ACCUMULATE):
        for parameter in module.parameters():  # fairscale takes every parameter to have a gradient
            parameter.grad = torch.zeros_like(parameter)
        for part in window:
            module.loss_of(batch_of(part)).div(ACCUMULATE).backward()
        gains.append([float(optimizer.gain(0)), float(optimizer.gain(1)), float(optimizer.gain())])
        optimizer.step()
    optimizer.unhook()
    return {"gains": gains, "sum": float(sum(abs(value).sum() for value in weights(module).values()))}


def run_fairscale_ddp() -> dict[str, Any]:
    """One of two ranks of DDP, with batches as `BigModelStrategy` deals them out. Returns what `run_fairscale` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairscale.optim import AdaScale

    module = Noisy()
    replica = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = AdaScale(module.configure_optimizers(), world_size=2)
    gains = []
    for window in parts_of(NUM_SAMPLES, BATCH_SIZE, 2, 1, 1):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        batch = batch_of(window[dist.get_rank()])
        nn.functional.cross_entropy(replica(batch), batch["label"]).backward()
        gains.append([float(optimizer.gain(0)), float(optimizer.gain(1)), float(optimizer.gain())])
        optimizer.step()
    optimizer.unhook()
    return {"gains": gains, "sum": float(sum(abs(value).sum() for value in weights(module).values()))}
