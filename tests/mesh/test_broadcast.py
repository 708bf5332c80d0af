import collections
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from transformers import BatchEncoding

from lightning_bigmodel.mesh.broadcast import Message, broadcast_message, digest_batch, pack_batch
from lightning_bigmodel.testing import run_ranks


class _Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class _Sample:
    x: torch.Tensor
    note: str | None


class _Odd:
    def __init__(self, value: Any) -> None:
        self.value = value


def _batches() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    big = torch.randn(300, 100, generator=generator)
    shared = torch.arange(3)
    return [
        {"x": big, "y": torch.tensor([1, 2]), "n": 3, "s": "text", "none": None, "flags": [True, 2.5]},
        _Pair(torch.zeros(0, 4), (torch.tensor(5.0), [torch.tensor(True)])),
        _Sample(big.t(), None),
        BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.zeros(2)}),
        collections.OrderedDict(a=big.to(torch.bfloat16), b=torch.view_as_complex(big.view(-1, 2)).conj()),
        torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True),
        _Odd([torch.ones(2), {"deep": big.half()}]),
        [torch.full((1000,), float(index)) for index in range(40)],
        "x" * 200_000,
        (shared, shared),
        None,
    ]


def test_every_structure_arrives_whole() -> None:
    """Guards against batches that only arrive when they are a dict of float tensors."""
    expected = [digest_batch(batch) for batch in _batches()]
    for rank, (digests, types, same) in enumerate(run_ranks(_send_all, 3)):
        assert digests == expected, rank
        assert types == [type(batch).__name__ for batch in _batches()]
        assert same


def _send_all() -> tuple[list[str], list[str], bool]:
    received = []
    for index, batch in enumerate(_batches()):
        message = None
        if dist.get_rank() == 0:
            body, tensors = pack_batch(batch)
            message = Message(kind="batch", batch_index=index, body=body, tensors=tensors)
        answer = broadcast_message(message, dist.group.WORLD)
        assert (answer.kind, answer.batch_index, answer.padding) == ("batch", index, False)
        received.append(answer.batch())
    odd = received[6].value
    assert torch.equal(odd[0], torch.ones(2))
    assert odd[1]["deep"].dtype == torch.float16
    shared = received[9]
    return [digest_batch(batch) for batch in received], [type(b).__name__ for b in received], shared[0] is shared[1]


def test_number_of_broadcasts() -> None:
    """Guards against one message for each small tensor: latency, not size, is what a batch costs."""
    assert run_ranks(_count_broadcasts, 2) == [[1, 1, 2, 2]] * 2


def _count_broadcasts() -> list[int]:
    calls: list[int] = []
    real = dist.broadcast

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    dist.broadcast = counting
    small = {str(index): torch.ones(10) for index in range(50)}
    counts = []
    for batch in (1, small, [torch.ones(100_000)], [torch.ones(10_000), torch.ones(10_000)]):
        calls.clear()
        message = None
        if dist.get_rank() == 0:
            body, tensors = pack_batch(batch)
            message = Message(kind="batch", batch_index=0, body=body, tensors=tensors)
        broadcast_message(message, dist.group.WORLD)
        counts.append(len(calls))
    return counts


def test_what_cannot_be_pickled_is_named() -> None:
    """Guards against a bare pickle error deep in the loader."""
    with pytest.raises(TypeError, match=r'type `dict` cannot be sent.*`batch_source="replicated"`'):
        pack_batch({"f": lambda: None})


def test_digest_sees_values_and_nothing_else() -> None:
    """Guards a check that calls equal batches different (identity, set order), or different ones equal."""
    first, second = _batches(), pickle.loads(pickle.dumps(_batches()))
    assert [digest_batch(batch) for batch in first] == [digest_batch(batch) for batch in second]
    text = "".join(["a", "b"])
    assert digest_batch(["ab", text]) == digest_batch(["ab", "ab"])
    assert digest_batch({"one", "two"}) == digest_batch({"two", "one"})
    different: list[Any] = [
        torch.ones(2),
        torch.ones(2, dtype=torch.float64),
        torch.ones(1, 2),
        torch.tensor([1.0, 1.0000001]),
        torch.ones(2).numpy(),
        [1, 1],
        (1, 1),
        [[1], 1],
        {"a": 1},
        {"b": 1},
        _Sample(torch.ones(2), None),
        _Sample(torch.ones(2), "note"),
        b"ab",
        "ab",
        None,
    ]
    assert len({digest_batch(batch) for batch in different}) == len(different)
