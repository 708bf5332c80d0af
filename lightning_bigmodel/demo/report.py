"""What the demo shows: with colour and live bars on a terminal, as plain lines anywhere else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["DemoReport", "format_bytes", "format_names", "plot_losses"]

_PLOT_WIDTH = 52
_PLOT_HEIGHT = 12

Advance = Callable[[int, float], None]


class DemoReport:
    """Writes the demo's findings to a console, in the order in which they come.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, text: str) -> None:
        """Writes one line; rich markup is understood."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        """Begins a part of the demo."""
        self.line("")
        self.line(f"[bold]{text}[/bold]")

    def layout(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Shows what each rank owns.

        Args:
            ranks: The strategy's `describe_ranks()`: one dictionary a rank.
        """
        table = Table()
        for title in ("rank", "stage", "replica", "modules it owns", "parameters", "bytes"):
            table.add_column(title, justify="left" if title == "modules it owns" else "right", overflow="fold")
        for rank in ranks:
            stages = ", ".join(str(stage) for stage in rank["stages"])
            table.add_row(
                str(rank["rank"]),
                stages,
                str(rank["data_rank"]),
                escape(format_names(rank["modules"])),
                f"{rank['num_parameters']:,}",
                format_bytes(rank["parameter_bytes"]),
            )
        self._console.print(table)

    @contextlib.contextmanager
    def steps(self, text: str, num_steps: int, first_step: int = 0) -> Iterator[Advance]:
        """Shows steps as they are done, while the context lasts.

        Args:
            text: What is being done.
            num_steps: The last step.
            first_step: Steps done before.

        Yields:
            A function to call as ``advance(step, loss)``.
        """
        if not self._console.is_terminal:
            self.line(f"{text} ...")
            every = max(1, (num_steps - first_step) // 8)

            def print_line(step: int, loss: float) -> None:
                if step == first_step + 1 or step == num_steps or (step - first_step) % every == 0:
                    self.line(f"  step {step}/{num_steps}  loss {loss:.4f} nats")

            yield print_line
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(text, total=num_steps, completed=first_step, loss="starting")

            def move_bar(step: int, loss: float) -> None:
                progress.update(task, completed=step, loss=f"loss {loss:.4f} nats")

            yield move_bar

    def curve(self, losses: Sequence[float], entropy: float) -> None:
        """Plots losses against steps, with the entropy as a line."""
        self._console.print(plot_losses(losses, entropy), highlight=False, markup=False, soft_wrap=True)

    def text(self, title: str, text: str) -> None:
        """Shows generated text in a frame; characters that would move the cursor are replaced."""
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
        self._console.print(Panel(escape(shown), title=title))

    def comparison(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Shows a small table of numbers."""
        table = Table()
        for index, title in enumerate(titles):
            table.add_column(title, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def verdict(self, passed: bool, text: str) -> bool:
        """Writes whether a claim held, and returns it."""
        mark = "[bold green]yes[/bold green]" if passed else "[bold red]NO [/bold red]"
        self.line(f"{mark}  {text}")
        return passed


def format_bytes(num_bytes: int) -> str:
    """Writes a number of bytes for people.

    Example:
        >>> format_bytes(2_000_000)
        '1.91 MiB'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def format_names(names: Sequence[str]) -> str:
    """Writes module names, those that count up as a range.

    Example:
        >>> format_names(["tokens", "blocks.0", "blocks.1", "blocks.2", "norm"])
        'tokens, blocks.0 .. blocks.2, norm'
    """
    runs: list[list[str]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        last_stem, _, last_number = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        follows = number.isdigit() and last_number.isdigit() and int(number) == int(last_number) + 1
        if follows and stem == last_stem:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} .. {run[-1]}" for run in runs)


def plot_losses(losses: Sequence[float], entropy: float) -> str:
    """Draws losses against steps in plain characters.

    Args:
        losses: Loss of each step, the first step first; neighbours are averaged where there are more than columns.
        entropy: Value drawn as a dashed line.

    Returns:
        Lines of text, the largest loss on top.

    Raises:
        ValueError: If there is no loss, or one is not finite.
    """
    if not losses or not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"`losses` holds {len(losses)} values; a plot takes at least one and all of them finite.")
    num_columns = min(_PLOT_WIDTH, len(losses))
    cuts = [round(column * len(losses) / num_columns) for column in range(num_columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    top, bottom = max(*means, entropy), min(*means, entropy)
    scale = (_PLOT_HEIGHT - 1) / max(top - bottom, 1e-9)
    rows = [[" "] * num_columns for _ in range(_PLOT_HEIGHT)]
    entropy_row = round((top - entropy) * scale)
    rows[entropy_row] = ["-"] * num_columns
    for column, mean in enumerate(means):
        rows[round((top - mean) * scale)][column] = "*"
    lines = []
    for index, row in enumerate(rows):
        note = f"  entropy {entropy:.3f}" if index == entropy_row else ""
        lines.append(f"{top - index / scale:7.3f} |{''.join(row)}{note}")
    lines.append(" " * 8 + "+" + "-" * num_columns)
    last = str(len(losses))
    lines.append(" " * 9 + "1" + last.rjust(num_columns - 1) + "  steps")
    return "\n".join(lines)
