"""The runs that the tests of averaged weights make, and the same by hand in a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_bigmodel import BigModelStrategy, ExponentialMovingAverage
from lightning_bigmodel.testing import CollectiveCounter
from tests.strategies.trainer_modules import Classifier, loader, numbers, trainer, weights

DECAY = 0.8
NUM_EPOCHS = 2
TOLERANCE = 1e-6
PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}


class Averaged(Classifier):
    """Plain SGD, so that rounding stays rounding and no schedule looks at what is evaluated."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def by_hand(accumulate: int = 1, num_epochs: int = NUM_EPOCHS) -> dict[str, Any]:
    """One process without Trainer, strategy or callback."""
    module = Averaged()
    optimizer = module.configure_optimizers()
    averages = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    val_losses, by_epoch = [], []
    for _ in range(num_epochs):
        for index, batch in enumerate(loader(32, 8)):
            loss = nn.functional.cross_entropy(module(batch), batch["label"])
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                for name, parameter in module.named_parameters():
                    averages[name] = DECAY * averages[name] + (1 - DECAY) * parameter.detach()
        evaluated = copy.deepcopy(module)
        evaluated.load_state_dict(averages, strict=True)
        val_losses.append(_loss(evaluated))
        by_epoch.append(weights(evaluated))
    return {"weights": weights(module), "averages": by_epoch, "val_losses": val_losses, "test_loss": _loss(evaluated)}


@torch.no_grad()
def _loss(module: Classifier) -> float:
    total = sum(nn.functional.cross_entropy(module(b), b["label"], reduction="sum") for b in loader(10, 4))
    return float(total) / 10


class Before(Callback):
    """Ahead of the average in the list: sees the training weights as each evaluation begins."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = snapshot(trainer, pl_module)


class After(Callback):
    """Behind the average: sees what evaluations compute with, and what they leave."""

    def __init__(self, before: Before) -> None:
        self._before = before
        self.evaluated: list[dict[str, Any]] = []
        self.is_back: list[bool] = []
        self.val_losses: list[float] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            held = set(held_names(trainer, pl_module))
            with whole(trainer):
                self.evaluated.append({n: value for n, value in weights(pl_module).items() if n in held})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.is_back.append(same_bits(snapshot(trainer, pl_module), self._before.seen))
        if not trainer.sanity_checking:
            self.val_losses.append(float(trainer.callback_metrics["val_loss"]))


def whole(trainer: Any) -> Any:
    """All parameters of this rank whole within."""
    strategy = trainer.strategy
    return strategy.whole_parameters(write=False) if isinstance(strategy, BigModelStrategy) else torch.no_grad()


def held_names(trainer: Any, module: Any) -> list[str]:
    """Names of what this rank holds."""
    strategy = trainer.strategy
    return list(
        strategy.held_parameters() if isinstance(strategy, BigModelStrategy) else dict(module.named_parameters())
    )


def snapshot(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """What this rank computes with, and the rows an optimizer steps; copies."""
    strategy = trainer.strategy
    if not isinstance(strategy, BigModelStrategy):
        return {name: value.clone() for name, value in module.state_dict().items()}
    held = {f"held {name}": tensor.clone() for name, tensor in strategy.held_parameters().items()}
    if strategy.has_whole_parameters:
        names = set(strategy.held_parameters())
        held.update({name: p.detach().clone() for name, p in module.named_parameters() if name in names})
    return held


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether all are equal, bit for bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


class Counted(ExponentialMovingAverage):
    """Counts the collectives of its own hooks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, list[dict[str, tuple[int, int]]]] = {"update": [], "start": [], "end": []}

    def on_train_batch_end(self, *args: Any) -> None:
        with CollectiveCounter() as counter:
            super().on_train_batch_end(*args)
        self.counts["update"].append(counter.as_dict())

    def on_validation_start(self, *args: Any) -> None:
        with CollectiveCounter() as counter:
            super().on_validation_start(*args)
        self.counts["start"].append(counter.as_dict())

    def on_validation_end(self, *args: Any) -> None:
        with CollectiveCounter() as counter:
            super().on_validation_end(*args)
        self.counts["end"].append(counter.as_dict())


def fit(
    strategy: Any,
    devices: int,
    batch_size: int,
    directory: str | None = None,
    resume: str | None = None,
    average: ExponentialMovingAverage | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, evaluate and test with averages; says all that can be compared."""
    module = Averaged()
    average = average or ExponentialMovingAverage(DECAY)
    before = Before()
    after = After(before)
    callbacks: list[Callback] = [before, average, after]
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, filename="{epoch}", monitor="val_loss", save_top_k=-1))
    run = trainer(
        strategy,
        devices,
        **{"max_epochs": NUM_EPOCHS, **options},
        callbacks=callbacks,
        enable_checkpointing=directory is not None,
    )
    run.fit(module, loader(32, batch_size), loader(10, 4), ckpt_path=resume)
    result = {
        "weights": weights(module),
        "evaluated": after.evaluated,
        "is_back": after.is_back,
        "val_losses": after.val_losses,
        "counts": getattr(average, "counts", None),
        "num_updates": average.state_dict()["num_updates"],
        "types": {tensor.dtype for tensor in average.averages.values()},
    }
    run.test(module, loader(10, 4), verbose=False)
    result["test_loss"] = numbers(run.callback_metrics)["test_loss"]
    result["weights_after_test"] = weights(module)
    return result


def fit_on_ranks(devices: int, batch_size: int, strategy: dict[str, Any] | str, **options: Any) -> dict[str, Any]:
    """`fit` for `run_ranks`, counted."""
    chosen = BigModelStrategy(**strategy) if isinstance(strategy, dict) else strategy
    return fit(chosen, devices, batch_size, average=Counted(DECAY), **options)


def assert_close(found: dict[str, Any], expected: dict[str, Any], *, partly: bool = False) -> None:
    """Every parameter, by name; with `partly` those that are there."""
    assert partly or found.keys() == expected.keys()
    assert found
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def check(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """A run under any layout against the plain loop."""
    assert_close(result["weights"], expected["weights"])
    assert len(result["evaluated"]) == 2
    for found, average in zip(result["evaluated"], expected["averages"], strict=True):
        assert_close(found, average, partly=True)
    assert result["val_losses"] == pytest.approx(expected["val_losses"], abs=TOLERANCE)
    assert result["test_loss"] == pytest.approx(expected["test_loss"], abs=TOLERANCE)
    assert result["is_back"] == [True] * 3  # the sanity check is one
    for name, value in result["weights"].items():
        assert (result["weights_after_test"][name] == value).all(), name


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Tensors as arrays."""
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}
