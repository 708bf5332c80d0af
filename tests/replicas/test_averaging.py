"""Weighted means in place: types, messages, memory layouts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.replicas.averaging import average_in_place
from lightning_bigmodel.testing import CollectiveCounter, run_ranks


def _tensors(rank: int) -> list[Tensor]:
    value = 2048.0 if rank == 0 else 1.0
    half = torch.full((2, 3), value, dtype=torch.float16).t()
    return [
        half,
        torch.full((3,), value, dtype=torch.float16),
        torch.full((), value, dtype=torch.bfloat16),
        torch.empty(0, 2),
        torch.full((5,), value),
    ]


def _average(bucket_bytes: int) -> tuple[list[Tensor], int]:
    tensors = _tensors(dist.get_rank())
    with CollectiveCounter() as counter:
        average_in_place(tensors, None, 0.25, bucket_bytes)
    assert not tensors[0].is_contiguous()
    return tensors, counter.num_calls["all_reduce"]


@pytest.mark.parametrize(("bucket_bytes", "num_messages"), [(1, 4), (1 << 20, 3)])
def test_means_of_half_precision_are_sums_of_fp32(bucket_bytes: int, num_messages: int) -> None:
    """512 + 0.25 is 512 in fp16, however often it is added."""
    for tensors, count in run_ranks(_average, 4, bucket_bytes):
        assert count == num_messages
        for tensor in tensors:
            assert (tensor == torch.tensor(512.75).to(tensor.dtype)).all()
