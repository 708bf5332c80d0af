"""Blocks in compiled code: what a treatment does around it, and what only the compiler can do within it.

A block that is compiled by itself is one function: what it saves can be given up, moved, and computed again around it.
Which operators' results are kept, and blocks of a model that is compiled as a whole, are the compiler's to decide. It
is told by `torch.utils.checkpoint`, which it takes for marks on its graph: its partitioner then computes again in the
backward graph what is not to be kept, with random numbers of the forward. That is no second run of Python code, and
holds for backends with such a partitioner only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_bigmodel.recompute._arguments import tensors_of
from lightning_bigmodel.recompute.frame import RecomputeError

if TYPE_CHECKING:
    from lightning_bigmodel.recompute.policy import Block, Treatment

__all__ = ["BACKENDS", "Compilation", "check_compiled", "check_unwritten", "marked_for_compiler", "written_state"]

# Whose partitioner was seen to follow the marks.
BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition", "aot_eager_default_partitioner")
_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Compilation:
    """How a block is compiled.

    Attributes:
        backend: Name of the backend.
        compile: Compiles a function in the same way.
        around: Name of the module that is compiled with the block in it; empty: the block is compiled by itself.
    """

    backend: str
    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    around: str = ""


def check_compiled(policy: str, blocks: Iterable[Block], treatments: Iterable[Treatment | None]) -> None:
    """Refuse treatments that compiled code would leave without effect, or with wrong gradients.

    Args:
        policy: Its name, for messages.
        blocks: Of a chain.
        treatments: For each.

    Raises:
        ValueError: With the block, what compiles it, and what to use.
    """
    pairs = [(block, treatment) for block, treatment in zip(blocks, treatments, strict=True) if treatment is not None]
    for block, treatment in pairs:
        if block.compilation is None and block.compiled_part and treatment.looks_inside:
            raise ValueError(
                f"`{policy}` chooses among the operators of `{block.name}`, of which `{block.compiled_part}` is "
                "compiled into one. Compile the block instead, or use `Full()` or `Offload()`."
            )
        if block.compilation is not None and block.compilation.around and treatment.kept_operators() is None:
            raise ValueError(
                f"`{policy}` works around each block, and `{block.name}` is compiled within "
                f"`{block.compilation.around}`. Compile block by block instead (`block.compile()` for each, or "
                "`compile_blocks` of `BigModelStrategy`), or use `Full()` or `Selective()`."
            )
    for block, treatment in pairs:
        compilation = block.compilation
        if compilation is None or compilation.backend in BACKENDS:
            continue
        if compilation.around or treatment.looks_inside:
            what = (
                f"is compiled within `{compilation.around}`"
                if compilation.around
                else f"is compiled, and `{policy}` chooses among its operators"
            )
            raise ValueError(
                f"`{block.name}` {what}, so that the compiler has to compute again what is not kept, and its backend "
                f"{compilation.backend!r} is not known to. Use one of {', '.join(map(repr, BACKENDS))}, "
                + ("compile block by block, " if compilation.around else "use `Full()` or `Offload()`, ")
                + "or leave compiling out."
            )


def marked_for_compiler(
    function: Callable[..., Any], keep: Collection[Any], otherwise: Callable[..., Any], backend: str
) -> Callable[..., Any]:
    """`function` for a compiler that is to keep its inputs and the results of operators only.

    Args:
        function: The forward of a block.
        keep: Operators.
        otherwise: What is called where this runs and is not compiled, as in a step that is only traced for its shapes.
        backend: Name of the compiler's backend.
    """
    caches, names = _cache_types(), tuple(sorted(map(str, keep)))
    contexts = functools.partial(_contexts, names, backend)
    # Compiled code is found again on disk by this, without a look at what is refused below: count up when that changes.
    contexts.cache_hash = ",".join(("recompute 1", backend, *names))  # type: ignore[attr-defined]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return otherwise(*args, **kwargs)
        if caches:  # see `without_caches`, which a compiler cannot follow
            args = tuple(None if isinstance(value, caches) else value for value in args)
            kwargs = {name: None if isinstance(value, caches) else value for name, value in kwargs.items()}

        def again() -> Any:
            return function(*args, **kwargs)

        return checkpoint(again, use_reentrant=False, context_fn=contexts)

    return forward


def _contexts(names: tuple[str, ...], backend: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    # A compiler that cannot take the block as one leaves the checkpoint to eager mode, and Dynamo's eager backend runs
    # it as it is: both draw other random numbers in backward than the rest of compiled code does.
    if not torch.compiler.is_compiling():
        torch.compiler.reset()  # else code that is cut here is taken for other blocks too, in the next run as well
        raise RecomputeError(_NOT_ONE_GRAPH)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if backend == "inductor" and any(tensor.dtype in _HALF for tensor in tensors_of(args)):
            _check_casts()
        return CheckpointPolicy.MUST_SAVE if str(operator) in names else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    return first, second


_HALF = (torch.bfloat16, torch.float16)


def _check_casts() -> None:
    from torch._inductor import config

    if not config.emulate_precision_casts:
        raise RecomputeError(
            "Inductor leaves out casts to half precision between operators that it fuses, so that what it computes "
            "again in backward would be rounded otherwise than in forward. Set "
            "`torch._inductor.config.emulate_precision_casts = True`, or as an option of `torch.compile`. Or compile "
            "block by block and use `Full()` or `Offload()`."
        )


_NOT_ONE_GRAPH = (
    "A compiled block that is to be computed again by the compiler cannot be compiled in one graph with a backend that "
    f"computes again ({', '.join(BACKENDS)}). Its forward must not print, draw numbers of `random` or numpy, nor set "
    "attributes, buffers or counters; `TORCH_LOGS=graph_breaks` tells what it was. Change that, use `Full()` with "
    "block-wise compiling, or leave compiling out."
)


def _cache_types() -> tuple[type, ...]:
    """Key-value caches of transformers, where it is in use."""
    module = sys.modules.get("transformers.cache_utils")
    found = [value for value in vars(module).values() if isinstance(value, type)] if module is not None else []
    return tuple(cls for cls in found if cls.__module__ == "transformers.cache_utils")


def written_state(module: nn.Module, given: Any = ()) -> list[tuple[str, torch.Tensor, int]]:
    """A note of what a compiled forward must not write: its inputs, and its buffers but for statistics of norms."""
    buffers = [
        (f"buffer `{name}`", buffer, buffer._version)
        for name, buffer in module.named_buffers()
        if name.rpartition(".")[2] not in _OF_NORMS
    ]
    return [*buffers, *(("input", tensor, tensor._version) for tensor in tensors_of(given))]


def check_unwritten(name: str, noted: Sequence[tuple[str, torch.Tensor, int]]) -> None:
    """Compare with a note.

    Raises:
        RecomputeError: Where something was written: the compiler would compute again from the values after it.
    """
    for what, tensor, version in noted:
        if tensor._version != version:
            raise RecomputeError(
                f"The forward of `{name}` writes its {what} of shape {tuple(tensor.shape)} in place, and the compiler "
                "would compute again from what is written there. Compile block by block and use `Full()`, leave this "
                "block out of `Recompute(blocks=[...])`, or leave compiling out."
            )
