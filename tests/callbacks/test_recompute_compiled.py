"""Recomputation in compiled code: the weights of the compiled run without it, bit for bit, and fewer bytes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_bigmodel import Full, Offload, Optimal, Recompute, Selective, SquareRoot
from lightning_bigmodel.recompute.frame import RecomputeError
from lightning_bigmodel.testing import SavedBytes, run_ranks
from tests.callbacks.recompute_runs import Block, Counted, trained

CALLS: Counter[str] = Counter()
COMPILER = "inductor" if shutil.which("g++") else "aot_eager"
AROUND = (Full(), SquareRoot(), Offload(min_bytes=0), Offload(saved="inputs", min_bytes=0), Optimal("180KiB"))


class Quiet(Block):
    """Without a count, which a compiler cannot compute again."""

    def forward(self, hidden: Tensor, *, given: dict[str, Any], twice: bool = False) -> tuple[Tensor, Tensor]:
        """`given["scale"]`: `(samples, 1, 1)`."""
        hidden = hidden + self.dropout(self.attention(self.norm(hidden))) * given["scale"]
        hidden = hidden + self.dropout(self.mlp(hidden))
        return (2 * hidden if twice else hidden), hidden.detach().mean()


class Model(Counted):
    """Compiled as `how` says, by its user."""

    def __init__(self, how: str = "", backend: Any = "aot_eager", block: Callable[..., nn.Module] = Quiet) -> None:
        super().__init__()
        blocks = [block(index, 16) for index in range(4)]
        if how == "block.compile":
            for each in blocks:
                each.compile(backend=backend)
        elif how == "compiled blocks":
            blocks = [torch.compile(each, backend=backend) for each in blocks]  # type: ignore[misc]  # a module
        elif how == "compiled parts":
            for each in blocks:
                each.get_submodule("mlp").compile(backend=backend)
        self.blocks = nn.ModuleList(blocks)
        if how == "module.compile":
            self.compile(backend=backend)
        elif how == "compiled step":
            self.training_step = torch.compile(self.training_step, backend=backend)  # type: ignore[method-assign]
        elif how == "compiled helper":
            self._helper = torch.compile(lambda batch: self.loss(batch), backend=backend)
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss."""
        return self._helper(batch) if self.how == "compiled helper" else self.loss(batch)


class Bytes(Callback):
    """What autograd keeps of each forward, at most."""

    peak = 0

    def on_train_batch_start(self, *args: Any) -> None:
        """Counts from here."""
        self._saved = SavedBytes()
        self._saved.__enter__()

    def on_before_backward(self, *args: Any) -> None:
        """To here."""
        self._saved.__exit__(None, None, None)
        self.peak = max(self.peak, self._saved.peak_bytes)


def _run(strategy: Any, policy: Any, module: Any) -> dict[str, Any]:
    count = Bytes()
    CALLS.clear()
    callbacks = [count] if policy is None else [Recompute(policy), count]
    found = trained(strategy, callbacks, module=module, max_epochs=1)
    return {**found, "bytes": count.peak, "calls": CALLS["forward"]}


def _assert_same(found: dict[str, Any], plain: dict[str, Any], policy: Any) -> None:
    for name, value in plain["weights"].items():
        assert np.array_equal(found["weights"][name], value), (policy, name)
    assert found["random"] == plain["random"], policy
    assert found["left"] == plain["left"], policy
    assert found["bytes"] < plain["bytes"], policy


def _compiled_blocks() -> None:
    strategy = {"compile_blocks": {"backend": "aot_eager"}}
    plain = _run(strategy, None, Model())
    for policy in (*AROUND, Selective()):
        _assert_same(_run(strategy, policy, Model()), plain, policy)


def test_blocks_that_the_strategy_compiles() -> None:
    """Other dropout masks than compiled code had, or operators that were compiled and are not any more."""
    run_ranks(_compiled_blocks, 1)


def _counting(graph: Any, inputs: Any) -> Any:
    """A backend that runs what it is given as it is."""

    def run(*args: Any) -> Any:
        CALLS["forward"] += 1
        return graph(*args)

    return run


def _users_blocks() -> None:
    for how in ("block.compile", "compiled blocks"):
        plain = _run("auto", None, Model(how))
        for policy in (Full(), Selective(), Offload(min_bytes=0)):
            module = Model(how)
            calls = [each.__dict__.get("_compiled_call_impl") for each in module.blocks]
            _assert_same(_run("auto", policy, module), plain, policy)
            assert [each.__dict__.get("_compiled_call_impl") for each in module.blocks] == calls
        plain = _run("auto", None, Model(how, _counting))
        assert plain["calls"] == 2 * 4, how
        found = _run("auto", Full(), Model(how, _counting))
        _assert_same(found, plain, how)
        assert found["calls"] == 2 * 7, how  # not the last one


def test_blocks_that_the_user_compiles() -> None:
    """A treatment that is traced into the compiled block, or a block that is not compiled any more."""
    run_ranks(_users_blocks, 1)


def _whole() -> None:
    for how in ("module.compile", "compiled step"):
        plain = _run("auto", None, Model(how))
        kept = []
        for policy in (Selective(), Full(), Selective(["gelu"])):
            found = _run("auto", policy, Model(how))
            _assert_same(found, plain, policy)
            kept.append(found["bytes"])
        assert len(set(kept)) == 3, (how, kept)  # code that was compiled for another policy
        for policy in AROUND[1:]:
            with pytest.raises(ValueError, match=rf"`{type(policy).__name__}` works around each .* within `Model`"):
                _run("auto", policy, Model(how))
        with pytest.raises(ValueError, match="within `Model`, so that .* 'eager' is not known to"):
            _run("auto", Full(), Model(how, "eager"))


def test_a_module_that_is_compiled_as_a_whole() -> None:
    """Errors of the compiler in the first step, or a policy without effect."""
    run_ranks(_whole, 1)


class Written(Quiet):
    """Normalised by a mean of what it has seen."""

    def __init__(self, index: int, width: int) -> None:
        super().__init__(index, width)
        self.register_buffer("level", torch.ones(width))

    def forward(self, hidden: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Moves the mean."""
        self.level.mul_(0.9).add_(hidden.detach().square().mean((0, 1)), alpha=0.1)
        return super().forward(hidden / self.level.sqrt(), **options)


def _refused() -> None:
    compiled = {"compile_blocks": {"backend": "eager"}}
    with pytest.raises(
        ValueError, match=r"`blocks\.0` is compiled, and `Selective` chooses .* 'eager' is not known to"
    ):
        _run(compiled, Selective(), Model())
    with pytest.raises(ValueError, match="'_counting, which is a function of your own' is not known to"):
        _run("auto", Selective(), Model("block.compile", _counting))
    with pytest.raises(ValueError, match=r"`blocks\.0`, of which `mlp` is compiled into one"):
        _run("auto", Selective(), Model("compiled parts"))
    for how in ("block.compile", "module.compile"):
        with pytest.raises(RecomputeError, match="cannot be compiled in one graph"):
            _run("auto", Selective(), Model(how, block=Block))
        with pytest.raises(RecomputeError, match=r"`blocks\.0` writes its buffer `level`"):
            _run("auto", Selective(), Model(how, block=Written))
    with pytest.raises(ValueError, match=r"`blocks\.0` is traced into code that is compiled around it"):
        _run("auto", Full(), Model("compiled helper"))


def test_what_compiled_code_would_get_wrong_is_refused() -> None:
    """Wrong gradients without a word: other random numbers, or values of after the forward, when computed again."""
    run_ranks(_refused, 1)


def _layout(strategy: dict[str, Any]) -> None:
    strategy = {**strategy, "compile_blocks": {"backend": "aot_eager"}}
    plain = trained(strategy, [], 2, module=Model(), max_epochs=1)
    for policy in (Full(), Selective()):
        found = trained(strategy, [Recompute(policy)], 2, module=Model(), max_epochs=1)
        for name, value in plain["weights"].items():
            assert np.array_equal(found["weights"][name], value), (policy, name)


def test_layouts() -> None:
    """Parameters that are not there when the compiler's backward computes again; parts of a batch that mix."""
    run_ranks(_layout, 2, {"zero_stage": 3, "num_microbatches": 2})
    run_ranks(_layout, 2, {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "InterleavedZeroBubble"})


class Small(Quiet):
    """Little to compile."""

    def forward(self, hidden: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Without attention."""
        hidden = hidden + self.dropout(self.mlp(hidden))
        return hidden, hidden.detach().mean()


def _by_default_backend() -> None:
    with pytest.raises(Exception, match=r"Set `torch\._inductor\.config\.emulate_precision_casts = True`"):
        trained(
            "auto", [Recompute(Selective())], module=Model("block.compile", "inductor", Small), precision="bf16-mixed"
        )
    torch._inductor.config.compile_threads = 1
    plain = _run("auto", None, Model("block.compile", COMPILER, Small))
    for policy in (Full(), Selective()):
        _assert_same(_run("auto", policy, Model("block.compile", COMPILER, Small)), plain, policy)


def test_torchs_own_compiler() -> None:
    """Random numbers that the compiler makes by itself, and kernels that differ between forward and backward."""
    run_ranks(_by_default_backend, 1, timeout_seconds=300.0)
