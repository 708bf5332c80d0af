"""The search for layers to cut over tensor-parallel ranks: candidates, and one trial for all that are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_bigmodel.mesh.rng import capture_rng, restore_rng
from lightning_bigmodel.sharding.plan_calls import Call, describe_call
from lightning_bigmodel.sharding.plan_trial import Verdict, try_plan
from lightning_bigmodel.sharding.tensor import UnlistedModuleError, check_tensor_plan
from lightning_bigmodel.sharding.tensor_styles import layer_of

__all__ = ["THEIR_STYLES", "PlanSearch", "join_names", "kind_of", "layer_sizes", "record_calls"]

# What the transformers library calls its styles, and what they are here.
THEIR_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "rowwise_rep": "rowwise_split",
    "rowwise_split_input": "rowwise_split",
    "packed_colwise": "colwise:2",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": "colwise",
    "replicated_with_grad_allreduce": "replicate_partial",
    "replicate": "replicate",
}
# More layers in one module than this are not searched: tries grow with their square.
_MAX_LAYERS = 16
# How far below a module its layers may lie.
_MAX_DEPTH = 4


def record_calls(module: nn.Module, run_step: Callable[[], Any]) -> tuple[dict[str, Call], list[str]]:
    """What modules were called with, and their names in the order of their first calls."""
    calls: dict[str, Call] = {}
    order: list[str] = []
    signatures: set[Any] = set()
    called: set[str] = set()

    def hook(name: str, signature: Any) -> Callable[..., None]:
        def keep(found: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in called:
                return
            called.add(name)
            order.append(name)
            if signature not in signatures and layer_of(found) is None:
                signatures.add(signature)
                calls[name] = describe_call(args, kwargs)

        return keep

    handles = [
        found.register_forward_pre_hook(hook(name, kind_of(found)), with_kwargs=True)
        for name, found in module.named_modules()
    ]
    state = capture_rng()
    try:
        with torch.no_grad():
            run_step()
    finally:
        for handle in handles:
            handle.remove()
        restore_rng(state)
    return calls, order


def kind_of(module: nn.Module) -> Any:
    """Equal for modules of which one trial speaks for all: layers of one stack."""
    return tuple(
        (
            name,
            type(found),
            tuple(sorted((key, value) for key, value in vars(found).items() if _counts(key, value))),
            tuple((key, None if own is None else tuple(own.shape)) for key, own in found._parameters.items()),
        )
        for name, found in module.named_modules()
    )


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute is a number or a switch that tells kinds of layers apart, and not their position."""
    return isinstance(value, int) and name != "training" and not any(word in name for word in ("idx", "index", "id"))


class PlanSearch:
    """Finds what can be cut, module by module, smallest first.

    Args:
        module: The module.
        calls: What one module of each kind was called with.
        order: Names of modules in the order of their first calls.
        size: Number of ranks, if known.

    Attributes:
        reasons: Why candidates were left whole: name of a module -> what its last trial found.
    """

    def __init__(self, module: nn.Module, calls: dict[str, Call], order: list[str], size: int | None = None) -> None:
        self.reasons: dict[str, str] = {}
        self._module = module
        self._size = size
        self._modules = dict(module.named_modules())
        self._calls = calls
        self._position = {name: position for position, name in enumerate(order)}
        # Of modules that are alike the one whose call was kept.
        self._twins = {kind_of(self._modules[name]): name for name in calls}
        self._found: dict[str, str] = {}
        # Plans that are right if the neighbours are cut alike, by kind of module: names within it -> style; and the
        # modules of these kinds.
        self._kinds: dict[type, dict[str, str]] = {}
        self._pending: list[str] = []

    def adopt(self, theirs: dict[str, str]) -> dict[str, str]:
        """Keep of a model's own plan what passes, and embeddings and heads if the size, where known, divides them."""
        groups: dict[str, dict[str, str]] = {}
        for name, style in theirs.items():
            parent, _, own = name.rpartition(".")
            groups.setdefault(parent, {})[own] = style
        alone: dict[str, str] = {}
        known: dict[Any, tuple[dict[str, str], Verdict]] = {}
        for parent, plan in groups.items():
            if not {"rowwise", "rowwise_split"} & set(plan.values()) or len(plan) == 1:
                alone |= {join_names(parent, own): style for own, style in plan.items()}
                continue
            if any(style not in THEIR_STYLES.values() for style in plan.values()):
                self.reasons[parent] = "its plan has styles that are not supported"
                continue
            signature = kind_of(self._modules[parent])
            if signature not in known and parent in self._calls:
                known[signature] = self._try(parent, plan)
                for parts in ("colwise:1", "colwise:3", "colwise:2"):
                    if not known[signature][1].is_right:
                        spelled = {own: parts if style == "colwise" else style for own, style in plan.items()}
                        known[signature] = self._try(parent, spelled)
            if signature in known:
                self._accept(parent, *known[signature])
        self._settle()
        return self._found | self._lone(alone, self._size or 1)

    def explore(self) -> dict[str, str]:
        """Look for pairs in every module that was called, the inner ones first."""
        known: dict[Any, list[tuple[dict[str, str], Verdict]]] = {}
        used: set[str] = set()
        names = [name for name in self._position if layer_of(self._modules[name]) is None]
        for name in sorted(names, key=lambda name: -len(name.split(".")) if name else 0):
            found = self._modules[name]
            layers = [own for own in self._layers(name) if join_names(name, own) not in used]
            if not 2 <= len(layers) <= _MAX_LAYERS:
                continue
            signature = (kind_of(found), tuple(layers))
            if signature not in known and type(found) in self._kinds:
                # Its kind hands on what is cut, and so it may not pass alone: tried together in the end.
                self._pending.append(name)
                used |= {join_names(name, own) for own in layers}
                continue
            if signature not in known:
                twin = self._twins.get(signature[0])
                known[signature] = [] if twin is None else self._pairs(twin, layers)
            for plan, verdict in known[signature]:
                self._accept(name, plan, verdict)
                used |= {join_names(name, own) for own in plan}
        self._settle()
        return self._found

    def _layers(self, name: str) -> list[str]:
        """Names, within a module, of linear layers not far below that ran, in the order they ran in."""
        start = len(name) + 1 if name else 0
        inside = [
            own
            for own in self._position
            if (not name or own.startswith(f"{name}."))
            and own[start:].count(".") < _MAX_DEPTH
            and (layer := layer_of(self._modules[own])) is not None
            and layer.kind == "linear"
        ]
        return [own[start:] for own in sorted(inside, key=self._position.__getitem__)]

    def _pairs(self, name: str, layers: list[str]) -> list[tuple[dict[str, str], Verdict]]:
        """Pairs among layers in the order they run in: each last layer with the most layers before it that pass."""
        accepted: list[tuple[dict[str, str], Verdict]] = []
        start = 0
        for last in range(1, len(layers)):
            for first in range(start, last):
                if self._is_within_one(name, layers[first : last + 1]):
                    continue
                result = self._pair(name, layers[first:last], layers[last])
                if result is not None:
                    accepted.append(result)
                    start = last + 1
                    break
        return accepted

    def _is_within_one(self, name: str, layers: list[str]) -> bool:
        """Whether all layers lie in one module further in that ran, and so have been tried."""
        common = layers[0].split(".")[:-1]
        for layer in layers[1:]:
            parts = layer.split(".")
            equal = [part == other for part, other in zip(common, parts[:-1], strict=False)]
            common = common[: equal.index(False) if False in equal else len(equal)]
        return any(join_names(name, ".".join(common[:end])) in self._position for end in range(1, len(common) + 1))

    def _pair(self, name: str, columns: list[str], row: str) -> tuple[dict[str, str], Verdict] | None:
        parent = self._modules[name]
        _, wanted = layer_sizes(parent.get_submodule(row))
        choices = [list(_column_styles(layer_sizes(parent.get_submodule(column))[0], wanted)) for column in columns]
        if not all(choices) or not any(layer_sizes(parent.get_submodule(column))[0] >= wanted for column in columns):
            return None
        for index in range(max(map(len, choices))):
            plan = {
                column: styles[min(index, len(styles) - 1)] for column, styles in zip(columns, choices, strict=True)
            }
            result = self._try(name, {**plan, row: "rowwise"})
            if result[1].is_right:
                return result
        return None

    def _try(self, name: str, plan: dict[str, str]) -> tuple[dict[str, str], Verdict]:
        """Try a plan, and say of modules and parameters that it forgets what they are."""
        verdict = Verdict(False)
        own = [key for key, parameter in self._modules[name]._parameters.items() if parameter is not None]
        for style in ("replicate_partial", "replicate")[: 2 if own else 1]:
            tried = plan | dict.fromkeys(own, style)
            while True:
                try:
                    verdict = self._trial(name, tried)
                except UnlistedModuleError as error:
                    layer = layer_of(self._modules[name].get_submodule(error.name))
                    is_embedding = layer is not None and layer.kind == "embedding"
                    tried = {**tried, error.name: "colwise_local" if is_embedding else "replicate_partial"}
                    continue
                break
            if verdict.is_right:
                return tried, verdict
        self.reasons[name] = verdict.why
        return plan, verdict

    def _trial(self, name: str, plan: dict[str, str]) -> Verdict:
        module = self._modules[name]
        why: dict[int, str] = {}
        # What is right for the parts of two ranks is right for those of more. The real number comes last, as it costs
        # more, and where it does not divide either it is the one to speak of.
        for size in dict.fromkeys((2, 3, 5, self._size or 2)):
            try:
                check_tensor_plan(module, plan, size)
            except ValueError as error:
                why[size] = str(error)
                continue
            return try_plan(module, plan, self._calls[name], size)
        return Verdict(False, why=why[self._size or 2])

    def _accept(self, name: str, plan: dict[str, str], verdict: Verdict) -> None:
        if not verdict.is_right:
            return
        if verdict.gives_slices:
            self._pending.append(name)
            # The one with most in it: of layers that share a position bias, the one that computes it.
            self._kinds[type(self._modules[name])] = max(self._kinds.get(type(self._modules[name]), {}), plan, key=len)
        else:
            self._found |= {join_names(name, own): style for own, style in plan.items()}

    def _settle(self) -> None:
        """Try pending plans together, in the smallest module that keeps to itself what they hand on cut."""
        for name in list(self._pending):
            if any(join_names(name, own) in self._found for own in self._kinds[type(self._modules[name])]):
                continue  # settled together with an earlier one
            ancestor = name
            while ancestor:
                ancestor = ancestor.rpartition(".")[0]
                twin = self._twins.get(kind_of(self._modules[ancestor]))
                if ancestor not in self._position or twin is None:
                    continue
                inside = self._inside(ancestor)
                prefix = len(ancestor) + 1 if ancestor else 0
                plan = {own[prefix:]: style for own, style in inside.items()}
                try:
                    verdict = self._trial(twin, plan)
                except UnlistedModuleError as error:
                    verdict = Verdict(False, why=str(error))
                if verdict.is_right and not verdict.gives_slices:
                    self._found |= inside
                    break
                self.reasons[name] = verdict.why or "it hands on what is cut"
        self._pending.clear()

    def _inside(self, ancestor: str) -> dict[str, str]:
        """Everything found in a module, and pending plans, also for modules of their kind that did not pass alone."""

        def is_inside(name: str) -> bool:
            return not ancestor or name.startswith(f"{ancestor}.")

        result = {name: style for name, style in self._found.items() if is_inside(name)}
        for name, found in self._modules.items():
            plan = self._kinds.get(type(found), {})
            if is_inside(name) and not any(join_names(name, own) in result for own in plan):
                result |= {
                    join_names(name, own): style
                    for own, style in plan.items()
                    if join_names(name, own) in self._modules
                }
        return result

    def _lone(self, plan: dict[str, str], size: int) -> dict[str, str]:
        """Of embeddings and heads, which are cut by themselves, those whose parameters are not used elsewhere whole."""
        kept = {
            name: style
            for name, style in plan.items()
            if style in ("colwise_gather", "colwise", "rowwise")
            and layer_of(self._modules[name]) is not None
            and (style == "colwise_gather" or isinstance(self._modules[name], nn.Embedding))
        }
        try:
            check_tensor_plan(self._module, kept, size)
        except ValueError as error:
            # A tied pair is cut together or not at all.
            self.reasons[", ".join(kept)] = str(error)
            return {}
        return kept


def _column_styles(width: int, wanted: int) -> Iterator[str]:
    """Styles to try for a layer of `width` output features before one that reads `wanted`."""
    if width <= wanted:
        if wanted % width == 0:
            yield "colwise"
        return
    if width % wanted == 0:
        yield f"colwise:{width // wanted}"
        yield "colwise:1"
    elif (width - wanted) % 2 == 0 and width < 3 * wanted:
        # Fewer heads of keys and values than of queries.
        yield f"colwise:{wanted},{(width - wanted) // 2},{(width - wanted) // 2}"


def layer_sizes(module: nn.Module) -> tuple[int, int]:
    """Output and input features of a layer."""
    layer = layer_of(module)
    assert layer is not None
    shape = module.weight.shape
    assert isinstance(shape, torch.Size)
    return shape[layer.out_dim], shape[layer.in_dim]


def join_names(parent: str, name: str) -> str:
    """Name of a module in another; either may be empty."""
    return ".".join(part for part in (parent, name) if part)
