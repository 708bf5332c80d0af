"""Replicas that agree on weights now and then, or on compressed gradients: what a Trainer run makes of it."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_bigmodel import (
    DGC,
    AdaptiveLocalSGD,
    AllReduce,
    BigModelPrecision,
    BigModelStrategy,
    DiLoCo,
    ExponentialMovingAverage,
    GradientNoiseScale,
    HierarchicalAllReduce,
    LocalSGD,
    PowerSGD,
    TopKErrorFeedback,
)
from lightning_bigmodel.checkpoint import convert_to_single_file
from lightning_bigmodel.testing import RanksFailedError
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.replica_modules import Net, SaveAt, average, make_optimizer, simulate, train

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)

PIPE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
ZERO = {"data_replicate_size": 2}
NUM_STEPS = 6
# Layout -> ranks, data ranks a replica.
LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "replicas": ({}, 2, 1),
    "pipe": (PIPE, 4, 1),
    "zero1": ({**ZERO, "zero_stage": 1}, 4, 2),
    "zero3": ({**ZERO, "zero_stage": 3}, 4, 2),
}
# Kind of sync -> the optimizer it runs with.
SYNCS: dict[str, Any] = {
    "dgc": (lambda: DGC(sparsity=0.5, min_numel=1), "momentum"),
    "top_k": (lambda: TopKErrorFeedback(density=0.5), "adamw"),
    "power_sgd": (lambda: PowerSGD(rank=1, begin_step=1), "adamw"),
    "local_sgd": (lambda: LocalSGD(period=4), "adamw"),
    "adaptive_local_sgd": (lambda: AdaptiveLocalSGD(initial_period=4), "momentum"),
    "diloco": (lambda: DiLoCo(period=4), "adamw"),
    "streaming_diloco": (lambda: DiLoCo(period=4, num_fragments=2, fragment_delay=1), "adamw"),
}


def _train(layout: str, sync: str, module: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    settings, devices, _ = LAYOUTS[layout]
    make, optimizer = SYNCS[sync]
    return train({**settings, "replica_sync": make()}, devices, {"optimizer": optimizer, **(module or {})}, **options)


def _with(settings: dict[str, Any], devices: int, make: Any, *args: Any, **options: Any) -> dict[str, Any]:
    return train({**settings, "replica_sync": make()}, devices, *args, **options)


def assert_close(found: dict[str, torch.Tensor], expected: Any, tolerance: float = 1e-5) -> None:
    """Every parameter."""
    wanted = dict(expected)  # once: it may be an iterator
    assert wanted
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_means_of_what_replicas_reach(layout: str, optimizer: str) -> None:
    """Gradients summed over replicas all the same, or the last two steps of the run lost with their period."""
    settings, devices, ranks_a_replica = LAYOUTS[layout]
    (expected, _) = simulate(
        2,
        NUM_STEPS,
        lambda step, replicas: average(replicas) if step % 4 == 0 or step == NUM_STEPS else None,
        optimizer,
        ranks_a_replica,
    )
    module = {"optimizer": optimizer}
    for rank in run_ranks(_with, devices, settings, devices, functools.partial(LocalSGD, period=4), module):
        assert rank["global_step"] == NUM_STEPS
        assert_close({**dict(expected.named_parameters()), **rank["weights"]}, expected.named_parameters())


class Loud(Net):
    """Each second data rank has a loss that rises to many times that of the others."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        """As before, times that."""
        trainer = self._trainer
        factor = 1.0 if trainer is None or trainer.global_rank % 2 else 1.0 + 2.0 * trainer.fit_loop.batch_idx
        return super().loss_of(batch) * factor


class Periods(Callback):
    """What a rank reckons with after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Of adaptive local SGD."""
        sync: Any = trainer.strategy._replica_sync  # type: ignore[attr-defined]
        self.seen.append((sync.period, sync._steps_apart))


def _periods(layout: str) -> list[tuple[int, int]]:
    periods = Periods()
    settings, devices, _ = LAYOUTS[layout]
    sync = AdaptiveLocalSGD(initial_period=4, max_period=64)
    train({**settings, "replica_sync": sync}, devices, {"num_batches": [12]}, kind=Loud, callbacks=[periods])
    return periods.seen


@pytest.mark.parametrize("layout", ["zero1", "pipe"])
def test_all_ranks_have_one_period(layout: str) -> None:
    """Shards of one replica that each follow the loss of their own batches, and are averaged at different steps."""
    first, *rest = run_ranks(_periods, LAYOUTS[layout][1], layout)
    assert len({period for period, _ in first}) > 1
    assert all(seen == first for seen in rest)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_replica_weighs_what_all_its_shards_have_seen(layout: str) -> None:
    """Rows that count by the batches of the rank that keeps them: other shares in each part of the model."""
    settings, devices, _ = LAYOUTS[layout]
    num_batches = [6, 6, 6, 3]
    weights = {4: (8.0, 7.0), 6: (4.0, 2.0)}
    (expected, _) = simulate(
        2,
        NUM_STEPS,
        lambda step, replicas: average(replicas, weights[step]) if step in weights else None,
        ranks_a_replica=2,
        num_batches=num_batches,
    )
    make = functools.partial(LocalSGD, period=4)
    for rank in run_ranks(_with, devices, settings, devices, make, {"num_batches": num_batches}):
        assert_close(rank["weights"], expected.named_parameters())


def _seen(period: int) -> dict[str, Any]:
    make = functools.partial(LocalSGD, period=period)
    return _with({}, 2, make, {"optimizer": "momentum"}, limit_val_batches=2, val_check_interval=3)


def test_evaluation_sees_the_mean_and_replicas_go_on_as_they_were() -> None:
    """Each replica evaluated with its own weights, or all going on with the mean."""
    means: list[torch.Tensor] = []

    def agree(step: int, replicas: Any) -> None:
        if step % 3 == 0:
            means.append(torch.stack([replica.head.weight.detach() for replica in replicas]).mean(0))
        if step in (4, 6):
            average(replicas)

    (expected, _) = simulate(2, NUM_STEPS, agree, "momentum")
    for rank in run_ranks(_seen, 2, 4):
        assert len(rank["val_weights"]) == 2
        for found, mean in zip(rank["val_weights"], means, strict=True):
            torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-6)
        assert_close(rank["weights"], expected.named_parameters())


@pytest.mark.parametrize(
    ("sync", "layout"),
    [(sync, "replicas") for sync in SYNCS]
    + [(sync, layout) for sync in ("dgc", "local_sgd", "streaming_diloco") for layout in ("zero1", "pipe")],
)
def test_a_resumed_run_is_the_same_run(sync: str, layout: str, tmp_path: Path) -> None:
    """What replicas keep for later steps, their own weights or their own moments that are not in the checkpoint."""
    devices = LAYOUTS[layout][1]
    path = str(tmp_path / "saved")
    whole = run_ranks(_train, devices, layout, sync, save=(path, 3))
    plain = run_ranks(_train, devices, layout, sync)
    resumed = run_ranks(_train, devices, layout, sync, ckpt_path=path)
    for expected, unsaved, found in zip(whole, plain, resumed, strict=True):
        assert found["losses"] == expected["losses"][-len(found["losses"]) :]
        assert len(found["losses"]) == 1 + NUM_STEPS - 3  # recorded in the hook that was due when it was saved
        for name, value in expected["weights"].items():
            assert torch.equal(found["weights"][name], value), name
            assert torch.equal(unsaved["weights"][name], value), f"saving has changed {name}"


def _save_after(sync: str, path: str) -> dict[str, Any]:
    make, optimizer = SYNCS[sync]
    net = Net(optimizer)
    run = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BigModelStrategy(replica_sync=make()),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    run.fit(net)
    run.save_checkpoint(path)
    return {}


@pytest.mark.parametrize("sync", ["dgc", "top_k", "power_sgd"])
def test_a_checkpoint_saved_after_the_run_has_what_waits(sync: str, tmp_path: Path) -> None:
    """Residuals that are let go of before the user saves, and a warm-up that begins again."""
    path = str(tmp_path / "saved")
    whole = run_ranks(_train, 2, "replicas", sync, max_epochs=2)
    run_ranks(_save_after, 2, sync, path)
    resumed = run_ranks(_train, 2, "replicas", sync, max_epochs=2, ckpt_path=path)
    for found, expected in zip(resumed, whole, strict=True):
        assert found["global_step"] == 2 * NUM_STEPS
        assert_close(found["weights"], expected["weights"], 0.0)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("replicas", {"sparsity": 0.0}),
        ("replicas", {"sparsity": 1e-9, "min_numel": 1, "threshold": "exact", "momentum_masking": False}),
        ("zero1", {"sparsity": 0.0}),
        ("pipe", {"sparsity": 0.0, "exempt": ["head.*"]}),  # which the first stage has not
    ],
)
def test_momentum_of_plain_sgd_is_taken_up(layout: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """A run that changes to `DGC` and goes on as if it stood still; a pattern that not every stage has, refused."""
    of_layout, devices, _ = LAYOUTS[layout]
    path = str(tmp_path / "saved")
    whole = run_ranks(train, devices, of_layout, devices, {"optimizer": "momentum"}, save=(path, 3))
    make = functools.partial(DGC, **settings)
    resumed = run_ranks(_with, devices, of_layout, devices, make, {"optimizer": "momentum"}, ckpt_path=path)
    for found, expected in zip(resumed, whole, strict=True):
        assert len(found["losses"]) == 1 + NUM_STEPS - 3  # recorded in the hook that was due when it was saved
        assert_close(found["weights"], expected["weights"])


class Looks(Net):
    """An embedding that makes sparse gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = torch.nn.Embedding(3, 6, sparse=True)

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Looks the class up."""
        return super().loss_of((batch[0] + self.embedding(batch[1]), batch[1]))


def test_sparse_gradients_are_refused_by_name() -> None:
    """An error of torch that names no parameter and no way out."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_train, 2, "replicas", "top_k", {"optimizer": "sgd"}, kind=Looks)
    assert "The gradient of `embedding.weight` is sparse" in str(caught.value)
    assert len(caught.value.failures) == 2


def _sums_in(overlap: bool, dtype: Any) -> dict[str, Any]:
    precision = BigModelPrecision("32-true", reduce_dtype=dtype)
    return train({"replica_sync": AllReduce(overlap=overlap)}, 2, plugins=[precision])


def test_sums_after_backward_have_the_type_of_the_precision() -> None:
    """A `reduce_dtype` that does nothing without overlap."""
    early, late = (run_ranks(_sums_in, 2, overlap, "bfloat16")[0]["weights"] for overlap in (True, False))
    wide = run_ranks(_sums_in, 2, False, None)[0]["weights"]
    assert any(not torch.equal(late[name], wide[name]) for name in wide)
    assert_close(late, early, 0.0)


@pytest.mark.parametrize("layout", ["replicas", "zero3"])
def test_checkpoints_have_the_mean(layout: str, tmp_path: Path) -> None:
    """The weights of the first replica, which are nobody's agreed weights."""
    settings, devices, ranks_a_replica = LAYOUTS[layout]
    path, means = tmp_path / "saved", {}

    def agree(step: int, replicas: Any) -> None:
        if step == 3:
            parameters = zip(*(replica.named_parameters() for replica in replicas), strict=True)
            means.update({pair[0][0]: torch.stack([p.detach() for _, p in pair]).mean(0) for pair in parameters})

    simulate(2, NUM_STEPS, agree, "momentum", ranks_a_replica)
    make = functools.partial(LocalSGD, period=4)
    run_ranks(_with, devices, settings, devices, make, {"optimizer": "momentum"}, save=(str(path), 3))
    convert_to_single_file(path, tmp_path / "whole.ckpt")
    assert_close(torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"], means)


@pytest.mark.parametrize("sync", SYNCS)
def test_another_number_of_replicas_goes_on(sync: str, tmp_path: Path) -> None:
    """Replicas that begin apart from each other, residuals of replicas that are gone, an error, or no word of it."""
    path = str(tmp_path / "saved")
    run_ranks(_train, 2, "replicas", sync, save=(path, 3))
    four = run_ranks(_resume_on, 4, sync, path)
    one, *rest = four
    assert all("was saved by 2 replicas and is loaded by 4" in "".join(rank["said"]) for rank in four[:1])
    assert len(one["losses"]) == NUM_STEPS - 3
    for rank in rest:
        assert_close(rank["weights"], one["weights"], 0.0)


def _resume_on(sync: str, path: str) -> dict[str, Any]:
    make, optimizer = SYNCS[sync]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_utilities.core.rank_zero").addHandler(handler)
    logging.getLogger("lightning.pytorch").addHandler(handler)
    found = train({"replica_sync": make()}, 4, {"optimizer": optimizer}, ckpt_path=path, max_steps=NUM_STEPS)
    return {**found, "said": said}


def _averages() -> DiLoCo:
    return DiLoCo(period=1, outer_options={"lr": 1.0, "momentum": 0.0, "nesterov": False})


@pytest.mark.parametrize("make", [functools.partial(LocalSGD, period=1), _averages])
def test_agreeing_after_each_step_is_plain_replicas(make: Any) -> None:
    """A sign, a factor, or a step that counts twice."""
    expected = run_ranks(train, 2, {}, 2)
    for found, wanted in zip(run_ranks(_with, 2, {}, 2, make), expected, strict=True):
        assert_close(found["weights"], wanted["weights"])


DENSE = {
    "settings": functools.partial(AllReduce, bucket_bytes=64, dtype="float64"),
    "after_backward": functools.partial(AllReduce, overlap=False),
    "levels": functools.partial(HierarchicalAllReduce, ranks_inside=2),
    "dgc_dense": functools.partial(DGC, sparsity=0.0),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    ("devices", "settings", "options"),
    [
        (4, {}, {"accumulate_grad_batches": 2}),
        (4, {"num_microbatches": 2}, {}),
        (8, {"zero_stage": 2, "data_replicate_size": 4}, {}),
    ],
)
def test_dense_sums_are_those_of_one_process(name: str, devices: int, settings: Any, options: Any) -> None:
    """A message that is not filled evenly and loses its rest; a level that is summed twice."""
    module = {"optimizer": "momentum"}
    expected = run_ranks(train, devices, settings, devices, module, **options)
    found = run_ranks(_with, devices, settings, devices, DENSE[name], module, **options)
    for rank, wanted in zip(found, expected, strict=True):
        assert_close(rank["weights"], wanted["weights"])
        assert rank["groups"] == wanted["groups"]  # what DGC applies itself stands in the optimizer still


@pytest.mark.parametrize("sync", ["dgc", "local_sgd", "diloco", "power_sgd"])
def test_replicas_that_run_out_at_different_times(sync: str) -> None:
    """A hang, or replicas that count steps apart."""
    module = {"num_batches": [3, 5]}
    options = {"accumulate_grad_batches": 2, "limit_val_batches": 2, "val_check_interval": 2, "max_epochs": 2}
    first, second = run_ranks(_train, 2, "replicas", sync, module, **options)
    assert first["global_step"] == second["global_step"] == 6
    assert_close(first["weights"], second["weights"], 0.0)
    for one, other in zip(first["val_weights"], second["val_weights"], strict=True):
        assert torch.equal(one, other)


class Freezes(Callback):
    """Freezes a block from one batch on, or lets an evaluation unfreeze it."""

    def __init__(self, from_batch: int | None = None) -> None:
        self.from_batch = from_batch

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Frozen at first, where it is to be unfrozen."""
        pl_module.blocks[0].requires_grad_(self.from_batch is not None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Between two agreements."""
        if self.from_batch is not None and batch_idx >= self.from_batch:
            pl_module.blocks[0].requires_grad_(False)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """While the agreed weights are in the place of each replica's own."""
        if self.from_batch is None and not trainer.sanity_checking:
            pl_module.blocks[0].requires_grad_(True)


def _freeze(sync: str, from_batch: int | None, **options: Any) -> dict[str, Any]:
    save = options.pop("path", None)
    callbacks: list[Any] = [Freezes(from_batch), *([] if save is None else [SaveAt(save, 3)])]
    return _train("replicas", sync, callbacks=callbacks, limit_val_batches=1, val_check_interval=3, **options)


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
@pytest.mark.parametrize("from_batch", [None, 2, 5])
def test_what_is_frozen_or_unfrozen_between_agreements(sync: str, from_batch: int | None, tmp_path: Path) -> None:
    """Replicas that keep a frozen block of their own for good; an error where an evaluation unfreezes one."""
    path = str(tmp_path / "saved")
    first, second = run_ranks(_freeze, 2, sync, from_batch, path=path)
    assert_close(first["weights"], second["weights"], 0.0)
    if from_batch == 2:
        resumed = run_ranks(_freeze, 2, sync, from_batch, ckpt_path=path)
        assert_close(resumed[1]["weights"], first["weights"], 0.0)


class UsesSome(Net):
    """A block that one replica uses only, and one that no optimizer steps."""

    user = 1

    def loss_of(self, batch: Any) -> torch.Tensor:
        """As before, or without the block."""
        rank = self._trainer.global_rank if self._trainer is not None else 0
        x = batch[0]
        for block in self.blocks[0 if rank == self.user else 1 :]:
            x = x + block(x)
        return torch.nn.functional.cross_entropy(self.head(x * self.scale), batch[1])

    def configure_optimizers(self) -> Any:
        """Without the last block."""
        named = [p for name, p in self.named_parameters() if not name.startswith("blocks.3")]
        return make_optimizer(named, self.optimizer)


class FirstUsesSome(UsesSome):
    """The other way round."""

    user = 0


@pytest.mark.parametrize("kind", [UsesSome, FirstUsesSome])
@pytest.mark.parametrize("sync", ["local_sgd", "dgc"])
def test_a_parameter_of_one_replica_or_of_no_optimizer(sync: str, kind: Any, tmp_path: Path) -> None:
    """Moments that the first replica has not, lost with a checkpoint; an error for want of momentum settings."""
    path = str(tmp_path / "saved")
    whole = run_ranks(_train, 2, "replicas", sync, kind=kind, save=(path, 3))
    assert_close(whole[1]["weights"], whole[0]["weights"], 0.0)
    untouched = dict(Net().named_parameters())["blocks.3.0.weight"]
    assert torch.equal(whole[0]["weights"]["blocks.3.0.weight"], untouched)
    resumed = run_ranks(_train, 2, "replicas", sync, kind=kind, ckpt_path=path)
    assert_close(resumed[0]["weights"], whole[0]["weights"], 0.0)


class Overflows(Net):
    """One replica has a gradient that is no number in the second step."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        """As before, but then."""
        loss = super().loss_of(batch)
        trainer = self._trainer
        if self.training and trainer is not None and trainer.global_rank == 1 and trainer.fit_loop.batch_idx == 1:
            loss = loss * float("inf")
        return loss


def _overflow(sync: str, overflows: bool) -> dict[str, Any]:
    make, optimizer = SYNCS[sync]
    settings = {"replica_sync": make()}
    kind = Overflows if overflows else Net
    # Without the overflow the batch is left out, so that all that was to come comes at the same steps.
    module = {"optimizer": optimizer} if overflows else {"optimizer": optimizer, "left_out": 1}
    precision = BigModelPrecision("16-mixed", init_scale=256.0)
    return train(settings, 2, module, kind=kind, plugins=[precision])


@pytest.mark.parametrize("sync", ["dgc", "top_k", "power_sgd", "local_sgd", "diloco"])
def test_a_skipped_step_leaves_nothing_behind(sync: str) -> None:
    """A residual that is infinite for good; replicas that count the step, or not all."""
    skipped = run_ranks(_overflow, 2, sync, True)
    without = run_ranks(_overflow, 2, sync, False)
    for found, expected in zip(skipped, without, strict=True):
        assert found["global_step"] == expected["global_step"] == NUM_STEPS - 1
        assert_close(found["weights"], expected["weights"], 2e-3)  # the loss scale has halved


REFUSED: dict[str, tuple[int, dict[str, Any], Any, dict[str, Any], str]] = {
    "one_replica": (1, {}, functools.partial(LocalSGD, period=4), {}, "only one"),
    "zero2_shards_all": (2, {"zero_stage": 2}, DGC, {}, "data_replicate_size=2"),
    "pipe_takes_all": (2, PIPE, functools.partial(DiLoCo, period=4), {}, "Start more ranks"),
    "dgc_adam": (2, {}, DGC, {"module": {"optimizer": "adamw"}}, "TopKErrorFeedback"),
    "dgc_clip": (2, {}, DGC, {"gradient_clip_val": 1.0}, "DGC(gradient_clip_val"),
    "average": (2, {}, LocalSGD, {"callbacks": [ExponentialMovingAverage()]}, "ExponentialMovingAverage"),
    "noise": (2, {}, LocalSGD, {"callbacks": [GradientNoiseScale()]}, "GradientNoiseScale"),
    "reduce_dtype": (
        2,
        {},
        LocalSGD,
        {"plugins": [BigModelPrecision("bf16-mixed", reduce_dtype="bfloat16")]},
        "reduce_dtype='bfloat16'",
    ),
    "exempt": (
        4,
        PIPE,
        functools.partial(DGC, exempt=["head.*", "heads.*"]),
        {"module": {"optimizer": "momentum"}},
        "no parameter fits 'heads.*'",
    ),
    "exempt_power_sgd": (2, {}, functools.partial(PowerSGD, exempt="heads.*"), {}, "no parameter fits 'heads.*'"),
    "levels": (3, {}, functools.partial(HierarchicalAllReduce, ranks_inside=2), {}, "divide"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused_on_all_ranks(name: str) -> None:
    """A setting that does nothing, or a hang of those that were not told."""
    devices, settings, make, options, said = REFUSED[name]
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_with, devices, settings, devices, make, **options)
    assert said in str(caught.value)
    assert len(caught.value.failures) == devices


class Seeds(Net):
    """Each rank begins with other weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        rank = int(os.environ.get("RANK", "0"))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(rank)


def _seeds(kind: Any) -> dict[str, Any]:
    return train({"replica_sync": LocalSGD(period=4)}, 2, kind=kind)


def test_replicas_begin_alike() -> None:
    """Replicas built from other seeds, which a mean would mix."""
    expected = run_ranks(_seeds, 2, Net)
    for found, wanted in zip(run_ranks(_seeds, 2, Seeds), expected, strict=True):
        assert_close(found["weights"], wanted["weights"], 0.0)


@pytest.mark.parametrize("name", ["dgc", "local_sgd", "adaptive_local_sgd", "diloco"])
def test_short_names(name: str) -> None:
    """A name that is not registered, or one object that two Trainers share."""
    first, second = run_ranks(_named, 2, name)
    assert_close(first["weights"], second["weights"], 0.0)


def _named(name: str) -> dict[str, Any]:
    train({}, 2, {"optimizer": "momentum"}, strategy=name)
    return train({}, 2, {"optimizer": "momentum"}, strategy=name)


class SeesWeights(Callback):
    """Keeps the weights that callbacks see."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the strategy is asked."""
        if not trainer.sanity_checking:
            self.seen.append(pl_module.head.weight.detach().clone())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Where users export."""
        self.seen.append(pl_module.head.weight.detach().clone())


def _looks() -> list[torch.Tensor]:
    looks = SeesWeights()
    options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 3, "callbacks": [looks]}
    train({"replica_sync": LocalSGD(period=4)}, 2, {"optimizer": "momentum"}, **options)
    return looks.seen


def test_callbacks_see_the_agreed_weights_too() -> None:
    """One replica's weights in what a callback exports at the end of training."""
    first, second = run_ranks(_looks, 2)
    assert len(first) == 3
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
