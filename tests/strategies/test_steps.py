"""Steps as people write them: None, dicts, shapes that change, random numbers, values that bypass the chain."""

from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.testing import RanksFailedError, TinyChain, run_ranks
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import Classifier, loader, numbers, pad, pipeline, trainer, weights


def run(module: Any, strategy: Any, devices: int, batches: Any, **options: Any) -> dict[str, Any]:
    """Fit and tell."""
    val = options.pop("val", None)
    trainer_ = trainer(strategy, devices, num_sanity_val_steps=0, **options)
    trainer_.fit(module, batches, val)
    return {"weights": weights(module), "metrics": numbers(trainer_.callback_metrics)}


def rows(module: Any, batch_size: int = 8, num_samples: int = 24) -> Any:
    """Batches of a tiny module."""
    return DataLoader(module.dataset(num_samples), batch_size=batch_size)


def _run(module_class: Any, strategy: dict[str, Any], options: dict[str, Any], batch_size: int = 8) -> dict[str, Any]:
    torch.manual_seed(0)
    module = module_class()
    world_size = torch.distributed.get_world_size()
    return run(module, pipeline(**strategy), world_size, rows(module, batch_size), **options)


def compare(
    module_class: Any, world_size: int = 2, strategy: dict[str, Any] | None = None, **options: Any
) -> list[Any]:
    """A module under a pipeline against one process; returns the ranks' results."""
    torch.manual_seed(0)
    module = module_class()
    expected = run(module, "auto", 1, rows(module), **options)
    batch_size = 8 // max(1, world_size // 2)
    results = run_ranks(_run, world_size, module_class, strategy or {}, options, batch_size)
    for result in results:
        assert_same_weights(result["weights"], expected["weights"])
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
    return [expected, *results]


class ReturnsNone(TinyChain):
    """Skips every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx % 2 else loss


class KeepsThings(TinyChain):
    """A counter and lists within lists before the blocks; a list, a dict and a set after them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"num_samples": 0, "losses": []}
        self.num_calls = 0
        self.deep: list[Any] = [[[[[[]]]]]]
        self.seen: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_calls += 1
        self.deep[0][0][0][0][0].append({self.num_calls})
        self.kept["num_samples"] += len(batch[0])
        loss = self.loss(batch)
        self.kept["losses"].append(loss.detach())
        self.seen.add(self.num_calls)
        self.deep[0][0][0][0][0][-1].add(-self.num_calls)
        return loss


class LogsEverywhere(TinyChain):
    """Values of the first stage, of between the blocks and of the last stage; sums and maxima."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        self.log("input_mean", inputs.mean())
        self.log("largest", inputs.max(), reduce_fx="max")
        hidden = inputs
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            self.log(f"norm_{index}", hidden.square().mean())
        self.log("rows", float(len(inputs)), reduce_fx="sum")
        loss = nn.functional.mse_loss(hidden, targets)
        self.log("train_loss", loss)
        return {"loss": loss, "hidden": hidden}


class Mixup(TinyChain):
    """Draws numbers before the blocks that the loss needs again: stages must draw the same ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        share = float(np.random.beta(0.5, 0.5))
        order = torch.randperm(len(inputs))
        mixed = share * inputs + (1 - share) * inputs[order]
        output = self.blocks(mixed)
        loss = share * nn.functional.mse_loss(output, targets)
        loss = loss + (1 - share) * nn.functional.mse_loss(output, targets[order])
        self.log("same_input", (mixed - self._first_mixed(mixed)).abs().max())
        self.log("train_loss", loss)
        return loss

    def _first_mixed(self, mixed: Any) -> Any:
        return mixed


class InPlace(TinyChain):
    """Edits a block's output in place between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, inputs: Any) -> Any:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
            hidden += 0.1
            hidden.mul_(0.9)
        return hidden


class Frozen(TinyChain):
    """The first two blocks take no gradient: nothing flows back over the cut."""

    def __init__(self) -> None:
        super().__init__()
        for block in list(self.blocks)[:2]:
            block.requires_grad_(False)


class LooseParameters(TinyChain):
    """Parameters of the module itself, used before, between and after the blocks; one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(8))
        self.between = nn.Parameter(torch.ones(8))
        self.twice = nn.Parameter(torch.ones(8))

    def forward(self, inputs: Any) -> Any:
        hidden = self.blocks[0](inputs * self.before * self.twice)
        hidden = self.blocks[2](self.blocks[1](hidden) * self.between)
        return self.blocks[3](hidden) * self.twice


class Unused(TinyChain):
    """A layer no step calls, as modules with several heads have."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


class FunctionalHead(TinyChain):
    """Uses a block's weight outside of the block, at the other end of the model."""

    def forward(self, inputs: Any) -> Any:
        return nn.functional.linear(self.blocks(inputs), self.blocks[0].linear.weight)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    "module_class", [LogsEverywhere, InPlace, Frozen, LooseParameters, Unused, FunctionalHead, ReturnsNone]
)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_habits_of_real_steps(module_class: Any, schedule: str) -> None:
    """Each of these gave a wrong gradient, metric or crash in a naive pipeline."""
    compare(module_class, strategy={"schedule": schedule})


@pytest.mark.parametrize("module_class", [LogsEverywhere, LooseParameters, FunctionalHead])
def test_habits_of_real_steps_with_replicas(module_class: Any) -> None:
    """The same over two replicas of two stages."""
    compare(module_class, world_size=4)


def _keeps(schedule: str) -> dict[str, Any]:
    module = KeepsThings()
    run(module, pipeline(schedule=schedule), 2, rows(module))
    deep = module.deep[0][0][0][0][0]
    return {"kept": module.kept, "num_calls": module.num_calls, "deep": deep, "seen": module.seen}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_attributes_a_step_writes_are_equal_on_every_rank(schedule: str) -> None:
    """A list that only the last stage fills, a counter that every stage advances."""
    for result in run_ranks(_keeps, 2, schedule):
        assert result["kept"]["num_samples"] == 24
        assert len(result["kept"]["losses"]) == 3 * 4  # one a micro-batch
        assert result["num_calls"] == 3 * 4
        assert result["seen"] == set(range(1, 13))
        assert result["deep"] == [{count, -count} for count in range(1, 13)]


def _mixup(schedule: str) -> dict[str, Any]:
    module = Mixup()
    torch.manual_seed(torch.distributed.get_rank())  # ranks whose own streams have drifted apart
    return run(module, pipeline(schedule=schedule, num_microbatches=4), 2, rows(module))


def test_random_numbers_outside_of_blocks_agree_on_all_stages() -> None:
    """Inputs mixed with one permutation and targets with another."""
    first, second = run_ranks(_mixup, 2, "1F1B")
    assert_same_weights(first["weights"], second["weights"])
    assert first["metrics"] == second["metrics"]


class Shapes(IterableDataset[Any]):
    """Batches of ever new sizes."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        for index in range(self.num_batches):
            length, size = 3 + index % 53, 2 + index % 7
            tokens = torch.randint(1, 20, (size, length), generator=generator)
            label = torch.randint(0, 5, (size,), generator=generator)
            yield pad([{"tokens": t, "label": y, "index": index} for t, y in zip(tokens, label, strict=True)])


def _many_shapes(num_batches: int) -> dict[str, Any]:
    from lightning.pytorch import Callback

    held: list[int] = []

    class Measure(Callback):
        def on_train_batch_end(self, trainer_: Trainer, *args: Any) -> None:
            # Both sides of a round of 52 shapes; the collector's own rhythm is not the matter.
            if len(held) in (52, 104):
                gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])

    module = Classifier()
    strategy = pipeline()
    tracemalloc.start()
    run(module, strategy, 2, DataLoader(Shapes(num_batches), batch_size=None), callbacks=[Measure()], val=loader(8, 4))
    tracemalloc.stop()
    return {"weights": weights(module), "held": held}


def test_fifty_new_shapes_leave_memory_flat() -> None:
    """A buffer or a trace kept for every shape that ever came along."""
    module = Classifier()
    expected = run(module, "auto", 1, DataLoader(Shapes(106), batch_size=None), val=loader(8, 4))
    for result in run_ranks(_many_shapes, 2, 106):
        assert_same_weights(result["weights"], expected["weights"])
        early, late = result["held"][52], result["held"][104]
        assert late - early < 60_000, (early, late)


class Ranks(IterableDataset[Any]):
    """Three batches on one data rank, five on the other."""

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank % 2)
        for _ in range(3 if rank % 2 == 0 else 5):
            yield torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


def _dry(accumulate: int) -> dict[str, Any]:
    module = TinyChain()
    trainer_ = trainer(pipeline(uneven_inputs="stop"), 4, accumulate_grad_batches=accumulate)
    trainer_.fit(module, DataLoader(Ranks(), batch_size=None))
    return {"weights": weights(module), "global_step": trainer_.global_step}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_data_ranks_that_run_dry_stop_together(accumulate: int) -> None:
    """The longer one would wait for the others at the epoch's end."""
    results = run_ranks(_dry, 4, accumulate, timeout_seconds=90)
    for result in results:
        assert result["global_step"] == -(-3 // accumulate)
        for name, value in results[0]["weights"].items():
            assert (result["weights"][name] == value).all(), name


class Ones(TinyChain):
    """A constant gradient of one a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.blocks(torch.zeros_like(batch[0]))
        return (self.blocks[3].linear.bias.sum() + 0.0 * output.sum()) * batch[1].mean() / batch[1].mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.blocks[3].linear.bias.grad
        self.seen.append(float("nan") if gradient is None else float(gradient.mean()))


def _ones(num_samples: int, accumulate: int) -> list[float]:
    module = Ones()
    run(module, pipeline(num_microbatches=2), 2, rows(module, 1, num_samples), accumulate_grad_batches=accumulate)
    return module.seen


def test_a_short_last_window_counts_by_its_samples() -> None:
    """Divided by the full window, the last update of an epoch is too small."""
    assert run_ranks(_ones, 2, 6, 4)[1] == [1.0, 1.0]


class Summed(TinyChain):
    """A loss that is a sum over samples."""

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets, reduction="sum") / 8


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_sum_losses_have_their_own_weight(schedule: str) -> None:
    """A sum averaged over micro-batches trains with a fraction of its gradient."""
    compare(Summed, strategy={"microbatch_weight": "sum", "schedule": schedule})
    if schedule == "1F1B":
        compare(Summed, world_size=4, strategy={"microbatch_weight": "sum"})


def _precision(precision: Any) -> dict[str, Any]:
    module = Classifier()
    run(module, pipeline(), 2, loader(16, 8), precision=precision, val=loader(8, 4))
    return {"losses": module.losses}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision_reaches_every_stage(precision: Any) -> None:
    """Autocast around the step that has no effect inside of stages."""
    module = Classifier()
    run(module, "auto", 1, loader(16, 8), precision=precision, val=loader(8, 4))
    for result in run_ranks(_precision, 2, precision):
        assert result["losses"] == pytest.approx(module.losses, rel=5e-3 if "16" in precision else 1e-9)
        assert len(result["losses"]) == 2


def _lbfgs() -> None:
    class Second(TinyChain):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    module = Second()
    run(module, pipeline(), 2, rows(module))


def test_lbfgs_is_refused() -> None:
    """It would call the schedule several times a step."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_lbfgs, 2)
    assert all("LBFGS" in text for text in caught.value.failures.values())
    assert len(caught.value.failures) == 2


class Pooled(TinyChain):
    """Tells its gradients before each step."""

    reduction = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[dict[str, Any]] = []

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        losses = nn.functional.mse_loss(self(inputs), targets, reduction="none").mean(1)
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({n: p.grad.numpy().copy() for n, p in self.named_parameters() if p.grad is not None})


class PooledSum(Pooled):
    """The same with a sum."""

    reduction = "sum"


class Unequal(torch.utils.data.Dataset[Any]):
    """Ready batches of the given sizes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.batches = [tuple(torch.randn(2, size, 8, generator=generator)) for size in sizes]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def ready(sizes: tuple[int, ...]) -> Any:
    """A loader of ready batches."""
    return DataLoader(Unequal(sizes), batch_size=None)


def _pooled(module_class: Any, sizes: tuple[int, ...], strategy: dict[str, Any], accumulate: int) -> Any:
    torch.manual_seed(0)
    module = module_class()
    trainer_ = trainer(pipeline(**strategy), 2, accumulate_grad_batches=accumulate)
    trainer_.fit(module, ready(sizes), ready(sizes))
    return (module.gradients,)


@pytest.mark.parametrize(("module_class", "weight"), [(Pooled, "samples"), (PooledSum, "sum")])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_gradient_is_that_of_the_pooled_window(module_class: Any, weight: str, accumulate: int) -> None:
    """Batches of unequal sizes averaged as if equal; accumulated gradients divided again by each schedule call."""
    sizes = (8, 5, 3, 6, 8, 2)
    torch.manual_seed(0)
    module = module_class()
    batches = Unequal(sizes).batches
    pooled = tuple(torch.cat(parts) for parts in zip(*batches[:accumulate], strict=True))
    module.loss(pooled).backward()
    expected = {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}
    results = run_ranks(_pooled, 2, module_class, sizes, {"microbatch_weight": weight}, accumulate)
    found = {**results[0][0][0], **results[1][0][0]}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6, rtol=1e-5, err_msg=name)
    assert len(results[0][0]) == -(-len(sizes) // accumulate)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_batches_that_do_not_split_evenly(schedule: str) -> None:
    """A size error on one rank and a hang on the others, in training and evaluation."""
    sizes = (8, 7, 5, 3, 1)
    torch.manual_seed(0)
    module = Pooled()
    trainer("auto", 1).fit(module, ready(sizes), ready(sizes))
    results = run_ranks(_pooled, 2, Pooled, sizes, {"schedule": schedule}, 1)
    for step, expected in enumerate(module.gradients):
        found = {**results[0][0][step], **results[1][0][step]}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=1e-6, rtol=1e-4, err_msg=name)


class ReturnsMuch(TinyChain):
    """Returns more than fits in a small message, in training and prediction."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "rows": batch[0].repeat(1, 4000), "names": ["a", "b"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = outputs["rows"].shape, float((outputs["rows"][:, :8] - batch[0]).abs().max()), outputs["names"]


def _much() -> Any:
    module = ReturnsMuch()
    run(module, pipeline(), 4, rows(module, 4))
    return module.seen


def test_large_results_reach_every_rank_of_their_pipeline() -> None:
    """Callbacks of a rank that see another replica's outputs, or none."""
    for shape, difference, names in run_ranks(_much, 4):
        assert tuple(shape) == (4, 32000)
        assert difference == 0
        assert names == ["a", "b"]


class LossAverage(TinyChain):
    """Keeps a running mean of its loss in a buffer of its own, and stops training by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("num_batches", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_batches += 1
        loss = self.loss(batch)
        self.average.lerp_(loss.detach(), 0.5)
        self.log("average", self.average)
        if batch_idx == 1:
            self.trainer.should_stop = True
        return loss


def _loss_average(schedule: str, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = LossAverage()
    trainer_ = trainer(pipeline(schedule=schedule, num_microbatches=1), 2, max_epochs=3)
    trainer_.fit(module, rows(module))
    return {"average": float(module.average), "num_batches": float(module.num_batches), "steps": trainer_.global_step}


@pytest.mark.parametrize("schedule", ["GPipe", "ZBVZeroBubble"])
def test_buffers_and_stops_of_the_last_stage_count(schedule: str) -> None:
    """A statistic lost with the stage that wrote it; one rank that stops alone and leaves the others waiting."""
    torch.manual_seed(0)
    module = LossAverage()
    plain = trainer("auto", 1, max_epochs=3)
    plain.fit(module, rows(module))
    for result in run_ranks(_loss_average, 2, schedule, 2, timeout_seconds=60):
        assert result["average"] == pytest.approx(float(module.average), abs=1e-6)
        assert result["num_batches"] == float(module.num_batches)
        assert result["steps"] == plain.global_step


class Thaws(TinyChain):
    """Frozen in part at first; clips by itself; gathers in a step; returns rows when predicting."""

    def __init__(self) -> None:
        super().__init__()
        for block in list(self.blocks)[:2]:
            block.requires_grad_(False)
        self.gathered: list[float] = []

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("largest", batch[0].max(), False, False, True, True, "max")
        self.gathered.append(float(self.all_gather(torch.ones(())).sum()))
        self.trainer.strategy.barrier()
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def thaw(strategy: Any, devices: int, batch_size: int) -> dict[str, Any]:
    """Two epochs and a prediction."""
    torch.manual_seed(0)
    module = Thaws()
    trainer_ = trainer(strategy, devices, max_epochs=2)
    trainer_.fit(module, rows(module, batch_size))
    metrics = numbers(trainer_.callback_metrics)
    predictions = trainer_.predict(module, rows(module, batch_size))
    assert predictions is not None
    return {
        "weights": weights(module),
        "metrics": metrics,
        "predictions": torch.cat(list(predictions)).numpy(),
        "gathered": module.gathered[-1] if module.gathered else None,
    }


def _thaw(devices: int, batch_size: int, pipe: int) -> dict[str, Any]:
    return thaw(pipeline(pipeline_parallel_size=pipe, num_microbatches=2 if pipe > 1 else 1), devices, batch_size)


@pytest.mark.parametrize(("world_size", "pipe"), [(2, 2), (4, 2), (2, 1)])
def test_unfreezing_own_clipping_gathering_and_rows(world_size: int, pipe: int) -> None:
    """What takes gradients changes on the way; hooks and steps that talk to other ranks by themselves."""
    expected = thaw("auto", 1, 8)
    for result in run_ranks(_thaw, world_size, world_size, 8 // (world_size // pipe), pipe, timeout_seconds=60):
        assert_same_weights(result["weights"], expected["weights"])
        np.testing.assert_allclose(result["predictions"], expected["predictions"], atol=1e-5)
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
        if world_size == 2 and pipe == 2:
            assert result["gathered"] in (1.0, None)


class CalledMetrics(LightningModule):
    """Metric objects called as functions and logged, a sum among them, in training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.train_error, self.error = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()
        self.count = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Logs by step and by epoch."""
        output = self.layer(batch[0])
        self.train_error(output, batch[1])
        self.count(float(len(output)))
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        self.log("count", self.count, on_step=True, on_epoch=True)
        return nn.functional.mse_loss(output, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs by epoch."""
        self.error(self.layer(batch[0]), batch[1])
        self.log("error", self.error)

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def called_metrics(strategy: Any, devices: int) -> dict[str, float]:
    """Train with 13 validation samples: more batches on one rank than on the other."""
    generator = torch.Generator().manual_seed(0)

    def data(num_samples: int, batch_size: int) -> DataLoader[Any]:
        parts = torch.randn(num_samples, 4, generator=generator), torch.randn(num_samples, 2, generator=generator)
        return DataLoader(TensorDataset(*parts), batch_size=batch_size)

    run = trainer(strategy, devices, max_epochs=2)
    run.fit(CalledMetrics(), data(24, 12 // devices), data(13, 6))
    return numbers(run.callback_metrics)


def _called_metrics() -> dict[str, float]:
    return called_metrics(BigModelStrategy(), 2)


def test_called_metrics_wait_for_nobody_in_a_step() -> None:
    """A synchronisation in each evaluation batch, which hangs where ranks have different numbers of them."""
    expected = called_metrics("auto", 1)
    for result in run_ranks(_called_metrics, 2, timeout_seconds=60.0):
        assert result == pytest.approx(expected, rel=1e-5)


class WaitsForOthers(TinyChain):
    """The second rank's step ends only when the first has begun its backward; long names fill more than one message."""

    def __init__(self, path: str, skips: bool) -> None:
        super().__init__()
        self.path, self.skips = path, skips

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_second, signal = self.trainer.global_rank == 1, Path(f"{self.path}_{batch_idx}")
        deadline = time.monotonic() + 15.0
        while is_second and batch_idx and not signal.exists():  # in the first, ranks agree on units of weights
            assert time.monotonic() < deadline, "the first rank waits for this one before its backward"
            time.sleep(0.005)
        loss = self.loss(batch)
        for index in range(12):
            self.log(f"a_name_that_is_rather_long_{index}_{'x' * 80}", loss * index)
        return None if self.skips and is_second and batch_idx == 1 else loss

    def on_before_backward(self, loss: Any) -> None:
        if self.trainer.global_rank == 0:
            Path(f"{self.path}_{self.trainer.fit_loop.batch_idx}").touch()


def _wait_for_others(path: str, strategy: dict[str, Any], skips: bool, accumulate: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = WaitsForOthers(path, skips)
    return run(module, BigModelStrategy(**strategy), 2, rows(module, 4), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(("zero_stage", "accumulate"), [(0, 1), (0, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("skips", [False, True])
def test_nobody_waits_between_forward_and_backward(
    zero_stage: int, accumulate: int, skips: bool, tmp_path: Path
) -> None:
    """A message of what steps log that stops all ranks before they go on; or that meets one of the gradients."""
    strategy = {"zero_stage": zero_stage}
    first, second = run_ranks(
        _wait_for_others, 2, str(tmp_path / "signal"), strategy, skips, accumulate, timeout_seconds=60.0
    )
    assert first["metrics"] == second["metrics"]
    assert len(first["metrics"]) == 12
    assert_same_weights(first["weights"], second["weights"])
