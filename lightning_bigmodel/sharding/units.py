"""Which parameters are gathered together: the repeated blocks of a model, its large outer layers, and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from lightning_bigmodel.sharding.gather import Unit

__all__ = ["find_blocks", "make_units"]

# Of the largest: messages of less take as long as their latency, and keeping them for whole passes costs little.
_SMALL_PART = 0.1
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """The repeated composite children of a model by name, and the layers with parameters outside of them.

    A module whose direct children include at least two of one class that have children themselves is a chain, whatever
    kind of container it is; its children are blocks. An encoder and a decoder of one class are none: what repeats in
    the lists within them is.

    Example:
        >>> layer = lambda: nn.TransformerEncoderLayer(4, 2)
        >>> list(find_blocks(nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer(), layer()))))
        ['0', '1.0', '1.1']
    """
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str, is_block: bool) -> None:
        children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
        if is_block or module._parameters and not children:
            if prefix:
                found[prefix] = module
            return
        repeated = _repeated(module)
        if not isinstance(module, _CONTAINERS):
            inside = [part for _, child in children if type(child) in repeated for part in child.modules()]
            if any(isinstance(part, _CONTAINERS) and _repeated(part) for part in inside):
                repeated = set()
        for name, child in children:
            visit(child, f"{prefix}.{name}" if prefix else name, type(child) in repeated)

    visit(root, "", False)
    return found


def _repeated(module: nn.Module) -> set[type[nn.Module]]:
    """Classes of which it has two children or more that have children themselves."""
    kinds = Counter(type(c) for c in module.children() if _has_parameters(c) and next(c.children(), None) is not None)
    return {kind for kind, count in kinds.items() if count >= 2}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def make_units(
    modules: Mapping[str, nn.Module], parameters: Sequence[nn.Parameter], blocks: Collection[nn.Module] = ()
) -> list[Unit]:
    """Put each of `parameters` into one unit.

    A parameter of several modules belongs to the unit of the first, which then is gathered for whole passes. So are
    the parameters that are in no module given, and those of modules that are no blocks and small beside the largest.

    Args:
        modules: Name -> module, none inside another.
        parameters: What is to be gathered.
        blocks: Those of the modules that are never too small.
    """
    wanted = {id(parameter): parameter for parameter in parameters}
    sizes = {name: sum(p.numel() for p in module.parameters() if id(p) in wanted) for name, module in modules.items()}
    limit = _SMALL_PART * max(sizes.values(), default=0)
    unit_of: dict[int, Unit] = {}
    units: list[Unit] = []
    rest = Unit("the rest", [], [])
    for name, module in modules.items():
        if not sizes[name]:
            continue
        is_small = module not in blocks and sizes[name] < limit
        unit = rest if is_small else Unit(name, [module], [])
        for parameter in module.parameters():
            if id(parameter) not in wanted:
                continue
            known = unit_of.get(id(parameter))
            if known is None:
                unit_of[id(parameter)] = unit
                unit.parameters.append(parameter)
            elif known is not unit and known is not rest and module not in known.modules:
                known.modules.append(module)
        if unit is not rest and unit.parameters:
            units.append(unit)
    rest.parameters += [parameter for key, parameter in wanted.items() if key not in unit_of]
    return [*units, rest] if rest.parameters else units
