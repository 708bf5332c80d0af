"""A plan as a table: for each block the choice, the bytes it saves, and the seconds it pays; and what is outside."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from lightning_bigmodel.recompute._bytes import shown_bytes
from lightning_bigmodel.recompute.optimal import Plan

__all__ = ["plan_table"]


def plan_table(plans: Sequence[Plan]) -> Table:
    """One row a block, of ranks that have the same blocks once.

    Args:
        plans: Of all ranks, in order.
    """
    different = {plan.names: (rank, plan) for rank, plan in reversed(list(enumerate(plans)))}
    first = next(iter(plans))
    link = f", link {shown_bytes(first.bandwidth)}/s" if first.bandwidth else ""
    table = Table(title=f"Activations within {shown_bytes(first.budget)} a rank{link}")
    columns = ("rank", "block", "choice", "keeps", "saves", "pays a pass")
    for name in columns:
        table.add_column(name, justify="left" if name in ("block", "choice") else "right", no_wrap=True)
    for rank, plan in sorted(different.values(), key=lambda item: item[0]):
        for name, option, saved in zip(plan.names, plan.options, plan.saved_bytes, strict=True):
            table.add_row(
                str(rank),
                escape(name),
                option.choice,
                shown_bytes(option.kept),
                shown_bytes(max(0, saved - option.kept)),
                f"{1000 * option.seconds:.2f} ms",
            )
        total = sum(option.seconds for option in plan.options)
        freed = sum(max(0, saved - o.kept) for o, saved in zip(plan.options, plan.saved_bytes, strict=True))
        if plan.outside_bytes is None or plan.outside_bytes:
            outside = "not measured" if plan.outside_bytes is None else shown_bytes(plan.outside_bytes)
            table.add_row(str(rank), "outside", "on top of all", outside, "", "")
        most = f"at most {shown_bytes(plan.peak_bytes)}"
        table.add_row(
            str(rank), "all", most, "", shown_bytes(freed), f"{1000 * total:.2f} ms", style="bold", end_section=True
        )
    needed = max(plan.least_bytes + (plan.outside_bytes or 0) for plan in plans)
    if needed > first.budget:
        table.caption = (
            f"The budget is for blocks alone; with what is outside, a rank takes {shown_bytes(needed)} or more."
        )
    return table
