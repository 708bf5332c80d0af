"""What an audit of 16 bits has found: ranked, printed, written."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_bigmodel.callbacks._block_audit import BlockNumbers
from lightning_bigmodel.scaling.audit import OperatorKey, listed_name
from lightning_bigmodel.scaling.comparison import Comparison

__all__ = ["AuditFindings", "Proposal", "RankFindings"]

_NUM_SHOWN = 20
_NUMBERS = ("error", "num_overflows", "underflow", "underflow_unscaled", "largest", "headroom_bits")


@dataclass(frozen=True)
class Proposal:
    """What to give `BigModelPrecision`; modules are those that no few operators explain."""

    precision: str
    full_precision_ops: tuple[str, ...] = ()
    full_precision_modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        """To copy."""
        names = ("full_precision_ops", "full_precision_modules")
        lists = [f"{name}={list(getattr(self, name))!r}" for name in names if getattr(self, name)]
        return f"BigModelPrecision({', '.join([repr(self.precision), *lists])})".replace("'", '"')


@dataclass
class RankFindings:
    """What one rank has seen.

    Attributes:
        blocks: Name -> numbers.
        operators: Key -> numbers.
        ops: Operators to propose.
        modules: Blocks to propose.
    """

    blocks: dict[str, BlockNumbers] = field(default_factory=dict)
    operators: dict[OperatorKey, Comparison] = field(default_factory=dict)
    ops: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def add_block(self, name: str, numbers: BlockNumbers) -> None:
        """Of one more call."""
        known = self.blocks.get(name)
        self.blocks[name] = numbers if known is None else known + numbers

    def add_operators(self, seen: Mapping[OperatorKey, Comparison]) -> None:
        """Of more calls."""
        for key, numbers in seen.items():
            self.operators[key] = self.operators.get(key, Comparison()) + numbers

    def add(self, other: RankFindings) -> None:
        """Of another rank."""
        for name, numbers in other.blocks.items():
            self.add_block(name, numbers)
        self.add_operators(other.operators)
        self.ops += other.ops
        self.modules += other.modules


class AuditFindings:
    """The numbers of all ranks and steps.

    Args:
        blocks: Name -> numbers.
        operators: Key -> numbers.
        tolerance: Errors up to here are taken for what 16 bits are.
        num_steps: Steps audited.
    """

    def __init__(
        self,
        blocks: Mapping[str, BlockNumbers],
        operators: Mapping[OperatorKey, Comparison],
        *,
        tolerance: float,
        num_steps: int,
    ) -> None:
        self.blocks = dict(sorted(blocks.items(), key=lambda item: item[1].rank, reverse=True))
        self.operators = dict(sorted(operators.items(), key=lambda item: item[1].rank, reverse=True))
        self.tolerance, self.num_steps = tolerance, num_steps

    def loose_ops(self) -> list[str]:
        """Functions called outside of blocks that overflow or lose more than the tolerance."""
        found = [
            key.function
            for key, numbers in self.operators.items()
            if not key.block and listed_name(key.function) and numbers.exceeds(self.tolerance)
        ]
        return list(dict.fromkeys(found))

    def headroom_bits(self, block: str) -> float:
        """Of the largest value that any operator of a block gave."""
        return min((n.headroom_bits for key, n in self.operators.items() if key.block == block), default=float("inf"))

    # -- printed -------------------------------------------------------------------------------------------------------

    def show(self, proposal: Proposal, is_changed: bool) -> None:
        """Print both tables and what follows from them."""
        console = Console()
        console.print(self._block_table())
        for note in dict.fromkeys(numbers.note for numbers in self.blocks.values() if numbers.note):
            names = [name for name, numbers in self.blocks.items() if numbers.note == note]
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            console.print(f"{', '.join(names[:5])}{more}: {note}", markup=False, highlight=False)
        console.print(self._operator_table())
        bad = sum(numbers.exceeds(self.tolerance) for numbers in self.blocks.values())
        what = f"{bad} of {len(self.blocks)} blocks lose more than {self.tolerance:.1e}"
        if is_changed:
            console.print(f"{what}. Proposed:", highlight=False)
            console.print(str(proposal), markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(f"{what}; nothing {'more can be proposed' if bad else 'has to change'}.", highlight=False)

    def _block_table(self) -> Table:
        table = Table(title=f"Blocks by error against fp32, {self.num_steps} step(s)")
        for name in ("block", "output", "gradient", "overflows", "underflow", "without scale", "headroom"):
            table.add_column(name, justify="left" if name == "block" else "right")
        for name, numbers in list(self.blocks.items())[:_NUM_SHOWN]:
            gradient = numbers.gradient
            table.add_row(
                escape(name),
                self._error(numbers.output),
                self._error(gradient),
                f"{numbers.output.num_overflows + gradient.num_overflows:.0f}",
                f"{gradient.underflow:.1%}",
                f"{gradient.underflow_unscaled:.1%}",
                _bits(self.headroom_bits(name)),
            )
        return table

    def _operator_table(self) -> Table:
        table = Table(title="Operators by overflow and error, over all blocks")
        for name in ("operator", "function", "pass", "calls", "error", "overflows", "underflow", "headroom"):
            table.add_column(name, justify="left" if name in ("operator", "function", "pass") else "right")
        total: dict[tuple[str, str, str], Comparison] = {}
        for key, numbers in self.operators.items():
            group = (key.operator, key.function, key.phase)
            total[group] = total.get(group, Comparison()) + numbers
        ranked = sorted(total.items(), key=lambda item: item[1].rank, reverse=True)
        for group, numbers in ranked[:_NUM_SHOWN]:
            table.add_row(
                *map(escape, group),
                f"{numbers.num_calls:.0f}",
                self._error(numbers),
                f"{numbers.num_overflows:.0f}",
                f"{numbers.underflow:.1%}",
                _bits(numbers.headroom_bits),
            )
        return table

    def _error(self, numbers: Comparison) -> str:
        if not numbers.num_compared:
            return "-"
        text = f"{numbers.error:.1e}"
        return f"[bold red]{text}[/]" if numbers.exceeds(self.tolerance) else text

    # -- written -------------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> str:
        """Write `blocks.csv`, `operators.csv` and, where matplotlib is installed, `blocks.png`; returns what to say."""
        folder.mkdir(parents=True, exist_ok=True)
        block_rows = [
            {
                "rank": rank,
                "block": name,
                **{f"output_{each}": getattr(numbers.output, each) for each in _NUMBERS},
                **{f"gradient_{each}": getattr(numbers.gradient, each) for each in _NUMBERS},
                "headroom_bits": self.headroom_bits(name),
                "note": numbers.note,
            }
            for rank, (name, numbers) in enumerate(self.blocks.items(), 1)
        ]
        operator_rows = [
            {
                "rank": rank,
                "block": key.block,
                "pass": key.phase,
                "operator": key.operator,
                "function": key.function,
                "num_calls": numbers.num_calls,
                "num_values": numbers.num_values,
                **{each: getattr(numbers, each) for each in _NUMBERS},
            }
            for rank, (key, numbers) in enumerate(self.operators.items(), 1)
        ]
        _write_rows(folder / "blocks.csv", block_rows)
        _write_rows(folder / "operators.csv", operator_rows)
        if not self._draw(folder / "blocks.png"):
            return f"Written to {folder}, without a picture: matplotlib is not installed (`pip install matplotlib`)."
        return f"Written to {folder}."

    def _draw(self, path: Path) -> bool:
        """A bar for each block's two errors; whether it could be drawn."""
        try:
            figure_module: Any = importlib.import_module("matplotlib.figure")
        except ImportError:
            return False
        shown = list(self.blocks.items())[:_NUM_SHOWN][::-1]
        # Without pyplot: no window system is asked, and the figure goes with this function.
        figure = figure_module.Figure(figsize=(8, 1.5 + 0.4 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        least = self.tolerance / 1e4  # a logarithm has no 0
        for offset, label, part in ((0.2, "output", "output"), (-0.2, "gradient", "gradient")):
            values = [_drawn(getattr(numbers, part), least) for _, numbers in shown]
            axes.barh([index + offset for index in range(len(shown))], values, height=0.38, left=least, label=label)
        axes.axvline(self.tolerance, color="black", linestyle="--", linewidth=1, label="tolerance")
        axes.set_xscale("log")
        axes.set_yticks(range(len(shown)), [name for name, _ in shown])
        axes.set_xlabel("relative error against fp32 (overflow: 10)")
        axes.legend()
        figure.savefig(path)
        return True


def _drawn(numbers: Comparison, least: float) -> float:
    return 10.0 if numbers.num_overflows else min(max(numbers.error, least), 10.0)


def _bits(bits: float) -> str:
    return "-" if bits == float("inf") else f"{bits:.1f} bits"


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
