"""What every way of agreeing on gradients must hold; a new subclass of `GradientSync` is tested without new code.

One that loses something with its defaults, or does nothing for small tensors, has below the settings with which it does
not.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_bigmodel.replicas
from lightning_bigmodel.replicas.sync import GradientSync, NamedGradient, StepProgress
from lightning_bigmodel.testing import CollectiveCounter, run_ranks
from tests.replicas.sync_runs import replicas_of

# Class -> settings with which the sum is the plain one.
LOSSLESS: dict[str, dict[str, Any]] = {
    "DGC": {"sparsity": 0.0},
    "PowerSGD": {"rank": 1000, "min_compression_rate": 1e-9},
    "TopKErrorFeedback": {"density": 1.0},
}
# Class -> settings with which it compresses tensors as small as these.
WORKING: dict[str, dict[str, Any]] = {
    "DGC": {"sparsity": 0.9, "min_numel": 1},
    "HierarchicalAllReduce": {"across_dtype": "bfloat16", "bucket_bytes": 1000},
    "PowerSGD": {"rank": 1},
    "TopKErrorFeedback": {"density": 0.1, "min_numel": 1, "value_dtype": "float16"},
}
NUM = 4
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (24, 30),
    "image": (6, 5, 3, 3),  # channels last
    "vector": (17,),
    "number": (),
    "empty": (0, 4),
    "unused": (12, 12),  # without a gradient on any replica
}
OPTIONS = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}


def _classes(base: type = GradientSync) -> Iterator[type[GradientSync]]:
    for kind in base.__subclasses__():
        public = kind.__module__.startswith("lightning_bigmodel.") and hasattr(lightning_bigmodel, kind.__name__)
        if public and not inspect.isabstract(kind):
            yield kind
        yield from _classes(kind)


for _module in pkgutil.iter_modules(lightning_bigmodel.replicas.__path__, "lightning_bigmodel.replicas."):
    importlib.import_module(_module.name)
NAMES = sorted({kind.__name__ for kind in _classes()})


def _made(name: str, settings: dict[str, Any]) -> GradientSync:
    kind = next(kind for kind in _classes() if kind.__name__ == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tiny tensors are hardly worth it
        sync = kind(**settings)
        sync.begin(replicas_of(2), _parameters(torch.float32))
    return sync


def _parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def _contributions(rank: int, step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Zeros on one replica, which had no batch in this step."""
    numbers = torch.Generator().manual_seed(10 * step + rank)
    values = {}
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=numbers, dtype=torch.float64)
        value = torch.zeros_like(value) if rank == step % NUM or name == "unused" else value
        values[name] = value.to(dtype, memory_format=torch.channels_last if len(shape) == 4 else torch.preserve_format)
    return values


def _reduced(sync: GradientSync, step: int, dtype: torch.dtype, names: list[str]) -> dict[str, torch.Tensor]:
    values = _contributions(dist.get_rank(), step, dtype)
    parameters = _parameters(dtype)
    gradients = [
        NamedGradient(name=name, value=values[name], parameter=parameters[name], options=OPTIONS) for name in names
    ]
    looks = {name: (value.data_ptr(), value.shape, value.stride(), value.dtype) for name, value in values.items()}
    options = dict(OPTIONS)
    state = torch.get_rng_state()
    sync.reduce(gradients, StepProgress(weight=float(dist.get_rank() != step % NUM)))
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers were drawn from"
    for name, value in values.items():
        assert (value.data_ptr(), value.shape, value.stride(), value.dtype) == looks[name], name
    assert not any(parameter.any() for parameter in parameters.values())
    assert options == OPTIONS
    return {name: values[name] for name in names}


def _alike(values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        assert value.isfinite().all(), name
        whole = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(NUM)]
        dist.all_gather(whole, value.contiguous())
        assert all(torch.equal(other, whole[0]) for other in whole), name


def _sums(name: str) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        sync = _made(name, LOSSLESS.get(name, {}))
        for step in range(6):
            found = _reduced(sync, step, dtype, list(SHAPES))
            for key, value in found.items():
                parts = [_contributions(rank, step, dtype)[key].double() for rank in range(NUM)]
                total = torch.stack(parts).sum(0)
                torch.testing.assert_close(
                    value.double(), total, rtol=limit, atol=limit, msg=lambda m, k=key: f"{k} {m}"
                )
        sync.end()


def _works(name: str) -> int:
    settings = WORKING.get(name, {})
    first, second = _made(name, settings), _made(name, settings)
    assert {"momentum", "weight_decay", "nesterov"} >= set(first.taken_over)
    for dtype in (torch.float32, torch.bfloat16):
        first.end()
        first.begin(first.replicas, _parameters(dtype))
        seen = [list(SHAPES), list(SHAPES)[1:], list(SHAPES), [], list(SHAPES)]  # some come and go
        for step, names in enumerate(seen):
            _alike(_reduced(first, step, dtype, names))
        second.end()
        second.begin(second.replicas, _parameters(dtype))
        second.load_state_dict(first.state_dict())
        for step in (5, 6):
            ours, theirs = (_reduced(sync, step, dtype, list(SHAPES)) for sync in (first, second))
            assert all(torch.equal(ours[key], theirs[key]) for key in SHAPES), "not all of the state was kept"
    # As if all of these had been one replica of a larger run.
    merged = second.merged_state([second.state_dict()] * 3)
    if merged is not None:
        second.load_state_dict(merged)
        _alike(_reduced(second, 7, torch.bfloat16, list(SHAPES)))
    with CollectiveCounter() as counter:
        _reduced(first, 8, torch.float32, list(SHAPES))
    assert sum(num_bytes for _, num_bytes in counter.as_dict().values()) > 0
    second.end()
    return sum(calls for calls, _ in counter.as_dict().values())


def test_the_walk_sees_them() -> None:
    """A walk over no classes finds no fault."""
    assert set(NAMES) >= {"DGC", "HierarchicalAllReduce", "PowerSGD", "TopKErrorFeedback"}
    assert set(NAMES) >= set(LOSSLESS) | set(WORKING)


@pytest.mark.parametrize("name", NAMES)
def test_sums_if_nothing_is_lost(name: str) -> None:
    """A factor of the number of replicas, an element left out, 16-bit gradients summed in 16 bits."""
    run_ranks(_sums, NUM, name)


@pytest.mark.parametrize("name", NAMES)
def test_replicas_stay_equal(name: str) -> None:
    """Replicas that drift, a hang where a replica has zeros or a parameter is absent, state that is not kept."""
    calls = run_ranks(_works, NUM, name)
    assert len(set(calls)) == 1
    assert calls[0] <= 12  # some messages a step, not some for each tensor
