"""The runs that the tests of the noise scale and of AdaScale make, and the same by hand in a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel import BigModelStrategy, GradientNoiseScale
from lightning_bigmodel.callbacks._noise import WindowSquares
from lightning_bigmodel.testing import CollectiveCounter
from tests.strategies.trainer_modules import Classifier, Sequences, loader, pad, trainer, weights

LEARNING_RATE = 0.1
LENGTHS = (3, 6, 5)


def live_tokens(batch: dict[str, Any]) -> Tensor:
    """A weight that differs from micro-batch to micro-batch."""
    return batch["mask"].sum()


class Noisy(Classifier):
    """Plain SGD in double precision, so that differences of squares stay exact."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def loss_of(self, batch: dict[str, Any]) -> Tensor:
        """The loss of `training_step`."""
        return nn.functional.cross_entropy(self(batch), batch["label"])

    def configure_optimizers(self) -> Any:
        own = [parameter for name, parameter in self.named_parameters() if "embed" in name]
        rest = [parameter for name, parameter in self.named_parameters() if "embed" not in name]
        return torch.optim.SGD([{"params": own, "lr": LEARNING_RATE / 2}, {"params": rest}], lr=LEARNING_RATE)


class Recorded(GradientNoiseScale):
    """Keeps the estimate of every step, and counts what a step sends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[tuple[float, ...]] = []
        self.counts: list[dict[str, tuple[int, int]]] = []
        self.logged: list[float] = []

    def _end_window(self) -> None:
        with CollectiveCounter() as counter:
            super()._end_window()
        self.counts.append(counter.as_dict())

    def _window_ends(self, window: WindowSquares) -> None:
        super()._window_ends(window)
        if window.compares:
            assert self.last_estimate is not None
            self.steps.append((*self.last_estimate, self.last_batch_size))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        if "noise_scale" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["noise_scale"]))


def fit(
    strategy: Any,
    devices: int,
    num_samples: int,
    batch_size: int,
    *,
    noise: GradientNoiseScale | None = None,
    callbacks: tuple[Any, ...] = (),
    module: Any = None,
    resume: str | None = None,
    data: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train with a noise scale; says all that can be compared."""
    noise = noise or Recorded()
    module = module or Noisy()
    run = trainer(strategy, devices, callbacks=[noise, *callbacks], use_distributed_sampler=data is None, **options)
    run.fit(module, data or loader(num_samples, batch_size, lengths=LENGTHS), ckpt_path=resume)
    return {
        "steps": getattr(noise, "steps", []),
        "counts": getattr(noise, "counts", []),
        "logged": getattr(noise, "logged", []),
        "noise_scale": noise.noise_scale,
        "interval": noise.interval,
        "state": noise.state_dict(),
        "weights": weights(module),
    }


def fit_on_ranks(devices: int, num_samples: int, batch_size: int, settings: Any, **options: Any) -> dict[str, Any]:
    """`fit` for `run_ranks`."""
    strategy = BigModelStrategy(**settings) if isinstance(settings, dict) else settings
    return fit(strategy, devices, num_samples, batch_size, **options)


def parts_of(
    num_samples: int, batch_size: int, data_size: int, num_microbatches: int, accumulate: int
) -> list[list[list[int]]]:
    """Window -> part -> indices of samples, as data ranks and micro-batches have them."""
    windows: list[list[list[int]]] = []
    rows = [list(range(rank, num_samples, data_size)) for rank in range(data_size)]
    num_batches = -(-len(rows[0]) // batch_size)
    for index in range(num_batches):
        if index % accumulate == 0:
            windows.append([])
        for row in rows:
            batch = row[index * batch_size : (index + 1) * batch_size]
            count = min(num_microbatches, len(batch))
            sizes = [len(batch) // count + (number < len(batch) % count) for number in range(count)]
            for size in sizes:
                windows[-1].append(batch[:size])
                batch = batch[size:]
    return windows


def batch_of(indices: list[int]) -> dict[str, Any]:
    """The batch of some samples."""
    dataset = Sequences(10**6, lengths=LENGTHS)
    return pad([dataset[index] for index in indices])


def gradients_of(module: Noisy, indices: list[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The gradient of the mean loss over some samples, and the batch of them."""
    batch = batch_of(indices)
    loss = module.loss_of(batch)
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(
        zip(names, torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True), strict=True)
    ), batch


def square(gradients: dict[str, Tensor], without: tuple[str, ...] = ()) -> float:
    """Its squared norm."""
    return sum(float(gradient.square().sum()) for name, gradient in gradients.items() if name not in without)


def by_hand(
    windows: list[list[list[int]]],
    weight_of: Any = None,
    *,
    equal: bool = False,
    module: Any = None,
    without: tuple[str, ...] = (),
) -> dict[str, Any]:
    """One process, one gradient after the other.

    Args:
        windows: See `parts_of`.
        weight_of: Batch -> weight; default: samples.
        equal: Whether each has the same share, whatever its size.
        module: Whose gradients.
        without: Names of parameters that do not count.
    """
    module = module or Noisy()
    optimizer = module.configure_optimizers()
    steps = []
    for window in windows:
        found = [gradients_of(module, part) for part in window]
        sizes = [
            float(len(part)) if weight_of is None else float(weight_of(batch))
            for part, (_, batch) in zip(window, found, strict=True)
        ]
        shares = [1.0] * len(sizes) if equal else sizes
        total = sum(shares)
        mean = {
            name: sum(share / total * gradient[name] for share, (gradient, _) in zip(shares, found, strict=True))
            for name in found[0][0]
        }
        small = sum(
            share / total * square(gradient, without) for share, (gradient, _) in zip(shares, found, strict=True)
        )
        big = square(mean, without)
        per_small = sum(share / total / size for share, size in zip(shares, sizes, strict=True))
        per_big = sum((share / total) ** 2 / size for share, size in zip(shares, sizes, strict=True))
        if per_small > per_big * 1.000001:
            b_small, b_big = 1 / per_small, 1 / per_big
            square_norm = (b_big * big - b_small * small) / (b_big - b_small)
            trace = (small - big) / (1 / b_small - 1 / b_big)
            steps.append((trace, square_norm, b_big))
        for name, parameter in module.named_parameters():
            parameter.grad = mean[name]
        optimizer.step()
    above = below = 0.0
    for trace, square_norm, _ in steps:
        above, below = 0.99 * above + 0.01 * trace, 0.99 * below + 0.01 * square_norm
    return {"steps": steps, "noise_scale": above / below, "weights": weights(module)}
