"""The Trainer's own features under a pipeline and replicas: numbers of one process, in any order of entry points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import run_ranks
from tests.strategies.trainer_modules import Classifier, loader, numbers, pipeline, trainer, weights

TOLERANCE = 1e-5


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every parameter, by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def assert_same_numbers(found: dict[str, float], expected: dict[str, float]) -> None:
    """Every metric, by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name


def fit(
    strategy: Any,
    devices: int,
    batch_size: int,
    *,
    num_samples: int = 32,
    lengths: tuple[int, ...] = (6,),
    shuffle: bool = False,
    seed: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train and say everything a user could read off afterwards."""
    module = Classifier()
    run = trainer(strategy, devices, **options)
    if seed is not None:
        torch.manual_seed(seed)
    run.fit(
        module,
        loader(num_samples, batch_size, lengths=lengths, shuffle=shuffle),
        loader(10, 4, lengths=lengths),
    )
    return {
        "weights": weights(module),
        "metrics": numbers(run.callback_metrics),
        "losses": module.losses,
        "calls": module.calls,
        "rates": [group["lr"] for group in run.optimizers[0].param_groups],
        "global_step": run.global_step,
        "seen": module.seen_indices,
    }


def _fit(devices: int, batch_size: int, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return fit(pipeline(**strategy), devices, batch_size, **options)


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain": (2, {}, {}),
    "interleaved": (2, {"schedule": "Interleaved1F1B"}, {}),
    "v_schedule": (2, {"schedule": "ZBVZeroBubble"}, {}),
    "replicas": (4, {}, {}),
    "accumulate_and_clip": (2, {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "clip_by_value": (2, {}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "uneven_last_batch": (2, {}, {"num_samples": 27}),
    "fewer_samples_than_microbatches": (2, {}, {"num_samples": 26}),
    "two_epochs": (2, {}, {"max_epochs": 2}),
    "lengths": (2, {}, {"lengths": (3, 7, 5, 9, 4, 6, 8)}),
    "max_steps": (2, {}, {"max_steps": 3, "max_epochs": None}),
    "limits": (2, {}, {"limit_train_batches": 3, "limit_val_batches": 2}),
    "val_check_interval": (2, {}, {"val_check_interval": 2}),
    "overfit_batches": (2, {}, {"overfit_batches": 2, "max_epochs": 2}),
    "detect_anomaly": (2, {}, {"detect_anomaly": True}),
    "no_sanity_check": (2, {}, {"num_sanity_val_steps": 0}),
    "replicated_loading": (2, {"batch_source": "replicated"}, {}),
    "shuffled": (2, {}, {"shuffle": True, "seed": 5, "max_epochs": 2}),
    "shuffled_replicas": (4, {}, {"shuffle": True, "seed": 5, "max_epochs": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_fit_equals_one_process(name: str) -> None:
    """A Trainer setting that a pipeline ignores, applies per stage or counts twice."""
    world_size, strategy, options = CASES[name]
    expected = fit("auto", 1, 8, **options)
    results = run_ranks(_fit, world_size, world_size, 8 // (world_size // 2), strategy, options)
    for result in results:
        assert_same_weights(result["weights"], expected["weights"])
        assert_same_numbers(result["metrics"], expected["metrics"])
        assert result["calls"] == expected["calls"]
        assert result["rates"] == pytest.approx(expected["rates"])
        assert result["global_step"] == expected["global_step"]
        assert len(result["losses"]) == len(expected["losses"])
        if world_size == 2:
            assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
            assert result["seen"] == expected["seen"]


def entry_points(strategy: Any, devices: int, batch_size: int) -> list[Any]:
    """One module object through every entry point, several times, under two Trainers and at last a plain one."""
    module = Classifier()
    run = trainer(strategy, devices)
    train, evaluate = loader(24, batch_size), loader(21, batch_size)
    found: list[Any] = []
    found.append(run.validate(module, evaluate, verbose=False)[0])
    run.fit(module, train, evaluate)
    found.append(numbers(run.callback_metrics))
    found.append(run.validate(module, evaluate, verbose=False)[0])
    found.append(run.test(module, evaluate, verbose=False)[0])
    predictions = run.predict(module, evaluate)
    assert predictions is not None
    found.append({"index_sum": float(sum(int(p["index"].sum()) for p in predictions))})
    order = [int(index) for prediction in predictions for index in prediction["index"]]
    assert order == list(range(21)), order
    found.append({"logits": float(torch.cat([p["logits"] for p in predictions]).abs().sum())})
    second = trainer(pipeline(schedule="ZBVZeroBubble") if devices > 1 else "auto", devices)
    second.fit(module, train, evaluate)
    found.append(numbers(second.callback_metrics))
    assert module.training
    assert all("Gate" not in base.__name__ for part in module.modules() for base in type(part).__mro__)
    found.append(weights(module))
    return found


def _entry_points(devices: int, batch_size: int) -> list[Any]:
    return entry_points(pipeline(), devices, batch_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_entry_point_in_any_order(world_size: int) -> None:
    """A second set-up that finds the model already cut, half of its weights missing, or samples counted twice."""
    expected = entry_points("auto", 1, 8)
    for result in run_ranks(_entry_points, world_size, world_size, 8 // (world_size // 2)):
        for found, wanted in zip(result[:-1], expected[:-1], strict=True):
            if world_size == 4:  # the module's own mean over its rank's samples: ranks have 11 and 10
                found.pop("val_mean", None), wanted.pop("val_mean", None)
            assert_same_numbers(numbers(found), numbers(wanted))
        assert_same_weights(result[-1], expected[-1])


def monitored(strategy: Any, devices: int, batch_size: int, directory: str) -> dict[str, Any]:
    """Checkpoints on a monitored metric, early stopping and a CSV log."""
    module = Classifier(learning_rate=0.3)
    best = ModelCheckpoint(f"{directory}/checkpoints", monitor="val_loss", save_top_k=1, filename="best-{epoch}")
    stop = EarlyStopping("val_loss", patience=1)
    logger = CSVLogger(directory, name="log", version=0)
    run = trainer(
        strategy,
        devices,
        callbacks=[best, stop],
        logger=logger,
        max_epochs=8,
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    run.fit(module, loader(32, batch_size), loader(10, 4))
    return {
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score or 0),
        "stopped": stop.stopped_epoch,
        "epoch": run.current_epoch,
        "metrics": numbers(run.callback_metrics),
    }


def _monitored(devices: int, batch_size: int, directory: str) -> dict[str, Any]:
    return monitored(pipeline(), devices, batch_size, directory)


@pytest.mark.parametrize("world_size", [2, 4])
def test_monitors_and_loggers_agree_on_every_rank(world_size: int, tmp_path: Path) -> None:
    """A loss that exists on the last stage only: others save elsewhere, stop at another epoch, or log nothing."""
    expected = monitored("auto", 1, 8, str(tmp_path / "one"))
    results = run_ranks(_monitored, world_size, world_size, 8 // (world_size // 2), str(tmp_path / "ranks"))
    for result in results:
        assert result["best"] == expected["best"]
        assert result["score"] == pytest.approx(expected["score"], abs=TOLERANCE)
        assert (result["stopped"], result["epoch"]) == (expected["stopped"], expected["epoch"])
        assert_same_numbers(result["metrics"], expected["metrics"])
    one, ranks = ((tmp_path / side / "log/version_0/metrics.csv").read_text().splitlines() for side in ("one", "ranks"))
    assert len(one) == len(ranks)
    assert one[0] == ranks[0]


def _replicas(world_size: int, num_microbatches: int, options: dict[str, Any]) -> dict[str, Any]:
    strategy = BigModelStrategy(num_microbatches=num_microbatches)
    return fit(strategy, world_size, 8 // world_size, **options)


@pytest.mark.parametrize(("world_size", "num_microbatches"), [(2, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "max_epochs": 2}])
def test_without_a_pipeline_it_equals_one_process_too(
    world_size: int, num_microbatches: int, options: dict[str, Any]
) -> None:
    """Replicas alone, micro-batches alone, and both: the same strategy on another path."""
    expected = fit("auto", 1, 8, **options)
    results = run_ranks(_replicas, world_size, world_size, num_microbatches, options)
    for result in results:
        assert_same_weights(result["weights"], expected["weights"])
        assert_same_numbers(result["metrics"], expected["metrics"])
        assert result["global_step"] == expected["global_step"]
