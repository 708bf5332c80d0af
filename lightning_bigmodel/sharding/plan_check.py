"""Whether a tensor-parallel plan that somebody wrote is right, as far as a trial can tell.

Between a `colwise` and a `rowwise` layer each rank has some of the features. A softmax, a norm or a mean over features
there gives every rank a number of its own, no shape tells so, and another model is trained. So each pair of layers is
tried, on copies and random numbers, in the smallest module around it that was called: outputs and gradients must be
those of the whole module. What does not pass there is tried in the modules around it, up to the whole step, as it may
be given, or give, what is cut. A plan is called wrong only where numbers differ for two sets of random numbers, and
where the whole module gives the same numbers twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_bigmodel.mesh.rng import capture_rng, restore_rng
from lightning_bigmodel.sharding.plan_calls import Call, count_tokens
from lightning_bigmodel.sharding.plan_search import kind_of
from lightning_bigmodel.sharding.plan_trial import try_plan, why_not_repeatable
from lightning_bigmodel.sharding.tensor_layout import CutRegion, lay_out
from lightning_bigmodel.sharding.tensor_styles import Target, match_plan

__all__ = ["Judgement", "has_pairs", "judge_plan"]

# A norm over half of 4096 features is off by 1 / 64. Rounding, in modules that are badly conditioned, is off by less.
_TOLERANCE = 1e-3
# Parameters of the smallest module around a pair (1 GiB a copy, of which there are two), and of those around it.
_MAX_PARAMETERS, _MAX_PARAMETERS_AROUND = 1 << 28, 1 << 26
# Parameters times tokens: some seconds of a processor with many cores.
_MAX_WORK = 1 << 40


@dataclass(frozen=True)
class Judgement:
    """What the trials of a plan found.

    Attributes:
        wrong: What to tell the user about a plan that is wrong; "" if none is known to be.
        untried: Names of a pair's layers and why it could not be tried, for each kind of pair that was not.
    """

    wrong: str = ""
    untried: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Level:
    """A module to try a pair in."""

    name: str
    """Of the module around the pair."""
    twin: str
    """Of the module of that kind whose call is known."""
    call: Call


@dataclass(frozen=True)
class _Outcome:
    kind: Literal["right", "gives slices", "wrong", "untried"]
    why: str = ""
    is_further: bool = False


def has_pairs(module: nn.Module, plan: Mapping[str, str], size: int) -> bool:
    """Whether a plan has anything that could be wrong and still run.

    Raises:
        ValueError: If the plan cannot be followed at all.
    """
    return bool(lay_out(module, plan, size).regions)


def judge_plan(
    module: nn.Module, plan: Mapping[str, str], size: int, calls: Mapping[str, Call], step: Call | None
) -> Judgement:
    """Try a plan pair by pair, pairs of one kind once.

    Nothing of the module changes, and no random state. Memory: two copies in 32 bits, on the host, of the module around
    a pair; no module of more than 2^28 parameters is tried.

    Args:
        module: The module, whole.
        plan: As of `apply_tensor_plan`.
        size: Number of ranks.
        calls: What one module of each kind was called with, from `record_calls`.
        step: The method of `module` that a step calls, if it can be tried.

    Raises:
        ValueError: If the plan cannot be followed at all.
    """
    state = capture_rng()
    try:
        return _Judge(module, plan, size, calls, step).judge()
    finally:
        restore_rng(state)


class _Judge:
    def __init__(
        self, module: nn.Module, plan: Mapping[str, str], size: int, calls: Mapping[str, Call], step: Call | None
    ) -> None:
        self._targets = match_plan(module, plan)
        layout = lay_out(module, plan, size)
        self._regions, self._is_sequence = layout.regions, layout.sequence_dim is not None
        self._modules = dict(module.named_modules())
        self._names = {id(found): name for name, found in self._modules.items()}
        self._calls, self._step = calls, step
        self._twins = {kind_of(self._modules[name]): name for name in calls}
        self._known: dict[Any, _Outcome] = {}
        # Widths that `size` divides, its smallest factor divides too.
        self._size = next(factor for factor in range(2, size + 1) if size % factor == 0)

    def judge(self) -> Judgement:
        wrong: dict[str, None] = {}
        untried: dict[str, None] = {}
        for region in self._regions:
            outcome = self._judge_region(region)
            if outcome.kind == "wrong":
                wrong.setdefault(outcome.why)
            elif outcome.kind == "untried":
                untried.setdefault(f"{_layers(region)}: {outcome.why}")
        first, *more = [*wrong] or [""]
        return Judgement(f"{first} So do {len(more)} more." if more else first, tuple(untried))

    def _judge_region(self, region: CutRegion) -> _Outcome:
        found: _Outcome | None = None
        gives_slices = is_final = False
        reason = ""
        for level in self._levels(region):
            outcome = self._try(level, self._inside(level))
            if outcome.kind == "right":
                return outcome
            if outcome.kind == "gives slices":
                gives_slices = True
            elif outcome.kind == "untried":
                reason = reason or outcome.why
            else:
                if found is None and not self._is_sequence and self._is_right_alone(level, region):
                    return _Outcome("right")
                found = found or self._told(region, level, outcome)
                is_final |= level.call.method is not None or not (outcome.is_further or self._is_fed(level))
        if found is not None:
            return found if is_final else _Outcome("untried", "it may be given, or give, what is cut elsewhere")
        return _Outcome("right") if gives_slices else _Outcome("untried", reason or "no module around it was called")

    def _levels(self, region: CutRegion) -> Iterator[_Level]:
        """Modules around a pair, the smallest first, then the step. A cut sequence is cut and put together anywhere."""
        name = self._names[id(region.ancestor)]
        while not self._is_sequence:
            twin = self._twins.get(kind_of(self._modules[name]))
            if twin is not None:
                yield _Level(name, twin, self._calls[twin])
            if not name:
                break
            name = name.rpartition(".")[0]
        if self._step is not None:
            yield _Level("", "", self._step)

    def _inside(self, level: _Level) -> dict[str, Target]:
        prefix = f"{level.name}." if level.name else ""
        return {target.name: target for target in self._targets if target.name.startswith(prefix)}

    def _belonging(self, region: CutRegion) -> dict[str, Target]:
        """A pair, and what the plan leaves whole in the module around it."""
        names = {target.name for target in [*region.columns, region.row]}
        name = self._names[id(region.ancestor)]
        prefix = f"{name}." if name else ""
        return {
            target.name: target
            for target in self._targets
            if target.name in names or (target.style.name.startswith("replicate") and target.name.startswith(prefix))
        }

    def _is_right_alone(self, level: _Level, region: CutRegion) -> bool:
        """Whether other pairs in the module are what is wrong."""
        return self._try(level, self._belonging(region)).kind in ("right", "gives slices")

    def _is_fed(self, level: _Level) -> bool:
        """Whether something outside may hand a module what is cut."""
        inside = self._inside(level)
        return any(target.style.name == "colwise_local" and target.name not in inside for target in self._targets)

    def _try(self, level: _Level, targets: Mapping[str, Target]) -> _Outcome:
        start = len(level.name) + 1 if level.name else 0
        plan = {
            name[start:]: ":".join([target.style.name, ",".join(map(str, target.style.numbers))]).rstrip(":")
            for name, target in targets.items()
        }
        key = (level.twin, level.call.method, frozenset(plan.items()))
        if key not in self._known:
            self._known[key] = self._run(level, plan)
        return self._known[key]

    def _run(self, level: _Level, plan: Mapping[str, str]) -> _Outcome:
        module, call = self._modules[level.twin], level.call
        why = self._too_much(module, call)
        if why:
            return _Outcome("untried", why)
        try:
            verdict = try_plan(module, plan, call, self._size, tolerance=_TOLERANCE)
            if verdict.is_right:
                return _Outcome("gives slices" if verdict.gives_slices else "right")
            why = verdict.why
            if verdict.disagrees:
                why = why_not_repeatable(module, call, tolerance=_TOLERANCE)
                if not why and any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()):
                    why = "it has hooks, which a copy has not"
                again = try_plan(module, plan, call, self._size, tolerance=_TOLERANCE, seed=1)
                if not why and again.disagrees:
                    return _Outcome("wrong", verdict.why, verdict.is_further and again.is_further)
        except Exception as error:  # whatever user code raises when it is copied; what is wrong for all, the run tells
            why = f"{type(error).__name__}: {error}"
        return _Outcome("untried", why or "on other random numbers it gives what the whole gives")

    def _too_much(self, module: nn.Module, call: Call) -> str:
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        is_smallest = any(region.ancestor is module for region in self._regions)
        if num_parameters > (_MAX_PARAMETERS if is_smallest else _MAX_PARAMETERS_AROUND):
            return f"the module to try has {num_parameters:,} parameters, which is too large for two copies"
        num_tokens = count_tokens(call)
        if num_parameters * num_tokens > _MAX_WORK:
            return f"{num_parameters:,} parameters and {num_tokens:,} tokens are too much to compute for a trial"
        return ""

    def _told(self, region: CutRegion, level: _Level, outcome: _Outcome) -> _Outcome:
        name = level.name or type(self._modules[""]).__name__
        return _Outcome(
            "wrong",
            f"`tensor_plan` cuts {_layers(region)}, and the numbers are not those of the whole: tried out on random "
            f"numbers in {name!r}, {outcome.why}. What lies between the two sees one rank's share of the features: a "
            "softmax, a norm or a mean over features, or a value used elsewhere, cannot be computed from it. Take both "
            "layers out of the plan, or write `colwise_gather` for the first and `rowwise_split` for the last; write "
            "the parts of a layer that has several side by side, as `colwise:3` for q|k|v, and `replicate_partial` for "
            "parameters that are used between the two.",
        )


def _layers(region: CutRegion) -> str:
    columns = ", ".join(repr(target.name) for target in region.columns[:3])
    return f"{columns} (`colwise`) and {region.row.name!r} (`rowwise`)"
