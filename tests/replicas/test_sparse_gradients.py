"""What sparse gradients send: nothing is lost, nothing is sent in vain, and a plan says how much it will be."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel import DGC, SampledThreshold
from lightning_bigmodel.replicas.largest import largest_elements
from lightning_bigmodel.replicas.sync import NamedGradient, StepProgress
from lightning_bigmodel.testing import CollectiveCounter, run_ranks
from tests.replicas.sync_runs import one_of, replicas_of

# -- nothing is lost ---------------------------------------------------------------------------------------------------


def _accounts(value_dtype: str | None) -> float:
    sync = DGC(0.99, min_numel=1, value_dtype=value_dtype, momentum_masking=False)  # type: ignore[arg-type]
    parameter = torch.zeros(40, 50, dtype=torch.float64)
    sync.begin(replicas_of(), {"w": parameter})
    options = {"momentum": 0.9, "weight_decay": 0.0, "nesterov": False}
    velocity, accumulated, received = (torch.zeros(40, 50, dtype=torch.float64) for _ in range(3))
    numbers = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(50):
        value = torch.randn(40, 50, dtype=torch.float64, generator=numbers)
        velocity = 0.9 * velocity + value
        accumulated += velocity
        sync.reduce([NamedGradient(name="w", value=value, parameter=parameter, options=options)], StepProgress())
        received += value
    kept = sync.state_dict()["residuals"]["w"].clone()
    dist.all_reduce(accumulated)
    dist.all_reduce(kept)
    assert 0.001 < received.count_nonzero() / received.numel() < 1  # some elements were never sent: they are kept
    return float((received + kept - accumulated).abs().max() / accumulated.abs().max())


@pytest.mark.parametrize("value_dtype", [None, "float16"])
def test_what_is_not_sent_is_kept(value_dtype: str | None) -> None:
    """Elements dropped at a mask, at rounding, or between two ranks, over 50 steps."""
    assert max(run_ranks(_accounts, 4, value_dtype)) < 1e-13


def _extremes() -> list[float]:
    sync = DGC(0.75, min_numel=1, threshold="exact", value_dtype="float16")
    parameter = torch.zeros(2, 4)
    sync.begin(replicas_of(), {"w": parameter})
    options = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
    value = torch.tensor([[1e5, 1e-9, 3e5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    total = torch.zeros(2, 4)
    for _ in range(8):
        sync.reduce([NamedGradient(name="w", value=value, parameter=parameter, options=options)], StepProgress())
        total += value
        value = torch.zeros(2, 4)
    return total.view(-1).tolist()


def test_half_precision_keeps_what_is_too_large_for_it() -> None:
    """Infinity from a value over 65504, and a small one rounded to nothing for good."""
    for total in run_ranks(_extremes, 2):
        assert total[0] == pytest.approx(2e5)
        assert total[2] == pytest.approx(6e5)


def _tensor(kind: str) -> torch.Tensor:
    value = torch.randn(200, 200, generator=torch.Generator().manual_seed(1))
    if kind == "zeros":
        return value.zero_()
    if kind == "one row":
        value[1:] = 0
    elif kind == "flat":
        value.fill_(0.5)
    elif kind == "steep":
        value = value.pow(9)
    elif kind == "with NaN":
        value[3, 3] = torch.nan
    return value


@pytest.mark.parametrize("threshold", [SampledThreshold(), SampledThreshold(strided=False, resample=False), None])
@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("zeros", 0, 0), ("one row", 1, 200), ("flat", 320, 520), ("steep", 320, 520), ("with NaN", 320, 520)],
)
def test_numbers_sent_lie_within_the_bounds(
    kind: str, least: int, most: int, threshold: SampledThreshold | None
) -> None:
    """Zeros sent because the threshold is 0, all of a tensor because it is flat; a NaN that is kept back."""
    value = _tensor(kind).view(-1)
    places = largest_elements(value, 0.01, threshold, seed=3)
    assert least <= places.numel() <= most
    assert places.unique().numel() == places.numel()
    assert bool(value[places].isnan().any()) == (kind == "with NaN")
    assert not (value[places] == 0).any()


def _seen() -> torch.Tensor:
    sync = DGC(0.99, min_numel=1)
    value = _tensor("with NaN") if dist.get_rank() == 0 else _tensor("zeros")
    sync.begin(replicas_of(), {"w": torch.zeros(200, 200)})
    sync.reduce([NamedGradient(name="w", value=value, parameter=value, options={})], StepProgress())
    return value


def test_a_nan_reaches_all_replicas() -> None:
    """A replica that broke, and goes on in silence with elements that never change again."""
    assert [int(value.isnan().sum()) for value in run_ranks(_seen, 2)] == [1, 1]


# -- bytes -------------------------------------------------------------------------------------------------------------


def _bytes(num_tensors: int) -> tuple[dict[str, tuple[int, int]], float]:
    sync = DGC(sparsity=0.99)
    parameters = {f"w{index}": torch.zeros(200, 200) for index in range(num_tensors)}
    sync.begin(replicas_of(), parameters)
    options = {"momentum": 0.9, "weight_decay": 0.0, "nesterov": False}
    numbers = torch.Generator().manual_seed(dist.get_rank())
    with CollectiveCounter() as counter:
        gradients = [
            NamedGradient(name=name, value=torch.randn(200, 200, generator=numbers), parameter=tensor, options=options)
            for name, tensor in parameters.items()
        ]
        sync.reduce(gradients, StepProgress())
    return counter.as_dict(), sync.planned_bytes(parameters, 2, 0.01).compressed


def test_bytes_sent() -> None:
    """More than 3 % of dense at a density of 1 %; a message for each tensor; a plan that is not what happens."""
    for counts, planned in run_ranks(_bytes, 2, 12):
        assert set(counts) == {"all_gather"}
        calls, num_bytes = counts["all_gather"]
        assert calls == 2
        assert num_bytes <= 0.03 * 12 * 200 * 200 * 4
        assert num_bytes == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize(
    ("size", "settings", "told"),
    [
        (3, {"sparsity": 0.75}, None),
        (4, {"sparsity": 0.75}, None),  # equal is not more
        (5, {"sparsity": 0.75}, r"0\.25 \(1\.2 times the bytes\)"),
        (999, {}, None),
        (1001, {}, r"0\.001 \(1\.0 times the bytes\)"),
        (16, {"warmup_epochs": 4}, r"0\.251 \(4\.0 times the bytes\), 0\.0631 \(1\.0 times the bytes\)\. What"),
        (1001, {"value_dtype": "float16"}, None),
        (
            8,
            {"min_numel": 10**6},
            r"all parameters here are exempt \(the largest has 40000 elements, `min_numel=1000000`",
        ),
    ],
)
def test_warns_of_more_bytes_than_dense(size: int, settings: dict[str, Any], told: str | None) -> None:
    """A run that compression makes slower, in its warm-up only or throughout; also a warning where none is due."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DGC(**settings).begin(one_of(size), {"w": torch.zeros(200, 200)})
    assert len(caught) == (told is not None)
    if told is not None:
        with pytest.warns(UserWarning, match=told):
            DGC(**settings).begin(one_of(size), {"w": torch.zeros(200, 200)})


def test_warns_of_the_whole_model() -> None:
    """A warning about the stage of the first rank, where there is nothing to compress."""
    replicas = dataclasses.replace(one_of(8), model={"w": torch.nn.Parameter(torch.zeros(200, 200))})
    DGC().begin(replicas, {"bias": torch.zeros(200)})
    with pytest.warns(UserWarning, match="all parameters here are exempt"):
        DGC().begin(one_of(8), {"bias": torch.zeros(200)})
