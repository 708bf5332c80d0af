"""Sums of gradients over replicas, bucket by bucket: what arrives late, in another order, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.replicas.overlap import OverlappedAllReduce
from lightning_bigmodel.testing import CollectiveCounter, RanksFailedError, run_ranks
from tests.strategies.trainer_modules import trainer


class Layers(nn.Module):
    """Some layers for all ranks, one for some, one with memory of another order, one that recomputation uses twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.never = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.shared = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, images: Tensor, *, takes_branch: bool) -> Tensor:
        """(n, 2, h, w) -> one number."""
        hidden = self.conv(images).mean((2, 3))
        for _ in range(2):
            hidden = hidden + checkpoint(self.shared, hidden, use_reentrant=True)
        if takes_branch:
            hidden = hidden + self.sometimes(hidden)
        loss: Tensor = self.head(self.frozen(hidden)).square().sum()
        return loss


def _images(rank: int) -> Tensor:
    return torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _sum(bucket_bytes: int) -> tuple[dict[str, Tensor], bool, dict[str, tuple[int, int]]]:
    rank, model = dist.get_rank(), Layers()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    reduction = OverlappedAllReduce(list(model.parameters()), names, None, bucket_bytes)
    for _ in range(2):  # the second time with what the first has left
        model.zero_grad()
        with CollectiveCounter() as counter:
            reduction.begin()
            model(_images(rank), takes_branch=rank == 0).backward()
            reduction.launch()
            late = reduction.has_late
            reduction.complete()
            if bucket_bytes == 1:
                reduction.add_late()
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()
    present = {names[key] for key in reduction.present}
    assert ("sometimes.weight" in present) == (rank == 0)
    assert "never.weight" not in present
    reduction.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return _gradients(model), late, counter.as_dict()


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_sums_whatever_arrives_when(bucket_bytes: int) -> None:
    """Buckets in the order of arrival, which differs; a gradient added to a message that is under way."""
    model, expected = Layers(), {}
    for rank in range(2):
        model(_images(rank), takes_branch=rank == 0).backward()
        expected = _gradients(model)
    for found, late, counts in run_ranks(_sum, 2, bucket_bytes):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
        assert set(found) - set(expected) == {"never.weight", "never.bias"}
        assert not any(bool(found[name].any()) for name in ("never.weight", "never.bias"))
        assert late == (bucket_bytes == 1)  # reentrant recomputation gives the shared weight two gradients
        if bucket_bytes > 1:
            assert counts["all_reduce"][0] == 1


def _first_messages() -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    reduction = OverlappedAllReduce(list(model.parameters()), {}, None, 8 * 8 * 4)
    sent: list[int] = []
    with CollectiveCounter() as counter:
        for layer in model:
            layer.weight.register_hook(lambda _: sent.append(counter.num_calls["all_reduce"]))
        reduction.begin()
        model(torch.ones(1, 8)).sum().backward()
        sent.append(counter.num_calls["all_reduce"])
        reduction.launch()
        reduction.complete()
    return sent


def test_messages_go_while_backward_runs() -> None:
    """All messages after the backward: no time is saved."""
    assert run_ranks(_first_messages, 2) == [[0, 1, 2, 3, 4]] * 2


def _sparse() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    reduction = OverlappedAllReduce([model.weight], {id(model.weight): "table.weight"}, None)
    reduction.begin()
    model(torch.tensor([1])).sum().backward()
    reduction.launch()


def test_sparse_gradients_are_refused_by_name() -> None:
    """An error from inside torch about layouts."""
    with pytest.raises(RanksFailedError, match=r"The gradient of `table.weight` is sparse.*`sparse=False`"):
        run_ranks(_sparse, 2)


class Counted(LightningModule):
    """Counts the messages of each batch's backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.counter = CollectiveCounter()
        self.sent: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Regression."""
        return self.layer(batch[0]).square().mean()

    def on_before_backward(self, loss: Tensor) -> None:
        """Counts from here."""
        self.counter = CollectiveCounter().__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        """Up to here."""
        self.counter.__exit__()
        self.sent.append(self.counter.num_calls["all_reduce"])

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _windows() -> list[int]:
    module = Counted()
    data = DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=2)
    trainer(BigModelStrategy(), 2, accumulate_grad_batches=3).fit(module, data)
    return module.sent


def test_accumulated_batches_are_summed_once() -> None:
    """A message for each batch, where one for each optimizer step will do."""
    # The gradients, and which there are; the run's last, shorter window too.
    assert run_ranks(_windows, 2) == [[0, 0, 2, 0, 0, 2]] * 2
