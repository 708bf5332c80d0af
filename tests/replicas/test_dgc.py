"""Deep Gradient Compression against its formulas in plain numpy, and what it keeps."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel import DGC, SampledThreshold
from lightning_bigmodel.mesh.rng import derive_seed
from lightning_bigmodel.replicas.sync import NamedGradient, Replicas, StepProgress
from lightning_bigmodel.testing import run_ranks
from tests.replicas.sync_runs import (
    SHAPES,
    STEPS_AN_EPOCH,
    Arrays,
    Run,
    contribution,
    one_of,
    replicas_of,
    start,
    worst,
)

NUM = 4
STEPS = 20
TYPES = {"float64": torch.float64, "float32": torch.float32}
Select = Callable[[np.ndarray, int, int], np.ndarray]  # |v|, how many, seed -> places

# -- the paper, in numpy -----------------------------------------------------------------------------------------------


def exactly(importance: np.ndarray, wanted: int, seed: int) -> np.ndarray:
    """The largest, by sorting."""
    return np.argsort(-importance, kind="stable")[:wanted]


def sampled(rule: SampledThreshold) -> Select:
    """The authors' search for a threshold."""

    def select(importance: np.ndarray, wanted: int, seed: int) -> np.ndarray:
        size = importance.size
        num = max(math.ceil(size * rule.sample_ratio), math.ceil(2 * size / wanted))
        if num >= size:
            sample = importance
        elif rule.strided:
            stride = next(stride for stride in range(size // num, 0, -1) if math.gcd(stride, size) == 1)
            sample = importance[seed % stride :: stride]
        else:
            sample = importance[torch.randint(size, (num,), generator=torch.Generator().manual_seed(seed)).numpy()]
        threshold = np.sort(sample)[-math.ceil(round(sample.size * wanted / size, 9))]
        for _ in range(rule.max_adaptations):
            found = int((importance >= threshold).sum())
            if found > rule.upper_bound * wanted and not rule.resample:
                threshold *= rule.upper_bound
            elif found < rule.lower_bound * wanted:
                threshold *= rule.lower_bound
            else:
                break
        places = np.flatnonzero(importance >= threshold)
        if places.size > rule.upper_bound * wanted:
            places = places[exactly(importance[places], wanted, 0)]
        if places.size < rule.lower_bound * wanted:
            places = exactly(importance, wanted, 0)
        return places

    return select


class Paper:
    """All replicas at once, in the notation of the docstring."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.optimizer = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "lr": 0.1, **case["optimizer"]}
        self.w = start()
        self.velocity: Arrays = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.u = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(NUM)]
        self.v = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(NUM)]
        self.was_sparse = False

    def is_exempt(self, name: str) -> bool:
        """Exempt in the cases below: one dimension, fewer than `min_numel`, by name."""
        by_name = name == "table.weight" and "exempt" in self.case["settings"]
        return by_name or len(SHAPES[name]) < 2 or int(np.prod(SHAPES[name])) < self.case["settings"]["min_numel"]

    def step(self, step: int) -> None:
        """One optimizer step."""
        case, optimizer = self.case, self.optimizer
        optimizer["momentum"] = case.get("momenta", {}).get(step, optimizer["momentum"])
        m, decay, clip = optimizer["momentum"], optimizer["weight_decay"], case["settings"].get("gradient_clip_val")
        sparsity = case["sparsity_at"](step)
        c = [contribution(self.w, step, k, NUM) for k in range(NUM)]
        if sparsity and clip:
            for part in c:
                norm = math.sqrt(sum(float((value**2).sum()) for value in part.values()))
                for value in part.values():
                    value *= min(1.0, clip * NUM**-0.5 / (norm + 1e-6))
        total = {name: sum(part[name] for part in c) for name in SHAPES}
        if not sparsity and clip:
            norm = math.sqrt(sum(float((value**2).sum()) for value in total.values()))
            total = {name: value * min(1.0, clip / (norm + 1e-6)) for name, value in total.items()}
        for name in SHAPES:
            if sparsity and not self.is_exempt(name):
                update = self.sparse(name, [part[name] for part in c], 1 - sparsity, step)
            else:
                corrected = total[name] + decay * self.w[name]
                velocity = self.velocity[name]
                velocity[...] = m * velocity + corrected
                update = corrected + m * velocity if optimizer["nesterov"] else velocity
            self.w[name] = self.w[name] - optimizer["lr"] * update
        self.was_sparse = self.was_sparse or sparsity > 0

    def sparse(self, name: str, c: list[np.ndarray], density: float, step: int) -> np.ndarray:
        """Algorithm 4 of the paper."""
        m, decay, settings = self.optimizer["momentum"], self.optimizer["weight_decay"], self.case["settings"]
        total = np.zeros(SHAPES[name])
        for k in range(NUM):
            u, v = self.u[k][name], self.v[k][name]
            if not self.was_sparse:
                u[...] = self.velocity[name] / NUM
            corrected = c[k] + decay / NUM * self.w[name]
            u[...] = m * u + corrected
            v += corrected + m * u if self.optimizer["nesterov"] else u
            wanted = math.ceil(round(v.size * density, 6))
            seed = derive_seed(zlib.crc32(name.encode()), step, k)
            places = self.case.get("select", exactly)(np.abs(v).reshape(-1), wanted, seed)
            values = v.reshape(-1)[places]
            sent = values.astype(settings.get("value_dtype") or np.float64).astype(np.float64)
            v.reshape(-1)[places] -= sent
            if settings.get("momentum_masking", True):
                u.reshape(-1)[places] = 0
            total.reshape(-1)[places] += sent
        return total


def case(sparsity_at: Callable[[int], float] = lambda step: 0.9, **changes: Any) -> dict[str, Any]:
    """A case: what `DGC` is given, and what that means for the paper's formulas."""
    optimizer = {"momentum": 0.9, "weight_decay": 0.01, **changes.pop("optimizer", {})}
    settings = {"sparsity": 0.9, "threshold": "exact", "min_numel": 100, **changes.pop("settings", {})}
    return {"optimizer": optimizer, "settings": settings, "sparsity_at": sparsity_at, **changes}


_WARMUP = [0.5, 0.75]
_LOOSE = SampledThreshold(sample_ratio=0.05, strided=False, resample=False, lower_bound=0.95, upper_bound=1.05)
_FEW = SampledThreshold(sample_ratio=0.02, resample=False, max_adaptations=1, lower_bound=0.9, upper_bound=1.2)
CASES = {
    "plain": case(),
    "nesterov": case(optimizer={"nesterov": True}),
    "no momentum": case(optimizer={"momentum": 0.0}),
    "no decay": case(optimizer={"weight_decay": 0.0}),
    "momentum not masked": case(settings={"momentum_masking": False}),
    "clipped": case(settings={"gradient_clip_val": 0.5}),
    "exempt by name": case(settings={"exempt": ["table.*"]}),
    "few exempt": case(settings={"min_numel": 1}),
    "nothing sparse": case(lambda step: 0.0, settings={"sparsity": 0.0, "gradient_clip_val": 2.0}),
    "nothing sparse, nesterov": case(lambda step: 0.0, settings={"sparsity": 0.0}, optimizer={"nesterov": True}),
    "begins later": case(
        lambda step: 0.0 if step < 5 else 0.9, settings={"begin_step": 5}, optimizer={"nesterov": True}
    ),
    "warm-up by steps": case(
        lambda step: 0.0 if step < 3 else 1 - 0.1 ** (((step - 3) // 2 + 1) / 5) if step < 11 else 0.9,
        settings={"begin_step": 3, "warmup_steps": 8, "gradient_clip_val": 1.0},
    ),
    "warm-up by epochs": case(
        # Epochs are counted from the one in which compression begins.
        lambda step: 0.0 if step < 5 else ([0.5, 0.5, 0.75] + [0.9] * 9)[step // STEPS_AN_EPOCH - 1],
        settings={"begin_step": 5, "warmup_epochs": 3, "warmup_sparsities": _WARMUP},
    ),
    "sampled": case(settings={"threshold": "sampled"}, select=sampled(SampledThreshold())),
    "sampled at random": case(settings={"threshold": _LOOSE}, select=sampled(_LOOSE)),
    "threshold found badly": case(settings={"threshold": _FEW}, select=sampled(_FEW)),
    "momentum changes": case(momenta={4: 0.5, 9: 0.8}),
}
HALF = {"half precision": case(settings={"value_dtype": "float16"})}


def _run_cases(dtype: str, names: list[str]) -> dict[str, Arrays]:
    found = {}
    for name in names:
        chosen = {**CASES, **HALF}[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that so many elements are sent to so many replicas
            run = Run(DGC(**chosen["settings"]), TYPES[dtype], **chosen["optimizer"])
        run.steps(STEPS, momenta=chosen.get("momenta"))
        found[name] = run.weights()
    return found


def _expected(name: str) -> Arrays:
    paper = Paper({**CASES, **HALF}[name])
    for step in range(STEPS):
        paper.step(step)
    return paper.w


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-10), ("float32", 1e-5)])
def test_equals_the_formulas(dtype: str, limit: float) -> None:
    """Any option with another effect than its formula; replicas that end with different weights."""
    names = [*CASES, *(HALF if dtype == "float64" else [])]
    found = run_ranks(_run_cases, NUM, dtype, names)
    differences = {name: worst(found[0][name], _expected(name)) for name in names}
    assert {name: value for name, value in differences.items() if not value < limit} == {}
    for other in found[1:]:
        for name in names:
            assert all(np.array_equal(other[name][key], found[0][name][key]) for key in SHAPES), name


def test_the_cases_differ() -> None:
    """Formulas that ignore an option too would agree with code that does."""
    ends = {name: _expected(name) for name in [*CASES, *HALF]}
    for name in ends:
        alike = [other for other in ends if other != name and worst(ends[other], ends[name]) < 1e-7]
        assert not alike, (name, alike)


def _dense_and_torch() -> list[tuple[Arrays, Arrays]]:
    ends = []
    for options in ({}, {"nesterov": True}, {"weight_decay": 0.0}):
        chosen = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **options}
        run = Run(DGC(sparsity=0.0), torch.float32, **chosen)
        run.steps(5)
        weights = {n: torch.nn.Parameter(torch.tensor(value, dtype=torch.float32)) for n, value in start().items()}
        optimizer = torch.optim.SGD(weights.values(), **chosen)
        for step in range(5):
            now = {name: parameter.detach().double().numpy() for name, parameter in weights.items()}
            parts = contribution(now, step, dist.get_rank(), 2)
            for name, parameter in weights.items():
                parameter.grad = torch.tensor(parts[name], dtype=torch.float32)
                if parameter.numel():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
        ends.append((run.weights(), {name: parameter.detach().numpy() for name, parameter in weights.items()}))
    return ends


def test_dense_steps_are_those_of_torch() -> None:
    """A dense phase that is almost momentum SGD over all-reduced gradients: the same to the bit."""
    for ends in run_ranks(_dense_and_torch, 2):
        for found, expected in ends:
            assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_nesterov_of_torch_is_that_of_the_paper() -> None:
    """The paper has u <- m (u + g), v <- v + u + g, torch and we another velocity: equal where everything is sent."""
    numbers = np.random.default_rng(0)
    weights = torch.nn.Parameter(torch.tensor(numbers.normal(size=(8, 8))))
    paper, ours, u = weights.detach().numpy().copy(), weights.detach().clone(), np.zeros((8, 8))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9, nesterov=True)
    sync = DGC(sparsity=1e-9, min_numel=1, threshold="exact", momentum_masking=False)
    sync.begin(one_of(1), {"w": ours})
    options = {"momentum": 0.9, "nesterov": True}
    for _ in range(10):
        g = numbers.normal(size=(8, 8))
        weights.grad = torch.tensor(g)
        optimizer.step()
        u = 0.9 * (u + g)
        paper -= 0.1 * (u + g)
        value = torch.tensor(g)
        sync.reduce([NamedGradient(name="w", value=value, parameter=ours, options=options)], StepProgress())
        ours -= 0.1 * value
    assert sync.state_dict()["residuals"]["w"].any().item() is False
    np.testing.assert_allclose(weights.detach().numpy(), paper, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours.numpy(), paper, rtol=0, atol=1e-12)


# -- states ------------------------------------------------------------------------------------------------------------

_LATE = {"sparsity": 0.9, "min_numel": 100, "begin_step": 2, "warmup_epochs": 2, "gradient_clip_val": 1.0}


def _resumed() -> None:
    options = {"momentum": 0.9, "weight_decay": 0.01}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, first, second = (Run(DGC(**_LATE), torch.float32, **options) for _ in range(3))
    for stop in (1, 7):  # in the dense phase, and in the warm-up
        for run in (whole, first, second):
            run.sync.begin(replicas_of(), run.parameters)
            run.step = 0
            for parameter, value in zip(run.parameters.values(), start().values(), strict=True):
                parameter.data.copy_(torch.from_numpy(value))
        whole.steps(12)
        first.steps(stop)
        second.sync.load_state_dict(first.sync.state_dict())
        for ours, theirs in zip(second.parameters.values(), first.parameters.values(), strict=True):
            ours.data.copy_(theirs)
        second.step = stop
        first.steps(1)  # what was loaded is a copy
        second.steps(12 - stop)
        for name, value in whole.weights().items():
            assert np.array_equal(second.weights()[name], value), (stop, name)
        ours, theirs = second.sync.state_dict(), whole.sync.state_dict()
        for table in ("residuals", "velocities"):
            assert ours[table].keys() == theirs[table].keys()
            assert all(torch.equal(ours[table][name], value) for name, value in theirs[table].items())


def test_goes_on_from_its_state() -> None:
    """Residuals, velocities, the step or the warm-up's first epoch missing from a checkpoint."""
    run_ranks(_resumed, 2)


def test_another_number_of_replicas() -> None:
    """Residuals of replicas that are gone are lost, or counted once for each new one; a dense velocity is divided."""
    states = [
        {
            "step": 5,
            "first_epoch": 1,
            "residuals": {"a": torch.full((2, 3), float(k)), "rows": torch.zeros(1 + k, 3)},
            "velocities": {"a": torch.full((2, 3), 10.0 * k), "rows": torch.zeros(1 + k, 3), "bias": torch.ones(3)},
        }
        for k in range(4)
    ]
    sync = DGC(min_numel=1)
    sync.begin(one_of(3), {"a": torch.zeros(2, 3), "rows": torch.zeros(2, 3), "bias": torch.zeros(3)})
    merged = sync.merged_state(states)
    assert merged is not None
    assert (merged["step"], merged["first_epoch"]) == (5, 1)
    assert {table: list(merged[table]) for table in ("residuals", "velocities")} == {
        "residuals": ["a"],
        "velocities": ["bias", "a"],
    }
    assert torch.equal(merged["residuals"]["a"], torch.full((2, 3), 6.0 / 3))
    assert torch.equal(merged["velocities"]["a"], torch.full((2, 3), 60.0 / 3))
    assert torch.equal(merged["velocities"]["bias"], torch.ones(3))
    sync.load_state_dict(merged)
    with pytest.raises(ValueError, match=r"residual of `a` has the shape \(2, 2\), and this rank holds \(2, 3\)"):
        sync.load_state_dict({**merged, "residuals": {"a": torch.zeros(2, 2)}})


def _sparse_then_dense() -> tuple[Arrays, Arrays]:
    """A run whose compression is switched off from a checkpoint, and one that flushes by hand."""
    options = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = Run(DGC(0.9, min_numel=1), torch.float64, **options)
        second = Run(DGC(0.0), torch.float64, **options)
    first.steps(6)
    second.sync.load_state_dict(first.sync.state_dict())
    for ours, theirs in zip(second.parameters.values(), first.parameters.values(), strict=True):
        ours.data.copy_(theirs)
    second.step = 6
    # By hand: everything that waits is sent, then it is plain SGD over the summed velocities.
    state, expected, velocities, size = first.sync.state_dict(), first.weights(), {}, dist.get_world_size()
    parts = contribution(expected, 6, dist.get_rank(), size)
    for name, velocity in state["velocities"].items():
        weights = torch.from_numpy(expected[name].copy())
        # Of what was dense, each replica has the whole velocity.
        own = velocity if name in state["residuals"] else velocity / size
        corrected = torch.from_numpy(parts[name]) + 0.01 / size * weights
        velocities[name] = 0.9 * own + corrected
        update = state["residuals"].get(name, 0.0) + corrected + 0.9 * velocities[name]
        dist.all_reduce(update)
        dist.all_reduce(velocities[name])
        expected[name] = (weights - 0.1 * update).numpy()
    second.steps(1)
    found = second.weights()
    left = second.sync.state_dict()
    assert not left["residuals"]
    for name, velocity in velocities.items():
        torch.testing.assert_close(left["velocities"][name], velocity, rtol=1e-12, atol=1e-12)
    return found, expected


def test_a_sparse_run_goes_on_dense() -> None:
    """What waits is dropped when compression is switched off, or a velocity is a part where the whole is meant."""
    for found, expected in run_ranks(_sparse_then_dense, 2):
        assert worst(found, expected) < 1e-12


def _some_steps_only() -> Arrays:
    run = Run(DGC(0.9, min_numel=100), torch.float32, momentum=0.9, weight_decay=0.01)
    names = list(SHAPES)
    before = run.weights()
    run.steps(9, named=lambda step: names if step > 5 else names[2:] if step % 2 else names[1:])
    run.steps(1, named=lambda step: [])
    assert run.sync.state_dict()["step"] == 10
    assert not np.array_equal(before["layer.weight"], run.weights()["layer.weight"])
    return run.weights()


def test_parameters_come_and_go() -> None:
    """A layer frozen at first, or used in some steps: an error, or replicas that differ afterwards."""
    ends = run_ranks(_some_steps_only, 2)
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in SHAPES)


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_a_parameter_that_no_optimizer_has(sparsity: float) -> None:
    """An error about a missing option, where training goes on without it."""
    sync = DGC(sparsity, min_numel=1, threshold="exact")
    sync.begin(one_of(1), {"w": torch.zeros(2, 2)})
    value = torch.tensor([[4.0, 3.0], [2.0, 1.0]])
    sync.reduce([NamedGradient(name="w", value=value, parameter=torch.zeros(2, 2), options={})], StepProgress())
    assert value.tolist() == ([[4.0, 3.0], [2.0, 1.0]] if not sparsity else [[4.0, 3.0], [0.0, 0.0]])


def _norm_of_two_stages() -> tuple[float, float]:
    """A replica on two ranks, as in a pipeline: each clips by the norm of both."""
    pair = [dist.new_group([first, first + 1]) for first in (0, 2)][dist.get_rank() // 2]
    rail = [dist.new_group([first, first + 2]) for first in (0, 1)][dist.get_rank() % 2]

    def norm(gradients: Any) -> torch.Tensor:
        square = sum((gradient.value.square().sum() for gradient in gradients), torch.zeros(()))
        dist.all_reduce(square, group=pair)
        return square.sqrt()

    sync = DGC(0.5, min_numel=1, threshold="exact", gradient_clip_val=1.0)
    replicas = Replicas(
        group=rail, size=2, rank=dist.get_rank() // 2, ranks_a_machine=1, levels=lambda _: (None, None), norm=norm
    )
    value = torch.tensor([[3.0, 4.0 * (dist.get_rank() % 2)]])
    sync.begin(replicas, {"w": torch.zeros(1, 2)})
    options = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
    sync.reduce([NamedGradient(name="w", value=value, parameter=torch.zeros(1, 2), options=options)], StepProgress())
    return float(value.abs().max()), 2 * (4 if dist.get_rank() % 2 else 3) / math.sqrt(9 + 9 + 16) / math.sqrt(2)


def test_clips_by_the_norm_of_the_whole_replica() -> None:
    """Each stage of a pipeline clipped by its own norm: parts of one gradient scaled differently."""
    for found, expected in run_ranks(_norm_of_two_stages, 4):
        assert found == pytest.approx(expected, rel=1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.Adam(p), r"got `Adam`. Use `torch.optim.SGD`, or `TopKErrorFeedback`"),
        (lambda p: type("Own", (torch.optim.SGD,), {})(p, lr=0.1), r"got `Own`"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), r"`dampening=0.1`"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), r"`maximize=True`"),
    ],
)
def test_optimizers_without_theory_are_refused(make: Any, words: str) -> None:
    """An option of the optimizer that is lost in silence."""
    with pytest.raises(ValueError, match=words):
        DGC().check_optimizer(make([torch.nn.Parameter(torch.zeros(2))]))
    DGC().check_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, nesterov=True, momentum=0.9))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sparsity": 1.0}, r"`sparsity=1.0` must be a number of at least 0 and below 1"),
        ({"sparsity": -0.1}, r"`sparsity=-0.1` must be"),
        ({"warmup_steps": 3, "warmup_epochs": 2}, r"`warmup_steps=3` and `warmup_epochs=2` both.*Leave one"),
        ({"warmup_sparsities": [0.5]}, r"needs `warmup_steps` or `warmup_epochs`"),
        ({"warmup_steps": 1, "warmup_sparsities": [0.5, 0.75]}, r"are 2, and the warm-up has only `warmup_steps=1`"),
        ({"warmup_steps": 9, "warmup_sparsities": [0.9, 0.5]}, r"none less than the one before"),
        ({"warmup_steps": 9, "warmup_sparsities": [0.9995]}, r"must not go over `sparsity=0.999`"),
        ({"warmup_steps": 9, "warmup_sparsities": []}, r"must be a list of numbers"),
        ({"begin_step": -1}, r"`begin_step=-1` must be a whole number of at least 0"),
        ({"gradient_clip_val": 0}, r"`gradient_clip_val=0` must be a number above 0"),
        ({"threshold": "largest"}, r"`threshold='largest'` is not known. Use 'sampled', 'exact'"),
        ({"min_numel": 0}, r"`min_numel=0` must be a whole number of at least 1"),
        ({"value_dtype": "int8"}, r"`value_dtype='int8'` is not known. Use None, 'float32', 'float16'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    """An error at the first step, or none."""
    with pytest.raises(ValueError, match=words):
        DGC(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sample_ratio": 0}, "`sample_ratio=0` must be"),
        ({"upper_bound": 1}, "`upper_bound=1` must be"),
        ({"lower_bound": 1}, "`lower_bound=1` must be"),
        ({"max_adaptations": -1}, "`max_adaptations=-1` must be"),
    ],
)
def test_thresholds_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    """A search that never ends."""
    with pytest.raises(ValueError, match=words):
        SampledThreshold(**settings)
