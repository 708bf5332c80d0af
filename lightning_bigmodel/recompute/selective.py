"""Selective recomputation: the results of costly operators are kept, everything else is computed again."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bigmodel import _host
from lightning_bigmodel.mesh.rng import RngState, capture_rng, restore_rng
from lightning_bigmodel.recompute._arguments import Position, map_tensors, tensors_of
from lightning_bigmodel.recompute._generators import drawn_from
from lightning_bigmodel.recompute.frame import Contexts, RecomputeError, kept_by_autograd
from lightning_bigmodel.recompute.policy import Again, Chain, RecomputePolicy, Treatment

__all__ = ["Selective", "operators"]

# What people call an operator -> the names of those that torch runs for it.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    ),
    "convolution": ("convolution",),
    "softmax": ("_softmax", "_log_softmax"),
    "norm": ("native_layer_norm", "native_group_norm", "_fused_rms_norm"),
}
_SAME = {"linear": "matmul", "@": "matmul", "conv": "convolution", "scaled_dot_product_attention": "attention"}


def operators(name: str, setting: str = "keep") -> frozenset[Any]:
    """The operators that a name stands for.

    Args:
        name: A group (`"matmul"`, `"attention"`, `"convolution"`, `"softmax"`, `"norm"`), an operator of
            `torch.ops.aten` (`"gelu"`), or one of another library as `"namespace::name"`.
        setting: For messages.

    Raises:
        ValueError: If there is none of that name, or torch computes it as others.

    Example:
        >>> operators("gelu")
        frozenset({<OpOverload(op='aten.gelu', overload='default')>})
    """
    group = _GROUPS.get(_SAME.get(name, name))
    if group is not None:
        return frozenset(op for part in group for op in _overloads("aten", part))
    namespace, _, plain = name.replace(".", "::").partition("::") if "::" in name or "." in name else ("aten", "", name)
    found = _overloads(namespace, plain.partition("::")[0])
    if not found:
        near = difflib.get_close_matches(name, [*_GROUPS, *_SAME, *dir(torch.ops.aten)], n=4, cutoff=0.5)
        raise ValueError(
            f"`{setting}` holds {name!r}, which is no operator that torch runs"
            + (f"; near it: {near}" if near else "")
            + f". Use a group ({', '.join(_GROUPS)}), a name in `torch.ops.aten`, or 'namespace::name'."
        )
    own = frozenset(op for op in found if _host.makes_results(op))
    if not own:
        raise ValueError(
            f"`{setting}` holds {name!r}, which works in place, gives a view, or is computed as other operators: it "
            f"has no result of its own to keep. Name a group ({', '.join(_GROUPS)}), or what a profile shows."
        )
    return own


def _overloads(namespace: str, name: str) -> list[Any]:
    packet: Any = getattr(getattr(torch.ops, namespace), name, None) if namespace.isidentifier() else None
    return [getattr(packet, overload) for overload in packet.overloads()] if hasattr(packet, "overloads") else []


@dataclass
class _Result:
    """What one call of a kept operator gave.

    Attributes:
        value: Its output; places in what autograd keeps instead of tensors, once the forward is over; None where code
            has changed a tensor in it in place since, so that the operator has to run again.
        versions: Of its tensors, when it was made.
        after: Random states after a random operator: what the next one goes on from.
        generator_after: State of the generator that it was given, if any.
    """

    value: Any
    versions: list[int]
    after: RngState | None
    generator_after: Tensor | None = None


class _Kept:
    """Results of kept operators of one run of a block, by operator and order."""

    def __init__(self, keep: frozenset[Any]) -> None:
        self.keep = keep
        self.results: dict[Any, list[_Result]] = defaultdict(list)
        self._next: dict[Any, int] = defaultdict(int)
        self._of_storage: dict[Any, list[_Result]] = defaultdict(list)
        self._read: Callable[[int], Tensor] | None = None

    def add(self, func: Any, output: Any, generator: torch.Generator | None) -> None:
        """Note a result."""
        value = map_tensors(_host.alias_below_autograd, output)
        after = capture_rng() if torch.Tag.nondeterministic_seeded in func.tags else None
        generator_after = None if generator is None else generator.get_state()
        result = _Result(value, [tensor._version for tensor in tensors_of(value)], after, generator_after)
        self.results[func].append(result)
        for tensor in tensors_of(value):
            self._of_storage[_host.storage_reference(tensor)].append(result)

    def lose_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Give up results that an operator has written to, also by an alias with a version of its own."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write:
                self._lose(value)
        for argument in func._schema.arguments:
            if argument.is_write and argument.name in kwargs:
                self._lose(kwargs[argument.name])

    def _lose(self, value: Any) -> None:
        for tensor in tensors_of(value):
            for result in self._of_storage.pop(_host.storage_reference(tensor), ()):
                result.value, result.versions, result.after = None, [], None

    def end_forward(self) -> None:
        """Hand the results to autograd, whose hooks see them then."""
        tensors: list[Tensor] = []

        def place(tensor: Tensor) -> Position:
            tensors.append(tensor)
            return Position(len(tensors) - 1)

        for results in self.results.values():
            for result in results:
                if [tensor._version for tensor in tensors_of(result.value)] != result.versions:
                    result.value, result.after = None, None
                result.value = map_tensors(place, result.value)
        self._of_storage.clear()
        self._read = kept_by_autograd(tensors)

    def take(self, func: Any) -> _Result:
        """The result of the next call."""
        index = self._next[func]
        self._next[func] += 1
        if index >= len(self.results[func]):
            raise RecomputeError(f"A block runs {func} more often in its second run than in its first.")
        return self.results[func][index]

    def value(self, result: _Result) -> Any:
        """With tensors again."""
        read = self._read
        assert read is not None
        return map_tensors(lambda position: read(position.index), result.value, Position)


class _First(TorchDispatchMode):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in self.kept.keep:
            self.kept.add(func, output, drawn_from(kwargs))
        elif func._schema.is_mutable:
            self.kept.lose_written(func, args, kwargs or {})
        return output


class _Second(TorchDispatchMode):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.kept.keep:
            return func(*args, **(kwargs or {}))
        result = self.kept.take(func)
        if result.value is None:
            return func(*args, **(kwargs or {}))
        if result.after is not None:
            restore_rng(result.after)
        generator = drawn_from(kwargs)
        if generator is not None and result.generator_after is not None:
            generator.set_state(result.generator_after)
        return self.kept.value(result)


def _contexts(keep: frozenset[Any]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    kept = _Kept(keep)

    @contextmanager
    def first() -> Iterator[None]:
        with _First(kept):
            yield
        kept.end_forward()

    return first(), _Second(kept)


class Selective(RecomputePolicy):
    """Keep what costly operators gave, and compute the rest of each block again in backward.

    As of arXiv 2205.05198, section 5, for any operators. Matrix products and attention make up nearly all of a
    transformer's operations and about half of its activations: keeping their results saves the other half for a few
    percent of a forward. Do not use it where that is not enough: `Full` keeps an input a block.

    In compiled code the compiler does it, where its backend has a partitioner that computes again: `"inductor"` or
    `"aot_eager"`, not `"eager"`. Compilers leave out much that is cheap anyway, so that this saves less than without
    them; `"aot_eager"` keeps random masks besides.

    A kept operator does not run again; random ones leave the random state behind that they left at first. Where code
    changes a kept result in place (`nn.ReLU(inplace=True)`), that operator does run again.

    Memory, for n blocks: their inputs, the kept results, and the activations of one block in backward. Compute: what is
    not kept, once more. Time: some microseconds an operator in Python.

    Args:
        keep: Operators whose results are kept: `"matmul"`, `"attention"`, `"convolution"`, `"softmax"`, `"norm"`, a
            name in `torch.ops.aten`, or `"namespace::name"` for operators of another library.

    Raises:
        TypeError: If `keep` is no list of names.
        ValueError: If a name stands for no operator that torch runs; at the start of a run where blocks are compiled by
            another backend, or in parts.

    Example:
        >>> from lightning_bigmodel import Recompute, Selective
        >>> callback = Recompute(policy=Selective(keep=["matmul", "attention"]))
    """

    def __init__(self, keep: Sequence[str] = ("matmul", "attention")) -> None:
        if not isinstance(keep, (list, tuple)) or not keep or not all(isinstance(name, str) for name in keep):
            raise TypeError(f"`keep={keep!r}` must be a list of operators, such as ['matmul', 'attention'].")
        self.keep = tuple(keep)
        self.operators()

    def operators(self) -> frozenset[Any]:
        """Those that are kept. Not an attribute: torch's operators cannot be sent to another process."""
        return frozenset(op for name in self.keep for op in operators(name))

    def contexts(self) -> Contexts:
        """What the runs of a block happen within."""
        kept = self.operators()
        return lambda: _contexts(kept)

    def treatment(self) -> Treatment:
        """What is done with one block."""
        return Again(self.contexts(), keep=self.operators())

    def treatments(self, chain: Chain) -> Sequence[Treatment | None]:
        """Of every block its input and the kept results."""
        last = len(chain.blocks) - 1
        return [
            None if index == last and chain.ends_in_backward else self.treatment() for index in range(len(chain.blocks))
        ]
