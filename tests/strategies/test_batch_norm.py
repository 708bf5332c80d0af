"""`deferred_batch_norm` under every layout: running statistics of whole batches on every rank, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import CollectiveCounter, run_ranks
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


class _Watches(Callback):
    """Keeps what a rank would evaluate with after each batch."""

    def __init__(self) -> None:
        self.whitening: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.whitening.append(torch.cat([pl_module.whiten.running_mean, pl_module.whiten.running_var]))


def _fit(
    num_samples: int, batch_size: int, settings: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    module, watches = Norms(), _Watches()
    attributes = {name: set(part.__dict__) for name, part in module.named_modules()}
    strategy = BigModelStrategy(**settings, deferred_batch_norm=True)
    run = trainer(strategy, torch.distributed.get_world_size(), callbacks=[watches], **options)
    run.fit(module, loader(num_samples, batch_size))
    for name, part in module.named_modules():
        assert {"forward"}.isdisjoint(set(part.__dict__) - attributes[name]), name
    assert all(layer.track_running_stats for layer in module.modules() if isinstance(layer, nn.BatchNorm1d))
    return {name: value.clone() for name, value in module.state_dict().items()}, watches.whitening


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
    for state, whitening in found:
        # Code before the blocks runs on every stage: it must evaluate alike there at any time, not after the run only.
        assert torch.equal(torch.stack(whitening), torch.stack(found[0][1]))
        assert list(state) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(
                state[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
            )
            if "norm.running" in key or "whiten" in key:
                assert torch.equal(state[key], found[0][0][key]), key
        for key, value in first.named_buffers():
            torch.testing.assert_close(state[f"blocks.0.norm.{key}"], value, rtol=1e-6, atol=1e-6)
    state, whitening = found[0]
    assert len(whitening) == int(state["blocks.0.norm.num_batches_tracked"]) > 1
    assert int(state["blocks.1.norm.num_batches_tracked"]) == 2 * len(whitening)
    assert int(state["blocks.3.norm.num_batches_tracked"]) == 0


def _count(settings: dict[str, Any]) -> tuple[int, int, int]:
    """All-reduces, their bytes, and gathers of a run."""
    with CollectiveCounter() as counter:
        trainer(BigModelStrategy(**settings), torch.distributed.get_world_size()).fit(Norms(), loader(24, 4))
    return counter.num_calls["all_reduce"], counter.payload_bytes["all_reduce"], counter.num_calls["all_gather"]


def test_one_small_message_a_step() -> None:
    """A message a layer, a message that tells of calls every time, or any where there are no such layers."""
    plain = run_ranks(_count, 2, {})
    deferred = run_ranks(_count, 2, {"deferred_batch_norm": True})
    num_steps, num_numbers = 3, 6 * (1 + 2 * 4)  # calls counted in a step: one a layer, two of the second, none frozen
    for (num_before, bytes_before, gathers_before), (num_after, bytes_after, gathers_after) in zip(
        plain, deferred, strict=True
    ):
        assert num_after - num_before == num_steps
        assert bytes_after - bytes_before == num_steps * num_numbers * 8
        assert gathers_after == gathers_before


def _replicas() -> list[Tensor]:
    module = Norms()
    trainer(BigModelStrategy(), 2).fit(module, loader(16, 4))
    return [module.blocks[0].norm.running_mean]


def test_replicas_without_it_drift_apart() -> None:
    """What the setting is for without micro-batches; the README says it of replicas."""
    first, second = run_ranks(_replicas, 2)
    assert (first[0] - second[0]).abs().max() > 1e-3


class _Only(LightningModule):
    """One layer, and a chain of blocks."""

    def __init__(self, kind: Any = nn.BatchNorm1d, **options: Any) -> None:
        super().__init__()
        self.norm = kind(4, **options)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A loss."""
        hidden = self.norm(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Settings, options of the module's layer, parts of the message.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "no layer": (PIPE, {"kind": nn.LayerNorm}, ["`_Only` has no BatchNorm", "Leave `deferred_batch_norm` out"]),
    "synchronised": (PIPE, {"kind": nn.SyncBatchNorm}, ["`_Only` has no BatchNorm", "SyncBatchNorm"]),
    "keeps nothing": (
        PIPE,
        {"track_running_stats": False},
        ["`_Only` has no BatchNorm", "`track_running_stats=False`"],
    ),
    "no split": (
        {**PIPE, "num_microbatches": 1, "schedule": "GPipe"},
        {},
        ["`num_microbatches=1` does not split", "one data rank"],
    ),
    "not deferred": (
        {**PIPE, "deferred_batch_norm": False},
        {},
        ["`norm` (BatchNorm1d)", "`deferred_batch_norm=True`"],
    ),
}


def _refusal(settings: dict[str, Any], options: dict[str, Any]) -> str:
    strategy = BigModelStrategy(**{"deferred_batch_norm": True, **settings})
    with pytest.raises(ValueError, match="deferred_batch_norm") as caught:
        trainer(strategy, 2).fit(_Only(**options), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=8))
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(name: str) -> None:
    """A setting that changes nothing, or that one rank alone refuses."""
    settings, options, parts = REFUSED[name]
    found = run_ranks(_refusal, 2, settings, options)
    assert len(found) == 2
    for message in found:
        for part in parts:
            assert part in message


def test_not_a_switch() -> None:
    """A word of YAML that is taken for True."""
    with pytest.raises(ValueError, match="`deferred_batch_norm='no'` must be True or False"):
        BigModelStrategy(deferred_batch_norm="no")  # type: ignore[arg-type]  # the mistake
