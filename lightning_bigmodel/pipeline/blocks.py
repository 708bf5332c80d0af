"""Find where a model may be cut: its chain of blocks, and the modules around it.

A *unit* is an outermost module that computes as a whole on one stage: a block, or an outer module such as an embedding,
a final norm or a head. Units are found in the module tree and in the order of calls of one traced step; the model is
not asked to be an `nn.Sequential`. Stages begin at blocks only.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

__all__ = ["UnitTree", "check_blocks", "find_units"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_HOW_TO_NAME = (
    "Name the modules where the model may be cut, in `blocks=[...]`, by module name or pattern as `named_modules()` "
    'prints them: for example `blocks=["model.layers.*"]`. Each must be called exactly once in a step, through '
    "`module(...)`."
)


def check_blocks(blocks: object) -> None:
    """Refuse a `blocks` setting that is neither `"auto"`, a name or pattern, nor a non-empty list of those.

    Raises:
        TypeError: For another type.
        ValueError: For an empty list.
    """
    if isinstance(blocks, str):
        return
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(name, str) for name in blocks):
        raise TypeError(f"`blocks={blocks!r}` must be 'auto' or a list of module names or patterns.")
    if not blocks:
        raise ValueError(
            '`blocks=[]` names no module. Use `blocks="auto"`, or name the modules where the model may be cut.'
        )


@dataclass(frozen=True)
class UnitTree:
    """The modules that compute as a whole, by their place in the module tree.

    Attributes:
        blocks: The modules a stage may begin with, in order of their calls.
        candidates: All outermost modules, blocks included; those that are called become units.
        names: Module name of each candidate.
    """

    blocks: tuple[nn.Module, ...]
    candidates: tuple[nn.Module, ...]
    names: dict[nn.Module, str]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _called_children(module: nn.Module, calls: Counter[nn.Module]) -> list[nn.Module]:
    return [child for child in module.children() if calls[child] and _has_parameters(child)]


def _is_strong_chain(module: nn.Module, calls: Counter[nn.Module]) -> bool:
    """Whether `module` repeats one kind of composite child: what people call the blocks of a model."""
    kinds = Counter(
        type(child) for child in _called_children(module, calls) if next(child.children(), None) is not None
    )
    return bool(kinds) and kinds.most_common(1)[0][1] >= 2


def _chains(root: nn.Module, calls: Counter[nn.Module], *, strong: bool) -> list[nn.Module]:
    """Topmost modules whose children form a chain, in tree order, `root` itself included."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        is_container = isinstance(module, _CONTAINERS)
        if strong and is_container and _is_strong_chain(module, calls):
            found.append(module)
        elif strong and not is_container and _is_strong_chain(module, calls):
            # Blocks given as attributes (block1, block2, ...): a chain only where no deeper level repeats blocks, else
            # an encoder and a decoder of one class would pass for two blocks.
            deeper = [chain for child in module.children() for chain in _chains(child, calls, strong=True)]
            if deeper:
                for child in module.children():
                    walk(child)
            else:
                found.append(module)
        elif not strong and is_container and len(_called_children(module, calls)) >= 2:
            found.append(module)
        else:
            for child in module.children():
                walk(child)

    walk(root)
    return found


def _expand(blocks: list[nn.Module], calls: Counter[nn.Module]) -> list[nn.Module]:
    """Replace blocks that hold chains of their own by those chains' children (stages of stages, as in Swin)."""
    expanded: list[nn.Module] = []
    for block in blocks:
        inner = [child for chain in _chains(block, calls, strong=True) for child in _called_children(chain, calls)]
        expanded.extend(inner or [block])
    return expanded


def _matches(pattern: str, name: str) -> bool:
    """Match a dotted name against a pattern segment by segment, so that `layers.*` does not reach into a layer."""
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatch.fnmatchcase, given, wanted))


def _named_blocks(root: nn.Module, patterns: Sequence[str], calls: Counter[nn.Module]) -> list[nn.Module]:
    names = {module: name for name, module in root.named_modules() if name}
    chosen: list[nn.Module] = []
    for pattern in patterns:
        hits = [module for module, name in names.items() if _matches(pattern, name)]
        if not hits:
            near = difflib.get_close_matches(pattern, names.values(), n=3, cutoff=0.4)
            hint = f" Nearest names: {', '.join(map(repr, near))}." if near else ""
            raise ValueError(f"`blocks` names {pattern!r}, but no module of this model has that name.{hint}")
        called = [module for module in hits if calls[module]]
        if not called:
            raise ValueError(
                f"`blocks` names {pattern!r}, but no module of that name is called in a step (through `module(...)`). "
                "Name the modules that are called."
            )
        chosen.extend(module for module in called if module not in chosen)
    for module in chosen:
        inside = [names[other] for other in chosen if other is not module and other in set(module.modules())]
        if inside:
            raise ValueError(f"`blocks` names {names[module]!r} and also {inside[0]!r} inside it: name one level only.")
    return chosen


def _outer_units(root: nn.Module, blocks: set[nn.Module], calls: Counter[nn.Module]) -> list[nn.Module]:
    """Outermost modules that hold no block: descend only where blocks, or an uncalled container, are below."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child in seen:
                continue
            seen.add(child)
            holds_block = child not in blocks and any(inner in blocks for inner in child.modules())
            if holds_block or (child not in blocks and not calls[child]):
                walk(child)
            else:
                found.append(child)

    walk(root)
    return found


def find_units(
    root: nn.Module, call_order: Sequence[nn.Module], blocks: str | Sequence[str], num_stages: int
) -> UnitTree:
    """Decide what the blocks of `root` are.

    Args:
        root: The whole module (a LightningModule).
        call_order: Every module call of one step, in order.
        blocks: `"auto"`, or names / patterns of the modules a stage may begin with.
        num_stages: How many stages are wanted; a chain too coarse for it is searched for finer blocks.

    Raises:
        ValueError: Where no chain is found, a name matches nothing, a block is called more than once in a step, or
            there are fewer blocks than stages.
    """
    calls = Counter(call_order)
    names = {module: name for name, module in root.named_modules()}
    if blocks == "auto":
        chosen = [child for chain in _chains(root, calls, strong=True) for child in _called_children(chain, calls)]
        while chosen and len(chosen) < num_stages:
            finer = _expand(chosen, calls)
            if len(finer) <= len(chosen):
                break
            chosen = finer
        if len(chosen) < num_stages:
            weak = [child for chain in _chains(root, calls, strong=False) for child in _called_children(chain, calls)]
            chosen = weak if len(weak) > len(chosen) else chosen
        if len(chosen) < num_stages:
            outer = [module for module in _outer_units(root, set(), calls) if _has_parameters(module)]
            chosen = outer if len(outer) > max(1, len(chosen)) else chosen
        if num_stages > 1 and len(chosen) < 2:
            top = [f"{name} ({type(module).__name__})" for name, module in root.named_children()]
            raise ValueError(
                '`blocks="auto"` found no chain of blocks to cut this model at. Looked for: an nn.ModuleList, '
                "nn.Sequential or nn.ModuleDict (or a module with several children of one class) whose children are "
                f"called one after another and hold parameters, at any depth below {', '.join(top) or 'the module'}. "
                f"{_HOW_TO_NAME}"
            )
    else:
        chosen = _named_blocks(root, [blocks] if isinstance(blocks, str) else blocks, calls)
    order = {module: index for index, module in reversed(list(enumerate(call_order)))}
    chosen.sort(key=order.__getitem__)
    for block in chosen:
        if calls[block] > 1:
            raise ValueError(
                f"The block `{names[block]}` ({type(block).__name__}) is called {calls[block]} times in one step. A "
                "block must be called exactly once to be cut at: its output would have to be on two stages at once. "
                + _HOW_TO_NAME
            )
    if len(chosen) < num_stages:
        raise ValueError(
            f"This layout needs {num_stages} pipeline stages, but the model has only {len(chosen)} blocks to begin a "
            f"stage with ({', '.join(names[block] for block in chosen) or 'none'}). Lower `pipeline_parallel_size`, "
            f"choose a schedule with fewer stages a rank, or name finer blocks. {_HOW_TO_NAME}"
        )
    return UnitTree(tuple(chosen), tuple(_outer_units(root, set(chosen), calls)), names)
