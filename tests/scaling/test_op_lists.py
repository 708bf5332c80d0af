"""`OpPrecision`: listed operators compute in the dtype they were listed for, in forward, backward and recompute."""

import copy
import pickle
import sys
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_bigmodel.scaling import OpPrecision, full_precision, half_precision
from tests.scaling import user_functions
from tests.scaling.dtypes import Dtypes
from tests.scaling.user_functions import mix, phase

_HALF = [torch.bfloat16, torch.float16]
_PHASE = "tests.scaling.user_functions.phase"
_MIX = "tests.scaling.user_functions.mix"


@pytest.fixture(autouse=True)
def _nothing_is_left_replaced():
    """A function left replaced changes the dtypes of every later test."""
    before = {name: id(value) for name, value in vars(user_functions).items()}
    yield
    assert {name: id(value) for name, value in vars(user_functions).items()} == before
    assert phase is user_functions.phase
    assert mix is user_functions.mix


def run_forms(x, w):
    """By short name, every public way to write the operator."""
    return {
        "softmax": [
            lambda: torch.softmax(x, -1),
            lambda: F.softmax(x, -1),
            lambda: F.softmax(x, dim=-1, dtype=x.dtype),
            lambda: x.softmax(dim=-1),
            lambda: torch.special.softmax(x, -1),
            lambda: nn.Softmax(-1)(x),
        ],
        "layer_norm": [
            lambda: torch.layer_norm(x, (4,)),
            lambda: F.layer_norm(x, (4,)),
            lambda: nn.LayerNorm(4)(x),
        ],
        "bmm": [lambda: torch.bmm(x, x), lambda: x.bmm(x), lambda: torch.bmm(input=x, mat2=x)],
        "matmul": [
            lambda: x @ w,
            lambda: torch.matmul(x, w),
            lambda: x.matmul(w),
            lambda: torch.linalg.matmul(x, w),
            lambda: w.__rmatmul__(x),
        ],
        "@": [lambda: x @ w, lambda: torch.matmul(x, w)],
        "linear": [lambda: F.linear(x, w), lambda: nn.Linear(4, 4)(x)],
        "gelu": [lambda: F.gelu(x), lambda: nn.GELU()(x)],
        "scaled_dot_product_attention": [lambda: F.scaled_dot_product_attention(x, x, x)],
        "add": [lambda: x + w, lambda: w + x, lambda: torch.add(x, w)],
        "sub": [lambda: x - 1, lambda: 1 - x, lambda: torch.sub(x, 1)],
        "div": [lambda: x / 2, lambda: 2 / x, lambda: torch.true_divide(x, 2)],
        "mul": [lambda: x * w, lambda: 2 * x],
        "pow": [lambda: x**2, lambda: 2**x],
        "sum": [lambda: x.sum(-1), lambda: torch.sum(x, (0,))],
        "norm": [lambda: x.norm(dim=-1), lambda: torch.norm(x, dim=-1), lambda: torch.linalg.norm(x, dim=-1)],
        "cat": [lambda: torch.cat([x, x])],
        "einsum": [lambda: torch.einsum("bij,jk->bik", x, w)],
    }


_FORMS = [(name, index) for name, forms in run_forms(None, None).items() for index in range(len(forms))]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("half", _HALF)
@pytest.mark.parametrize(("name", "index"), _FORMS)
def test_each_form_of_an_operator_obeys_its_list(name, index, half, autocast):
    """A form that slips through computes in half what the user wanted in full."""
    x, w = torch.randn(4, 4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", half, enabled=autocast):
        with OpPrecision([name], half_dtype=half).active():
            assert run_forms(x.to(half), w.to(half))[name][index]().dtype == torch.float32
        with OpPrecision([], [name], half_dtype=half).active():
            assert run_forms(x, w)[name][index]().dtype == half


class Block(nn.Module):
    """All kinds of listed operators, and some that are not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x_BTD):
        h_BTD = self.linear(self.norm(x_BTD))
        scores_BTT = torch.bmm(h_BTD, h_BTD.mT)
        weights_BTT = F.softmax(scores_BTT, dim=-1)
        return torch.bmm(weights_BTT, phase(h_BTD, 0.5)) * 2


class BlockByHand(Block):
    """The same with each cast written out."""

    half = torch.bfloat16

    def forward(self, x_BTD):
        with torch.autocast("cpu", enabled=False):
            n_BTD = F.layer_norm(x_BTD.float(), (4,), self.norm.weight, self.norm.bias)
        h_BTD = self.linear(n_BTD)
        with torch.autocast("cpu", enabled=False):
            scores_BTT = torch.bmm(h_BTD.to(self.half), h_BTD.to(self.half).mT)
            weights_BTT = torch.softmax(scores_BTT.float(), dim=-1)
            phases_BTD = torch.cos(h_BTD.float() * 0.5)
            return torch.bmm(weights_BTT.to(self.half), phases_BTD.to(self.half)) * 2


def _ops(half=torch.bfloat16):
    return OpPrecision(["softmax", "layer_norm", _PHASE], ["bmm"], half)


def _gradients(block, x, loss):
    loss.float().square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())]


@pytest.mark.parametrize("half", _HALF)
def test_numbers_and_gradients_are_those_of_casts_by_hand(half):
    """Casts that break the graph, or round twice, train another model."""
    ours, hand = Block(), BlockByHand()
    hand.load_state_dict(ours.state_dict())
    hand.half = half
    x = torch.randn(2, 3, 4, dtype=half, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    with _ops(half).active(), torch.autocast("cpu", half), Dtypes() as dtypes:
        out = ours(x)
    assert set(dtypes.of("_softmax", "native_layer_norm", "cos")) == {torch.float32}
    assert dtypes.of("bmm") == [half, half]
    with torch.autocast("cpu", half):
        expected = hand(y)
    assert torch.equal(out, expected)
    assert out.dtype == half
    gradients = _gradients(ours, x, out)
    assert [gradient.dtype for gradient in gradients] == [half] + [torch.float32] * 4
    assert all(torch.equal(*pair) for pair in zip(gradients, _gradients(hand, y, expected), strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_operators_obey_too(use_reentrant):
    """What is recomputed in other dtypes gives the gradients of another model."""
    block, plain = Block(), Block()
    plain.load_state_dict(block.state_dict())
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ops = _ops()
    with ops.active(), torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(block, x, use_reentrant=use_reentrant)
        expected = plain(y)
    with ops.active(), Dtypes() as dtypes:
        gradients = _gradients(block, x, out)
    assert dtypes.of("_softmax") == [torch.float32]
    assert dtypes.of("native_layer_norm") == [torch.float32]
    assert torch.float32 not in dtypes.of("bmm")
    assert len(dtypes.of("cos")) == 1
    assert all(torch.equal(*pair) for pair in zip(gradients, _gradients(plain, y, expected), strict=True))


def test_a_backward_outside_of_active_is_no_silent_change():
    """The documented limit: torch compares what it recomputes, and refuses."""
    block, x = Block(), torch.randn(2, 3, 4, requires_grad=True)
    with OpPrecision(["softmax"], ["layer_norm"]).active(), torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(block, x, use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        out.float().sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_users_function_is_recomputed_in_full_without_active(use_reentrant):
    """From `install` on it does not matter which thread runs the backward pass."""
    ops = OpPrecision([_PHASE])
    ops.install()
    x = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)
    out = checkpoint(lambda value: phase(value, 0.5), x, use_reentrant=use_reentrant)
    seen = []

    def backward():
        with Dtypes() as dtypes:
            out.sum().backward()
        # The first of them is that within `phase`; what follows it is not needed again.
        seen.append(dtypes.of("mul")[0])

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    ops.remove()
    assert seen == [torch.float32]
    assert x.grad.dtype == torch.bfloat16


def test_what_is_untouched():
    """Integers, complex numbers and float64 have no half; casting them would lose what they hold."""
    ops = OpPrecision(["add", "softmax"], ["bmm", "mul"])
    with ops.active():
        assert (torch.arange(3) + 1).dtype == torch.int64
        assert (torch.ones(2, dtype=torch.complex64) + 1).dtype == torch.complex64
        assert (torch.ones(2, dtype=torch.complex64) * 2).dtype == torch.complex64
        assert torch.softmax(torch.ones(2, dtype=torch.float64), 0).dtype == torch.float64
        assert torch.bmm(*[torch.ones(1, 1, 1, dtype=torch.float64)] * 2).dtype == torch.float64
        # Not listed.
        assert (torch.ones(2, dtype=torch.bfloat16) - 1).dtype == torch.bfloat16


def test_results_in_place_or_elsewhere_are_left_alone():
    """A cast copy would be written to in place of the caller's tensor."""
    x = torch.ones(2, 2, 2, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    with OpPrecision(["bmm", "add", "relu", "dropout"]).active():
        with pytest.warns(UserWarning, match="`bmm` .* `out=` or in place"):
            assert torch.bmm(x, x, out=out) is out
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.bmm(x, x, out=out)
        assert out.tolist() == [[[2.0] * 2] * 2] * 2
        x += 1
        assert x.dtype == torch.bfloat16
        negative = -x
        with pytest.warns(UserWarning, match="`relu`"):
            assert F.relu(negative, True) is negative
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert nn.ReLU(inplace=True)(negative) is negative
            assert F.dropout(x, 0.5, False, True) is x
        assert F.relu(x, False).dtype == torch.float32
        assert F.relu(x, inplace=False).dtype == torch.float32
        assert not negative.any()


def test_operators_within_torchs_own_functions_are_seen():
    """An attention layer computes its softmax inside of torch's Python; its user listed softmax."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 4)
    for train in (True, False):
        layer.train(train)
        with OpPrecision(["linear", "layer_norm"]).active(), torch.autocast("cpu", torch.bfloat16), Dtypes() as dtypes:
            layer(x)
        assert torch.bfloat16 not in dtypes.of("addmm", "mm", "native_layer_norm")
    attention = nn.MultiheadAttention(4, 2)
    with OpPrecision(["softmax"]).active(), torch.autocast("cpu", torch.bfloat16), Dtypes() as dtypes:
        attention(x, x, x, need_weights=True)
    assert dtypes.of("_softmax") == [torch.float32]


def test_modules_of_many_kinds_run_as_before():
    """Calling a function of torch past its own check must not change what it does."""
    x_BCL, x_BCHW, target = torch.randn(2, 4, 8), torch.randn(2, 4, 6, 6), torch.tensor([0, 1])
    calls = [
        lambda: nn.Conv2d(4, 4, 3)(x_BCHW),
        lambda: nn.BatchNorm2d(4)(x_BCHW),
        lambda: nn.GroupNorm(2, 4)(x_BCHW),
        lambda: nn.InstanceNorm1d(4)(x_BCL),
        lambda: nn.RMSNorm(8)(x_BCL),
        lambda: nn.MaxPool1d(2)(x_BCL),
        lambda: F.max_pool2d(x_BCHW, 2, return_indices=True)[1],
        lambda: F.adaptive_max_pool1d(x_BCL, 2),
        lambda: F.fractional_max_pool2d(x_BCHW, 2, output_size=3),
        lambda: nn.LSTM(8, 4)(x_BCL)[0],
        lambda: nn.GRUCell(8, 4)(x_BCL[0]),
        lambda: nn.Transformer(8, 2, 1, 1, 8, dropout=0.0, batch_first=True)(x_BCL, x_BCL),
        lambda: nn.Embedding(4, 3, max_norm=1.0)(target),
        lambda: nn.EmbeddingBag(4, 3)(target[None]),
        lambda: F.cross_entropy(x_BCL[..., 0], target, label_smoothing=0.1),
        lambda: F.interpolate(x_BCHW, scale_factor=2, mode="bilinear"),
        lambda: F.pad(x_BCL, (1, 1), mode="reflect"),
        lambda: F.gumbel_softmax(x_BCL, hard=True),
        lambda: F.normalize(x_BCL),
        lambda: F.triplet_margin_with_distance_loss(x_BCL, x_BCL + 1, x_BCL - 1),
        lambda: F.ctc_loss(
            x_BCL.permute(2, 0, 1).log_softmax(-1), torch.ones(2, 3).long(), torch.tensor([8, 8]), torch.tensor([3, 3])
        ),
        lambda: torch.stft(x_BCL[0], 4, window=torch.ones(4), return_complex=True),
        lambda: torch.cdist(x_BCL, x_BCL),
        lambda: torch.norm(x_BCL),
        lambda: x_BCL.unflatten(-1, (2, 4)),
        lambda: torch.unique(target, return_counts=True)[1],
        lambda: torch.meshgrid(target, target, indexing="ij")[0],
        lambda: torch.split(x_BCL, 2)[0],
        lambda: nn.init.kaiming_uniform_(torch.empty(3, 3)),
    ]
    ops = OpPrecision([_PHASE, "logsumexp"])
    for call in calls:
        torch.manual_seed(1)
        expected = call()
        torch.manual_seed(1)
        with ops.active():
            assert torch.equal(call(), expected)


def test_no_half_within_full():
    """A function that must be exact may call what is listed for half elsewhere."""
    x = torch.randn(1, 3, 3)
    with OpPrecision([_MIX], ["bmm", "add"]).active():
        assert mix(x, x, extra=[x]).dtype == torch.float32
        assert torch.equal(mix(x, x), torch.matmul(x, x))
        assert torch.bmm(x, x).dtype == torch.bfloat16
    with OpPrecision([], ["bmm"]).active():
        assert full_precision(torch.bmm)(x, x).dtype == torch.float32
        assert full_precision(half_precision(dtype=torch.float16)(mix))(x, x).dtype == torch.float32


def test_full_operators_hold_within_a_half_function():
    """The operator's own rule is the closer one."""
    x = torch.randn(1, 3, 3)
    with OpPrecision(["bmm"], [_MIX]).active(), Dtypes() as dtypes:
        assert mix(x, x).dtype == torch.bfloat16
    assert dtypes.of("bmm") == [torch.float32]


def test_arguments_in_structures_are_cast():
    """Tensors in a list, a dict or a keyword are arguments as well."""
    x = torch.randn(1, 2, 2, dtype=torch.float16)
    seen = []

    @full_precision
    def keep(*args, **kwargs):
        seen.append((args, kwargs))
        return {"out": (x, [x]), "size": torch.Size([2]), "none": None}

    pair = torch.return_types.max((x, x.long()))
    out = keep([x], (x, 1), {"a": [x]}, pair, b=x)
    (args, kwargs) = seen[0]
    tensors = [args[0][0], args[1][0], args[2]["a"][0], args[3].values, kwargs["b"], out["out"][0], out["out"][1][0]]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert args[3].indices.dtype == torch.int64
    assert out["size"] == torch.Size([2])


def test_active_again_within_itself():
    """A step inside of a step must neither cast twice nor end the outer one."""
    ops, x = _ops(), torch.ones(2, dtype=torch.bfloat16)
    with ops.active():
        with ops.active():
            assert torch.softmax(x, 0).dtype == torch.float32
        assert torch.softmax(x, 0).dtype == torch.float32
        assert phase(x, 1.0).dtype == torch.float32
    assert torch.softmax(x, 0).dtype == phase(x, 1.0).dtype == torch.bfloat16
    with pytest.raises(KeyboardInterrupt), ops.active():
        raise KeyboardInterrupt
    assert torch.softmax(x, 0).dtype == phase(x, 1.0).dtype == torch.bfloat16


def test_other_threads_go_on_as_they_were():
    """A thread that loads data must not compute otherwise because the main thread trains."""
    x, seen = torch.ones(2, dtype=torch.bfloat16), []

    def work():
        seen.append(torch.softmax(x, 0).dtype)
        with ops.active():
            seen.append(torch.softmax(x, 0).dtype)

    ops = OpPrecision(["softmax"])
    with ops.active():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [torch.bfloat16, torch.float32]


def test_empty_lists_cost_nothing():
    """Who lists nothing must not pay for each call of torch."""
    ops = OpPrecision()
    assert not ops
    with ops.active():
        assert not torch.overrides.has_torch_function((torch.ones(1),))


def test_lists_travel_to_other_processes():
    """A launcher that spawns processes pickles the precision with all that it holds."""
    ops = OpPrecision(["softmax", _PHASE], ["@"], torch.float16)
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    ops.install()
    copies = [pickle.loads(pickle.dumps(ops)), copy.deepcopy(ops)]
    ops.remove()
    for each in copies:
        assert phase(x, 1.0).dtype == torch.bfloat16
        with each.active():
            assert torch.softmax(x, 0).dtype == phase(x, 1.0).dtype == torch.float32
            assert (x @ x).dtype == torch.float16


def test_install_and_remove():
    """Names imported before, and modules that come or change in between, must all be right afterwards."""
    ops, original, x = OpPrecision([_PHASE]), user_functions.phase, torch.ones(2, dtype=torch.bfloat16)
    early, late = types.ModuleType("bigmodel_test_early"), types.ModuleType("bigmodel_test_late")
    early.renamed = original
    sys.modules["bigmodel_test_early"] = early
    try:
        ops.install()
        ops.install()
        replaced = user_functions.phase
        assert replaced is phase is early.renamed is not original
        assert replaced.__wrapped__ is original
        assert replaced.__name__ == "phase"
        assert phase(x, 1.0).dtype == torch.float32
        late.taken = user_functions.phase
        sys.modules["bigmodel_test_late"] = late
        user_functions.phase = lambda *args: replaced(*args)
        with ops.active():
            pass
        assert early.renamed is replaced
        ops.remove()
        ops.remove()
        # Another replacement came around ours, which passes calls on from now on.
        assert user_functions.phase(x, 1.0).dtype == torch.bfloat16
        assert early.renamed is late.taken is original
    finally:
        del sys.modules["bigmodel_test_early"]
        sys.modules.pop("bigmodel_test_late", None)
        user_functions.phase = original
    assert replaced(x, 1.0).dtype == torch.bfloat16


def test_methods_of_classes():
    """Attention is often a method; static and class methods must stay what they are."""
    place = "tests.scaling.user_functions"
    names = [f"{place}.Attention.scores", f"{place}.Attention.weights", f"{place}.Cached.both", f"{place}.Double.apply"]
    held = {cls: dict(vars(cls)) for cls in (user_functions.Attention, user_functions.Cached, user_functions.Double)}
    x = torch.randn(2, 2, dtype=torch.bfloat16, requires_grad=True)
    with OpPrecision(names).active():
        attention = user_functions.Attention()
        assert attention.scores(x, key=x).dtype == torch.float32
        assert attention.weights(x).dtype == user_functions.Attention.weights(x).dtype == torch.float32
        assert user_functions.Cached.both(x, x).dtype == torch.float32
        doubled = user_functions.Double.apply(x)
        doubled.sum().backward()
        assert doubled.dtype == torch.float32
        assert x.grad.tolist() == [[2.0] * 2] * 2
        assert x.grad.dtype == torch.bfloat16
    assert {cls: dict(vars(cls)) for cls in held} == held


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sofmax", "'sofmax'.*Close to it:.*'softmax'"),
        ("LayerNorm", "'LayerNorm'.*'layer_norm'.*`full_precision_modules`"),
        ("torch.nn.functional.sofmax", "Close to it:.*'torch.nn.functional.softmax'"),
        ("torch.utils.checkpoint.checkpoint", "no operator of torch"),
        ("add_", "'add_', which works in place.*Name 'add'"),
        ("Tensor.add_", "works in place"),
        ("float", "no operator of torch"),
        ("size", "no operator of torch"),
        ("my_function", "'my_package.module.function'"),
        ("no_such_package.function", "There is no module 'no_such_package'"),
        ("tests.scaling.user_functions.phas", "has no 'phas'. Close to it: .*'phase'"),
        ("tests.scaling.user_functions.Attention.score", "Close to it: .*'scores'"),
        ("tests.scaling.user_functions.Nothing.score", "has no 'Nothing'"),
        ("tests.scaling.user_functions.Norm", "is a class.*`full_precision_modules`"),
        ("tests.scaling.user_functions.CONSTANT", "is a int and no function"),
    ],
)
@pytest.mark.parametrize("setting", ["full_precision_ops", "half_precision_ops"])
def test_an_unknown_name_is_refused(setting, name, message):
    """A typo that is passed over leaves the operator in the precision that the user wanted to avoid."""
    with pytest.raises(ValueError, match=f"`{setting}` holds") as caught:
        OpPrecision(**{setting: ["softmax", name]})
    caught.match(message)


@pytest.mark.parametrize(
    ("full", "half", "message"),
    [
        (["softmax"], ["softmax"], "'softmax' in `full_precision_ops` and 'softmax' in `half_precision_ops`"),
        (["softmax"], ["Tensor.softmax"], "'Tensor.softmax'"),
        (["@"], ["torch.matmul"], "'@' .* 'torch.matmul'"),
        ([_PHASE], [_PHASE], "user_functions.phase"),
    ],
)
def test_one_operator_in_both_lists_is_refused(full, half, message):
    """Whichever list won, the other would be ignored."""
    with pytest.raises(ValueError, match=message):
        OpPrecision(full, half)


def test_settings_of_a_wrong_kind_are_refused():
    """A string is a sequence of letters; a dtype that is no half would turn the lists around."""
    with pytest.raises(TypeError, match=r"write \['softmax'\]"):
        OpPrecision("softmax")
    with pytest.raises(TypeError, match="`half_precision_ops` holds 3"):
        OpPrecision(half_precision_ops=[3])
    with pytest.raises(ValueError, match="`half_dtype=torch.float32`"):
        OpPrecision(half_dtype=torch.float32)
    with pytest.raises(ValueError, match="`dtype=torch.float64`"):
        half_precision(dtype=torch.float64)


def test_a_full_name_is_one_form():
    """Who names one form has a reason to leave the others."""
    x = torch.ones(2, dtype=torch.bfloat16)
    for name in ("Tensor.softmax", "torch.Tensor.softmax"):
        with OpPrecision([name]).active():
            assert x.softmax(0).dtype == torch.float32
            assert torch.softmax(x, 0).dtype == torch.bfloat16


def test_decorators():
    """What no list reaches, in a table or a closure, is decorated where it is defined."""
    x = torch.randn(2, 2)
    table = {
        "full": full_precision(phase),
        "half": half_precision(phase),
        "fp16": half_precision(dtype=torch.float16)(phase),
    }
    assert table["half"](x, 0.5).dtype == torch.float32
    assert table["fp16"](x, 0.5).dtype == torch.float16
    assert table["full"](x.half(), 0.5).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert table["half"](x, 0.5).dtype == torch.bfloat16
        assert full_precision(torch.mm)(x, x).dtype == torch.float32
        # Autocast goes on within, for weights that are not among the arguments.
        assert half_precision(lambda value: F.linear(value, x))(x).dtype == torch.bfloat16
    assert full_precision(phase).__name__ == "phase"


@pytest.fixture
def compiler(monkeypatch):
    """Torch's compiler, as it starts. Its progress bars would leave a thread behind."""
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    # By its own default the compiler traces the backward pass as if autocast were on in it.
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        yield lambda function, **options: torch.compile(function, backend="aot_eager", **options)
    torch._dynamo.reset()


@pytest.mark.parametrize("half", _HALF)
def test_compiled_code_obeys(half, compiler):
    """A compiled block is traced once; the lists must be part of the trace, and of what decides to trace again."""
    block, x = Block(), torch.randn(2, 3, 4)
    compiled = compiler(block, fullgraph=True)
    results = set()
    # On the CPU the first two agree: autocast chooses the same.
    for ops in (_ops(half), OpPrecision(), OpPrecision(["bmm"]), OpPrecision([], [_PHASE, "softmax"], half)):
        with ops.active(), torch.autocast("cpu", half):
            outputs = [block(x), compiled(x)]
        gradients = [torch.autograd.grad(out.float().square().sum(), block.linear.weight)[0] for out in outputs]
        assert torch.equal(*outputs)
        assert torch.equal(*gradients)
        results.add(str(gradients[0].tolist()))
    assert len(results) == 3


# The compiler looks at the results of what it left out.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_compiled_with_recompute(use_reentrant, compiler):
    """The compiler would trace through a checkpoint without the lists: it must go around it, or refuse."""
    block, x = Block(), torch.randn(2, 3, 4, requires_grad=True)

    def step(value):
        return checkpoint(block, value, use_reentrant=use_reentrant) + 1

    compiled = compiler(step)
    strict = compiler(lambda value: checkpoint(block, value, use_reentrant=use_reentrant), fullgraph=True)
    # On the CPU autocast alone would take softmax to float32, and this list takes it to half.
    ops = OpPrecision(["layer_norm", "bmm"], ["softmax"])
    gradients = []
    for run in (lambda value: block(value) + 1, step, compiled):
        block.zero_grad()
        with ops.active(), torch.autocast("cpu", torch.bfloat16):
            run(x).float().square().sum().backward()
        gradients.append([parameter.grad for parameter in block.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients[0], others, strict=True))
    with (
        ops.active(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be traced through a checkpoint"),
    ):
        strict(x)


def test_decorated_functions_compile(compiler):
    """A decorator that the compiler cannot follow would split the block in pieces."""
    x = torch.randn(2, 2)
    for function in (full_precision(phase), half_precision(dtype=torch.bfloat16)(phase)):
        for value in (x, x.bfloat16()):
            out = compiler(lambda each, function=function: function(each, 0.5) + 1, fullgraph=True)(value)
            assert out.dtype == function(value, 0.5).dtype
            assert torch.equal(out, function(value, 0.5) + 1)
