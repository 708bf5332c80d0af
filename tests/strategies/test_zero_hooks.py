"""What user code sees and does under ZeRO: gradients in hooks, norms, weights, methods called outside of steps."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.cli import main
from lightning_bigmodel.testing import RanksFailedError
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.test_trainer import assert_same_weights
from tests.strategies.trainer_modules import Classifier, loader, trainer, weights

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero0": (2, 2, {}),
    "zero1": (2, 2, {"zero_stage": 1}),
    "zero2": (2, 2, {"zero_stage": 2}),
    "zero3": (2, 2, {"zero_stage": 3}),
    "hybrid3": (4, 4, {"zero_stage": 3, "data_replicate_size": 2}),
}


class Habits(Classifier):
    """Hooks that read, change and log gradients and weights."""

    def __init__(self, clip: str = "trainer", norm_type: float = 2.0) -> None:
        super().__init__()
        self.clip, self.norm_type = clip, norm_type
        self.norms: list[float] = []
        self.embed_norms: list[float] = []
        self.head_gradients: list[Any] = []
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """With a parameter that has no dimensions."""
        logits: Tensor = super().forward(batch) * self.scalar
        return logits

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """The documented way to watch gradient norms."""
        super().on_before_optimizer_step(optimizer)
        norms = grad_norm(self, norm_type=self.norm_type)
        self.norms.append(float(norms[f"grad_{self.norm_type}_norm_total"]))
        assert self.embed.weight.grad is not None
        self.embed_norms.append(float(self.embed.weight.grad.norm()))
        strategy = self.trainer.strategy
        if isinstance(strategy, BigModelStrategy):
            gradient = strategy.whole_gradient(self.head.weight)
        else:
            gradient = self.head.weight.grad
        assert gradient is not None
        self.head_gradients.append(gradient.double().numpy().copy())
        if self.clip == "hook":
            total = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05, norm_type=self.norm_type)
            self.log("total", total)
        elif self.clip == "hook_value":
            torch.nn.utils.clip_grad_value_(self.parameters(), 1e-3)

    def configure_optimizers(self) -> Any:
        """Plain SGD, whose steps show gradients as they are."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def habits(strategy: Any, devices: int, batch_size: int, clip: str, norm_type: float) -> dict[str, Any]:
    """Train and say what the hooks saw."""
    module = Habits(clip, norm_type)
    options = {"gradient_clip_val": 0.05} if clip == "trainer" else {}
    run = trainer(strategy, devices, **options)
    run.fit(module, loader(32, batch_size), loader(10, 4))
    return {
        "weights": weights(module),
        "norms": module.norms,
        "embed_norms": module.embed_norms,
        "head": module.head_gradients,
        "total": float(run.callback_metrics.get("total", 0.0)),
    }


def _habits(devices: int, batch_size: int, layout: dict[str, Any], clip: str, norm_type: float) -> dict[str, Any]:
    return habits(BigModelStrategy(**layout), devices, batch_size, clip, norm_type)


@pytest.mark.parametrize(
    ("name", "clip", "norm_type"),
    [
        *((name, "hook", 2.0) for name in LAYOUTS),
        ("hybrid3", "trainer", 2.0),
        ("zero2", "trainer", 2.0),
        ("zero3", "hook", 1.0),
        ("zero1", "hook", float("inf")),
        ("zero3", "hook_value", 2.0),
    ],
)
def test_hooks_see_whole_gradients(name: str, clip: str, norm_type: float) -> None:
    """A norm over this rank's rows, a clip that looks at no gradient at all, a scalar counted once a rank."""
    devices, data_size, layout = LAYOUTS[name]
    expected = habits("auto", 1, 8, clip, norm_type)
    for result in run_ranks(_habits, devices, devices, 8 // data_size, layout, clip, norm_type):
        assert_same_weights(result["weights"], expected["weights"])
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["embed_norms"] == pytest.approx(expected["embed_norms"], rel=1e-5)
        assert result["total"] == pytest.approx(expected["total"], rel=1e-5)
        for found, wanted in zip(result["head"], expected["head"], strict=True):
            assert found == pytest.approx(wanted, abs=1e-6)


class Edits(Classifier):
    """Changes gradients in a hook, in one of the ways people do."""

    def __init__(self, how: str, hook: str) -> None:
        super().__init__()
        self.how, self.hook = how, hook

    def on_after_backward(self) -> None:
        """Before clipping."""
        super().on_after_backward()
        if self.hook == "on_after_backward":
            self.edit()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Before clipping too."""
        super().on_before_optimizer_step(optimizer)
        if self.hook == "on_before_optimizer_step":
            self.edit()

    def edit(self) -> None:
        """One of the ways."""
        for parameter in self.parameters():
            if parameter.grad is None:
                continue
            if self.how == "in place":
                parameter.grad.mul_(0.5)
            elif self.how == "assigned":
                parameter.grad = parameter.grad * 0.5
            elif self.how == "data":
                parameter.grad.data = parameter.grad.data / 2
            elif self.how == "taken off" and parameter.ndim == 1:
                parameter.grad = None

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def edits(strategy: Any, devices: int, batch_size: int, how: str, hook: str) -> dict[str, Any]:
    """Train with a clip besides."""
    module = Edits(how, hook)
    run = trainer(strategy, devices, gradient_clip_val=0.3)
    run.fit(module, loader(32, batch_size), loader(10, 4))
    return weights(module)


def _edits(settings: dict[str, Any], how: str, hook: str) -> dict[str, Any]:
    return edits(BigModelStrategy(**settings), 2, 4, how, hook)


@pytest.mark.parametrize("how", ["in place", "assigned", "data", "taken off"])
@pytest.mark.parametrize(("stage", "hook"), [(3, "on_after_backward"), (1, "on_before_optimizer_step")])
def test_gradients_changed_in_hooks_count(stage: int, hook: str, how: str) -> None:
    """A change of the user's that the step does not see."""
    expected = edits("auto", 1, 8, how, hook)
    for result in run_ranks(_edits, 2, {"zero_stage": stage}, how, hook):
        assert_same_weights(result, expected)


class Grows(Classifier):
    """Its blocks are trained from the second epoch on."""

    def configure_optimizers(self) -> Any:
        """The head alone at first."""
        return torch.optim.Adam(self.head.parameters(), lr=1e-2)

    @property
    def backbone(self) -> Any:
        """What `BackboneFinetuning` asks for."""
        return self.blocks


def grows(strategy: Any, devices: int, batch_size: int) -> dict[str, Any]:
    """Train with Lightning's own callback."""
    module = Grows()
    finetuning = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=1e-3)
    run = trainer(strategy, devices, max_epochs=3, callbacks=[finetuning])
    run.fit(module, loader(16, batch_size), loader(8, 4))
    return weights(module)


def _grows(settings: dict[str, Any]) -> dict[str, Any]:
    return grows(BigModelStrategy(**settings), 2, 4)


@pytest.mark.parametrize("stage", [1, 3])
def test_layers_that_are_unfrozen_later_are_trained(stage: int) -> None:
    """Whole parameters put into an optimizer of row shards, which never get a gradient."""
    expected = grows("auto", 1, 8)
    for result in run_ranks(_grows, 2, {"zero_stage": stage}):
        assert_same_weights(result, expected)


@pytest.mark.parametrize("is_exponential", [False, True])
def test_averages_of_whole_models_are_refused(is_exponential: bool) -> None:
    """An error from inside the callback, epochs later."""
    with pytest.raises(RanksFailedError, match="ExponentialMovingAverage"):
        run_ranks(_averaged, 2, is_exponential)


def _averaged(is_exponential: bool) -> None:
    callback = EMAWeightAveraging() if is_exponential else StochasticWeightAveraging(1e-2)
    trainer(BigModelStrategy(zero_stage=3), 2, callbacks=[callback]).fit(Classifier(), loader(16, 4), loader(8, 4))


class Replaced(Classifier):
    """Gives its parameters other memory after set-up."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.new_dtype = dtype

    def on_train_start(self) -> None:
        """As `to` does for memory formats and types."""
        for parameter in self.blocks.parameters():
            parameter.data = parameter.data.t().clone().t() if parameter.ndim == 2 else parameter.data.clone()
            if self.new_dtype is not None:
                parameter.data = parameter.data.to(self.new_dtype)


def replaced(strategy: Any, devices: int, batch_size: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Train."""
    module = Replaced(dtype)
    trainer(strategy, devices, num_sanity_val_steps=0).fit(module, loader(16, batch_size), loader(8, 4))
    return weights(module)


def _replaced(stage: Any, dtype: torch.dtype | None = None) -> dict[str, Any]:
    return replaced(BigModelStrategy(zero_stage=stage), 2, 4, dtype)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_with_other_memory_are_still_trained(stage: int) -> None:
    """Rows of memory that the module does not use any more."""
    expected = replaced("auto", 1, 8)
    for result in run_ranks(_replaced, 2, stage):
        assert_same_weights(result, expected)
    with pytest.raises(RanksFailedError, match=r"`blocks.0.*has become .*float64"):
        run_ranks(_replaced_by_double, 2, stage)


def _replaced_by_double(stage: Any) -> None:
    module = Doubled()
    trainer(BigModelStrategy(zero_stage=stage), 2, num_sanity_val_steps=0).fit(module, loader(16, 4), loader(8, 4))


class Doubled(Classifier):
    """Converts its parameters where it is too late."""

    def on_after_backward(self) -> None:
        """Between backward and step."""
        super().on_after_backward()
        for parameter in self.blocks.parameters():
            parameter.grad = None
            parameter.data = parameter.data.double()


class Prototypes(Classifier):
    """Normalises a weight in its step, sets one anew between steps, and has a parameter without elements."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        self.optimizer = optimizer
        num_rows = 0 if optimizer == "SGD" else 1  # torch's Adafactor divides by the number of elements
        self.nothing, self.scalar = nn.Parameter(torch.ones(num_rows, 3)), nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """As methods with prototypes do."""
        with torch.no_grad():
            self.head.weight.copy_(nn.functional.normalize(self.head.weight, dim=1))
        return super().training_step(batch, batch_idx)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """With the parameters that have no dimensions, and no elements."""
        logits: Tensor = super().forward(batch) * (self.scalar + 0.1 * self.nothing.sum())
        return logits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Other memory for a weight."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        strategy = self.trainer.strategy
        with strategy.whole_parameters() if isinstance(strategy, BigModelStrategy) else torch.enable_grad():
            self.embed.weight.data = self.embed.weight.data * 0.99

    def configure_optimizers(self) -> Any:
        """One of torch's."""
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.05)


def prototypes(strategy: Any, devices: int, batch_size: int, optimizer: str, path: str | None = None) -> Any:
    """Train, and save where a path is given."""
    module = Prototypes(optimizer)
    run = trainer(strategy, devices)
    run.fit(module, loader(16, batch_size), loader(8, 4))
    if path is not None:
        run.save_checkpoint(path)
    return weights(module)


def _prototypes(stage: Any, optimizer: str, path: str) -> Any:
    return prototypes(BigModelStrategy(zero_stage=stage), 2, 4, optimizer, path)


@pytest.mark.parametrize("optimizer", ["SGD", "Adafactor"])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_written_in_a_step_stay_written(stage: int, optimizer: str, tmp_path: Path) -> None:
    """A write that is lost when the memory is given up; a checkpoint that lacks an empty parameter."""
    expected = prototypes("auto", 1, 8, optimizer)
    for result in run_ranks(_prototypes, 2, stage, optimizer, str(tmp_path / "run.ckpt")):
        assert_same_weights(result, expected)
    assert main(["convert", str(tmp_path / "run.ckpt"), str(tmp_path / "out.ckpt")]) == 0
    state = torch.load(tmp_path / "out.ckpt", weights_only=False)["state_dict"]
    module = Prototypes(optimizer)
    module.load_state_dict(state, strict=True)
    assert_same_weights(weights(module), expected)


class Sparse(Classifier):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, sparse=True)

    def configure_optimizers(self) -> Any:
        """SGD takes sparse gradients."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _sparse() -> None:
    trainer(BigModelStrategy(zero_stage=2), 2).fit(Sparse(), loader(16, 4), loader(8, 4))


def test_sparse_gradients_are_refused_by_name() -> None:
    """An error about reshaping from inside torch."""
    with pytest.raises(RanksFailedError, match=r"gradient of `embed.weight` is sparse.*sparse=False"):
        run_ranks(_sparse, 2)


class Constrained(Classifier):
    """Changes its own weights between steps, and reads them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keeps a weight in a range, as Wasserstein critics do."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        with self._whole(), torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)

    def on_fit_end(self) -> None:
        """Reads weights and calls a method."""
        with self._whole():
            batch = next(iter(loader(4, 4)))
            self.seen = float(self(batch).detach().abs().sum()) + float(
                sum(p.detach().norm() for p in self.parameters())
            )

    def _whole(self) -> Any:
        strategy = self.trainer.strategy
        return strategy.whole_parameters() if isinstance(strategy, BigModelStrategy) else torch.enable_grad()


def constrained(strategy: Any, devices: int, batch_size: int) -> dict[str, Any]:
    """Train with a constraint on a weight."""
    module = Constrained()
    trainer(strategy, devices).fit(module, loader(32, batch_size), loader(10, 4))
    return {"weights": weights(module), "seen": module.seen}


def _constrained(devices: int, batch_size: int, layout: dict[str, Any]) -> dict[str, Any]:
    return constrained(BigModelStrategy(**layout), devices, batch_size)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_weights_changed_by_hand_stay_changed(name: str) -> None:
    """A constraint that the next step forgets; a forward in a hook on rows only."""
    devices, data_size, layout = LAYOUTS[name]
    expected = constrained("auto", 1, 8)
    for result in run_ranks(_constrained, devices, devices, 8 // data_size, layout):
        assert_same_weights(result["weights"], expected["weights"])
        assert result["seen"] == pytest.approx(expected["seen"], rel=1e-5)


class Careless(Classifier):
    """Uses its weights outside of steps without saying so."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_train_epoch_end(self) -> None:
        """One of the ways."""
        if self.what == "arithmetic":
            _ = self.head.weight * 2
        elif self.what == "method":
            self(next(iter(loader(4, 4))))
        elif self.what == "state_dict":
            self.state_dict()
        elif self.what == "copy":
            copy.deepcopy(self.head)


def _careless(what: str, stage: int) -> str:
    run = trainer(BigModelStrategy(zero_stage=stage), 2)  # type: ignore[arg-type]  # 2 or 3
    run.fit(Careless(what), loader(16, 4), loader(10, 4))
    return "done"


@pytest.mark.parametrize("what", ["arithmetic", "method", "state_dict", "copy"])
def test_use_outside_of_a_step_is_right_or_explained(what: str) -> None:
    """Wrong values, a shape error from inside torch, or a hang."""
    assert run_ranks(_careless, 2, what, 2) == ["done", "done"]
    with pytest.raises(RanksFailedError, match=r"`(head|embed)\.weight` is read outside of a step.*whole_parameters"):
        run_ranks(_careless, 2, what, 3)


def _evaluate(devices: int, batch_size: int, layout: dict[str, Any], num_samples: int) -> list[Any]:
    return evaluate(BigModelStrategy(**layout), devices, batch_size, num_samples)


def evaluate(strategy: Any, devices: int, batch_size: int, num_samples: int) -> list[Any]:
    """Every evaluating entry point before and after training, with ranks that have fewer batches."""
    module = Classifier()
    run = trainer(strategy, devices)
    data = loader(num_samples, batch_size)
    found = [run.test(module, data, verbose=False)[0]["test_loss"]]
    run.fit(module, loader(16, 8 // devices), data)
    found.append(run.test(module, data, verbose=False)[0]["test_loss"])
    predictions = run.predict(module, data)
    assert predictions is not None
    found.append([float(value) for part in predictions for value in part["logits"].sum(1)])
    return found


@pytest.mark.parametrize("num_samples", [3, 5])
def test_ranks_with_fewer_evaluation_batches(num_samples: int) -> None:
    """Ranks that have no batch left while others gather parameters for theirs."""
    expected = evaluate("auto", 1, 1, num_samples)
    for result in run_ranks(_evaluate, 2, 2, 1, {"zero_stage": 3}, num_samples):
        assert result[0] == pytest.approx(expected[0], rel=1e-5)
        assert result[1] == pytest.approx(expected[1], rel=1e-5)
        assert result[2] == pytest.approx(expected[2], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zero_stage": 4}, "Use 0, 1, 2 or 3"),
        ({"zero_stage": True}, "Use 0, 1, 2 or 3"),
        ({"zero_stage": 2.0}, "Use 0, 1, 2 or 3"),
        ({"zero_stage": 3, "keep_gathered": "false"}, "True or False"),
        ({"zero_stage": 2, "reduce_every_microbatch": 0}, "True or False"),
        ({"zero_stage": 3, "data_replicate_size": 0}, "at least 1"),
        ({"zero_stage": 2, "keep_gathered": True}, "zero_stage=3"),
        ({"zero_stage": 1, "reduce_every_microbatch": True}, "zero_stage=2"),
        ({"zero_stage": 3, "pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble"}, "keep_gathered=True"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(settings: dict[str, Any], said: str) -> None:
    """A setting that is silently ignored."""
    with pytest.raises(ValueError, match=said):
        BigModelStrategy(**settings)


def _start(settings: dict[str, Any]) -> str:
    try:
        trainer(BigModelStrategy(**settings), 4).fit(Classifier(), loader(16, 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zero_stage": 3, "data_replicate_size": 3}, "does not divide the 4 data-parallel ranks"),
        ({"zero_stage": 0, "data_replicate_size": 2}, "has no effect with `zero_stage=0`"),
        ({"zero_stage": 3, "pipeline_parallel_size": 3}, "cannot be divided"),
        ({"zero_stage": 3, "blocks": ["nothing.*"]}, "matches no module"),
    ],
)
def test_impossible_layouts_are_refused_on_every_rank(settings: dict[str, Any], said: str) -> None:
    """An error on one rank while the others wait."""
    answers = run_ranks(_start, 4, settings)
    assert all(said in answer for answer in answers), answers
