"""Each optimizer, stepped on rows spread over ranks, against the same on whole parameters in one process."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bigmodel.sharding.optimizers import adapt_optimizer, is_elementwise, state_layout
from lightning_bigmodel.sharding.rows import RowShard
from lightning_bigmodel.testing import CollectiveCounter, run_ranks

_NUM_STEPS = 5
_SHAPES = {
    "matrix": (5, 3),
    "even": (4, 6),
    "wide": (1, 4),
    "vector": (5,),
    "short": (4,),
    "one": (1,),
    "number": (),
    "cube": (5, 2, 3),
    "unused": (3, 2),
    "here": (2, 3),  # whole on every rank
}
_MATRICES = {"matrix": (5, 3), "even": (4, 6), "wide": (1, 4), "tall": (7, 2), "unused": (3, 2), "here": (2, 3)}
Make = Callable[[Iterable[dict[str, Any]]], Optimizer]


# -- Third parties -----------------------------------------------------------------------------------------------------


class SignDescent(Optimizer):
    """Elementwise, and fails on tensors without elements."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    assert parameter.numel(), "no elements"
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 0.2)
                    parameter.sub_(average.sign(), alpha=group["lr"])


class Lookahead(Optimizer):
    """Wraps another and goes back halfway every fifth step."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.slow = {id(each): each for group in self.param_groups for each in group["params"]}
        self.num_steps = 0
        self.before: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [each for group in self.param_groups for each in group["params"]]
        if self.num_steps % 5 == 0:
            self.before = [each.clone() for each in parameters]
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            for parameter, before in zip(parameters, self.before, strict=True):
                parameter.lerp_(before, 0.5)


class LayerNormed(Optimizer):
    """Scales each update by norms of the whole parameter, as LARS and LAMB do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (parameter.norm() / parameter.grad.norm()), alpha=group["lr"])


class OneDistance(Optimizer):
    """Estimates one learning rate from all gradients together and keeps it among its options, as Prodigy does."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "distance": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["distance"] += sum(float(each.grad.norm()) for each in group["params"] if each.grad is not None)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=0.1)


class Aliased(SignDescent):
    """Reaches its groups by an attribute of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mine, self.update = self.param_groups, self.each

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.mine:
            self.update(group)

    def each(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * self.param_groups[0]["lr"])


class Noisy(Optimizer):
    """Draws random numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        random.random()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


class NeedsClosure(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


class Still(SignDescent):
    """Does next to nothing for the first steps."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data *= 1 + 1e-7


class AdamP(torch.optim.Adam):
    """Would pass a trial: it couples rows only when the gradient is nearly orthogonal to the parameter."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class NamedAdafactor(torch.optim.Adafactor):
    """A subclass that only sets options."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)


# -- One training in two ways ------------------------------------------------------------------------------------------


def _gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor | None:
    """Of different sizes from step to step and row to row, so that means of a part are not those of the whole."""
    if name == "unused":
        return None
    generator = torch.Generator().manual_seed(100 * step + sum(map(ord, name)))
    gradient = torch.randn(shape, generator=generator) * 3.0**step
    if shape:
        gradient *= torch.arange(1.0, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
    return gradient


def _wholes(shapes: dict[str, tuple[int, ...]]) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def _groups(parameters: dict[str, nn.Parameter], has_rates: bool = True) -> list[dict[str, Any]]:
    """Two groups, the second with options of its own."""
    names = list(parameters)
    second = {"lr": 0.03, "weight_decay": 0.2} if has_rates else {}
    return [
        {"params": [parameters[name] for name in names[::2]]},
        {"params": [parameters[name] for name in names[1::2]], **second},
    ]


def _take_rows(optimizer: Optimizer, wholes: dict[str, nn.Parameter]) -> tuple[dict[str, nn.Parameter], dict[int, Any]]:
    """Puts this rank's rows in the place of the whole parameters, as a strategy does."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    locals_, shards = dict(wholes), {}
    new = {}
    for name, whole in wholes.items():
        if name == "here":
            continue
        shard = RowShard(name=name, shape=whole.shape, num_ranks=num_ranks, rank=rank, group=None)
        locals_[name] = new[id(whole)] = nn.Parameter(shard.rows(whole.detach()).clone())
        shards[id(locals_[name])] = shard
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    return locals_, shards


def _set_gradients(parameters: dict[str, nn.Parameter], shapes: Any, shards: dict[int, RowShard], step: int) -> None:
    for name, parameter in parameters.items():
        gradient = _gradient(name, tuple(shapes[name]), step)
        if gradient is not None and id(parameter) in shards:
            gradient = shards[id(parameter)].rows(gradient).clone()
        parameter.grad = gradient


def _train(
    make: Make, shapes: Any, on_rows: bool, scheduler: str | None = None, has_rates: bool = True
) -> tuple[Optimizer, dict[str, nn.Parameter], dict[int, RowShard]]:
    parameters = _wholes(shapes)
    optimizer = make(_groups(parameters, has_rates))
    shards: dict[int, RowShard] = {}
    attach = lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))  # noqa: E731
    schedule = attach() if scheduler == "before" else None
    if on_rows:
        parameters, shards = _take_rows(optimizer, parameters)
        adapt_optimizer(optimizer, shards)
    schedule = attach() if scheduler == "after" else schedule
    for step in range(_NUM_STEPS):

        def closure(step: int = step) -> int:
            assert torch.is_grad_enabled() or not on_rows  # Adafactor of transformers forgets to
            optimizer.zero_grad()
            _set_gradients(parameters, shapes, shards, step)
            return step

        if isinstance(optimizer, SignDescent | Lookahead):
            closure()
            optimizer.step()
        else:
            assert optimizer.step(closure) == step
        if schedule is not None:
            schedule.step()
    return optimizer, parameters, shards


def _largest_error(make: Make, shapes: Any, **options: Any) -> float:
    """Of any row held here, after all steps, relative to what is larger of 1 and the values."""
    _, wholes, _ = _train(make, shapes, on_rows=False, **options)
    _, rows, shards = _train(make, shapes, on_rows=True, **options)
    start = _wholes(shapes)
    errors = []
    for name, parameter in wholes.items():
        whole = parameter.detach()
        assert whole.isfinite().all(), name
        assert (name == "unused") == torch.equal(whole, start[name]), name
        shard = shards.get(id(rows[name]))
        expected, got = whole if shard is None else shard.rows(whole), rows[name].detach()
        assert got.shape == expected.shape, name
        assert got.isfinite().all(), name
        if expected.numel():
            errors.append(float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0)))
    return max(errors)


def _torch_cases() -> dict[str, tuple[Make, Any, dict[str, Any]]]:
    optim = torch.optim
    elementwise: dict[str, Make] = {
        "sgd": lambda params: optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
        "sgd fused": lambda params: optim.SGD(params, lr=0.01, fused=True),
        "adam fused": lambda params: optim.Adam(params, fused=True, amsgrad=True),
        "adamw foreach": lambda params: optim.AdamW(params, foreach=True, maximize=True),
        "adamax": optim.Adamax,
        "nadam": optim.NAdam,
        "radam": optim.RAdam,
        "rmsprop": lambda params: optim.RMSprop(params, centered=True, momentum=0.5),
        "asgd": lambda params: optim.ASGD(params, t0=2),
        "adagrad fused": lambda params: optim.Adagrad(params, fused=True),
        "adadelta": optim.Adadelta,
    }
    adafactor: dict[str, Make] = {
        "adafactor": optim.Adafactor,
        "adafactor foreach": lambda params: optim.Adafactor(params, lr=0.1, foreach=True),
        "adafactor options": lambda params: optim.Adafactor(
            params, lr=torch.tensor(0.2), beta2_decay=-0.5, eps=(1e-4, 0.1), d=2.0, weight_decay=0.1, maximize=True
        ),
        "adafactor subclass": NamedAdafactor,
    }
    muon: dict[str, Make] = {
        "muon": lambda params: optim.Muon(params, lr=0.1),
        "muon options": lambda params: optim.Muon(
            params,
            lr=torch.tensor(0.1),
            weight_decay=0.0,
            momentum=0.5,
            nesterov=False,
            ns_coefficients=(3.0, -4.0, 2.0),
            eps=1e-3,
            ns_steps=3,
            adjust_lr_fn="match_rms_adamw",
        ),
    }
    third: dict[str, Make] = {
        "sign descent": SignDescent,
        "lookahead of adamw": lambda params: Lookahead(optim.AdamW(params)),
        "lookahead of adafactor": lambda params: Lookahead(optim.Adafactor(params)),
    }
    cases = {name: (make, _SHAPES, {}) for name, make in {**elementwise, **adafactor, **third}.items()}
    cases["rprop"] = (optim.Rprop, _SHAPES, {"has_rates": False})
    for name, when in (("adafactor", "before"), ("adafactor", "after"), ("adamw foreach", "before")):
        cases[f"{name} scheduled {when}"] = (cases[name][0], _SHAPES, {"scheduler": when})
    cases["sign descent scheduled"] = (SignDescent, _SHAPES, {"scheduler": "before"})
    return {**cases, **{name: (make, _MATRICES, {}) for name, make in muon.items()}}


def _torch_errors() -> dict[str, float]:
    warnings.simplefilter("error")  # schedulers warn of a step that somebody took over
    return {name: _largest_error(make, shapes, **options) for name, (make, shapes, options) in _torch_cases().items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_are_stepped_as_in_one_process(num_ranks: int) -> None:
    """A rank that takes its rows for the parameter trains another model, and nothing tells so."""
    errors = run_ranks(_torch_errors, num_ranks)
    assert len(errors) == num_ranks
    for of_rank in errors:
        assert of_rank.keys() == _torch_cases().keys()
        assert {name: error for name, error in of_rank.items() if not error <= 1e-5} == {}


# -- transformers ------------------------------------------------------------------------------------------------------


def _transformers_errors() -> dict[str, float]:
    from transformers.optimization import Adafactor, AdafactorSchedule

    cases: dict[str, Make] = {
        "default": Adafactor,
        "warm-up": lambda params: Adafactor(params, warmup_init=True, weight_decay=0.3, beta1=0.9),
        "own rate": lambda params: Adafactor(
            params, lr=0.02, relative_step=False, scale_parameter=False, clip_threshold=0.5, decay_rate=-0.6
        ),
    }
    errors = {name: _largest_error(make, _SHAPES, has_rates=name == "own rate") for name, make in cases.items()}
    optimizer, _, _ = _train(Adafactor, _SHAPES, on_rows=True, has_rates=False)
    reference, _, _ = _train(Adafactor, _SHAPES, on_rows=False, has_rates=False)
    rates = zip(AdafactorSchedule(optimizer).get_lr(), AdafactorSchedule(reference).get_lr(), strict=True)
    return {**errors, "schedule": max(abs(float(rate - expected)) for rate, expected in rates)}


def test_adafactor_of_transformers_is_stepped_as_in_one_process() -> None:
    """It goes by the same name as torch's and has other rules, options and state."""
    pytest.importorskip("transformers")
    for errors in run_ranks(_transformers_errors, 3):
        assert len(errors) == 4
        assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}


# -- bitsandbytes ------------------------------------------------------------------------------------------------------

# 64 * 128 elements a rank are whole blocks; 49 * 66 are not, and under `min_8bit_size`, which all 97 * 66 are over.
_LARGE = {"aligned": (128, 128), "straddling": (97, 66), "small": (40, 40), "few": (1, 5000)}


def _bitsandbytes_outcome(name: str) -> dict[str, Any]:
    import bitsandbytes

    make: Make = getattr(bitsandbytes.optim, name)
    _, wholes, _ = _train(make, _LARGE, on_rows=False)
    optimizer, rows, shards = _train(make, _LARGE, on_rows=True)
    start = _wholes(_LARGE)
    errors, kinds = {}, {}
    for key, whole in wholes.items():
        shard = shards[id(rows[key])]
        moved = shard.rows((whole - start[key]).detach())
        if moved.numel():
            errors[key] = float((rows[key].detach() - shard.rows(whole.detach())).norm() / moved.norm())
        kinds[key] = state_layout(optimizer, rows[key], shard)
    return {"errors": errors, "kinds": kinds, "is elementwise": is_elementwise(optimizer)}


def _bitsandbytes_outcomes() -> dict[str, Any]:
    names = ("AdamW8bit", "Adam8bit", "Lion8bit", "RMSprop8bit", "AdEMAMix8bit", "PagedAdamW8bit", "AdamW", "PagedLion")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        return {name: _bitsandbytes_outcome(name) for name in names}


def test_bitsandbytes_is_exact_but_for_its_blocks() -> None:
    """The number of ranks would decide which parameters are quantised, and ranks without rows would start kernels."""
    pytest.importorskip("bitsandbytes")
    outcomes = run_ranks(_bitsandbytes_outcomes, 2)
    assert [outcome.keys() for outcome in outcomes] == [outcomes[0].keys()] * 2
    for rank, outcome in enumerate(outcomes):
        for name, found in outcome.items():
            is_8_bit = name.endswith("8bit")
            assert found["is elementwise"] is not is_8_bit, name
            for key, error in found["errors"].items():
                is_shifted = is_8_bit and key == "straddling"
                # Lion moves by signs, some of which flip.
                assert error <= ((0.03 if "Lion" in name else 0.01) if is_shifted else 1e-5), (name, key)
                assert (error > 1e-4) is is_shifted or rank == 0, (name, key)  # whose last block only is cut short
            kinds = found["kinds"]
            assert kinds["aligned"].keys() == kinds["straddling"].keys() == kinds["few"].keys(), name
            is_mixed = name.startswith("AdEMAMix")
            assert kinds["small"] == {
                "step": "whole",
                "state1": "local" if is_mixed else "rows",
                **({"state2": "rows"} if "state2" in kinds["small"] else {}),
            }
            if is_8_bit:
                assert kinds["straddling"]["state1"] == kinds["straddling"]["absmax1"] == "local"
                assert kinds["straddling"]["qmap1"] == "whole"


def test_bitsandbytes_is_refused_where_it_needs_whole_parameters() -> None:
    """Its LARS and LAMB are no classes of their own kind, and overrides by parameter object would be lost quietly."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.ones(3, 2))
    shards = {id(weight): RowShard(name="weight", shape=torch.Size((5, 2)), num_ranks=2, rank=0, group=None)}
    for make in (bitsandbytes.optim.LAMB8bit, lambda params: bitsandbytes.optim.LARS(params, lr=0.1, momentum=0.9)):
        optimizer = make([weight])
        assert not is_elementwise(optimizer)
        with pytest.raises(ValueError, match="norms of the whole parameter"):
            adapt_optimizer(optimizer, shards)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    whole = nn.Parameter(torch.ones(5, 2))
    manager.override_config(whole, "optim_bits", 32)
    try:
        with pytest.raises(ValueError, match="`AdamW8bit` cannot train .*GlobalOptimManager"):
            adapt_optimizer(bitsandbytes.optim.AdamW8bit([weight]), shards)
    finally:
        manager.initialize()
    with pytest.raises(ValueError, match="`PytorchLARS` cannot train .*other values than among all rows"):
        adapt_optimizer(bitsandbytes.optim.PytorchLARS([weight], lr=0.1, momentum=0.9), shards)


# -- Messages ----------------------------------------------------------------------------------------------------------


def _messages() -> dict[str, Any]:
    def count(make: Make, shapes: Any) -> dict[str, tuple[int, int]]:
        wholes = _wholes(shapes)
        optimizer = make(_groups(wholes))
        rows, shards = _take_rows(optimizer, wholes)
        adapt_optimizer(optimizer, shards)
        _set_gradients(rows, shapes, shards, 0)
        with CollectiveCounter() as counter:
            optimizer.step()
        return counter.as_dict()

    few = {"matrix": (5, 3)}
    return {
        "adafactor few": count(torch.optim.Adafactor, few),
        "adafactor": count(torch.optim.Adafactor, _SHAPES),
        "muon few": count(torch.optim.Muon, few),
        "muon": count(torch.optim.Muon, _MATRICES),
        "adamw": count(torch.optim.AdamW, _SHAPES),
    }


def test_number_of_messages_does_not_grow_with_the_parameters() -> None:
    """A message a parameter makes a step of a model with hundreds of parameters slower than its backward."""
    for rank, messages in enumerate(run_ranks(_messages, 2)):
        assert messages["adamw"] == {}
        # [gradient there?, squares, sum of R, columns] of each matrix, two numbers of any other; one of each then.
        assert messages["adafactor few"] == {"all_reduce": (2, 4 * (3 + 3 + 1))}
        num_matrices, num_columns, num_others = 4, 3 + 6 + 4 + 2, 5
        num_used = num_matrices + num_others - 1
        assert messages["adafactor"] == {
            "all_reduce": (2, 4 * (3 * num_matrices + num_columns + 2 * num_others + num_used))
        }
        # A flag a matrix; all-to-alls of bf16: the rows here, and the matrices that fall to this rank.
        assert messages["muon few"]["all_reduce"] == (1, 4)
        assert messages["muon few"]["all_to_all"] == (2, 2 * ([9, 6][rank] + [15, 0][rank]))
        assert messages["muon"]["all_reduce"] == (1, 4 * 5)
        # The dearest matrix falls to the first rank, the three others to the second.
        assert messages["muon"]["all_to_all"] == (2, 2 * ([33, 24][rank] + [24, 33][rank]))


# -- Gradients of a part -----------------------------------------------------------------------------------------------


def _without_gradient_where_without_rows(name: str) -> float:
    shapes = {"wide": (1, 4), "matrix": (5, 3)}
    make: Make = getattr(torch.optim, name)
    _, wholes, _ = _train(make, shapes, on_rows=False)
    parameters = _wholes(shapes)
    optimizer = make(_groups(parameters))
    rows, shards = _take_rows(optimizer, parameters)
    adapt_optimizer(optimizer, shards)
    for step in range(_NUM_STEPS):
        _set_gradients(rows, shapes, shards, step)
        if not rows["wide"].numel():
            rows["wide"].grad = None
        optimizer.step()
    return max(
        float((rows[key].detach() - shards[id(rows[key])].rows(whole.detach())).abs().sum())
        for key, whole in wholes.items()
    )


def _gradient_on_one_rank(name: str) -> str:
    wholes = _wholes({"matrix": (5, 3)})
    optimizer = getattr(torch.optim, name)(wholes.values())
    rows, shards = _take_rows(optimizer, wholes)
    adapt_optimizer(optimizer, shards)
    if dist.get_rank() == 0:
        rows["matrix"].grad = torch.ones_like(rows["matrix"])
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert not optimizer.state
    return str(caught.value)


def _gradients_of_a_part() -> dict[str, Any]:
    return {
        name: (_without_gradient_where_without_rows(name), _gradient_on_one_rank(name))
        for name in ("Adafactor", "Muon")
    }


def test_ranks_agree_on_which_gradients_there_are() -> None:
    """Where some ranks leave a parameter out, messages of others would be read as something else."""
    for of_rank in run_ranks(_gradients_of_a_part, 2):
        for name, (error, message) in of_rank.items():
            assert error <= 1e-5
            assert f"`{name}`: 1 of the 2 ranks that hold rows of `matrix` have a gradient" in message


# -- State -------------------------------------------------------------------------------------------------------------


def _states() -> dict[str, dict[str, dict[str, tuple[str, Any]]]]:
    """Each entry with its kind, on rows; and in one process, as kind "reference"."""
    result: dict[str, Any] = {}
    makes = {name: _torch_cases()[name] for name in ("adafactor", "muon", "adam fused", "asgd", "lookahead of adamw")}
    if dist.get_world_size() == 3:
        from transformers.optimization import Adafactor

        makes["transformers"] = (lambda params: Adafactor(params, beta1=0.5), _SHAPES, {"has_rates": False})
    for name, (make, shapes, options) in makes.items():
        reference, wholes, _ = _train(make, shapes, on_rows=False, **options)
        optimizer, rows, shards = _train(make, shapes, on_rows=True, **options)
        if not isinstance(optimizer, Lookahead):
            assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys(), name
        # What a wrapper wraps has the state.
        states, expected_states = (getattr(each, "optimizer", each).state for each in (optimizer, reference))
        result[name] = {}
        for key, parameter in rows.items():
            if key in ("here", "unused"):
                assert states.get(parameter, {}).keys() == expected_states.get(wholes[key], {}).keys()
                continue
            layout = state_layout(optimizer, parameter, shards[id(parameter)])
            assert layout.keys() == states[parameter].keys() != set()
            for entry, kind in layout.items():
                expected = expected_states[wholes[key]][entry]
                result[name][f"{key}.{entry}"] = (kind, states[parameter][entry], expected)
    return result


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_state_is_laid_out_as_told(num_ranks: int) -> None:
    """A checkpoint that takes the rows of one rank for the whole, or the whole for rows, loads nonsense."""
    if num_ranks == 3:
        pytest.importorskip("transformers")
    ranks = run_ranks(_states, num_ranks)
    kinds = set()
    for name, entries in ranks[0].items():
        for key, (kind, _, expected) in entries.items():
            parts = []
            for rank in ranks:
                assert rank[name][key][0] == kind, (name, key)
                parts.append(torch.as_tensor(rank[name][key][1]))
            expected = torch.as_tensor(expected)
            kinds.add(kind)
            if kind == "whole":
                for part in parts:
                    torch.testing.assert_close(part, expected, msg=f"{name} {key}")
            else:
                assert kind in ("rows", "leading"), (name, key)
                together = torch.cat(parts)
                torch.testing.assert_close(
                    together.view_as(expected), expected, rtol=1e-5, atol=1e-6, msg=f"{name} {key}"
                )
    assert kinds == {"whole", "rows", "leading"}


def _resumed() -> bool:
    """Whether an optimizer that gets the state of another goes on as that one does, bit for bit."""
    results = []
    for name in ("adafactor", "muon"):
        make, shapes, _ = _torch_cases()[name]
        optimizer, rows, shards = _train(make, shapes, on_rows=True)
        saved = copy.deepcopy(optimizer.state_dict())
        other = make(_groups(_wholes(shapes)))
        others = {key: nn.Parameter(parameter.detach().clone()) for key, parameter in rows.items()}
        shards_of_others = {id(others[key]): shards[id(row)] for key, row in rows.items() if id(row) in shards}
        for group, names in zip(other.param_groups, (list(rows)[::2], list(rows)[1::2]), strict=True):
            group["params"] = [others[key] for key in names]
        adapt_optimizer(other, shards_of_others)
        other.load_state_dict(saved)
        for parameters, of, stepped in ((rows, shards, optimizer), (others, shards_of_others, other)):
            _set_gradients(parameters, shapes, of, 3)
            stepped.step()
        results.append(all(torch.equal(rows[key], others[key]) for key in rows))
    return all(results)


def test_state_can_be_saved_and_loaded() -> None:
    """Statistics that are not in the state are forgotten by every resumed run."""
    assert run_ranks(_resumed, 2) == [True, True]


# -- In one process ----------------------------------------------------------------------------------------------------


def _rows_of_two(shape: tuple[int, ...] = (3, 2)) -> tuple[nn.Parameter, dict[int, RowShard]]:
    weight = nn.Parameter(torch.ones(shape))
    shard = RowShard(name="weight", shape=torch.Size((5, *shape[1:])), num_ranks=2, rank=0, group=None)
    return weight, {id(weight): shard}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "`LBFGS` cannot .* inner products"),
        (torch.optim.SparseAdam, "`SparseAdam` cannot .* sparse"),
        (LayerNormed, "`LayerNormed` cannot .* other values than among all rows"),
        (lambda params: LayerNormed(params, lr=0.0), "other values than among all rows"),
        (OneDistance, "its option `distance` takes other values"),
        (Noisy, "other values than among all rows"),
        (NeedsClosure, "could not be tried on small tensors: TypeError"),
        (Still, "moves small tensors by .* so nothing can be told"),
        (AdamP, "angle to the whole parameter"),
        (lambda params: Lookahead(LayerNormed(params)), "it wraps `LayerNormed`: a part of the rows"),
        (lambda params: Lookahead(torch.optim.LBFGS(params)), "it wraps `LBFGS`: it takes inner products"),
    ],
    ids=[
        "lbfgs",
        "sparse",
        "norms",
        "norms at rate 0",
        "option",
        "noise",
        "closure",
        "still",
        "by name",
        "wrapped",
        "wrapped 2",
    ],
)
def test_what_needs_whole_parameters_is_refused(make: Make, reason: str) -> None:
    """It would train on without a word, each rank by norms of its own."""
    weight, shards = _rows_of_two()
    with pytest.raises(ValueError, match=reason) as caught:
        adapt_optimizer(make([weight]), shards)  # type: ignore[list-item]
    assert "zero_stage=0" in str(caught.value)
    assert not is_elementwise(make([weight]))  # type: ignore[list-item]


def test_dimensions_of_the_parameters_decide() -> None:
    """An optimizer that couples rows of matrices only may train vectors, and one that takes matrices only is tried."""

    class OnMatrices(LayerNormed):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad / (parameter.grad.norm() if parameter.dim() > 1 else 2.0))

    vector, shards = _rows_of_two((3,))
    assert is_elementwise(OnMatrices([vector]))
    adapt_optimizer(OnMatrices([vector]), shards)
    assert not is_elementwise(OnMatrices([nn.Parameter(torch.ones(3, 2))]))


def test_trying_leaves_no_trace() -> None:
    """The trial of an optimizer would shift its state, its options and all random numbers after it."""
    weight, shards = _rows_of_two()
    calls: list[str] = []
    for optimizer in (SignDescent([weight], lr=1e-4), Noisy([weight]), Aliased([weight])):
        optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
        groups = copy.deepcopy([{**group, "params": []} for group in optimizer.param_groups])
        random.seed(1)
        torch.manual_seed(1)
        expected = random.random(), float(torch.rand(()))
        random.seed(1)
        torch.manual_seed(1)
        assert is_elementwise(optimizer) is not isinstance(optimizer, Noisy)
        assert (random.random(), float(torch.rand(()))) == expected
        assert not optimizer.state
        assert [{**group, "params": []} for group in optimizer.param_groups] == groups
        assert optimizer.param_groups[0]["params"][0] is weight
        assert torch.equal(weight, torch.ones(3, 2))
        assert weight.grad is None
        assert not calls


def test_class_options_and_hooks_stay() -> None:
    """Other code asks for the class, reads the options and hangs hooks on the step."""
    weight, _ = _rows_of_two()
    alone = RowShard(name="weight", shape=weight.shape, num_ranks=1, rank=0, group=None)
    optimizer = torch.optim.Adafactor([weight])
    before = {**optimizer.param_groups[0]}
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    adapt_optimizer(optimizer, {id(weight): alone})
    adapt_optimizer(optimizer, {id(weight): alone})  # once more must do nothing
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert calls == ["pre", "post"]
    assert type(optimizer) is torch.optim.Adafactor
    assert optimizer.param_groups[0] == before
    assert optimizer.state_dict()["state"][0].keys() == {"step", "row_var", "col_var"}


def test_a_step_that_somebody_replaced_is_not_lost() -> None:
    """What a user put in the place of `step` would be dropped without a word."""
    weight, shards = _rows_of_two()
    optimizer = torch.optim.Muon([weight])
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="`step` of this `Muon` object has been replaced"):
        adapt_optimizer(optimizer, shards)


def test_an_unknown_rule_of_muon_is_refused() -> None:
    """A rule that a newer torch adds would be taken for the default."""
    weight, shards = _rows_of_two()
    optimizer = torch.optim.Muon([weight])
    optimizer.param_groups[0]["adjust_lr_fn"] = "newer"
    with pytest.raises(ValueError, match="adjust_lr_fn='newer'"):
        adapt_optimizer(optimizer, shards)


def test_sparse_and_complex_are_refused_as_torch_does() -> None:
    """Their norms mean something else."""
    for make in (torch.optim.Adafactor, torch.optim.Muon):
        for weight, gradient, kind in (
            (nn.Parameter(torch.ones(3, 2)), torch.ones(3, 2).to_sparse(), "sparse gradients"),
            (nn.Parameter(torch.ones(3, 2, dtype=torch.cfloat)), torch.ones(3, 2, dtype=torch.cfloat), "complex"),
        ):
            optimizer = make([weight])
            adapt_optimizer(optimizer, {})
            weight.grad = gradient
            with pytest.raises(RuntimeError, match=f"does not support {kind}"):
                optimizer.step()
