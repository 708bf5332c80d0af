"""Deferred statistics of one layer, in one process: what counts, what does not, and that nothing is left behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_bigmodel.pipeline.batch_norm import DeferredStatistics, deferred_layers, refuse_batch_statistics
from lightning_bigmodel.testing import run_ranks

SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (10, 3),
    nn.BatchNorm2d: (10, 3, 2, 2),
    nn.BatchNorm3d: (10, 3, 2, 1, 2),
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _deferred(root: nn.Module) -> DeferredStatistics:
    layers = deferred_layers(root)
    return DeferredStatistics(
        layers,
        owned=list(layers),
        loose=(),
        device=torch.device("cpu"),
        data_group=None,
        pipe_group=None,
        last_pipe_rank=0,
    )


def _step(statistics: DeferredStatistics, call: Any, parts: list[Tensor], *, counts: bool = True) -> None:
    for part in parts:
        with statistics.collecting(is_last_stage=True):
            output = call(part)
        if output.requires_grad:
            output.square().sum().backward()
    statistics.finish([statistics.news()], counts=counts)


def _assert_same(found: nn.Module, expected: nn.Module, tolerance: float = 1e-6) -> None:
    for name, value in expected.state_dict().items():
        difference = (found.state_dict()[name].double() - value.double()).abs().max()
        assert difference <= tolerance * max(1.0, float(value.abs().max())), (name, float(difference))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("kind", SHAPES)
def test_statistics_of_the_whole_batch(kind: Any, momentum: float | None) -> None:
    """Means of micro-batches' variances, a biased variance, or unequal micro-batches weighed alike."""
    layer = kind(3, momentum=momentum)
    expected, statistics = copy.deepcopy(layer), _deferred(nn.Sequential(layer))
    for _ in range(3):
        batch = torch.randn(SHAPES[kind]) * torch.randn(()) + 4
        _step(statistics, layer, list(batch.split([4, 4, 2])))
        expected(batch)
        _assert_same(layer, expected)
    layer.eval(), expected.eval()
    assert torch.allclose(layer(batch), expected(batch), atol=1e-6)


def test_training_normalises_by_the_micro_batch() -> None:
    """Outputs that silently use running statistics, or those of another micro-batch."""
    layer = nn.BatchNorm1d(3)
    plain, statistics = copy.deepcopy(layer), _deferred(nn.Sequential(layer))
    with statistics.collecting(is_last_stage=True):
        for part in torch.randn(8, 3).split(4):
            assert torch.equal(layer(part), plain(part))


def test_far_from_zero() -> None:
    """Sums of squares in single precision cancel where the mean is large."""
    layer = nn.BatchNorm1d(3, momentum=1.0)
    expected, statistics = copy.deepcopy(layer), _deferred(nn.Sequential(layer))
    batch = torch.randn(4000, 3, dtype=torch.float64).float() + 1000
    _step(statistics, layer, list(batch.split(1000)))
    expected.double()(batch.double())
    _assert_same(layer, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    """Statistics added up in half precision: a count above 256 would stop growing."""
    layer = nn.BatchNorm1d(3, momentum=1.0).to(dtype)
    statistics = _deferred(nn.Sequential(layer))
    batch = (torch.randn(1200, 3) + 2).to(dtype)
    _step(statistics, layer, list(batch.split(400)))
    tolerance = 1e-12 if dtype == torch.float64 else 0.0
    torch.testing.assert_close(layer.running_mean, batch.double().mean(0).to(dtype), rtol=tolerance, atol=0.0)
    torch.testing.assert_close(layer.running_var, batch.double().var(0).to(dtype), rtol=tolerance, atol=0.0)


class _Twice(nn.Module):
    """Calls its layer once, and once more where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.norm(inputs)
        if (inputs[:, 0] > 0).all():
            output = output + self.norm(3 * inputs + 1)
        return output


def test_calls_in_a_forward_are_batches_of_their_own() -> None:
    """Two calls pooled into one update, or the second call of one micro-batch into the first of the next."""
    module = _Twice()
    expected, statistics = copy.deepcopy(module), _deferred(module)
    for sign in (1, -1, 1):
        batch = torch.rand(9, 3) * sign
        _step(statistics, module, list(batch.split(3)))
        expected(batch)
        _assert_same(module, expected)
    assert int(module.norm.num_batches_tracked) == 5


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_counts_nothing(use_reentrant: bool) -> None:
    """Torch by itself moves running statistics once more in backward."""
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Tanh())
    expected, statistics = copy.deepcopy(module), _deferred(module)
    batch = torch.randn(8, 3).requires_grad_()
    _step(statistics, lambda part: checkpoint(module, part, use_reentrant=use_reentrant), list(batch.split(4)))
    expected(batch)
    _assert_same(module, expected)
    # Also where the backward lies within the step, as in manual optimization.
    with statistics.collecting(is_last_stage=True):
        checkpoint(module, batch, use_reentrant=use_reentrant).sum().backward()
    statistics.finish([statistics.news()], counts=True)
    expected(batch)
    _assert_same(module, expected)


def _compiled(*, recomputes: bool) -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    expected, statistics = copy.deepcopy(module), _deferred(module)
    compiled = torch.compile(module.forward, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        batch = torch.randn(8, 3)
        call = (lambda part: checkpoint(compiled, part, use_reentrant=False)) if recomputes else compiled
        _step(statistics, call, [part.clone().requires_grad_() for part in batch.split([3, 3, 2])])
        expected[0](batch)
        _assert_same(module[0], expected[0])
    assert int(module[2].num_batches_tracked) == 3
    compiled(batch), expected[0](batch)  # outside of a training step
    _assert_same(module[0], expected[0])


def _compiled_both_ways() -> None:
    _compiled(recomputes=False)
    _compiled(recomputes=True)


def test_compiled_layers() -> None:
    """Notes that are taken once, when the compiler traces, or a layer that breaks the graph."""
    assert run_ranks(_compiled_both_ways, 1) == [None]


def test_what_counts_nothing() -> None:
    """A batch that only keeps a rank in step, frozen layers, layers that keep nothing."""
    module = nn.ModuleDict({"a": nn.BatchNorm1d(3), "frozen": nn.BatchNorm1d(3).eval()})
    before, statistics = copy.deepcopy(module), _deferred(module)
    batch = torch.full((4, 3), float("nan"))
    _step(statistics, lambda part: module["frozen"](module["a"](part)), [batch, batch], counts=False)
    _assert_same(module, before, 0.0)
    batch = torch.randn(4, 3)
    _step(statistics, lambda part: module["frozen"](part), [batch, batch])
    _assert_same(module, before, 0.0)
    with statistics.collecting(is_last_stage=True):
        assert torch.equal(module["frozen"](batch), before["frozen"](batch))


def test_a_layer_frozen_later_is_not_written() -> None:
    """Backward needs the running statistics a frozen layer normalised by; where it comes after `finish`, it fails."""
    layer = nn.BatchNorm1d(3)
    statistics = _deferred(nn.Sequential(layer))
    _step(statistics, layer, [torch.randn(4, 3)])
    layer.eval()
    with statistics.collecting(is_last_stage=True):
        output = layer(torch.randn(4, 3).requires_grad_())
    statistics.finish([statistics.news()], counts=True)
    output.square().sum().backward()
    assert layer.weight.grad is not None


def test_calls_outside_of_training_steps_are_as_always() -> None:
    """A hook that refreshes running statistics by hand (as `torch.optim.swa_utils.update_bn` does) finds them fixed."""
    layer = nn.BatchNorm1d(3)
    expected, statistics = copy.deepcopy(layer), _deferred(nn.Sequential(layer))
    batch = torch.randn(8, 3)
    layer(batch), expected(batch)
    _assert_same(layer, expected, 0.0)
    _step(statistics, layer, [batch])
    expected(batch)
    _assert_same(layer, expected)


def test_one_value_a_channel_is_refused_by_name() -> None:
    """Torch's message names neither the layer nor the setting that made the part so small."""
    module = nn.Sequential(nn.BatchNorm1d(3))
    statistics = _deferred(module)
    with pytest.raises(ValueError, match=r"`0` \(BatchNorm1d\).*\(1, 3\).*fewer `num_microbatches`.*`drop_last=True`"):
        _step(statistics, module, [torch.ones(1, 3)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.SyncBatchNorm(3), r"`1` \(SyncBatchNorm\) waits for all ranks.*`num_microbatches=2`.*Use BatchNorm"),
        (
            nn.BatchNorm1d(3, track_running_stats=False),
            r"`1` \(BatchNorm1d\) has `track_running_stats=False`.*GroupNorm",
        ),
    ],
)
def test_layers_that_cannot_be_deferred(other: nn.Module, message: str) -> None:
    """One layer that can be deferred hides another that cannot; frozen or where batches are whole, none matters."""
    root = nn.Sequential(nn.BatchNorm1d(3), other)
    assert list(deferred_layers(root)) == ["0"]
    with pytest.raises(ValueError, match=message):
        refuse_batch_statistics(root, 2, is_deferred=True)
    refuse_batch_statistics(root, 1, is_deferred=True)
    other.eval()
    refuse_batch_statistics(root, 2, is_deferred=True)


def test_nothing_is_left_behind() -> None:
    """Copies that write into the original, modules that do not pickle, and attributes that stay."""
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    own_forward = module[0].forward
    names, attributes = list(module.state_dict()), set(module[0].__dict__)
    statistics = _deferred(module)
    assert list(module.state_dict()) == names
    copied, before = copy.deepcopy(module), copy.deepcopy(module.state_dict())
    unpickled = pickle.loads(pickle.dumps(module))
    with statistics.collecting(is_last_stage=True):
        for other in (copied, unpickled):
            other(torch.randn(4, 3))
            assert int(other[0].num_batches_tracked) == 1
    assert statistics.news() == {}
    statistics.finish([{}], counts=True)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    statistics.close()
    assert module[0].forward == own_forward
    assert set(module[0].__dict__) == attributes
    assert module[0].track_running_stats is True
