"""What `fairscale.optim.AdaScale` 0.4.13 does on the problem of these tests, and how that was found.

`python -m tests.callbacks.fairscale_runs` prints `RECORDED` again, where fairscale is installed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

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


if __name__ == "__main__":
    import pprint

    pprint.pprint({name: run_fairscale(**settings) for name, settings in CASES.items()}, width=120)
