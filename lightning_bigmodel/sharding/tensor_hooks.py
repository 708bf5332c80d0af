"""What tensor-parallel modules do around their forwards: hooks on modules, which are otherwise unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_bigmodel import _host
from lightning_bigmodel.mesh.rng import derive_seed
from lightning_bigmodel.sharding.tensor_layout import CutRegion, TensorLayout
from lightning_bigmodel.sharding.tensor_ops import (
    Exchange,
    copy_in,
    gather_in,
    gather_out,
    scatter_out,
    split_in,
    sum_out,
)
from lightning_bigmodel.sharding.tensor_styles import Target, layer_of

__all__ = ["UnlistedModuleError", "install_hooks"]


class UnlistedModuleError(ValueError):
    """A module with parameters runs on cut activations, and the plan does not mention it.

    Args:
        name: The module.
        message: The whole message.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def install_hooks(layout: TensorLayout, exchange: Exchange) -> tuple[list[RemovableHandle], list[Callable[[], None]]]:
    """Make modules compute their rank's share.

    Returns:
        Handles that undo it, and checks for the end of a step.
    """
    handles: list[RemovableHandle] = []
    stream = _RankStream(exchange.rank)
    regions: dict[int, _Region] = {}
    for cut in layout.regions:
        region = _Region(cut, exchange, layout.sequence_dim, stream)
        regions |= {id(target.owner): region for target in [*cut.columns, cut.row]}
        handles += region.install()
    for target in layout.targets:
        if target.parameter is None:
            handles += _install(target, exchange, layout.sequence_dim, stream, regions.get(id(target.owner)))
    return handles, [region.refuse_open for region in dict.fromkeys(regions.values())]


class _RankStream:
    """Random numbers that differ between the ranks of a tensor group, whose generators otherwise go in step.

    Only torch's generators are switched: what is decided by the module `random` must be the same on all ranks.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: tuple[Tensor, Any, Tensor | None] | None = None

    def enter(self, device: torch.device) -> None:
        """Leave the shared stream at a number drawn from it, which moves it on: no two regions get the same seed."""
        if self._shared is not None:
            return
        seed = derive_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_()), self._rank)
        module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._shared = (torch.get_rng_state(), module, None if module is None else module.get_rng_state(device))
        torch.default_generator.manual_seed(seed)
        if module is not None:
            module.manual_seed(seed)

    def leave(self, device: torch.device | None = None) -> None:
        """Go back to where the shared stream was left."""
        if self._shared is None:
            return
        state, module, device_state = self._shared
        self._shared = None
        torch.set_rng_state(state)
        if module is not None:
            module.set_rng_state(device_state)


class _Region:
    """A stretch of the forward on activations that are cut by features.

    It opens when the first colwise layer has run, and closes when the rowwise layer is about to run, or when the module
    that holds both ends, by an exception too.
    """

    def __init__(self, cut: CutRegion, exchange: Exchange, sequence_dim: int | None, stream: _RankStream) -> None:
        self._cut = cut
        self._exchange = exchange
        self._sequence_dim = sequence_dim
        self._stream = stream
        self._is_open = False
        # What the colwise layers were given, and what they were handed instead: q, k and v share one exchange. Held
        # by reference until the region closes, so that each rank decides alike, whenever memory is freed.
        self._inputs: list[tuple[Tensor, int, Tensor]] = []
        self._dropouts = [
            (module, name)
            for module in cut.ancestor.modules()
            for name, value in vars(module).items()
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__))
        ]

    def install(self) -> list[RemovableHandle]:
        """The hooks on modules that are not cut."""
        ancestor = self._cut.ancestor
        # Functions and not bound methods: a deep copy of the module takes hooks along, and must not copy what they use.
        handles: list[RemovableHandle] = [
            ancestor.register_forward_hook(lambda _, args, output: self.close(), always_call=True),
            *(
                module.register_forward_pre_hook(self._guard(name, module))
                for name, module in self._cut.guarded.items()
            ),
        ]
        if self._cut.gathers_at_ancestor:
            handles.append(_before(ancestor, self._gather))
        return handles

    def prepare(self, tensor: Tensor) -> Tensor:
        """The input of a colwise layer."""
        gathers = self._sequence_dim is not None and not self._cut.gathers_at_ancestor
        tracks = torch.is_grad_enabled() and tensor.requires_grad
        if not gathers and not (tracks and self._sequence_dim is None):
            return tensor
        version = 0 if tensor.is_inference() else tensor._version
        for seen, seen_version, handed in self._inputs:
            if seen is tensor and seen_version == version:
                return handed
        if gathers:
            assert self._sequence_dim is not None
            handed = gather_in(tensor, self._sequence_dim, self._exchange)
        else:
            handed = copy_in(tensor, self._exchange)
        self._inputs.append((tensor, version, handed))
        return handed

    def open(self, output: Tensor) -> None:
        """A colwise layer has run."""
        if self._is_open:
            return
        self._is_open = True
        if not _host.is_fake(output) and any(m.training and getattr(m, name) > 0 for m, name in self._dropouts):
            self._stream.enter(output.device)

    def close(self) -> None:
        """The rowwise layer is about to run."""
        self._inputs.clear()
        if self._is_open:
            self._is_open = False
            self._stream.leave()

    def refuse_open(self) -> None:
        """At the end of a step: features that are cut must have come to where they are summed.

        Raises:
            RuntimeError: With the layers' names.
        """
        if self._is_open:
            self.close()
            columns, row = self._cut.columns, self._cut.row
            raise RuntimeError(
                f"{columns[0].name!r} ran without {row.name!r} after it in a step: `tensor_plan` cuts its output. It "
                "is one rank's slice elsewhere. Call the module that holds both, or take the two out of the plan."
            )

    def _gather(self, tensor: Tensor) -> Tensor:
        assert self._sequence_dim is not None
        return gather_in(tensor, self._sequence_dim, self._exchange)

    def _guard(self, name: str, module: nn.Module) -> Callable[..., None]:
        def refuse_inside(_: nn.Module, args: Any) -> None:
            if self._is_open:
                columns, row = self._cut.columns, self._cut.row
                advice = (
                    "'colwise_local' if its features are one number for each head"
                    if isinstance(module, nn.Embedding)
                    else "'replicate_partial' if it works on each head or feature alone, so that its gradient is "
                    "summed over ranks"
                )
                raise UnlistedModuleError(
                    name,
                    f"{name!r} ({type(module).__name__}) runs between {columns[0].name!r} and {row.name!r}, whose "
                    f"activations `tensor_plan` cuts, and the plan does not mention it. Add {name!r}: {advice}; "
                    "otherwise take the layers around it out of the plan.",
                )

        return refuse_inside


def _install(
    target: Target, exchange: Exchange, sequence_dim: int | None, stream: _RankStream, region: _Region | None
) -> list[RemovableHandle]:
    """The hooks of one module."""
    style, module = target.style.name, target.owner
    layer = layer_of(module)
    if style == "sequence_split":
        assert sequence_dim is not None
        return [module.register_forward_hook(_on_output(lambda out: split_in(out, sequence_dim, exchange)))]
    if style == "sequence_gather":
        assert sequence_dim is not None
        return [_before(module, lambda tensor: gather_out(tensor, sequence_dim, exchange))]
    if style == "sequence":
        return _random_apart(module, stream) if isinstance(module, nn.Dropout) else []
    if not style.startswith(("colwise", "rowwise")):
        return []
    assert layer is not None
    if layer.kind == "embedding":
        return _install_embedding(module, style, exchange, sequence_dim)
    if style.startswith("colwise"):
        if region is not None:
            return [
                _before(module, region.prepare),
                module.register_forward_hook(lambda _, args, output: region.open(output)),
            ]
        enter = copy_in if sequence_dim is None else lambda t, exchange: gather_in(t, sequence_dim, exchange)
        return [
            _before(module, lambda tensor: enter(tensor, exchange)),
            module.register_forward_hook(_on_output(lambda out: gather_out(out, -1, exchange))),
        ]
    if region is None:
        start = _before(module, lambda tensor: split_in(tensor, -1, exchange))
    else:
        start = module.register_forward_pre_hook(lambda _, args: region.close())
    return [start, *_sum_output(module, layer.needs_bias, exchange, sequence_dim)]


def _sum_output(
    module: nn.Module, needs_bias: bool, exchange: Exchange, sequence_dim: int | None
) -> list[RemovableHandle]:
    """Sum a rowwise layer's outputs and add its bias, which is whole on every rank, once."""
    held: list[nn.Parameter] = []

    # By the module that is called and not the one that was hooked: a deep copy takes these functions along.
    def hide_bias(module: nn.Module, args: Any) -> None:
        bias = module._parameters.get("bias")
        if bias is not None:
            held.append(bias)
            # Not an `nn.Parameter`, and not registered: nothing but this forward sees it.
            module._parameters["bias"] = torch.zeros_like(bias).detach() if needs_bias else None  # type: ignore[assignment]

    def finish(module: nn.Module, args: Any, output: Tensor | None) -> Tensor | None:
        bias = held.pop() if held else None
        if bias is not None:
            module._parameters["bias"] = bias
        if output is None:  # the forward raised
            return None
        output = sum_out(output, exchange) if sequence_dim is None else scatter_out(output, sequence_dim, exchange)
        # Autocast gives an output of fewer bits, which the bias must not widen.
        return output if bias is None else output + bias.to(output.dtype)

    return [module.register_forward_pre_hook(hide_bias), module.register_forward_hook(finish, always_call=True)]


def _install_embedding(
    module: nn.Module, style: str, exchange: Exchange, sequence_dim: int | None
) -> list[RemovableHandle]:
    if style == "colwise_local":
        return []
    if style.startswith("colwise"):
        return [module.register_forward_hook(_on_output(lambda out: gather_out(out, -1, exchange)))]
    misses: list[Tensor] = []

    def own_rows(indices: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        num_rows = module.num_embeddings
        local = indices - exchange.rank * num_rows
        is_missing = (local < 0) | (local >= num_rows)
        misses[:] = [is_missing]
        return local.masked_fill(is_missing, 0)

    def sum_rows(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.masked_fill(misses.pop().unsqueeze(-1), 0)
        return sum_out(output, exchange) if sequence_dim is None else scatter_out(output, sequence_dim, exchange)

    return [_before(module, own_rows), module.register_forward_hook(sum_rows)]


def _random_apart(module: nn.Module, stream: _RankStream) -> list[RemovableHandle]:
    """A dropout on activations cut along the sequence draws apart on each rank."""

    def enter(module: nn.Module, args: Sequence[Any]) -> None:
        if module.training and not _host.is_fake(args[0]):
            stream.enter(args[0].device)

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        stream.leave()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _replace_input(args, kwargs, change)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _on_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    return hook


def _replace_input(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Any:
    """Change the first tensor that a module is given."""
    for position, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:position], change(value), *args[position + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: change(value)}
    return args, kwargs
