"""What `fairscale.optim.AdaScale` 0.4.13 does on the problem of these tests, and how that was found.

`python -m tests.callbacks.fairscale_runs` prints `RECORDED` again, where fairscale is installed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.callbacks.noise_runs import Noisy, batch_of, parts_of, weights

NUM_SAMPLES, BATCH_SIZE, ACCUMULATE = 48, 4, 3
# Settings of fairscale -> the gains of both groups, and of all, at each step; the sum of all weights at the end.
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "scaled": {"scale": 5.0, "smoothing": 0.6},
}
RECORDED: dict[str, dict[str, Any]] = {
    "default": {
        "gains": [
            [2.8385465235304843, 1.6758021249663475, 1.6846735398699528],
            [2.910072524063176, 1.987988360329619, 1.996672253813965],
            [2.6230061371231, 2.0012994589283344, 2.009295807824184],
            [2.7404971045550632, 2.1834120138285407, 2.1919026356994267],
        ],
        "sum": 212.43893488415895,
    },
    "scaled": {
        "gains": [
            [4.677092804509729, 2.3516041305838127, 2.369346959451024],
            [4.8675981433457425, 3.2594445975518567, 3.2773905036648805],
            [4.0924007639426865, 3.0227449185060844, 3.039983135093596],
            [4.553208664339704, 3.7372179814834046, 3.7541969932666763],
        ],
        "sum": 212.28564996420496,
    },
    "ddp": {
        "gains": [
            [2.0, 1.911398585332838, 1.9137327075543957],
            [1.8286523525054676, 1.5933410553274978, 1.597736478865051],
            [1.8686254363283352, 1.7191288908094187, 1.7216491078013463],
            [1.851286229064544, 1.7325493583856788, 1.7347930714801267],
            [1.8860897113507318, 1.7867973862734552, 1.7887485800802998],
            [1.8831474521583464, 1.760910039308425, 1.7634822634506584],
        ],
        "sum": 212.4172883784291,
    },
}


def run_fairscale(**settings: Any) -> dict[str, Any]:
    """One process that accumulates, with fairscale's optimizer."""
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
    """Two ranks of DDP, with batches as `BigModelStrategy` deals them out."""
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


if __name__ == "__main__":
    import pprint

    from lightning_bigmodel.testing import run_ranks
    from tests.callbacks import fairscale_runs

    found = {name: run_fairscale(**settings) for name, settings in CASES.items()}
    found["ddp"] = run_ranks(fairscale_runs.run_fairscale_ddp, 2)[0]
    pprint.pprint(found, width=120)
