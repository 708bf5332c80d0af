"""`ModulePrecision`: chosen modules compute in float32, and are afterwards as they were."""

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bigmodel.scaling import ModulePrecision, OpPrecision, matching_modules
from tests.scaling.dtypes import Dtypes


class Router(nn.Module):
    """Weighs its inputs by a softmax over them, with a linear layer that autocast would run in half."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.gate = nn.Linear(4, 4)

    def forward(self, x, *, scale=None, extra=()):
        x = self.gate(self.norm(x))
        for each in extra:
            x = x + each
        return F.softmax(x if scale is None else x * scale, -1), {"count": torch.tensor(x.shape[0])}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.router = Router()
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.router(self.first(x))[0])


def _state(model):
    return {
        name: (type(module), {key: id(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_numbers_and_gradients_are_those_of_casts_by_hand(half):
    """Autocast inside of the module would round what the user wants exact."""
    ours, hand = Model(), Model()
    hand.load_state_dict(ours.state_dict())
    x = torch.randn(3, 4, dtype=half)
    precision = ModulePrecision(ours, ["Router"])
    precision.install()
    with torch.autocast("cpu", half), Dtypes() as dtypes:
        out = ours(x)
    with torch.autocast("cpu", half):
        first = hand.first(x)
        with torch.autocast("cpu", enabled=False):
            routed, _ = hand.router(first.float())
        expected = hand.last(routed)
    precision.remove()
    assert dtypes.of("addmm") == [half, torch.float32, half]
    assert dtypes.of("_softmax", "native_layer_norm") == [torch.float32] * 2
    assert torch.equal(out, expected)
    for loss in (out, expected):
        loss.float().square().sum().backward()
    for left, right in zip(ours.parameters(), hand.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_inputs_of_every_form_are_cast_and_results_are_full():
    """A keyword left in half makes the sum half again."""
    router = Router()
    half = torch.randn(2, 4, dtype=torch.bfloat16)
    precision = ModulePrecision(router, ["Router"])
    precision.install()
    weights, others = router(half, scale=half, extra=[half])
    precision.remove()
    expected, _ = router(half.float(), scale=half.float(), extra=[half.float()])
    assert weights.dtype == torch.float32
    assert torch.equal(weights, expected)
    assert others["count"].dtype == torch.int64


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_modules_are_in_full_too(use_reentrant):
    """Recompute happens in the backward pass, outside of every context and in whichever thread."""
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    precisions = [ModulePrecision(each, ["router"]) for each in (model, plain)]
    for precision in precisions:
        precision.install()
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(model, x, use_reentrant=use_reentrant)
        expected = plain(x)
    expected.float().sum().backward()
    seen = []

    def backward():
        with Dtypes() as dtypes:
            out.float().sum().backward()
        seen.extend(dtypes.of("addmm", "_softmax")[:3])

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    for precision in precisions:
        precision.remove()
    assert seen == [torch.bfloat16, torch.float32, torch.float32]
    assert all(
        torch.equal(*(p.grad for p in pair)) for pair in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_removal_leaves_no_trace():
    """A leftover attribute is saved, copied and compiled with the module."""
    model = Model()
    before = _state(model)
    precision = ModulePrecision(model, ["*Norm", "router", "*.gate"])
    assert list(precision.modules) == ["router", "router.norm", "router.gate"]
    precision.install()
    precision.install()
    assert "forward" in vars(model.router)
    assert set(model.state_dict()) == set(Model().state_dict())
    precision.remove()
    precision.remove()
    assert _state(model) == before
    precision.install()
    assert model(torch.randn(1, 4).bfloat16().float()).dtype == torch.float32
    precision.remove()
    assert _state(model) == before


def test_other_wrappers_before_and_after():
    """A module's forward may be wrapped already, or be wrapped later and outlive this."""
    norm = nn.LayerNorm(4)
    half = torch.randn(2, 4, dtype=torch.bfloat16)
    calls = []
    inner = norm.forward

    def before(*args):
        calls.append("before")
        return inner(*args)

    norm.forward = before
    precision = ModulePrecision(norm, ["LayerNorm"])
    precision.install()
    assert norm(half).dtype == torch.float32
    precision.remove()
    assert vars(norm)["forward"] is before
    precision.install()
    ours = norm.forward
    norm.forward = after = lambda *args: ours(*args)
    precision.remove()
    assert vars(norm)["forward"] is after
    norm.bfloat16()
    assert norm(half).dtype == torch.bfloat16
    assert len(calls) == 2


def test_a_copy_computes_with_its_own_weights():
    """A copied model, such as that of averaged weights, must not call the modules of the first."""
    model = Model()
    precision = ModulePrecision(model, ["router", "LayerNorm"])
    precision.install()
    other = copy.deepcopy(model)
    restored = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    x = torch.randn(2, 4)
    assert other(x).any()
    assert restored(x).any()
    assert other.router(x.bfloat16())[0].dtype == torch.float32
    precision.remove()
    assert "forward" not in vars(model.router)


class _Stop(BaseException):
    pass


def test_leaving_in_the_middle_leaves_autocast_on():
    """A pipeline leaves a module's forward by an exception at the end of its stage."""
    model = Model()

    def stop(*args):
        raise _Stop

    model.router.gate.forward = stop
    precision = ModulePrecision(model, ["router"])
    precision.install()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(_Stop):
            model(torch.randn(2, 4))
        assert torch.is_autocast_enabled("cpu")
        with OpPrecision([], ["bmm"]).active():
            assert torch.bmm(*[torch.ones(1, 1, 1)] * 2).dtype == torch.bfloat16
    precision.remove()


def test_half_operators_do_not_apply_within():
    """Who keeps a module exact means all of it."""
    model = Model()
    precision = ModulePrecision(model, ["router"])
    precision.install()
    with OpPrecision([], ["softmax", "linear"]).active(), torch.autocast("cpu", torch.bfloat16), Dtypes() as dtypes:
        model(torch.randn(2, 4))
    precision.remove()
    assert dtypes.of("_softmax") == [torch.float32]
    assert dtypes.of("addmm") == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_model_of_half_weights_goes_on_in_half(half):
    """Without autocast a linear layer of half weights refuses what a norm in float32 gives."""
    model = Model().to(half)
    for module in matching_modules(model, ["Router"]).values():
        module.float()
    x = torch.randn(2, 4, dtype=half)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    precision = ModulePrecision(model, ["Router"], output_dtype=half)
    precision.install()
    routed, others = model.router(x)
    assert routed.dtype == half
    assert others["count"].dtype == torch.int64
    assert model.router(x.float())[0].dtype == half  # as an embedding, whose inputs have no such type
    out = model(x)
    out.sum().backward()
    precision.remove()
    assert out.dtype == half
    assert model.router.gate.weight.grad.dtype == torch.float32
    assert model.first.weight.grad.dtype == half


def test_matching_modules():
    """Patterns choose by the place in the model or by class, and by what a class derives from."""

    class OwnNorm(nn.LayerNorm):
        pass

    model = nn.ModuleDict({"a": Router(), "b": nn.ModuleDict({"norm": OwnNorm(4), "c": nn.Linear(2, 2)})})
    assert list(matching_modules(model, ["LayerNorm"])) == ["a.norm", "b.norm"]
    assert list(matching_modules(model, ["OwnNorm"])) == ["b.norm"]
    assert list(matching_modules(model, ["*.norm", "a"])) == ["a", "a.norm", "b.norm"]
    assert list(matching_modules(model, ["b.*"])) == ["b.norm", "b.c"]
    assert list(matching_modules(model, ["?.c"])) == ["b.c"]
    assert matching_modules(model, ["a.norm"])["a.norm"] is model["a"].norm
    assert matching_modules(model, []) == {}
    assert list(matching_modules(nn.LayerNorm(2), ["LayerNorm"])) == [""]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layernorm", "'layernorm', which matches no module's name or class. Close to it: .*'LayerNorm'"),
        ("*.first", "Close to it: .*'first'"),
        ("router.nrom", "'router.norm'"),
        ("zzzzzz", r"The first modules are \['Model', 'first'"),
        ("Module", "matches no module"),
    ],
)
def test_a_pattern_without_a_match_is_refused(pattern, message):
    """A typo leaves the module in half, which shows only as a worse loss."""
    for call in (matching_modules, ModulePrecision):
        with pytest.raises(ValueError, match=message):
            call(Model(), ["router", pattern])


def test_patterns_of_a_wrong_kind_are_refused():
    """One string is a list of letters."""
    with pytest.raises(TypeError, match="must be a list of names"):
        matching_modules(Model(), "LayerNorm")
    with pytest.raises(TypeError, match="must be a list of names"):
        ModulePrecision(Model(), [nn.LayerNorm])


def test_compiled_modules_obey(monkeypatch):
    """A compiled block is traced with the replaced forward, and again after it is removed."""
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    model, x = Model(), torch.randn(2, 4)
    precision = ModulePrecision(model, ["router"])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for change in (lambda: None, precision.install, precision.remove):
        change()
        with torch.autocast("cpu", torch.bfloat16):
            expected, out = model(x), compiled(x)
        assert torch.equal(expected, out)
        results.append(out)
    torch._dynamo.reset()
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_lists_and_the_model_itself_stand_for_what_they_hold():
    """A name of something nobody calls, which changes nothing."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])
    assert list(matching_modules(model, ["blocks"])) == ["blocks.0", "blocks.1", "blocks.1.0"]
    assert set(matching_modules(model, ["*"])) == {"", "blocks.0", "blocks.1", "blocks.1.0"}


def test_inner_modules_leave_it_to_the_outer_one():
    """A half output in the middle of a module in full precision."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = ModulePrecision(model, ["*"], output_dtype=torch.bfloat16)
    precision.install()
    assert model(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    precision.remove()
