"""Which layers of a module to cut over tensor-parallel ranks, found by looking at what they do.

A model of the transformers library may bring a plan of its own. Of other modules, layers are taken that run one after
the other and fit in size. Either way only a plan whose outputs and gradients agree with those of the whole module is
kept, as `plan_trial` finds on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from lightning_bigmodel.sharding.plan_search import THEIR_STYLES, PlanSearch, join_names, layer_sizes, record_calls
from lightning_bigmodel.sharding.tensor_styles import layer_of

__all__ = ["find_tensor_plan"]


def find_tensor_plan(module: nn.Module, run_step: Callable[[], Any], size: int | None = None) -> dict[str, str]:
    """Find a plan for `apply_tensor_plan`.

    Every part of the plan has been tried on a copy of the smallest module that holds it, cut over two ranks (three or
    five where two do not divide), and gave the outputs and gradients of the whole one within 1e-4. What does not pass
    stays whole. Layers of the same kind are tried once.

    The plan does not depend on the number of ranks, unless `size` is given; `apply_tensor_plan` refuses a number that
    does not divide heads or widths. The search takes the memory of one layer twice, of a whole stack of layers where
    these hand each other what is cut (T5's position bias), and runs `run_step` once without gradients.

    Args:
        module: The module; unchanged, apart from what `run_step` does.
        run_step: Runs the module's forward once on a batch, for example the training step. Random states are put back
            afterwards. Its tensors may be fake.
        size: Number of ranks, if known: embeddings and heads whose rows it does not divide are then left whole.

    Returns:
        Pattern -> style.

    Raises:
        ValueError: If nothing can be cut; the message shows how to write a plan for this module.

    Example::

        plan = find_tensor_plan(model, lambda: model(tokens))
        assert plan["layers.*.mlp.up_proj"] == "colwise"
    """
    search = PlanSearch(module, *record_calls(module, run_step), size)
    theirs = _their_plan(module)
    found = (search.adopt(theirs) if theirs else {}) or search.explore()
    if not found:
        raise ValueError(_nothing_found(module, search.reasons, size))
    return _patterns(found, [name for name, _ in module.named_modules()])


def _their_plan(module: nn.Module) -> dict[str, str]:
    """The plan that transformers models inside bring: name of a module -> style; an unknown style stays as it is."""
    plan: dict[str, str] = {}
    modules = dict(module.named_modules())
    covered: list[str] = []
    for name, found in modules.items():
        theirs = getattr(found, "_tp_plan", None) or getattr(getattr(found, "config", None), "base_model_tp_plan", None)
        if not isinstance(theirs, dict) or any(not outer or name.startswith(f"{outer}.") for outer in covered):
            continue
        if not hasattr(type(found), "_tp_plan"):
            continue  # a layer that only holds the model's config
        covered.append(name)
        for pattern, style in theirs.items():
            wanted = join_names(name, pattern).split(".")
            for own in modules:
                parts = own.split(".")
                if len(parts) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True)):
                    plan[own] = THEIR_STYLES.get(style, str(style))
    return plan


def _patterns(plan: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """The same plan with one pattern for the layers of a stack, where all modules it matches have that style."""
    result: dict[str, str] = {}
    everything = list(names)
    for name, style in plan.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        shape = pattern.split(".")
        alike = [
            other
            for other in everything
            if len(parts := other.split(".")) == len(shape)
            and all(want in ("*", part) for part, want in zip(parts, shape, strict=True))
        ]
        key = pattern if len(alike) > 1 and all(plan.get(other) == style for other in alike) else name
        result.setdefault(key, style)
    return result


def _nothing_found(module: nn.Module, reasons: dict[str, str], size: int | None) -> str:
    modules = dict(module.named_modules())
    linears = [name for name, found in modules.items() if (la := layer_of(found)) is not None and la.kind == "linear"]
    message = "`tensor_plan='auto'` found no layers that can be cut over ranks."
    if reasons:
        name, why = next(iter(reasons.items()))
        message += f" For example {name or type(module).__name__!r}: {why.rstrip('.')}."
    if len(linears) < 2:
        return message + " It has fewer than two linear layers; choose `tensor_parallel_size=1`."
    widths = layer_sizes(modules[linears[0]])[0], layer_sizes(modules[linears[1]])[1]
    if not any(width % (size or 1) for width in widths):
        pair = _patterns({linears[0]: "colwise", linears[1]: "rowwise"}, modules)
        message += (
            f" Write the plan yourself, for example `tensor_plan={pair}` if the second layer reads the first's output."
        )
    return message + f" Layers with weights to cut: {', '.join(_patterns(dict.fromkeys(linears, ''), modules))}."
