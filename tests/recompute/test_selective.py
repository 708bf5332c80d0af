"""Which operators are kept: by name, in order, and with the random numbers that come after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.policy import Block, Chain
from lightning_bigmodel.recompute.selective import Selective
from tests.recompute.chains import assert_same


class Noisy(nn.Module):
    """A random operator that may be kept, one that is not, and a kept result that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(samples, 4)`."""
        hidden = F.dropout(hidden * torch.rand_like(hidden), 0.5)
        hidden = self.linear(hidden)
        hidden.add_(1)
        return F.dropout(hidden.exp() * torch.rand_like(hidden), 0.5)


def _gradients(policy: Any) -> list[Any]:
    torch.manual_seed(0)
    block = Noisy()
    chain = Chain([Block("block", block, 0)], ends_in_backward=False)
    treated = None if policy is None else TreatedBlocks(chain, policy.treatments(chain))
    hidden = torch.randn(3, 4, requires_grad=True)
    block(hidden).sum().backward()
    if treated is not None:
        treated.close()
    return [hidden.grad, block.linear.weight.grad, float(torch.rand(()))]


@pytest.mark.parametrize("keep", [["native_dropout"], ["matmul"], ["rand_like", "matmul"], ["native_dropout", "exp"]])
def test_random_and_changed_results(keep: list[str]) -> None:
    """Random numbers that move up by one where an operator does not run again; a result with the change in it twice."""
    assert_same(_gradients(Selective(keep)), _gradients(None))


def test_results_that_are_written_by_parts_with_versions_of_their_own() -> None:
    """A recurrent cell changes what a product gave by `unsafe_chunk`: the change would be there twice."""
    found = []
    for policy in (None, Selective(["matmul"])):
        torch.manual_seed(0)
        cells = nn.GRU(4, 4, batch_first=True)
        chain = Chain([Block("block", cells, 0)], ends_in_backward=False)
        treated = None if policy is None else TreatedBlocks(chain, policy.treatments(chain))
        hidden = torch.randn(2, 3, 4, requires_grad=True)
        cells(hidden)[0].square().sum().backward()
        if treated is not None:
            treated.close()
        found.append([hidden.grad, *(parameter.grad for parameter in cells.parameters())])
    assert_same(found[1], found[0])


def test_unknown_operators_are_named() -> None:
    """A list that keeps nothing."""
    with pytest.raises(
        ValueError, match=r"`keep` holds 'sofmax', which is no operator that torch runs; near it: .*softmax"
    ):
        Selective(["sofmax"])
    for name in ("relu_", "dropout", "view"):
        with pytest.raises(
            ValueError, match=f"`keep` holds '{name}', which works in place, gives a view, or is computed"
        ):
            Selective([name])
