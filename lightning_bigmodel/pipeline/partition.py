"""Cut the traced chain of units into stages of equal cost, and give every module and parameter its owners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_bigmodel.pipeline.trace import StepTrace

__all__ = [
    "Ownership",
    "PartitionError",
    "balance",
    "cut_points",
    "parameter_owners",
    "stage_of_positions",
    "unit_costs",
]

# Computing decides the pace of a pipeline, so floating-point operations weigh most; parameters weigh in so that blocks
# of equal work are spread by memory too, and so that an embedding (no multiply-adds) is not taken for free.
_PARAMETER_SHARE = 0.1


class PartitionError(ValueError):
    """The model cannot be cut as asked without changing its results; the message names the module."""


@dataclass(frozen=True)
class Ownership:
    """Which stages hold what.

    Attributes:
        num_stages: Number of stages.
        stage_of_unit: Unit module -> stages at which it is called.
        stages_of_parameter: id(parameter) -> sorted stages that hold it; the first is its primary owner.
    """

    num_stages: int
    stage_of_unit: Mapping[nn.Module, tuple[int, ...]]
    stages_of_parameter: Mapping[int, tuple[int, ...]]


def unit_costs(trace: StepTrace) -> list[float]:
    """Cost of each unit call as a share of the whole, from its FLOPs and parameters."""
    parameters = [sum(parameter.numel() for parameter in call.module.parameters()) for call in trace.units]
    flops = [call.flops for call in trace.units]
    if flops:
        flops[-1] += trace.flow.flops.get(trace.end, 0)  # what comes after the last unit runs on its stage
    total_flops, total_parameters = sum(flops) or 1, sum(parameters) or 1
    return [
        (1 - _PARAMETER_SHARE) * flop / total_flops + _PARAMETER_SHARE * count / total_parameters
        for flop, count in zip(flops, parameters, strict=True)
    ]


def balance(costs: Sequence[float], starts: Sequence[int], num_stages: int) -> list[int]:
    """Choose at which of `starts` the stages begin so that the most expensive stage is as cheap as possible.

    Args:
        costs: Cost of each position.
        starts: Positions a stage may begin at, ascending. The first stage always begins at position 0.
        num_stages: Number of stages, at most `len(starts)`.

    Returns:
        The first position of each stage. Among equally good cuts the one with the smallest sum of squares is taken, so
        that the other stages are even too.
    """
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    borders = [0, *starts[1:], len(costs)]  # what comes before the first block belongs to the first stage
    num_segments = len(borders) - 1

    def segment(first: int, last: int) -> float:
        return prefix[borders[last]] - prefix[borders[first]]

    # best[i]: (largest stage, sum of squares, starts) for segments 0..i in the stages so far
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(stage + 1, num_segments - (num_stages - stage - 1) + 1):
            options = [
                (max(largest, segment(first, end)), squares + segment(first, end) ** 2, [*chosen, borders[first]])
                for first, (largest, squares, chosen) in best.items()
                if first < end
            ]
            following[end] = min(
                (round(largest, 12), round(squares, 12), chosen) for largest, squares, chosen in options
            )
        best = following
    return best[num_segments][2]


def cut_points(trace: StepTrace, num_stages: int) -> list[int]:
    """First position of each stage for a traced step.

    Raises:
        PartitionError: Where fewer blocks than stages were called.
    """
    starts = [position for position, call in enumerate(trace.units) if call.is_block]
    if len(starts) < num_stages:
        raise PartitionError(
            f"This layout needs {num_stages} pipeline stages, but stages can begin only at {len(starts)} blocks of "
            "this step. (Blocks within one call of `torch.utils.checkpoint.checkpoint` stay together: checkpoint them "
            "one by one.)"
        )
    return balance(unit_costs(trace), starts, num_stages)


def stage_of_positions(trace: StepTrace, owners: Mapping[nn.Module, Collection[int]], num_stages: int) -> list[int]:
    """The stage of each unit call of a step under a given ownership of modules, for steps other than the one cut first.

    Raises:
        PartitionError: Where the step calls modules in an order that would send values backwards.
    """
    stages: list[int] = []
    current = 0
    for call in trace.units:
        allowed = owners.get(call.module)
        if allowed:
            reachable = [stage for stage in allowed if stage >= current]
            if not reachable:
                raise PartitionError(
                    f"`{call.name}` is held by pipeline stage {max(allowed)}, but this step calls it after modules of "
                    f"stage {current}. Steps must call modules in the order of the training step."
                )
            current = reachable[0]
        stages.append(current)
    return stages


def parameter_owners(root: nn.Module, trace: StepTrace, stages: Sequence[int], num_stages: int) -> Ownership:
    """Give every parameter of `root` the stages that need it.

    A parameter belongs to each stage at which a unit that contains it is called, and to each stage whose code uses it
    outside of units. One that no traced code uses stays with every stage.

    Raises:
        PartitionError: Where values leak from inside a unit into code of another stage, or a random value made between
            units is used on two stages.
    """
    last = num_stages - 1

    def stage_at(position: int) -> int:
        return stages[position] if position < len(stages) else last

    _refuse_leaks(trace, stage_at)
    of_unit: dict[nn.Module, set[int]] = {}
    owners: dict[int, set[int]] = {}
    for position, call in enumerate(trace.units):
        of_unit.setdefault(call.module, set()).add(stages[position])
        for parameter in call.module.parameters():
            owners.setdefault(id(parameter), set()).add(stages[position])
    for parameter in root.parameters():
        used = {stage_at(position) for position in trace.parameter_uses(id(parameter))}
        owners.setdefault(id(parameter), set()).update(used)
        if not owners[id(parameter)]:
            owners[id(parameter)] = set(range(num_stages))
    return Ownership(
        num_stages,
        {module: tuple(sorted(found)) for module, found in of_unit.items()},
        {key: tuple(sorted(found)) for key, found in owners.items()},
    )


def _refuse_leaks(trace: StepTrace, stage_at: Callable[[int], int]) -> None:
    for unit, positions in sorted(trace.flow.leaks.items()):
        users = sorted({stage_at(position) for position in positions} - {stage_at(unit)})
        if users:
            where = [
                trace.units[p].name if p < len(trace.units) else "the code after the last block" for p in positions
            ]
            raise PartitionError(
                f"A value made inside `{trace.units[unit].name}` (pipeline stage {stage_at(unit)}) is used by "
                f"{', '.join(sorted(set(where)))} (stage {', '.join(map(str, users))}) without being returned by the "
                "block: it was kept in an attribute, written into an argument in place, or caught by a hook, as router "
                "losses are. It cannot travel between stages, and its gradient would be lost. Return it from the "
                "block, or apply its loss inside the block."
            )
    for tag, positions in trace.flow.consumers.items():
        if tag[0] == "random" and len({stage_at(position) for position in positions}) > 1:
            raise PartitionError(
                "A random operator (such as functional dropout) runs between blocks and its result is used on several "
                "pipeline stages; each stage would draw other numbers. Put it into a module (nn.Dropout) or into a "
                "block."
            )
