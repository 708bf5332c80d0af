"""From a tensor-parallel plan to what is cut where. Everything is checked here, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_bigmodel.sharding.tensor_attributes import divided_attributes
from lightning_bigmodel.sharding.tensor_slices import SlicedParameter, is_placeholder
from lightning_bigmodel.sharding.tensor_styles import Layer, Target, layer_of, match_plan

__all__ = ["CutRegion", "TensorLayout", "lay_out"]

_ADAPTER = ("lora_A", "lora_B")


@dataclass(eq=False)
class CutRegion:
    """Layers between which activations are cut: those that cut by output features, and the one that sums.

    Attributes:
        row: The `rowwise` layer.
        columns: The `colwise` layers before it.
        ancestor: The smallest module that holds all of them.
        guarded: Modules in `ancestor` with parameters of their own of which the plan says nothing: name -> module.
        gathers_at_ancestor: With a cut sequence: whether `ancestor` gathers its input, and not each column layer.
    """

    row: Target
    ancestor: nn.Module
    columns: list[Target] = field(default_factory=list)
    guarded: dict[str, nn.Module] = field(default_factory=dict)
    gathers_at_ancestor: bool = False


@dataclass(kw_only=True)
class TensorLayout:
    """What a plan comes to.

    Attributes:
        targets: What the plan says, module by module, without those whose parameters another pipeline stage holds.
        regions: Where activations are cut by features.
        slices: Of each parameter that is cut, the parameter and its record for rank 0.
        attributes: (module, attribute, value to set).
        partial: Whole parameters whose gradients are partial on each rank.
        sequence_dim: The dimension along which activations are cut between regions, or None.
    """

    targets: list[Target]
    regions: list[CutRegion]
    slices: list[tuple[nn.Parameter, SlicedParameter]]
    attributes: list[tuple[nn.Module, str, int]]
    partial: list[nn.Parameter]
    sequence_dim: int | None


def lay_out(module: nn.Module, plan: Mapping[str, str], size: int) -> TensorLayout:
    """Check a plan and say what it cuts; changes nothing.

    Raises:
        ValueError: If the plan cannot be followed, with the names and numbers and what to change.
    """
    targets = match_plan(module, plan)
    for target in targets:
        _check_kind(target)
    dims = sorted({(*target.style.numbers, 1)[0] for target in targets if target.style.name.startswith("sequence")})
    if len(dims) > 1:
        raise ValueError(f"`tensor_plan` cuts the sequence along dimensions {dims}; all `sequence` styles need one.")
    sequence_dim = dims[0] if dims else None
    regions = _find_regions(module, targets, is_sequence=sequence_dim is not None)
    modules = dict(module.named_modules())
    parts = {
        id(column.owner): _parts_of(column, region, modules[column.name.rpartition(".")[0]])
        for region in regions
        for column in region.columns
    }
    attributes = _attributes(module, regions, parts, size)
    slices = _slices(module, targets, parts, size)
    stays = [target for target in targets if not _is_elsewhere(target)]
    return TensorLayout(
        targets=stays,
        regions=[region for region in regions if not _is_elsewhere(region.row)],
        slices=[(parameter, record) for parameter, record in slices if not is_placeholder(parameter)],
        attributes=attributes,
        partial=_partial(stays, sequence_dim is not None),
        sequence_dim=sequence_dim,
    )


def _is_elsewhere(target: Target) -> bool:
    """Whether the parameters belong to another pipeline stage: the module then stays whole, and is not run here."""
    own = list(target.owner.parameters())
    return any(is_placeholder(parameter) for parameter in own)


def _layer(target: Target) -> Layer:
    layer = layer_of(target.owner)
    assert layer is not None
    return layer


def _check_kind(target: Target) -> None:
    """Refuse a style that a module cannot take."""
    style, layer = target.style.name, layer_of(target.owner)
    kind = type(target.owner).__name__
    if target.parameter is not None:
        if style not in ("replicate", "replicate_partial"):
            raise _cannot(
                target, "a parameter can only be `replicate` or `replicate_partial`; name the module to cut it"
            )
    elif style.startswith(("colwise", "rowwise")):
        if layer is None:
            raise _cannot(
                target,
                f"{kind} is none of nn.Linear, nn.Embedding and transformers' Conv1D (nor is a subclass with its own "
                "forward). Name such layers inside it, or write `replicate`",
            )
        if layer.kind == "embedding":
            _check_embedding(target)
        elif style == "colwise_local":
            raise _cannot(target, "`colwise_local` is for embeddings; write `colwise`")
    elif style == "sequence":
        name = kind.lower()
        is_norm = "norm" in name and not any(word in name for word in ("batch", "instance", "group"))
        if not is_norm and not isinstance(target.owner, nn.Dropout):
            raise _cannot(target, f"{kind} is neither a layer norm nor a dropout, and may look at the whole sequence")


def _check_embedding(target: Target) -> None:
    style, module = target.style, target.owner
    assert isinstance(module, nn.Embedding)
    if style.name == "rowwise_split" or style.numbers:
        raise _cannot(target, "an embedding takes `colwise`, `colwise_local` or `rowwise`")
    if module.max_norm is not None:
        raise _cannot(target, "`max_norm` rescales whole rows in the forward. Write `replicate`")
    if style.name == "rowwise" and (module.scale_grad_by_freq or module.sparse):
        raise _cannot(target, "`scale_grad_by_freq` and `sparse` need all rows at once. Write `replicate`")


def _cannot(target: Target, why: str) -> ValueError:
    return ValueError(
        f"`tensor_plan` pattern {target.pattern!r} gives {target.name!r} the style {target.style.name!r}, which it "
        f"cannot take: {why}."
    )


def _find_regions(module: nn.Module, targets: list[Target], is_sequence: bool) -> list[CutRegion]:
    """Pair each colwise layer with the rowwise layer that reads it.

    That is the next one in the smallest module that has one after it. Where a module has its rowwise layer first, it is
    the last one there that no other layer is followed by.
    """
    modules = dict(module.named_modules())
    order = {name: position for position, name in enumerate(modules)}
    rows = [t for t in targets if t.style.name == "rowwise" and _layer(t).kind == "linear"]
    columns = [t for t in targets if t.style.name == "colwise" and _layer(t).kind == "linear"]
    listed = {target.name for target in targets}
    around = {column.name: _rows_around(column.name, rows) for column in columns}

    def after(column: Target, near: list[Target]) -> list[Target]:
        return [row for row in near if order[row.name] > order[column.name]]

    followed: set[str] = set()
    for column in columns:
        for _, near in around[column.name][:1]:
            followed |= {row.name for row in after(column, near)[:1]}
    regions: dict[str, CutRegion] = {}
    for column in columns:
        found: tuple[str, Target] | None = None
        for ancestor, near in around[column.name]:
            later = after(column, near)
            free = [row for row in near if row.name not in followed]
            if later or free:
                found = (ancestor, later[0] if later else free[-1])
                break
        if found is None:
            raise _cannot(
                column,
                "no `rowwise` layer reads its cut output. Add it, or write `colwise_gather`",
            )
        ancestor, row = found
        region = regions.setdefault(row.name, CutRegion(row=row, ancestor=modules[ancestor]))
        region.columns.append(column)
        if len([*region.ancestor.modules()]) < len([*modules[ancestor].modules()]):
            region.ancestor = modules[ancestor]
    for row in rows:
        if row.name not in regions:
            raise _cannot(
                row,
                "no `colwise` layer before it cuts its input. Add it, or write `rowwise_split`",
            )
    names = {id(found): name for name, found in modules.items()}
    for region in regions.values():
        _look_around(region, names[id(region.ancestor)], listed)
        own_parent = {column.name.rpartition(".")[0] for column in region.columns} == {names[id(region.ancestor)]}
        has_sequence_inside = any(
            target.style.name.startswith("sequence") and target.owner in set(region.ancestor.modules())
            for target in targets
        )
        region.gathers_at_ancestor = is_sequence and own_parent and not has_sequence_inside
    return list(regions.values())


def _rows_around(name: str, rows: Sequence[Target]) -> list[tuple[str, list[Target]]]:
    """Each module around a layer, from the smallest, with the rowwise layers in it where it has any."""
    found = []
    while name:
        name = name.rpartition(".")[0]
        near = [row for row in rows if not name or row.name.startswith(f"{name}.")]
        if near:
            found.append((name, near))
    return found


def _look_around(region: CutRegion, ancestor_name: str, listed: set[str]) -> None:
    """Find what the plan does not mention beside the layers that are cut."""
    prefix = f"{ancestor_name}." if ancestor_name else ""
    for name, found in region.ancestor.named_modules():
        if name and f"{prefix}{name}" not in listed and any(p is not None for p in found._parameters.values()):
            region.guarded[f"{prefix}{name}"] = found
    parent_name = region.columns[0].name.rpartition(".")[0]
    if parent_name != ancestor_name:
        return
    for own, parameter in region.ancestor._parameters.items():
        if parameter is not None and f"{prefix}{own}" not in listed:
            raise ValueError(
                f"Parameter '{prefix}{own}' lies beside {region.columns[0].name!r}, which `tensor_plan` cuts. Add "
                f"'{prefix}{own}': 'replicate' if it is used before `colwise` or after `rowwise`, or "
                "'replicate_partial' if it is used between them."
            )


def _parts_of(column: Target, region: CutRegion, parent: nn.Module) -> tuple[int, ...]:
    """Widths of the parts of a colwise layer's output features."""
    width, wanted = _features(column, of_output=True), _features(region.row, of_output=False)
    numbers = column.style.numbers
    if len(numbers) > 1:
        if sum(numbers) != width:
            raise _cannot(column, f"the parts {numbers} add up to {sum(numbers)}, and it has {width} output features")
        return numbers
    if numbers:
        if width % numbers[0]:
            raise _cannot(column, f"{width} output features are not {numbers[0]} equal parts")
        return (width // numbers[0],) * numbers[0]
    if width <= wanted:
        return (width,)
    split_size = getattr(parent, "split_size", None)
    if isinstance(split_size, int) and split_size > 0 and width % split_size == 0:
        return (split_size,) * (width // split_size)
    raise _cannot(
        column,
        f"it gives {width} features and {region.row.name!r} reads {wanted}, so several things lie side by side. Write "
        f"their number or widths, such as `colwise:{max(2, width // wanted)}` for equal parts like q|k|v, or "
        "`colwise:1` if each head has its parts together",
    )


def _attributes(
    module: nn.Module, regions: list[CutRegion], parts: dict[int, tuple[int, ...]], size: int
) -> list[tuple[nn.Module, str, int]]:
    """Attributes of the modules around colwise layers that must be divided for the local computation."""
    changes: dict[tuple[int, str], tuple[nn.Module, str, int]] = {}
    modules = dict(module.named_modules())
    for region in regions:
        # Queries, keys and values; or heads that have theirs together.
        num_parts = sum(len(parts[id(column.owner)]) for column in region.columns)
        is_attention = num_parts > 2 or any(column.style.numbers == (1,) for column in region.columns)
        for column in region.columns:
            parent = modules[column.name.rpartition(".")[0]]
            widths = parts[id(column.owner)]
            heads_width = _features(region.row, of_output=False) if column.style.numbers == (1,) else None
            divided = divided_attributes(column, parent, widths, heads_width, is_attention, size)
            if not _is_elsewhere(column):
                changes |= {(id(parent), name): (parent, name, value) for name, value in divided.items()}
    return list(changes.values())


def _features(target: Target, *, of_output: bool) -> int:
    layer = _layer(target)
    return int(getattr(target.owner, layer.out_attribute if of_output else layer.in_attribute))


def _slices(
    module: nn.Module, targets: list[Target], parts: dict[int, tuple[int, ...]], size: int
) -> list[tuple[nn.Parameter, SlicedParameter]]:
    """The record of each parameter that is cut; a parameter of several modules must be cut alike by all."""
    slices: dict[int, tuple[nn.Parameter, SlicedParameter]] = {}
    users: dict[int, set[str]] = {}
    for name, found in module.named_modules():
        for parameter in found._parameters.values():
            users.setdefault(id(parameter), set()).add(name)
    seen: dict[int, set[str]] = {}
    for target in targets:
        if target.parameter is not None or not target.style.name.startswith(("colwise", "rowwise")):
            continue
        layer = _layer(target)
        is_column = target.style.name.startswith("colwise")
        for own, parameter in target.owner._parameters.items():
            dim = None if parameter is None else _cut_dim(own, parameter, layer, is_column=is_column)
            if parameter is None or dim is None:
                continue
            if own.startswith("weight"):
                _check_blocks(target, parameter, size, is_column=is_column)
            widths = parts.get(id(target.owner), (parameter.shape[dim],))
            for width in widths:
                if width % size:
                    raise ValueError(
                        f"{target.name!r} would be cut by `{target.style.name}` over {width} features, which "
                        f"`tensor_parallel_size={size}` does not divide. Choose a size that divides {width}, or write "
                        f"'replicate' for {target.pattern!r} and the layers that belong to it."
                    )
            record = SlicedParameter(
                name=f"{target.name}.{own}", full_shape=parameter.shape, dim=dim, parts=widths, rank=0, size=size
            )
            first = slices.setdefault(id(parameter), (parameter, record))[1]
            if (first.dim, first.parts) != (record.dim, record.parts):
                raise ValueError(
                    f"{first.name!r} and {record.name!r} are one parameter, and `tensor_plan` cuts them differently: "
                    f"along dimension {first.dim} and {record.dim}. Cut both by rows (`rowwise` for an embedding, "
                    "`colwise_gather` for the head)."
                )
            seen.setdefault(id(parameter), set()).add(target.name)
    for identity, (_, record) in slices.items():
        forgotten = sorted(users[identity] - seen[identity])
        if forgotten:
            raise ValueError(
                f"{record.name!r} is also the parameter of {forgotten[0]!r}, which `tensor_plan` does not cut. Give "
                "both a style (`rowwise` for an embedding, `colwise_gather` for the head tied to it), or write "
                "'replicate' for both."
            )
    return list(slices.values())


def _cut_dim(own: str, parameter: Tensor, layer: Layer, *, is_column: bool) -> int | None:
    """The dimension along which a parameter of a layer is cut, or None if it stays whole.

    The matrices of a low-rank adapter, `lora_A` of shape (rank, inputs) and `lora_B` of shape (outputs, rank), go with
    the weight: one is cut, so that no activation is sent for them, and the other is whole.
    """
    if own == "bias":
        return 0 if is_column else None
    if own in _ADAPTER:
        return {("lora_B", True): 0, ("lora_A", False): 1}.get((own, is_column))
    if own == "weight_scales" and not is_column:  # of a quantised layer, one a row or one a block
        return 1 if parameter.dim() > 1 else None
    return layer.out_dim if is_column else layer.in_dim


def _check_blocks(target: Target, parameter: Tensor, size: int, *, is_column: bool) -> None:
    """Refuse to cut a quantised layer within blocks of one scale."""
    block = getattr(target.owner, "block_size", None)
    if block is None:
        return
    width = _features(target, of_output=False)
    share = width if is_column else width / size
    if share % block:
        raise _cannot(
            target,
            f"its weight is quantised in blocks of {block} elements along its {width} inputs, which "
            f"{'rows' if is_column else f'`tensor_parallel_size={size}`'} would cut. Leave it out of the plan (write "
            "`replicate`), or out of `Quantize`",
        )
    if "weight_scales_scale" in target.owner._parameters:
        raise _cannot(
            target,
            "its scales are quantised in runs that do not end where it is cut. Let the `Quantize` callback convert it, "
            "or give `double_quantization=False`",
        )


def _partial(targets: list[Target], is_sequence: bool) -> list[nn.Parameter]:
    """Whole parameters of which each rank sees a part of the activations only."""
    partial: dict[int, nn.Parameter] = {}
    for target in targets:
        found: list[nn.Parameter | None] = []
        if target.parameter is not None:
            if target.style.name == "replicate_partial":
                found = [target.owner._parameters[target.parameter]]
        elif target.style.name in ("sequence", "replicate_partial"):
            found = list(target.owner.parameters())
        elif target.style.name.startswith("rowwise"):
            found = [target.owner._parameters.get("lora_B")]
            if is_sequence:
                found.append(target.owner._parameters.get("bias"))
        elif target.style.name.startswith("colwise"):
            found = [target.owner._parameters.get("lora_A")]
        partial |= {id(parameter): parameter for parameter in found if parameter is not None}
    return list(partial.values())
