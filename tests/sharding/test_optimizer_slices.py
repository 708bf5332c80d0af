"""Adafactor and Muon on slices over tensor ranks, and on rows of these, against whole parameters in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bigmodel.sharding.optimizers import adapt_optimizer, check_slices, is_elementwise
from lightning_bigmodel.sharding.rows import RowShard
from lightning_bigmodel.sharding.tensor_slices import HeldSlice, SlicedParameter
from lightning_bigmodel.testing import CollectiveCounter, run_ranks
from tests.sharding.test_optimizers import Lookahead, SignDescent

# Name -> (shape, dimension that is cut or None, widths of the parts).
_CUTS: dict[str, tuple[tuple[int, ...], int | None, tuple[int, ...]]] = {
    "colwise": ((8, 3), 0, (8,)),
    "rowwise": ((5, 8), 1, (8,)),
    "fused": ((12, 4), 0, (4, 4, 4)),
    "fused columns": ((5, 12), 1, (8, 2, 2)),
    "one row": ((1, 4), 1, (4,)),
    "whole": ((5, 3), None, ()),
    "unused": ((4, 4), 1, (4,)),
    "bias": ((8,), 0, (4, 4)),
    "number": ((), None, ()),
    "cube": ((5, 2, 3), None, ()),
}
_MATRICES = {name: cut for name, cut in _CUTS.items() if len(cut[0]) == 2}
_NUM_STEPS = 4
Make = Callable[[Any], Optimizer]


def _gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor | None:
    """Of sizes that differ between steps, rows and columns, so that means of a part are not those of the whole."""
    if name == "unused":
        return None
    generator = torch.Generator().manual_seed(100 * step + sum(map(ord, name)))
    gradient = torch.randn(shape, generator=generator) * 3.0**step
    for dim, length in enumerate(shape):
        gradient *= torch.arange(1.0, length + 1).view(-1, *[1] * (len(shape) - 1 - dim))
    return gradient


class _Parts:
    """What this rank of `tensor_size` x data ranks holds of each parameter."""

    def __init__(self, cuts: dict[str, Any], tensor_size: int) -> None:
        rank, data_size = dist.get_rank(), dist.get_world_size() // tensor_size
        tensor_groups = [dist.new_group([*range(d * tensor_size, (d + 1) * tensor_size)]) for d in range(data_size)]
        data_groups = [dist.new_group([*range(t, data_size * tensor_size, tensor_size)]) for t in range(tensor_size)]
        data_rank, tensor_rank = divmod(rank, tensor_size)
        self.records: dict[str, SlicedParameter] = {}
        self.rows: dict[str, RowShard] = {}
        self.group = tensor_groups[data_rank]
        for name, (shape, dim, parts) in cuts.items():
            local = torch.Size(shape)
            if dim is not None:
                record = SlicedParameter(
                    name=name, full_shape=local, dim=dim, parts=parts, rank=tensor_rank, size=tensor_size
                )
                self.records[name], local = record, record.local_shape
            if data_size > 1 and local:
                self.rows[name] = RowShard(
                    name=name, shape=local, num_ranks=data_size, rank=data_rank, group=data_groups[tensor_rank]
                )

    def take(self, name: str, whole: Tensor) -> Tensor:
        own = self.records[name].take(whole) if name in self.records else whole.clone()
        return self.rows[name].rows(own).clone() if name in self.rows else own


def _wholes(cuts: dict[str, Any]) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(cut[0], generator=generator)) for name, cut in cuts.items()}


def _train(make: Make, cuts: dict[str, Any], parts: _Parts | None) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    parameters = _wholes(cuts)
    if parts is not None:
        parameters = {name: nn.Parameter(parts.take(name, whole.detach())) for name, whole in parameters.items()}
    names = list(parameters)
    optimizer = make(
        [
            {"params": [parameters[name] for name in names[::2]]},
            {"params": [parameters[name] for name in names[1::2]], "weight_decay": 0.2},
        ]
    )
    if parts is not None:
        check_slices(optimizer)
        adapt_optimizer(
            optimizer,
            {id(parameters[name]): rows for name, rows in parts.rows.items()},
            {id(parameters[name]): HeldSlice(record, parts.group) for name, record in parts.records.items()},
        )
    for step in range(_NUM_STEPS):
        for name, parameter in parameters.items():
            gradient = _gradient(name, cuts[name][0], step)
            parameter.grad = gradient if gradient is None or parts is None else parts.take(name, gradient)
        optimizer.step()
    return optimizer, parameters


def _makes() -> dict[str, tuple[Make, dict[str, Any]]]:
    optim = torch.optim
    from transformers.optimization import Adafactor

    return {
        "adafactor": (lambda groups: optim.Adafactor(groups, lr=0.1), _CUTS),
        "adafactor options": (
            lambda groups: optim.Adafactor(groups, lr=0.2, eps=(1e-4, 0.1), d=2.0, foreach=True, maximize=True),
            _CUTS,
        ),
        "transformers": (lambda groups: Adafactor(groups, beta1=0.5), _CUTS),
        "transformers rate": (
            lambda groups: Adafactor(groups, lr=0.02, relative_step=False, scale_parameter=False, clip_threshold=0.5),
            _CUTS,
        ),
        "muon": (lambda groups: optim.Muon(groups, lr=0.1), _MATRICES),
        "muon options": (
            lambda groups: optim.Muon(groups, lr=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw"),
            _MATRICES,
        ),
    }


def _errors(tensor_size: int) -> dict[str, float]:
    found = {}
    for name, (make, cuts) in _makes().items():
        parts = _Parts(cuts, tensor_size)
        reference, wholes = _train(make, cuts, None)
        optimizer, own = _train(make, cuts, parts)
        worst = 0.0
        for key, whole in wholes.items():
            expected = parts.take(key, whole.detach())
            assert own[key].shape == expected.shape
            if expected.numel():
                difference = (own[key].detach() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
                worst = max(worst, float(difference))
            assert (own[key] in optimizer.state) == (whole in reference.state), key
            if "momentum_buffer" in optimizer.state.get(own[key], {}):
                assert optimizer.state[own[key]]["momentum_buffer"].shape == own[key].shape
        found[name] = worst
    return found


@pytest.mark.parametrize(("num_ranks", "tensor_size"), [(2, 2), (4, 2)])
def test_slices_are_stepped_as_in_one_process(num_ranks: int, tensor_size: int) -> None:
    """Statistics of a slice taken for those of the parameter train another model, and nothing tells so."""
    pytest.importorskip("transformers")
    results = run_ranks(_errors, num_ranks, tensor_size)
    assert len(results) == num_ranks
    for errors in results:
        assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}


def _messages() -> dict[str, Any]:
    cuts = {name: _CUTS[name] for name in ("colwise", "rowwise", "bias", "whole")}
    matrices = {name: cut for name, cut in cuts.items() if len(cut[0]) == 2}
    found = {}
    for name, make, chosen in (("adafactor", torch.optim.Adafactor, cuts), ("muon", torch.optim.Muon, matrices)):
        parts = _Parts(chosen, 2)
        optimizer, own = _train(make, chosen, parts)
        for key, parameter in own.items():
            parameter.grad = parts.take(key, torch.ones(chosen[key][0]))
        with CollectiveCounter() as counter:
            optimizer.step()
        found[name] = counter.as_dict()
    return found


def test_messages_over_tensor_ranks() -> None:
    """A message a parameter, or whole gradients gathered for statistics of them."""
    for rank, found in enumerate(run_ranks(_messages, 2)):
        # Rows of the rowwise matrix; [gradient?, squares] of all three, sum of R and columns of the colwise one; then
        # one number of each.
        assert found["adafactor"] == {"all_reduce": (3, 4 * (5 + 2 * 3 + 1 + 3 + 3))}
        # The dearer matrix falls to the first rank: halves of 40 and 24 elements, sent both ways in bf16.
        assert found["muon"]["all_reduce"] == (1, 4 * 2)
        assert found["muon"]["all_to_all"] == (2, 2 * ((20 + 12) + (40, 24)[rank]))


def _gradient_on_one_rank() -> list[str]:
    cuts = {"rowwise": _CUTS["rowwise"]}
    said = []
    for make in (torch.optim.Adafactor, torch.optim.Muon):
        parts = _Parts(cuts, 2)
        weight = nn.Parameter(parts.take("rowwise", torch.ones(5, 8)))
        optimizer = make([weight])
        adapt_optimizer(optimizer, {}, {id(weight): HeldSlice(parts.records["rowwise"], parts.group)})
        if dist.get_rank() == 0:
            weight.grad = torch.ones_like(weight)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert not optimizer.state
        said.append(str(caught.value))
    return said


def test_tensor_ranks_agree_on_which_gradients_there_are() -> None:
    """One rank would wait for the others, or step with a part of the statistics."""
    for said in run_ranks(_gradient_on_one_rank, 2):
        for message in said:
            assert "1 of the 2 ranks that hold parts of `rowwise` have a gradient" in message


class RowNormed(Optimizer):
    """Scales each row of a step by that row's norm: right on rows, wrong on columns."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norms = parameter.grad.norm(dim=-1, keepdim=True) if parameter.dim() > 1 else 1.0
                    parameter.sub_(parameter.grad / norms, alpha=group["lr"])


def test_what_cannot_be_made_exact_on_slices_is_refused() -> None:
    """It would train on with norms of slices."""
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"`LBFGS` cannot train where `tensor_parallel_size`.*inner products"):
        check_slices(torch.optim.LBFGS([weight]))
    assert is_elementwise(RowNormed([weight]))
    with pytest.raises(ValueError, match="a part of the columns alone gives other values"):
        check_slices(RowNormed([weight]))
    for make in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon, SignDescent):
        check_slices(make([weight]))
    for inner in (torch.optim.AdamW, torch.optim.Adafactor):
        check_slices(Lookahead(inner([weight])))
    with pytest.raises(ValueError, match="it wraps `RowNormed`: a part of the columns"):
        check_slices(Lookahead(RowNormed([weight])))
