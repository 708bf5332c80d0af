"""What training sends, by axis and collective, against a counter that sees every operator, and by hand."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy, CommunicationMonitor, LocalSGD
from lightning_bigmodel.mesh.communication import CommunicationCounter, sent_share
from lightning_bigmodel.testing import CollectiveCounter, RanksFailedError, fake_world, run_ranks

WIDTH = 64
NUM_STEPS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(LightningModule):
    """Large enough for weights to outweigh what ranks tell each other besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.blocks(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


NUM_BYTES = 4 * sum(p.numel() for p in Net().parameters())


class Oracle(Callback):
    """Sees every operator, so slowly that it is for tests."""

    counter: CollectiveCounter

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counter = CollectiveCounter().__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen = dict(self.counter.payload_bytes)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counter.__exit__()


class Weights(Callback):
    """As they are when drift is measured."""

    seen: list[dict[str, Tensor]]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen = [*getattr(self, "seen", []), {n: p.detach().clone() for n, p in pl_module.named_parameters()}]


def _fit(strategy: Any, monitor: CommunicationMonitor, callbacks: list[Callback], **options: Any) -> Trainer:
    data = DataLoader(
        TensorDataset(torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1))), batch_size=128 // 16
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=NUM_STEPS,
        logger=False,
        callbacks=[monitor, *callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"limit_val_batches": 0, **options},
    )
    trainer.fit(Net(), data, data)
    return trainer


LAYOUTS: dict[str, dict[str, Any]] = {
    "pipe": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "zero3": {"zero_stage": 3, "data_replicate_size": 2},
    "tensor": {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
}


def _layouts() -> dict[str, Any]:
    found = {}
    for name, settings in LAYOUTS.items():
        monitor, oracle = CommunicationMonitor(print_table=name == "pipe"), Oracle()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer = _fit(BigModelStrategy(**settings), monitor, [oracle])
        logged = {key: float(value) for key, value in trainer.callback_metrics.items() if "communication" in key}
        found[name] = monitor.totals, oracle.seen, logged, monitor.compression, printed.getvalue()
    return found


@pytest.fixture(scope="module")
def layouts() -> list[dict[str, Any]]:
    """By rank, then by layout."""
    return run_ranks(_layouts, 4)


def test_nothing_is_missed(layouts: list[dict[str, Any]]) -> None:
    """A function of `torch.distributed` that goes by another way."""
    for found in layouts:
        for name, (totals, seen, *_) in found.items():
            assert sum(traffic.payload_bytes for traffic in totals.values()) == sum(seen.values()), name
            for kind in ("send", "recv", "reduce_scatter"):  # of which no objects are made
                own = sum(traffic.payload_bytes for (_, k), traffic in totals.items() if k == kind)
                assert own == seen.get(kind, 0), (name, kind)


def test_each_axis_has_its_own(layouts: list[dict[str, Any]]) -> None:
    """Bytes of one axis under the name of another."""
    for found in layouts:
        pipe, zero3, tensor = (found[name][0] for name in LAYOUTS)
        # Half the batch's activations in each direction: of 2 micro-batches of 4 samples.
        assert pipe["pipe", "send"].payload_bytes == NUM_STEPS * 2 * 4 * WIDTH * 4
        assert pipe["data_replicate", "all_reduce"].payload_bytes >= NUM_STEPS * NUM_BYTES / 2
        assert zero3["data_shard", "reduce_scatter"].payload_bytes >= NUM_STEPS * NUM_BYTES
        assert zero3["data_shard", "all_gather"].payload_bytes >= NUM_STEPS * NUM_BYTES / 2
        assert zero3["data_replicate", "all_reduce"].payload_bytes >= NUM_STEPS * NUM_BYTES / 2
        # Forwards sum what 4 rowwise layers make, backwards what 3 colwise ones need; data needs no gradient.
        assert tensor["tensor", "all_reduce"].payload_bytes == NUM_STEPS * 7 * 8 * WIDTH * 4
        assert not {axis for totals in (pipe, zero3, tensor) for axis, _ in totals} & {"other"}
        for name in LAYOUTS:
            assert 0.9 < found[name][3] <= 1.0, (name, found[name][3])


def test_numbers_are_logged_and_printed(layouts: list[dict[str, Any]]) -> None:
    """A key that comes and goes; sums of ranks; a table on every rank, or with the numbers of another step."""
    totals, _, logged, compression, printed = layouts[0]["pipe"]
    send = totals["pipe", "send"]
    assert logged["communication_bytes/pipe/send"] == send.sent_bytes / NUM_STEPS == send.payload_bytes / NUM_STEPS
    assert logged["communication_calls/pipe/send"] == send.calls / NUM_STEPS
    assert logged["communication_calls/pipe"] >= logged["communication_calls/pipe/send"]
    assert logged["communication_compression"] == pytest.approx(compression)
    row = next(line for line in printed.splitlines() if "send" in line)
    assert f"{send.calls / NUM_STEPS:.2f}" in row
    assert f"{send.sent_bytes / NUM_STEPS:,.0f}" in row
    assert "fewer bytes than dense gradients" in printed
    assert [bool(found["pipe"][4]) for found in layouts] == [True, False, False, False]


def _local() -> Any:
    monitor, weights = CommunicationMonitor(drift_every_num_steps=3, print_table=False), Weights()
    trainer = _fit(BigModelStrategy(replica_sync=LocalSGD(period=4)), monitor, [weights])
    return monitor.compression, monitor.drift, float(trainer.callback_metrics["replica_drift"]), weights.seen


def test_compression_and_drift_of_replicas_that_agree_now_and_then() -> None:
    """Compression against the wrong dense sum; a drift of weights after the agreement, or of one rank."""
    (compression, drift, logged, first), (_, other, _, second) = run_ranks(_local, 2)
    assert 3.8 < compression < 4.0
    assert drift == other == pytest.approx(logged)
    distance, size = 0.0, 0.0
    for name, value in first[5].items():  # after step 6
        mean = (value + second[5][name]).double() / 2
        distance += float(sum((one[5][name].double() - mean).square().sum() for one in (first, second)))
        size += 2 * float(mean.square().sum())
    assert drift == pytest.approx((distance / size) ** 0.5, rel=1e-4)
    assert drift > 1e-6


def _ddp() -> Any:
    found = []
    for options in (
        {},
        {"accumulate_grad_batches": 2, "max_epochs": 4, "limit_val_batches": 2, "val_check_interval": 2},
    ):
        monitor = CommunicationMonitor(drift_every_num_steps=1, print_table=False)
        _fit(DDPStrategy(), monitor, [], **options)
        found.append((monitor.totals, monitor.drift))
    return found


def test_ddp() -> None:
    """A reducer in C++ that is not seen; batches counted that send nothing; evaluation counted as training."""
    for found in run_ranks(_ddp, 2):
        for totals, drift in found:
            assert totals["data_replicate", "all_reduce"].payload_bytes == NUM_STEPS * NUM_BYTES
            # 2 ranks
            assert totals["data_replicate", "all_reduce"].sent_bytes == NUM_STEPS * NUM_BYTES
            assert totals["data_replicate", "all_reduce"].calls == NUM_STEPS
            assert drift == 0.0


class _Fails(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        assert dist.ProcessGroup.allreduce.__name__ == "watched"
        raise KeyError("on purpose")


def _left() -> bool:
    before = dict(vars(dist.ProcessGroup))
    with contextlib.suppress(KeyError):
        _fit(BigModelStrategy(), CommunicationMonitor(), [_Fails()])
    return all(vars(dist.ProcessGroup)[name] is value for name, value in before.items())


def test_nothing_is_left_in_place_after_a_failure() -> None:
    """Methods of torch that stay replaced, and go on counting."""
    assert run_ranks(_left, 1) == [True]


@pytest.mark.parametrize(
    ("strategy", "drift", "message"),
    [
        ("auto", None, r"does not see all that `SingleDeviceStrategy` sends. Use `BigModelStrategy`"),
        (BigModelStrategy(), 5, r"`drift_every_num_steps=5` measures .* and here there is one"),
    ],
)
def test_what_cannot_be_measured_is_refused(strategy: Any, drift: int | None, message: str) -> None:
    """Zeros that look like a measurement."""
    with pytest.raises((ValueError, RanksFailedError), match=message):
        run_ranks(_refused, 1, strategy, drift)


def _refused(strategy: Any, drift: int | None) -> None:
    _fit(strategy, CommunicationMonitor(drift_every_num_steps=drift), [])


def test_bytes_of_ring_algorithms_and_groups() -> None:
    """Bytes on the wire that are those of another algorithm; a group that belongs to a smaller axis."""
    shares = {"all_reduce": 1.5, "all_gather": 3.0, "reduce_scatter": 0.75, "send": 1.0, "recv": 0.0, "barrier": 0.0}
    assert {kind: sent_share(kind, 4) for kind in shares} == shares
    with fake_world(8):
        groups = [dist.new_group(ranks) for ranks in ([0], [0, 1], [0, 1, 2, 3], [0, 4], [0, 1, 4])]
        counter = CommunicationCounter(
            {"inner": frozenset(range(4)), "data": frozenset(range(4)), "across": frozenset({0, 4})}
        )
        counter.start()
        for group in groups:
            dist.all_reduce(torch.ones(10), group=group)
        counter.pause()
        dist.all_reduce(torch.ones(10))
        counter.resume()
        dist.broadcast(torch.ones(6, dtype=torch.float16), 0)
        counter.stop()
        dist.all_reduce(torch.ones(10))
        taken = counter.take()
    assert {key: traffic.calls for key, traffic in taken.items()} == {
        ("inner", "all_reduce"): 2,
        ("across", "all_reduce"): 1,
        ("other", "all_reduce"): 1,
        ("other", "broadcast"): 1,
    }
    assert taken["inner", "all_reduce"].sent_bytes == 40 * (1.0 + 1.5)
    assert taken["other", "broadcast"].payload_bytes == 12
    assert counter.take() == {}
