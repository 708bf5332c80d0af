"""`deferred_batch_norm` under every layout: running statistics of whole batches on every rank, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import CollectiveCounter, TinyChain, run_ranks
from tests.strategies.batch_norm_modules import Norms, by_hand, loader, samples
from tests.strategies.trainer_modules import trainer

PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}
# Ranks, data ranks, samples, batch size a rank, settings, Trainer options. 13 samples over two ranks are batches of 4
# and 3 on one, 4 and 2 on the other; 9 are 4 and 1 on one, 4 and a batch that counts nothing on the other.
LAYOUTS: dict[str, tuple[int, int, int, int, dict[str, Any], dict[str, Any]]] = {
    "micro-batches only": (1, 1, 22, 8, {"num_microbatches": 4}, {}),
    "replicas": (2, 2, 13, 4, {}, {}),
    "pipe": (2, 1, 22, 8, PIPE, {}),
    "interleaved": (2, 1, 22, 8, {**PIPE, "schedule": "Interleaved1F1B"}, {"accumulate_grad_batches": 2}),
    "zero bubble": (2, 1, 22, 8, {**PIPE, "schedule": "ZBVZeroBubble"}, {}),
    "pipe x data": (4, 2, 13, 4, PIPE, {}),
    "padding": (4, 2, 9, 4, PIPE, {}),
    "zero 3": (2, 2, 13, 4, {"zero_stage": 3, "num_microbatches": 2}, {}),
    "compiled": (2, 1, 22, 8, {**PIPE, "compile_blocks": {"backend": "eager"}}, {}),
}


def _fit(num_samples: int, batch_size: int, settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    module = Norms()
    attributes = {name: set(part.__dict__) for name, part in module.named_modules()}
    strategy = BigModelStrategy(**settings, deferred_batch_norm=True)
    trainer(strategy, torch.distributed.get_world_size(), **options).fit(module, loader(num_samples, batch_size))
    for name, part in module.named_modules():
        assert {"forward"}.isdisjoint(set(part.__dict__) - attributes[name]), name
    assert all(layer.track_running_stats for layer in module.modules() if isinstance(layer, nn.BatchNorm1d))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_running_statistics_of_whole_batches(name: str) -> None:
    """Statistics of the last micro-batch, of one rank, of some micro-batches twice; steps that another rule makes."""
    world_size, data_size, num_samples, batch_size, settings, options = LAYOUTS[name]
    window = options.get("accumulate_grad_batches", 1)
    num_microbatches = settings.get("num_microbatches", 1)
    expected = by_hand(Norms(), num_samples, batch_size, data_size, num_microbatches, window)
    first = Norms().blocks[0].norm
    for batch in samples(num_samples).split(data_size * batch_size):
        first(batch)  # one process
    found = run_ranks(_fit, world_size, num_samples, batch_size, settings, options)
    assert len(found) == world_size
    for state in found:
        assert list(state) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(
                state[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
            )
            if "norm.running" in key or "whiten" in key:
                assert torch.equal(state[key], found[0][key]), key
        for key, value in first.named_buffers():
            torch.testing.assert_close(state[f"blocks.0.norm.{key}"], value, rtol=1e-6, atol=1e-6)
    assert int(found[0]["blocks.1.norm.num_batches_tracked"]) == 2 * int(found[0]["blocks.0.norm.num_batches_tracked"])
    assert int(found[0]["blocks.3.norm.num_batches_tracked"]) == 0
