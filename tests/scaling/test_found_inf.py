"""Overflow flags and unscaling: every dtype, every place a value can hide, and every rank."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bigmodel.scaling import any_rank, first_overflowing, has_nonfinite, unscale_, unscale_and_check
from lightning_bigmodel.testing import run_ranks

_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def _is_flag(flag: torch.Tensor, value: bool) -> bool:
    return flag.shape == () and flag.dtype == torch.float32 and not flag.requires_grad and flag.item() == float(value)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("check", [has_nonfinite, lambda tensors: unscale_and_check(tensors, 0.5)])
def test_one_bad_value_among_many_is_found(check, dtype, bad):
    """One value overlooked goes into the weights."""
    for place in (0, 7, 14):
        tensors = [torch.ones(3, 5, dtype=dtype), torch.ones(5, 3, dtype=dtype).t(), torch.ones((), dtype=dtype)]
        assert _is_flag(check([tensor.clone() for tensor in tensors]), False)
        tensors[1][place // 5, place % 5] = bad
        assert _is_flag(check(tensors), True)


def test_a_bad_imaginary_part_is_found():
    """The real part alone looks sound."""
    assert _is_flag(has_nonfinite([torch.tensor([complex(1.0, math.inf)])]), True)


def test_mixed_dtypes_empty_tensors_and_what_cannot_overflow():
    """Gradients of a real model come in all sorts; none may make the check fail, or hide another."""
    sorts = [
        None,
        torch.ones(0),
        torch.arange(3),
        torch.tensor([True]),
        torch.ones(2, dtype=torch.float16),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, 2),
    ]
    assert _is_flag(has_nonfinite(sorts), False)
    assert _is_flag(unscale_and_check(sorts, 0.5), False)
    assert [sort.tolist() for sort in sorts[2:]] == [[0, 1, 2], [True], [0.5] * 2, [0.5] * 2, [[0.5] * 2] * 2]
    for index in (4, 5, 6):
        bad = [None if sort is None else sort.clone() for sort in sorts]
        bad[index].view(-1)[1] = math.inf
        assert _is_flag(has_nonfinite(iter(bad)), True)
        assert _is_flag(unscale_and_check(iter(bad), 0.5), True)


@pytest.mark.parametrize("tensors", [[], [None], [torch.ones(0)], [torch.arange(2)]])
def test_nothing_to_check_is_no_overflow(tensors):
    """A stage whose parameters are all frozen has no gradients, and still takes part."""
    assert _is_flag(has_nonfinite(tensors), False)
    assert _is_flag(unscale_and_check(tensors, 0.5), False)
    unscale_(tensors, 0.5)
    assert has_nonfinite([], torch.device("meta")).device.type == "meta"


def test_large_finite_values_are_no_overflow():
    """A sum of large values is infinite though each of them is finite."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert _is_flag(has_nonfinite([torch.full((100,), torch.finfo(dtype).max, dtype=dtype)]), False)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_unscaling_is_a_multiplication_in_place(dtype):
    """Gradients unscaled out of place never reach the optimizer."""
    tensors = [torch.randn(4, 3).to(dtype), torch.randn(3, 4).to(dtype).t()]
    expected = [tensor * 0.125 for tensor in tensors]
    for inverse in (0.125, torch.tensor(0.125), torch.tensor([0.125], dtype=torch.float64)):
        once, again = ([tensor.clone() for tensor in tensors] for _ in range(2))
        unscale_(once, inverse)
        unscale_and_check(again, inverse)
        for left, right, value in zip(once, again, expected, strict=True):
            assert torch.equal(left, value)
            assert torch.equal(right, value)


def test_unscaling_agrees_with_gradscaler():
    """The same parameters after torch's scaler and after ours, also for a scale that is no power of two."""
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.randn(5, 4)).square().mean()
        scaler.scale(loss).backward()
        if ours:
            unscale_((p.grad for p in model.parameters()), 1 / 1000.0)
        else:
            scaler.unscale_(optimizer)
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("dtype", "as_tensor"),
    [
        (torch.float16, False),
        (torch.float16, True),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        # A factor on the device is not read, and then only the short range of float16 is checked again.
        (torch.float32, False),
    ],
)
def test_an_overflow_by_unscaling_itself_is_found(dtype, as_tensor):
    """A scale under 1 multiplies float16 gradients beyond their range after they were checked."""
    gradient = torch.full((3,), torch.finfo(dtype).max / 2, dtype=dtype)
    inverse = torch.tensor(8.0) if as_tensor else 8.0
    assert _is_flag(unscale_and_check([gradient], inverse), True)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_factor_that_destroys_the_gradients_is_refused(wrong):
    """1 over an infinite scale is zero, and would train on nothing."""
    for call in (unscale_, unscale_and_check):
        with pytest.raises(ValueError, match="`inverse_scale=.*must be finite and over 0"):
            call([torch.ones(1)], wrong)
        with pytest.raises(ValueError, match="tensor of 2 elements"):
            call([torch.ones(1)], torch.ones(2))


def test_sparse_gradients():
    """Repeated rows of an embedding may overflow only when they are summed."""
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    unscale_([table.weight.grad], 0.5)
    assert torch.equal(table.weight.grad.to_dense()[1], torch.ones(3))
    assert _is_flag(has_nonfinite([table.weight.grad]), False)
    values = torch.full((2,), 60000.0, dtype=torch.float16)
    large = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), values, (4,), check_invariants=True)
    assert _is_flag(has_nonfinite([large]), True)
    assert _is_flag(unscale_and_check([large], 1.0), True)


def test_a_gradient_that_is_part_of_a_graph():
    """With `create_graph=True` a gradient requires grad, and a change in place must not be recorded."""
    weight = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert _is_flag(has_nonfinite([gradient]), False)
    unscale_([gradient], 0.5)
    assert gradient.tolist() == [1.5, 1.5]


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_kernels_do_not_grow_with_the_number_of_tensors():
    """A kernel a tensor, or a wait a tensor, costs more than the step on a model of thousands of parameters."""
    counts = []
    for num_tensors in (2, 50):
        tensors = [torch.ones(3) for _ in range(num_tensors)]
        with _Count() as count:
            has_nonfinite(tensors)
            unscale_and_check(tensors, 0.5)
            unscale_(tensors, 0.5)
        counts.append(len(count.names))
        assert not any("_local_scalar_dense" in name or "item" in name for name in count.names)
    assert counts[0] == counts[1] < 25


def test_the_names_of_what_overflowed():
    """A message without a name leaves the user to search thousands of parameters."""
    gradients = {
        "a": torch.ones(2),
        "b": torch.tensor([math.nan]),
        "c": None,
        "d": torch.arange(2),
        "e": torch.tensor([1.0, -math.inf], dtype=torch.float16),
        "f": torch.ones(0),
        "g": torch.tensor(math.inf),
    }
    assert first_overflowing(gradients) == ["b", "e", "g"]
    assert first_overflowing(gradients.items(), limit=2) == ["b", "e"]
    assert first_overflowing(iter(gradients.items()), limit=None) == ["b", "e", "g"]
    assert first_overflowing([]) == []
    assert first_overflowing({"a": torch.ones(2)}) == []


def test_without_ranks_the_flag_is_the_answer():
    """A script on one device has no process group to ask."""
    assert any_rank(True) is True
    assert any_rank(False) is False
    assert any_rank(torch.tensor(1.0)) is True
    assert any_rank(torch.tensor([False])) is False
    assert any_rank(torch.tensor(math.nan)) is True
    assert any_rank(True, []) is True
    with pytest.raises(ValueError, match="2 elements"):
        any_rank(torch.ones(2))


def _flags(bad_rank: int) -> list[bool]:
    rank = dist.get_rank()
    gradients = [] if rank != bad_rank else [torch.tensor([math.inf])]
    flag = has_nonfinite(gradients)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pipe", "data"))
    return [
        any_rank(flag),
        any_rank(rank == bad_rank),
        any_rank(flag, dist.group.WORLD),
        any_rank(flag, [mesh.get_group("pipe"), mesh.get_group("data")]),
        any_rank(flag, mesh.get_group("pipe")),
        any_rank(flag, []),
        any_rank(torch.tensor(math.nan if rank == bad_rank else 0.0)),
        any_rank(flag.bool()),
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_ranks_overflow_is_every_ranks(world_size):
    """If only the rank that overflowed skips, the weights part for good; ranks without gradients must know as well."""
    for rank, answers in enumerate(run_ranks(_flags, world_size, 1)):
        same_column = rank % (world_size // 2) == 1 % (world_size // 2)
        assert answers == [True, True, True, True, same_column, rank == 1, True, True]
    assert run_ranks(_flags, world_size, -1) == [[False] * 8] * world_size


def _sharded() -> tuple[float, bool, list[str], list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(4)
    whole[3] = math.inf
    gradient = distribute_tensor(whole, mesh, [Shard(0)])
    flag = has_nonfinite([gradient])
    names = first_overflowing({"weight": gradient})
    again = unscale_and_check([gradient], 0.5)
    assert flag.item() == again.item()
    return flag.item(), any_rank(again), names, gradient.to_local().tolist()


def test_a_shard_is_checked_where_it_is():
    """A shard's check must not gather the parameter, and only the owner sees the overflow at first."""
    first, second = run_ranks(_sharded, 2)
    assert first == (0.0, True, [], [0.5, 0.5])
    assert second == (1.0, True, ["weight"], [0.5, math.inf])
