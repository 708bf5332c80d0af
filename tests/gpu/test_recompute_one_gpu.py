"""What one GPU can show of recomputation: streams that copy beside what is computed, and the memory that is freed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_bigmodel import BigModelStrategy, Full, Offload, Optimal, Recompute, Selective, SquareRoot
from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.link import CudaLink, measured_bandwidth
from lightning_bigmodel.recompute.policy import Block, Chain
from lightning_bigmodel.testing import run_ranks
from tests.gpu.test_one_gpu import fit


def _fit(policy: Any, options: dict[str, Any]) -> dict[str, Any]:
    torch.backends.cudnn.deterministic = True
    callbacks = [] if policy is None else [Recompute(policy)]
    return fit(BigModelStrategy(), callbacks=callbacks, **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_weights_are_those_without_it(precision: str) -> None:
    """Bytes that are read before they came, random states of the device, types of autocast on it."""
    options = {"precision": precision}
    (expected,) = run_ranks(_fit, 1, None, options, init_process_group=False)
    policies = [
        Full(),
        SquareRoot(),
        Selective(),
        Offload(min_bytes=0, prefetch=2),
        Offload(min_bytes=0, saved="inputs"),
        Optimal("64MiB"),
    ]
    for policy in policies:
        (found,) = run_ranks(_fit, 1, policy, options, init_process_group=False)
        for name, value in expected["weights"].items():
            assert np.array_equal(found["weights"][name], value), (type(policy).__name__, name)


class Deep(nn.Module):
    """A block that keeps 4 tensors of its input's size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(samples, width)`."""
        return hidden + self.dropout(self.second(torch.tanh(self.first(hidden))))


def _gradients(policy: Any, num_blocks: int = 24, num_steps: int = 3) -> tuple[list[torch.Tensor], int]:
    """Gradients of the last step, and the most memory beside weights, gradients and the batch."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Deep(1024) for _ in range(num_blocks)).cuda()
    chain = Chain([Block(str(index), block, index) for index, block in enumerate(blocks)])
    treated = None if policy is None else TreatedBlocks(chain, policy.treatments(chain))
    for _ in range(num_steps):
        torch.manual_seed(1)
        torch.cuda.manual_seed(1)
        hidden = torch.randn(8192, 1024, device="cuda")
        for parameter in blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for block in blocks:
            hidden = block(hidden)
        hidden.square().mean().backward()
        del hidden
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    gradients = [parameter.grad for parameter in blocks.parameters()]
    if treated is not None:
        treated.close()
    return gradients, peak


def test_moved_tensors_come_back_in_time_and_leave_the_device() -> None:
    """A race between a copy and what is computed; memory that an event keeps."""
    expected, whole = _gradients(None)
    peaks = {}
    for prefetch in (1, 2, 4):
        for _ in range(3):
            found, peaks[prefetch] = _gradients(Offload(prefetch=prefetch))
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    found, full = _gradients(Full())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert peaks[1] < peaks[2] < peaks[4] < whole / 2
    assert full < whole / 2
    # The depth of the model does not matter to the device.
    assert _gradients(Offload(prefetch=1), num_blocks=48)[1] < 1.2 * peaks[1]


def test_a_budget_is_kept_on_the_device() -> None:
    """A plan by numbers that the allocator does not know."""
    expected, whole = _gradients(None, num_steps=4)
    policy = Optimal(whole // 3)
    found, peak = _gradients(policy, num_steps=4)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert policy.plan is not None
    assert policy.plan.bandwidth > 1e9
    # Beside what is saved there is what operators need while they run.
    assert peak < 1.2 * policy.budget


def test_copies_run_beside_what_is_computed() -> None:
    """Copies that wait for what is computed, or the other way round."""
    device = torch.device("cuda")
    link = CudaLink(device)
    assert measured_bandwidth(link, device) > 1e9
    left = torch.randn(8192, 8192, device=device)
    source = torch.ones(256 * 2**20, dtype=torch.uint8, device=device)
    host = link.host_buffer(source.numel())

    def seconds(copies: bool, computes: bool) -> float:
        best = float("inf")
        for _ in range(4):
            torch.cuda.synchronize()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            copy = link.start_out(source, host) if copies else None
            for _ in range(4 if computes else 0):
                left @ left
            if copy is not None:
                copy.wait()
            ended.record()
            ended.synchronize()
            best = min(best, began.elapsed_time(ended))
        return best

    apart = seconds(True, False) + seconds(False, True)
    assert seconds(True, True) < 0.8 * apart
    assert torch.equal(host, source.cpu())
