"""Layers cut over ranks give the outputs and gradients of whole ones, at two all-reduces a layer each way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_bigmodel._host import FakeTensorMode, is_fake
from lightning_bigmodel.sharding.tensor import apply_tensor_plan, check_tensor_plan
from lightning_bigmodel.testing import CollectiveCounter, RanksFailedError, run_ranks
from tests.sharding.tensor_modules import (
    BLOCK_PLAN,
    HEADS,
    LENGTH,
    WIDTH,
    WORDS,
    Attention,
    Block,
    Gated,
    Language,
    Mlp,
    compare,
    randomize,
)

_BYTES = 2 * LENGTH * WIDTH * 4
_TOLERANCE = 1e-5
_SEQUENCE = {
    **BLOCK_PLAN,
    "start": "sequence_split",
    "blocks.*.norm1": "sequence",
    "blocks.*.norm2": "sequence",
    "norm": "sequence",
}
_MLP = {"up": "colwise", "down": "rowwise"}


def _tokens() -> Tensor:
    return (torch.arange(2 * LENGTH).view(2, LENGTH) * 7) % WORDS


def _hidden() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))


def _language_step(module: nn.Module) -> Tensor:
    loss: Tensor = module(_tokens())
    return loss


def _square_step(module: nn.Module) -> Tensor:
    loss: Tensor = module(_hidden()).square().mean()
    return loss


def _language(**kwargs: Any) -> nn.Module:
    return randomize(Language(**kwargs))


def _tied() -> nn.Module:
    return _language(tied=True)


def _padded() -> nn.Module:
    return _language(padding=14)


def _gated() -> nn.Module:
    return randomize(Gated())


def _compare(make: Callable[[], nn.Module], step: Callable[[nn.Module], Tensor], plan: dict[str, str]) -> Any:
    return compare(make, step, plan)


def _check(results: list[Any], num_cut: int) -> None:
    for result in results:
        assert result["num_cut"] == num_cut
        assert result["shapes"]
        wrong = {name: error for name, error in result["errors"].items() if not error < _TOLERANCE}
        assert not wrong


@pytest.mark.parametrize("size", [2, 4])
def test_a_plan_gives_the_numbers_of_the_whole_module(size: int) -> None:
    """A bias added once a rank, a missing sum, or q|k|v cut across: wrong numbers and no error."""
    results = run_ranks(_compare, size, _language, _language_step, BLOCK_PLAN)
    _check(results, 12)
    # Two blocks of two pairs: Megatron's two all-reduces each way a block, q|k|v and its norms included.
    assert results[0]["forward"] == {"all_reduce": (4, 4 * _BYTES)}
    assert results[0]["backward"] == {"all_reduce": (4, 4 * _BYTES)}


@pytest.mark.parametrize(
    ("make", "plan", "num_cut"),
    [
        (_padded, {**BLOCK_PLAN, "words": "rowwise", "head": "colwise_gather"}, 14),
        (_tied, {**BLOCK_PLAN, "words": "rowwise", "head": "colwise_gather"}, 13),
        (_language, {**BLOCK_PLAN, "words": "colwise", "places": "replicate", "head": "rowwise_split"}, 14),
    ],
    ids=["rows", "tied", "columns"],
)
def test_embeddings_and_heads(make: Callable[[], nn.Module], plan: dict[str, str], num_cut: int) -> None:
    """A row of another rank looked up, the gradient of a padding row, a tied weight cut for one of its users only."""
    _check(run_ranks(_compare, 2, make, _language_step, plan), num_cut)


def test_parts_side_by_side() -> None:
    """A gate cut across would put gates on one rank and values on the other."""
    _check(run_ranks(_compare, 2, _gated, _square_step, {"both": "colwise:2", "down": "rowwise"}), 3)


@pytest.mark.parametrize("head", ["sequence_gather", "colwise_gather"])
def test_sequence_styles(head: str) -> None:
    """Norms see a part of the tokens: their gradients, and those of biases after the sum, must be summed."""
    results = run_ranks(_compare, 2, _language, _language_step, {**_SEQUENCE, "head": head})
    _check(results, 12 if head == "sequence_gather" else 13)
    forward, backward = results[0]["forward"], results[0]["backward"]
    assert forward["reduce_scatter"] == (4, 4 * _BYTES)
    assert forward["all_gather"][0] == (5 if head == "sequence_gather" else 6)
    assert backward["all_gather"] == (5, 5 * _BYTES // 2)
    assert "all_reduce" not in forward | backward


def _penalty_step(module: nn.Module) -> Tensor:
    """With a penalty on the gradient of the loss by what the embedding gives, as adversarial training has it."""
    shown: list[Tensor] = []
    handle = module.words.register_forward_hook(lambda _, args, output: shown.append(output))
    with sdpa_kernel(SDPBackend.MATH):  # the only one whose backward can be differentiated
        loss = module(_tokens())
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, shown, create_graph=True)
    penalised: Tensor = loss + 20.0 * gradient.square().sum()
    return penalised


@pytest.mark.parametrize(
    ("plan", "num_cut"),
    [
        ({**BLOCK_PLAN, "words": "rowwise", "head": "colwise_gather"}, 14),
        ({**BLOCK_PLAN, "words": "colwise", "head": "rowwise_split"}, 14),
        ({**_SEQUENCE, "head": "sequence_gather"}, 12),
        ({**_SEQUENCE, "head": "colwise_gather"}, 13),
    ],
    ids=["rows", "columns", "sequence", "sequence head"],
)
def test_a_gradient_can_be_differentiated_again(plan: dict[str, str], num_cut: int) -> None:
    """A sum of the second backward that is missing, or done twice."""
    _check(run_ranks(_compare, 2, _language, _penalty_step, plan), num_cut)


def _odd_sequence() -> None:
    module = _language()
    apply_tensor_plan(module, {**_SEQUENCE, "head": "sequence_gather"}, dist.group.WORLD, dist.get_rank(), 2)
    module(_tokens()[:, :5])


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    """Tokens at the end would be dropped."""
    with pytest.raises(RanksFailedError, match=r"has length 5, which `tensor_parallel_size=2` does not divide"):
        run_ranks(_odd_sequence, 2)


def _partial_parameters() -> tuple[list[str], list[str]]:
    names = []
    for plan in (BLOCK_PLAN, {**_SEQUENCE, "head": "sequence_gather"}):
        module = _language(num_blocks=1)
        slices = apply_tensor_plan(module, plan, dist.group.WORLD, dist.get_rank(), 2)
        own = {id(parameter): name for name, parameter in module.named_parameters()}
        names.append(sorted(own[id(parameter)] for parameter in slices.partial_gradients))
    return names[0], names[1]


def test_which_gradients_are_partial() -> None:
    """Summed without need they are too large by the number of ranks; not summed, they drift apart."""
    heads, sequence = run_ranks(_partial_parameters, 2)[0]
    norms = ["blocks.0.attn.q_norm.bias", "blocks.0.attn.q_norm.weight"]
    assert heads == norms
    outer = [f"{name}.{own}" for name in ("blocks.0.norm1", "blocks.0.norm2", "norm") for own in ("bias", "weight")]
    assert sequence == sorted([*norms, *outer, "blocks.0.attn.out.bias", "blocks.0.mlp.down.bias"])


def _dropped(p: float) -> dict[str, Any]:
    """Masks inside a pair and after it, what the random states are then, and whether a recomputed forward is equal."""
    rank = dist.get_rank()
    torch.manual_seed(11)
    block = randomize(Block(dropout=p))
    block.mlp.drop.p = p
    block.attn.dropout = p
    apply_tensor_plan(block, {name[9:]: style for name, style in BLOCK_PLAN.items()}, dist.group.WORLD, rank, 2)
    inside: list[Tensor] = []
    block.mlp.drop.register_forward_hook(lambda module, args, output: inside.append(output == 0))
    hidden = _hidden().requires_grad_()
    before = torch.get_rng_state()
    output = block(hidden)
    after = torch.get_rng_state()
    drawn_after = torch.rand(3)
    output.square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in block.parameters()]
    block.zero_grad()
    torch.set_rng_state(before)
    again = checkpoint(block, hidden, use_reentrant=False)
    again.square().mean().backward()
    repeated = [parameter.grad for parameter in block.parameters()]
    return {
        "inside": inside[0],
        "output": output.detach(),
        "has_drawn": not torch.equal(before, after),
        "drawn_after": drawn_after,
        "recomputed": all(map(torch.equal, gradients, repeated)) and torch.equal(output, again),
    }


def test_dropout_masks() -> None:
    """Equal masks on different heads are no dropout of the whole; unequal ones on equal activations part the ranks."""
    first, second = run_ranks(_dropped, 2, 0.5)
    assert not torch.equal(first["inside"], second["inside"])
    assert 0.3 < first["inside"].float().mean() < 0.7
    assert torch.equal(first["output"], second["output"])
    assert torch.equal(first["drawn_after"], second["drawn_after"])
    assert first["recomputed"]
    assert second["recomputed"]


def test_without_dropout_no_random_number_is_drawn() -> None:
    """Each draw costs, and shifts the numbers of everything after it."""
    assert not any(result["has_drawn"] for result in run_ranks(_dropped, 2, 0.0))


def _sequence_dropout() -> Tensor:
    torch.manual_seed(11)
    module = nn.Sequential(nn.Identity(), nn.Dropout(0.5))
    plan = {"0": "sequence_split", "1": "sequence"}
    apply_tensor_plan(module, plan, dist.group.WORLD, dist.get_rank(), 2)
    output: Tensor = module(torch.ones(2, LENGTH, WIDTH))
    return torch.stack([(output == 0).flatten(), (torch.rand(output.numel()) < 0.5)])


def test_dropout_along_the_sequence() -> None:
    """One mask for each part of the sequence would repeat itself."""
    first, second = run_ranks(_sequence_dropout, 2)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def _failed_forward() -> tuple[bool, bool]:
    """A forward that raises between the layers of a pair."""
    torch.manual_seed(11)
    module = Mlp(dropout=0.5)
    bias = module.down.bias
    apply_tensor_plan(module, _MLP, dist.group.WORLD, dist.get_rank(), 2)
    handle = module.drop.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        module(_hidden())
    handle.remove()
    drawn = torch.rand(4)
    with pytest.raises(RuntimeError):
        module.down(torch.ones(2, 3))
    everyone = [torch.empty(4) for _ in range(2)]
    dist.all_gather(everyone, drawn)
    return torch.equal(*everyone), module.down.bias is bias


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    """A rank that goes on with random numbers of its own, or without a bias, differs from then on."""
    assert run_ranks(_failed_forward, 2) == [(True, True)] * 2


class _Projections(nn.Module):
    """Two layers read one input, or the second another."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        a = self.a(x).relu()
        if self.changes:
            x = x * 0.5
        return self.down(a * self.b(x))


def _projections(changes: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), randomize(_Projections(changes)))


def _reads_once() -> nn.Module:
    return randomize(_projections(False))


def _reads_twice() -> nn.Module:
    return randomize(_projections(True))


_SHARED = {"1.a": "colwise", "1.b": "colwise", "1.down": "rowwise"}


@pytest.mark.parametrize(("make", "num_sums"), [(_reads_once, 1), (_reads_twice, 2)])
def test_layers_share_one_sum_of_an_input(make: Callable[[], nn.Module], num_sums: int) -> None:
    """q, k and v would send their input's gradient three times; and two inputs must not be taken for one."""
    results = run_ranks(_compare, 2, make, _square_step, _SHARED)
    _check(results, 5)
    assert results[0]["backward"] == {"all_reduce": (num_sums, num_sums * _BYTES)}


def _evaluated() -> tuple[bool, bool, bool]:
    module = _language()
    tokens = _tokens()
    with torch.no_grad():
        expected = module(tokens)
        apply_tensor_plan(module, {**BLOCK_PLAN, "words": "rowwise"}, dist.group.WORLD, dist.get_rank(), 2)
        copied = copy.deepcopy(module)
        own = module.blocks[0].mlp.down.bias
        results = [module(tokens), copied(tokens)]
    with torch.inference_mode():
        results.append(module(tokens))
    same = all(torch.allclose(result, expected, atol=1e-6) for result in results)
    return same, module.blocks[0].mlp.down.bias is own, copied.blocks[0].mlp.down.bias is not own


def test_evaluation_and_copies() -> None:
    """A copy, such as an average of weights, would add its bias once a rank, or take that of the original."""
    assert run_ranks(_evaluated, 2) == [(True, True, True)] * 2


def _on_fake_tensors(plan: dict[str, str]) -> tuple[bool, list[int], dict[str, Any], bool]:
    module = _language()
    apply_tensor_plan(module, plan, dist.group.WORLD, dist.get_rank(), 2)
    with CollectiveCounter() as counter, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        hidden: list[Any] = []
        module.norm.register_forward_hook(lambda module, args, output: hidden.append(output.shape))
        loss = module(mode.from_tensor(_tokens()))
        loss.backward()
    result = (is_fake(loss), list(hidden[0]), counter.as_dict(), loss.shape == ())
    module.zero_grad()
    return result


@pytest.mark.parametrize("is_sequence", [False, True])
def test_fake_tensors_are_not_sent(is_sequence: bool) -> None:
    """A step is traced by each rank alone: a collective would wait for nobody, or read memory that is not there."""
    plan = {**_SEQUENCE, "head": "colwise_gather"} if is_sequence else {**BLOCK_PLAN, "words": "rowwise"}
    length = LENGTH // 2 if is_sequence else LENGTH
    assert run_ranks(_on_fake_tensors, 2, plan) == [(True, [2, length, WIDTH], {}, True)] * 2


def _other_stage() -> tuple[list[str], list[int], int, bool]:
    """The second block is another stage's: its parameters are NaN expanded."""
    module = _language()
    for parameter in module.blocks[1].parameters():
        parameter.data = torch.full((), torch.nan).expand(parameter.shape)
    slices = apply_tensor_plan(module, BLOCK_PLAN, dist.group.WORLD, dist.get_rank(), 2)
    names = [name for name, parameter in module.named_parameters() if slices.is_sliced(parameter)]
    output = module.blocks[1](torch.zeros(2, LENGTH, WIDTH))
    shape = list(module.blocks[1].attn.qkv.weight.shape)
    return names, shape, module.blocks[1].attn.num_heads, bool(output.isnan().all())


def test_parameters_of_another_stage_are_left_alone() -> None:
    """A slice of a stand-in would pass for a parameter; and the block must still run whole when a step is traced."""
    names, shape, num_heads, is_nan = run_ranks(_other_stage, 2)[0]
    assert len(names) == 6
    assert all(name.startswith("blocks.0.") for name in names)
    assert (shape, num_heads, is_nan) == ([3 * WIDTH, WIDTH], HEADS, True)


def _undone() -> tuple[bool, bool, int]:
    module = _language()
    before = copy.deepcopy(module)
    slices = apply_tensor_plan(module, {**BLOCK_PLAN, "words": "rowwise"}, dist.group.WORLD, dist.get_rank(), 2)
    module(_tokens()).backward()
    slices.restore()
    before(_tokens()).backward()
    pairs = list(zip(module.parameters(), before.parameters(), strict=True))
    same = all(torch.equal(one, other) for one, other in pairs)
    partial = [name for name, _ in module.named_parameters() if "q_norm" in name]
    gradients = all(
        torch.allclose(parameter.grad, other.grad, atol=1e-6)
        for (name, parameter), (_, other) in zip(module.named_parameters(), pairs, strict=True)
        if name not in partial
    )
    num_hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    attributes = [
        {key: value for key, value in vars(found).items() if isinstance(value, int)} for found in module.modules()
    ]
    expected = [{k: v for k, v in vars(found).items() if isinstance(v, int)} for found in before.modules()]
    return same, gradients and attributes == expected, num_hooks


def test_restore() -> None:
    """What is saved or exported afterwards must be the user's whole module, bit for bit."""
    assert run_ranks(_undone, 2) == [(True, True, 0)] * 2


class _Custom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def _model() -> nn.ModuleDict:
    attention, shared = Attention(), Mlp()
    return nn.ModuleDict(
        {
            "language": Language(tied=True),
            "attention": attention,
            "mlp": Mlp(),
            "norm": nn.BatchNorm1d(4),
            "custom": _Custom(4, 4),
            "bounded": nn.Embedding(4, 4, max_norm=1.0),
            "shared": nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"up": shared.up.__class__(WIDTH, 32)})}),
            "grouped": _Grouped(),
        }
    )


class _Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads = 4, 4
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.o = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))


_QKVO = {f"grouped.{name}": "colwise" for name in "qkv"} | {"grouped.o": "rowwise"}

_BAD = {
    "no module": (
        {"atention.qkv": "colwise"},
        2,
        r"'atention.qkv', which matches no module. The nearest names are 'att",
    ),
    "no style": (
        {"mlp.up": "colwize"},
        2,
        r"'mlp.up' the style 'colwize', which does not exist. Did you mean 'colwise'",
    ),
    "no number": ({"mlp.up": "colwise:x", "mlp.down": "rowwise"}, 2, r"After the colon stand the number"),
    "number of a style without": ({"mlp.down": "rowwise:2"}, 2, r"After the colon stand the number"),
    "norm as layer": ({"norm": "colwise"}, 2, r"'norm' the style 'colwise'.*BatchNorm1d is none of nn.Linear"),
    "own forward": ({"custom": "colwise"}, 2, r"_Custom is none of"),
    "batch norm on a sequence": ({"norm": "sequence"}, 2, r"BatchNorm1d is neither a layer norm nor a dropout"),
    "bounded": ({"bounded": "rowwise"}, 2, r"`max_norm` rescales"),
    "no partner": ({"mlp.up": "colwise"}, 2, r"no `rowwise` layer reads its cut output.*`colwise_gather`"),
    "no first layer": ({"mlp.down": "rowwise"}, 2, r"no `colwise` layer before it.*`rowwise_split`"),
    "side by side": ({"attention.qkv": "colwise", "attention.out": "rowwise"}, 2, r"it gives 48 features.*`colwise:3`"),
    "sum of parts": (
        {"attention.qkv": "colwise:16,16,8", "attention.out": "rowwise"},
        2,
        r"add up to 40, and it has 48",
    ),
    "parts": ({"attention.qkv": "colwise:5", "attention.out": "rowwise"}, 2, r"48 output features are not 5 equal"),
    "heads": (
        {"attention.qkv": "colwise:3", "attention.out": "rowwise"},
        8,
        r"has 4 heads of width 4.*size=8` does not",
    ),
    "key and value heads": (
        {**_QKVO, "grouped.scale": "replicate"},
        2,
        r"'grouped.k' has 1 heads of width 4, which `tensor_parallel_size=2` does not divide",
    ),
    "beside": (_QKVO, 1, r"Parameter 'grouped.scale' lies beside 'grouped.q'"),
    "width": ({"mlp.up": "colwise", "mlp.down": "rowwise"}, 3, r"cut by `colwise` over 32 features, which .*size=3`"),
    "rows": ({"language.words": "rowwise", "language.head": "colwise_gather"}, 5, r"over 24 features, which .*size=5`"),
    "tied": (
        {"language.head": "colwise_gather"},
        2,
        r"'language.words.weight'|is also the parameter of 'language.words'",
    ),
    "tied otherwise": ({"language.words": "colwise", "language.head": "colwise_gather"}, 2, r"cuts them differently"),
    "two dims": ({"language.start": "sequence_split", "language.norm": "sequence:0"}, 2, r"dimensions \[0, 1\]"),
    "parameter": ({"grouped.scale": "colwise"}, 2, r"a parameter can only be `replicate`"),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_plans_are_refused_before_anything_changes(name: str) -> None:
    """Found after half of the module was cut, on one rank, it would be a module of no use or a hang."""
    plan, size, message = _BAD[name]
    module = _model()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        apply_tensor_plan(
            module,
            {"mlp.up": "colwise", "mlp.down": "rowwise", **plan} if name in ("no module", "tied") else plan,
            None,
            0,
            size,
        )
    after = module.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert not any(found._forward_hooks or found._forward_pre_hooks for found in module.modules())
    assert module["attention"].num_heads == HEADS


def _unlisted() -> None:
    module = randomize(Attention())
    apply_tensor_plan(module, {"qkv": "colwise:3", "out": "rowwise"}, dist.group.WORLD, dist.get_rank(), 2)
    module(_hidden())


def test_a_norm_inside_that_the_plan_forgets() -> None:
    """Its gradient would be a part of the whole on each rank, and its weights would drift apart."""
    with pytest.raises(
        RanksFailedError, match=r"'q_norm' \(LayerNorm\) runs between 'qkv' and 'out'.*replicate_partial"
    ):
        run_ranks(_unlisted, 2)


def test_patterns() -> None:
    """`*` across components, or a suffix where a whole name fits, would cut layers that nobody named."""
    module = nn.ModuleDict({"mlp": Mlp(), "inner": nn.ModuleDict({"mlp": Mlp()})})
    whole = {"mlp.up": "colwise", "mlp.down": "rowwise"}
    check_tensor_plan(module, whole, 2)
    with pytest.raises(ValueError, match="'colwise'"):
        check_tensor_plan(module, {**whole, "inner.*": "colwise"}, 2)
    check_tensor_plan(module, {"up": "colwise", "down": "rowwise"}, 2)
    with pytest.raises(ValueError, match="no `rowwise` layer"):
        check_tensor_plan(module, {**whole, "mlp.down": "replicate"}, 2)
    # The later of two counts.
    with pytest.raises(ValueError, match="no `colwise` layer"):
        check_tensor_plan(module, {"up": "colwise", "down": "rowwise", "inner.mlp.up": "replicate"}, 2)


def test_one_rank_changes_nothing() -> None:
    """A layout of one tensor rank must cost nothing."""
    module = Mlp()
    slices = apply_tensor_plan(module, _MLP, None, 0, 1)
    assert not slices.is_sliced(module.up.weight)
    assert not any(found._forward_hooks or found._forward_pre_hooks for found in module.modules())
    with pytest.raises(ValueError, match="less than `size=2`"):
        apply_tensor_plan(module, _MLP, None, 2, 2)
