"""The demo from beginning to end, as its user sees it; runs in the parent process, which trains nothing itself."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from lightning_bigmodel.demo.launch import RankGroup, abandon_launch, prepare_launch
from lightning_bigmodel.demo.report import DemoReport
from lightning_bigmodel.demo.settings import DemoSettings

__all__ = ["run_demo"]

_RUN_MODULE = "lightning_bigmodel.demo.run"
_TOLERANCE_NATS = 1e-3


@dataclass
class _Run:
    """What a group of ranks reported, averaged over its ranks (all replicas have batches of one size)."""

    losses: dict[int, float] = field(default_factory=dict)
    validation_losses: dict[int, float] = field(default_factory=dict)
    sample: str = ""
    seconds: float = 0.0


def run_demo(settings: DemoSettings, console: Console) -> int:
    """Trains the demo's model over the ranks, compares it with one process and with a resumed run.

    Args:
        settings: What to run; `settings.output` is created if need be.
        console: Where to report.

    Returns:
        0 if every claim held, else 1.

    Raises:
        RankFailedError: If a rank fails; no rank is left running, whatever is raised.
        ValueError: If the standard library's sources are missing.
    """
    (settings.output / "logs").mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    # Ranks and this process load torch at the same time.
    prepare_launch(settings.output / "logs" / "launch.log", preload=_RUN_MODULE)
    try:
        passed = _run_parts(settings, DemoReport(console), began)
    except BaseException:
        abandon_launch()
        raise
    return 0 if passed else 1


def _run_parts(settings: DemoSettings, report: DemoReport, began: float) -> bool:
    from lightning_bigmodel.demo.data import byte_entropy_nats, read_texts

    train_text, validation_text = read_texts()
    entropy = byte_entropy_nats(train_text)
    _introduce(settings, report, len(train_text), len(validation_text))

    trained = _run(settings, report, "train", "train_ranks", "training")
    losses = [trained.losses[step] for step in range(1, settings.num_steps + 1)]
    report.heading("Loss against steps, in nats a byte")
    report.curve(losses, entropy)
    tail = losses[-max(1, settings.num_steps // 16) :]
    final, validation = sum(tail) / len(tail), trained.validation_losses[settings.num_steps]
    report.line(f"Entropy of single bytes of the training text: {entropy:.4f} nats ({entropy / math.log(2):.4f} bits).")
    beaten = final < entropy and validation < entropy
    report.verdict(
        beaten,
        f"training loss {final:.4f} (mean of the last {len(tail)}) and validation loss {validation:.4f} are"
        f" {'below it: the model uses' if beaten else 'NOT both below it: the model does not yet use'} context.",
    )
    report.heading("Text from the trained weights")
    report.text("sampled on one process, temperature 0.6", trained.sample)

    report.heading("The same run on one process: same seed, same data, plain Lightning, no strategy")
    single = _run(settings, report, "one-process", "train_one_process", "one process", num_ranks=1)
    equal = _compare_with_one_process(settings, report, trained, single)

    step = settings.resume_step
    report.heading(f"Resuming from the middle, in new ranks: {escape(str(settings.checkpoint_path(step)))}")
    resumed = _run(settings, report, "resume", "resume_ranks", "resuming", first_step=step)
    continues = _compare_with_resumed(settings, report, trained, resumed)

    report.heading("Result")
    report.line(f"checkpoints (sharded folders): {escape(str(settings.output / 'checkpoints'))}")
    report.line(f"results as JSON: {escape(str(settings.output / 'results.json'))}")
    report.line(f"ranks' own logs: {escape(str(settings.output / 'logs'))}")
    passed = beaten and equal and continues
    report.verdict(
        passed,
        f"all three claims hold; {time.perf_counter() - began:.0f} seconds in all"
        if passed
        else "not every claim above holds",
    )
    results: dict[str, Any] = {"entropy_nats": entropy, "passed": passed}
    for name, run in (("trained", trained), ("one_process", single), ("resumed", resumed)):
        results[name] = {
            "losses": run.losses,
            "validation_losses": run.validation_losses,
            "seconds": round(run.seconds, 2),
        }
    (settings.output / "results.json").write_text(json.dumps(results, indent=1))
    return passed


def _introduce(settings: DemoSettings, report: DemoReport, num_train_bytes: int, num_validation_bytes: int) -> None:
    stages, replicas = settings.num_stages, settings.num_replicas
    report.heading("bigmodel demo")
    report.line(
        f"An ordinary LightningModule, a GPT over bytes ({settings.num_blocks} blocks of width {settings.width}),"
        f" learns Python's standard library: {num_train_bytes:,} bytes to train on, {num_validation_bytes:,} to"
        " validate on."
    )
    report.line(
        f"Layout: {settings.num_ranks} {'rank' if settings.num_ranks == 1 else 'ranks'} on {settings.accelerator}:"
        f" {stages} pipeline {'stage' if stages == 1 else 'stages'} x {replicas} data"
        f" {'replica' if replicas == 1 else 'replicas'}; schedule {settings.schedule}, {settings.num_microbatches}"
        f" micro-batches; {settings.global_batch_size} windows of {settings.context} bytes a step."
    )
    report.line(f"Output: {escape(str(settings.output))}")


def _run(
    settings: DemoSettings,
    report: DemoReport,
    name: str,
    entry_name: str,
    text: str,
    num_ranks: int | None = None,
    first_step: int = 0,
) -> _Run:
    """Runs one group of ranks to its end and gathers what it reports."""
    began = time.perf_counter()
    distributed = num_ranks is None
    num_ranks = settings.num_ranks if num_ranks is None else num_ranks
    run = _Run()
    gather = {"step": _Mean(num_ranks, run.losses), "validation": _Mean(num_ranks, run.validation_losses)}
    with report.steps(text, settings.num_steps, first_step) as advance:
        group = RankGroup(
            f"{_RUN_MODULE}:{entry_name}",
            num_ranks=num_ranks,
            arguments=(settings,),
            name=name,
            log_directory=settings.output / "logs",
            distributed=distributed,
        )
        with group as ranks:
            for event in ranks.events():
                if event.kind in gather:
                    step, loss = event.value
                    if gather[event.kind].add(step, loss) and event.kind == "step":
                        advance(step, run.losses[step])
                elif event.kind == "layout" and event.rank == 0 and name == "train":
                    report.layout(event.value)
                elif event.kind == "sample":
                    run.sample = event.value
    run.seconds = time.perf_counter() - began
    return run


class _Mean:
    """Averages each step's values over ranks, into `means`, as soon as all ranks have reported theirs."""

    def __init__(self, num_ranks: int, means: dict[int, float]) -> None:
        self._num_ranks = num_ranks
        self._means = means
        self._values: dict[int, list[float]] = defaultdict(list)

    def add(self, step: int, value: float) -> bool:
        """Takes one rank's value; returns whether it was the step's last."""
        values = self._values[step]
        values.append(value)
        if len(values) < self._num_ranks:
            return False
        self._means[step] = sum(values) / len(values)
        return True


def _compare_with_one_process(settings: DemoSettings, report: DemoReport, trained: _Run, single: _Run) -> bool:
    last = settings.num_steps
    rows: list[tuple[str, str, str, str]] = []
    for title, ours, theirs in (
        ("validation loss after the last step", trained.validation_losses[last], single.validation_losses[last]),
        ("training loss of the last step", trained.losses[last], single.losses[last]),
    ):
        rows.append((title, f"{ours:.6f}", f"{theirs:.6f}", f"{abs(ours - theirs):.1e}"))
    report.comparison(("", f"{settings.num_ranks} ranks", "one process", "difference"), rows)
    difference = abs(trained.validation_losses[last] - single.validation_losses[last])
    equal = difference < _TOLERANCE_NATS
    return report.verdict(
        equal,
        f"the validation losses differ by {difference:.1e} nats, {'within' if equal else 'MORE THAN'}"
        f" {_TOLERANCE_NATS:.0e}.",
    )


def _compare_with_resumed(settings: DemoSettings, report: DemoReport, trained: _Run, resumed: _Run) -> bool:
    steps = range(settings.resume_step + 1, settings.num_steps + 1)
    missing = [step for step in steps if step not in resumed.losses]
    if missing or set(resumed.losses) - set(steps):
        return report.verdict(
            False,
            f"the resumed run did steps {sorted(resumed.losses)} instead of {steps.start} to {settings.num_steps}",
        )
    differences = {step: abs(trained.losses[step] - resumed.losses[step]) for step in steps}
    shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    rows = [
        (f"step {step}", f"{trained.losses[step]:.6f}", f"{resumed.losses[step]:.6f}", f"{differences[step]:.1e}")
        for step in shown
    ]
    report.comparison(("training loss", "uninterrupted", "resumed", "difference"), rows)
    largest = max(differences.values())
    # Each on its own: `max` may pass over a NaN.
    continues = all(difference < _TOLERANCE_NATS for difference in differences.values())
    return report.verdict(
        continues,
        f"the resumed run's {len(differences)} losses differ from the uninterrupted run's by at most"
        f" {largest:.1e} nats.",
    )
