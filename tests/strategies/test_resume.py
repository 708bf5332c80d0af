"""A resumed run is the same run: the bits of the one that was never stopped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lightning_bigmodel import GradientNoiseScale
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.resume_modules import CaptureLogs, fit

run_ranks = functools.partial(run_ranks_for, timeout_seconds=90.0)

PIPE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
PLAN = {"blocks.*.0": "colwise", "head": "replicate"}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "microbatches": (1, 1, {"num_microbatches": 2}),
    "replicas": (2, 2, {}),
    "zero1": (2, 2, {"zero_stage": 1}),
    "zero2": (2, 2, {"zero_stage": 2}),
    "zero3": (2, 2, {"zero_stage": 3}),
    "pipe": (2, 1, PIPE),
    "pipe_replicated": (2, 1, {**PIPE, "batch_source": "replicated"}),
    "pipe_zero3": (4, 2, {**PIPE, "zero_stage": 3}),
}
WHEN: dict[str, dict[str, Any]] = {
    "first": {"batch": 1},
    "middle": {"batch": 4},
    "second_epoch": {"batch": 8},
    "validation": {"hook": "validation"},
    "epoch": {"hook": "epoch"},
    "last": {"batch": 6},  # of its epoch, saved before its validation
}
HOW: dict[str, dict[str, Any]] = {
    "interval": {"val_check_interval": 2},
    "steps": {"val_check_interval": 4, "check_val_every_n_epoch": None},
}


def check(layout: str, when: str, path: Path, precision: str = "32-true", **options: Any) -> None:
    """Straight through, then from the checkpoint; every loss, mean and weight."""
    devices, data_ranks, settings = LAYOUTS[layout]
    arguments = (settings, devices, data_ranks)
    whole = run_ranks(fit, devices, *arguments, WHEN[when], str(path / "saved.ckpt"), precision, **options)
    resumed = run_ranks(fit, devices, *arguments, None, str(path / "saved.ckpt"), precision, **options)
    for expected, found in zip(whole, resumed, strict=True):
        assert 0 < found["batches"] < expected["batches"]
        assert found["losses"] == expected["losses"][-len(found["losses"]) :]
        num_epochs = 1 if when in ("second_epoch", "epoch") else 2
        assert found["epochs"][-num_epochs:] == expected["epochs"][-num_epochs:]
        assert found["rows"] == expected["rows"][-len(found["rows"]) :]  # each in the place that it has in the other
        for name, value in expected["weights"].items():
            assert (found["weights"][name] == value).all(), name


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("layout", ["one", "zero3", "pipe"])
def test_resumed_anywhere_it_is_the_same_run(layout: str, when: str, tmp_path: Path) -> None:
    """Data seen twice or never, other dropout, other noise, means over half an epoch."""
    check(layout, when, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_within_a_window(layout: str, tmp_path: Path) -> None:
    """Gradients of the first half of a window that are lost, or counted twice, or weighed anew; a loss scale too."""
    check(layout, "first", tmp_path, "16-mixed", accumulate_grad_batches=2)


@pytest.mark.parametrize("layout", ["one", "replicas", "pipe"])
def test_resumed_with_workers(layout: str, tmp_path: Path) -> None:
    """Workers that draw other noise, or hand out samples in another order."""
    check(layout, "middle", tmp_path, num_workers=2)


@pytest.mark.parametrize("layout", ["one", "replicas", "pipe"])
def test_resumed_without_a_length(layout: str, tmp_path: Path) -> None:
    """A batch that was loaded ahead of the checkpoint."""
    check(layout, "middle", tmp_path, stream=True)


@pytest.mark.parametrize(("layout", "other"), [("replicas", "zero3"), ("zero2", "replicas"), ("microbatches", "one")])
def test_another_layout_goes_on_with_the_same_data(layout: str, other: str, tmp_path: Path) -> None:
    """An epoch that begins again, in another order, where only the layout of the model has changed."""
    path = str(tmp_path / "saved.ckpt")
    devices, data_ranks, settings = LAYOUTS[layout]
    whole = run_ranks(fit, devices, settings, devices, data_ranks, WHEN["middle"], path, probability=0.0)
    devices, data_ranks, settings = LAYOUTS[other]
    resumed = run_ranks(fit, devices, settings, devices, data_ranks, None, path, probability=0.0)
    for expected, found in zip(whole, resumed, strict=True):
        assert found["losses"] == pytest.approx(expected["losses"][-len(found["losses"]) :], rel=1e-5)
        assert found["epochs"][-1] == pytest.approx(expected["epochs"][-1], rel=1e-5)


def _fit_fewer(path: str) -> tuple[dict[str, Any], str]:
    with CaptureLogs("lightning.pytorch.utilities.rank_zero") as logged:
        found = fit({}, 1, 1, None, path, accumulate_grad_batches=2)
    return found, logged.text


def test_what_cannot_be_taken_over_is_said(tmp_path: Path) -> None:
    """A failure, or silence, where there are fewer data ranks than before."""
    path = str(tmp_path / "saved.ckpt")
    run_ranks(fit, 2, {}, 2, 2, WHEN["first"], path, accumulate_grad_batches=2)
    found, said = run_ranks(_fit_fewer, 1, path)[0]
    assert len(found["losses"]) == 11
    assert "gradients of an accumulation window" in said
    assert "begin anew" in said


@pytest.mark.parametrize("when", ["first", "middle", "last", "validation"])
@pytest.mark.parametrize("layout", ["one", "zero2", "pipe"])
def test_the_modules_own_last_hook_comes_first(layout: str, when: str, tmp_path: Path) -> None:
    """A target network that has missed a step, or made one twice."""
    check(layout, when, tmp_path, follows=True)


def _said_by(path: str, options: dict[str, Any]) -> tuple[str, int]:
    with CaptureLogs("lightning.pytorch.utilities.rank_zero") as logged:
        found = fit({}, 1, 1, None, path, **options)
    return logged.text, len(found["losses"])


@pytest.mark.parametrize(
    ("when", "options"),
    [("middle", {"follows": True, "ballast": 5_000_000}), ("second_epoch", {"habit": "persistent"}), ("middle", {})],
)
def test_what_no_checkpoint_has_is_said(when: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A hook whose last call is lost, or other noise, of which nobody is told; or a note where all is there."""
    path = str(tmp_path / "saved.ckpt")
    run_ranks(fit, 1, {}, 1, 1, WHEN[when], path, **options)
    said, num_hooks = run_ranks(_said_by, 1, path, options)[0]
    assert ("whose outputs are too large" in said) == ("ballast" in options), said
    assert ("persistent_workers" in said) == ("habit" in options)
    # The hook of the last batch before is called once more than those of later ones, unless it cannot be.
    assert num_hooks == 12 - WHEN[when]["batch"] + ("ballast" not in options)


def _fit_noise(save: dict[str, Any] | None, path: str) -> list[float]:
    noise = GradientNoiseScale(decay=0.5)
    fit({"num_microbatches": 2}, 1, 1, save, path, accumulate_grad_batches=2, extra=[noise])
    return [noise.noise_scale, noise.noise_trace, noise.gradient_square]


def test_callbacks_go_on_within_a_window(tmp_path: Path) -> None:
    """A noise scale that has seen half of a window."""
    path = str(tmp_path / "saved.ckpt")
    assert run_ranks(_fit_noise, 1, WHEN["first"], path) == run_ranks(_fit_noise, 1, None, path)


@pytest.mark.parametrize("layout", ["replicas", "zero2", "zero3", "pipe"])
@pytest.mark.parametrize("save", [{"hook": "start"}, {"batch": 1}])
def test_saving_changes_nothing(save: dict[str, Any], layout: str, tmp_path: Path) -> None:
    """Random numbers drawn, gradients moved or states made by a save before the first step or within a window."""
    devices, data_ranks, settings = LAYOUTS[layout]
    arguments = (settings, devices, data_ranks)
    never = {"batch": -1}
    plain = run_ranks(fit, devices, *arguments, never, str(tmp_path / "a"), "16-mixed", accumulate_grad_batches=2)
    saved = run_ranks(fit, devices, *arguments, save, str(tmp_path / "b"), "16-mixed", accumulate_grad_batches=2)
    assert (tmp_path / "b").is_dir()
    for expected, found in zip(plain, saved, strict=True):
        assert found["losses"] == expected["losses"]
        assert all((found["weights"][name] == value).all() for name, value in expected["weights"].items())


@pytest.mark.parametrize("when", ["middle", "epoch", "second_epoch"])
@pytest.mark.parametrize("kind", ["own_generator", "weighted", "persistent", "draws"])
@pytest.mark.parametrize("layout", ["one", "zero2"])
def test_loaders_with_habits(layout: str, kind: str, when: str, tmp_path: Path) -> None:
    """Generators of the loader's own, workers that outlive an epoch, hooks that draw before the first batch."""
    check(layout, when, tmp_path, habit=kind)


@pytest.mark.parametrize("when", ["validation", "epoch"])
@pytest.mark.parametrize("layout", ["one", "zero2"])
def test_epochs_that_are_cut_short(layout: str, when: str, tmp_path: Path) -> None:
    """Noise that workers have drawn for batches that nobody took."""
    check(layout, when, tmp_path, habit="persistent", limit_train_batches=4, max_epochs=3)


@pytest.mark.parametrize("when", ["middle", "second_epoch"])
def test_the_windows_of_a_schedule_go_on(when: str, tmp_path: Path) -> None:
    """A callback that sets the window where an epoch starts, as a resumed one does not."""
    check("one", when, tmp_path, schedule={0: 2, 1: 3})


@pytest.mark.parametrize("layout", ["one", "zero2", "zero3", "pipe"])
@pytest.mark.parametrize("kind", ["sharded", "single"])
def test_groups_that_a_callback_has_added_are_there_again(layout: str, kind: str, tmp_path: Path) -> None:
    """A checkpoint with one group more than the optimizer of the new run; layers that are frozen again."""
    devices, data_ranks, settings = LAYOUTS[layout]
    arguments = ({**settings, "checkpoint_format": kind}, devices, data_ranks)
    path = str(tmp_path / "saved.ckpt")
    options: dict[str, Any] = {"unfreezes": True, "probability": 0.0, "max_epochs": 3, "shuffle": False}
    whole = run_ranks(fit, devices, *arguments, {"batch": 9}, path, **options)
    resumed = run_ranks(fit, devices, *arguments, None, path, **options)
    for expected, found in zip(whole, resumed, strict=True):
        assert found["rates"] == expected["rates"] == 2
        if kind == "sharded":
            assert found["losses"] == expected["losses"][-len(found["losses"]) :]


@pytest.mark.parametrize("when", ["middle", "validation", "second_epoch", "last", "epoch"])
@pytest.mark.parametrize("layout", ["one", "pipe"])
def test_a_rate_that_follows_a_metric_goes_on(layout: str, when: str, tmp_path: Path) -> None:
    """A step of the schedule that is left out at the end of the epoch that was resumed."""
    check(layout, when, tmp_path, plateau={}, max_epochs=4)


@pytest.mark.parametrize(
    ("when", "how"), [("middle", "interval"), ("last", "interval"), ("middle", "steps"), ("second_epoch", "steps")]
)
def test_what_followed_the_batch_is_done_first(how: str, when: str, tmp_path: Path) -> None:
    """A validation within an epoch, and a schedule that follows it, left out as they came after the save."""
    options = HOW[how]
    follows: dict[str, Any] = {"interval": "step", "frequency": options["val_check_interval"]}
    check("zero2", when, tmp_path, plateau=follows, max_epochs=2, **options)


@pytest.mark.parametrize("when", ["last", "epoch", "validation"])
def test_a_run_that_counts_steps_goes_on(when: str, tmp_path: Path) -> None:
    """An epoch's end twice, or never, where the steps are limited and epochs are not."""
    check("one", when, tmp_path, plateau={}, max_epochs=-1, max_steps=13)


@pytest.mark.parametrize("when", ["last", "epoch", "validation"])
def test_one_file_goes_on_at_the_end_of_an_epoch(when: str, tmp_path: Path) -> None:
    """The validation after the last batch, and the step of a schedule that follows it, without the ranks' own parts."""
    devices, data_ranks, settings = LAYOUTS["replicas"]
    arguments = ({**settings, "checkpoint_format": "single"}, devices, data_ranks)
    path = str(tmp_path / "saved.ckpt")
    options: dict[str, Any] = {"plateau": {}, "probability": 0.0, "habit": "quiet", "max_epochs": 3}
    whole = run_ranks(fit, devices, *arguments, WHEN[when], path, **options)
    resumed = run_ranks(fit, devices, *arguments, None, path, **options)
    for expected, found in zip(whole, resumed, strict=True):
        assert found["losses"] == expected["losses"][6:]
        assert found["epochs"][-2:] == expected["epochs"][-2:]
        for name, value in expected["weights"].items():
            assert (found["weights"][name] == value).all(), name


@pytest.mark.parametrize("kind", ["sharded", "single"])
@pytest.mark.parametrize("when", ["end", "validation", "last"])
def test_a_run_that_was_stopped_early_stays_so(when: str, kind: str, tmp_path: Path) -> None:
    """An epoch more than the run that was not interrupted."""
    arguments = ({"checkpoint_format": kind}, 1, 1)
    path = str(tmp_path / "saved.ckpt")

    def stops() -> EarlyStopping:
        in_validation = when == "validation"
        return EarlyStopping("val_loss", patience=1, stopping_threshold=1e3, check_on_train_epoch_end=not in_validation)

    options: dict[str, Any] = {"habit": "quiet", "probability": 0.0, "max_epochs": 4}
    save = WHEN.get(when, {"hook": when})
    whole = run_ranks(fit, 1, *arguments, save, path, extra=[stops()], **options)[0]
    resumed = run_ranks(fit, 1, *arguments, None, path, extra=[stops()], **options)[0]
    assert len(whole["losses"]) == 6
    assert resumed["batches"] == 0
    assert resumed["epochs"][-1]["val_loss"] == whole["epochs"][-1]["val_loss"]
    for name, value in whole["weights"].items():
        assert (resumed["weights"][name] == value).all(), name
    onwards = run_ranks(fit, 1, *arguments, None, path, **options)[0]
    assert onwards["batches"] == 18


@pytest.mark.parametrize("when", ["middle", "epoch"])
def test_metrics_with_more_than_states_go_on(when: str, tmp_path: Path) -> None:
    """A range, and a window over the latest values, that begin anew."""
    check("replicas", when, tmp_path, wraps=True)
