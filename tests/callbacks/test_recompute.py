"""Recomputation under every layout: the weights of a run without it, bit for bit, and as many forwards as declared."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelPrecision, Full, Offload, Optimal, Recompute, Selective, SquareRoot
from lightning_bigmodel.mesh.failures import RankFailedError
from lightning_bigmodel.recompute.choose import BudgetError
from lightning_bigmodel.testing import SavedBytes, run_ranks
from tests.callbacks.recompute_runs import Counted, data, trained

PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}
# name: (ranks, strategy, options of the Trainer)
LAYOUTS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "one": (1, {}, {}),
    "one_mixed": (1, {}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    "lightning_ddp": (2, "ddp", {}),
    "pipe": (2, PIPE, {}),
    "interleaved_zero_bubble": (2, {**PIPE, "schedule": "InterleavedZeroBubble"}, {}),
    "zero3": (2, {"zero_stage": 3, "num_microbatches": 2}, {}),
    "pipe_zero3": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}, {}),
    "tensor": (
        2,
        {"tensor_parallel_size": 2, "tensor_plan": {"blocks.*.mlp.1": "colwise", "blocks.*.mlp.3": "rowwise"}},
        {},
    ),
}
# Where the backward of the last block directly follows its forward.
LEAVES_OUT_LAST = {"one", "one_mixed", "lightning_ddp", "pipe", "zero3", "pipe_zero3", "tensor"}


def _trained(strategy: Any, policy: Any, devices: int, options: dict[str, Any]) -> dict[str, Any]:
    look = Callback()
    recompute = [] if policy is None else [Recompute(policy)]
    # The order of callbacks must not matter.
    callbacks = [*recompute, look] if isinstance(policy, Full) else [look, *recompute]
    return trained(strategy, callbacks, devices, **options)


def _compared(strategy: Any, devices: int, options: dict[str, Any]) -> dict[str, Any]:
    plain = _trained(strategy, None, devices, options)
    found = {}
    # Where a run takes its time, what differs between policies has been seen in smaller layouts.
    is_slow = devices > 2 or (isinstance(strategy, dict) and "tensor_plan" in strategy)
    policies = (Full(), SquareRoot(), Selective(), Offload(min_bytes=0), Offload(saved="inputs", min_bytes=0))
    for policy in policies[:1] if is_slow else policies:
        other = _trained(strategy, policy, devices, options)
        found[f"{type(policy).__name__} {getattr(policy, 'saved', '')}"] = {
            "different": [
                name for name, value in plain["weights"].items() if not np.array_equal(value, other["weights"][name])
            ],
            "random": plain["random"] == other["random"],
            "names": plain["names"] == other["names"],
            "left": plain["left"] == other["left"],
            "forwards": {i: (count, other["forwards"][i]) for i, count in plain["forwards"].items()},
        }
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_those_without_it(name: str) -> None:
    """Other dropout masks in the second run, other types, a parameter that is not there, a third forward."""
    devices, strategy, options = LAYOUTS[name]
    for rank in run_ranks(_compared, devices, strategy, devices, options, timeout_seconds=120.0):
        for policy, found in rank.items():
            assert found["different"] == [], policy
            assert found["random"], policy
            assert found["names"], policy
            assert found["left"], policy
            for index, (plain, counted) in found["forwards"].items():
                leaves_out = index == 3 and name in LEAVES_OUT_LAST
                if policy.startswith("SquareRoot"):
                    assert counted in (plain, 2 * plain), index
                    assert index or counted == 2 * plain
                else:
                    assert counted == plain * (1 if leaves_out or policy == "Offload all" else 2), (policy, index)


def _budgeted(strategy: Any, devices: int, budget: int) -> dict[str, Any]:
    plain = _trained(strategy, None, devices, {})
    recompute = Recompute(budget=f"{budget}KiB")
    found = trained(strategy, [recompute], devices)
    if "schedule" not in strategy:  # ending a failed pipeline takes its time
        with pytest.raises(
            BudgetError, match=r"`budget=3000` bytes do not hold .* The least that would do is \d+ bytes"
        ):
            trained(strategy, [Recompute(budget=3000)], devices)
    assert isinstance(recompute.policy, Optimal)
    assert recompute.policy.plan is not None
    return {
        "different": [n for n, value in plain["weights"].items() if not np.array_equal(value, found["weights"][n])],
        "left": found["left"],
        "plan": recompute.policy.plan,
        "num_plans": len(recompute.policy.plans),
    }


@pytest.mark.parametrize(("name", "budget"), [("one", 180), ("interleaved_zero_bubble", 30), ("zero3", 90)])
def test_a_budget_chooses_for_each_block(name: str, budget: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that choose otherwise for the same blocks, or one that alone is out of budget and leaves the others."""
    devices, strategy, _ = LAYOUTS[name]
    ranks = run_ranks(_budgeted, devices, strategy, devices, budget, timeout_seconds=120.0)
    for rank in ranks:
        assert rank["different"] == []
        assert rank["left"] == []
        assert rank["num_plans"] == devices
        assert rank["plan"].peak_bytes <= budget * 1024
        assert rank["plan"].outside_bytes > 0
        assert {option.choice for option in rank["plan"].options} != {"save"}
    names = [rank["plan"].names for rank in ranks]
    if name == "zero3":
        assert ranks[0]["plan"] == ranks[1]["plan"]
    elif devices == 2:
        assert names == [("blocks.0", "blocks.2"), ("blocks.1", "blocks.3")]
    shown = capfd.readouterr()
    assert (shown.out + shown.err).count(f"Activations within {budget}.0 KiB a rank") == 1


def test_a_failed_run_leaves_the_module_as_it_was() -> None:
    """Blocks that go on recomputing, or fail, in the next run."""

    class Broken(Counted):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            """Fails."""
            raise KeyError("boom")

    module = Broken()
    recompute = Recompute()
    with pytest.raises(KeyError, match="boom"):
        trained("auto", [recompute], module=module)
    assert all("forward" not in part.__dict__ for part in module.blocks)
    module.__class__ = Counted
    plain = trained("auto", [], module=Counted())
    again = trained("auto", [recompute], module=Counted())
    assert all(np.array_equal(again["weights"][name], value) for name, value in plain["weights"].items())


def test_named_blocks_and_evaluation() -> None:
    """A pattern that is not followed, or a second run where there is no backward."""
    plain = trained("auto", [])
    found = trained("auto", [Recompute(blocks=["blocks.1", "blocks.2", "head"])])
    assert found["forwards"] == {**plain["forwards"], 1: 8, 2: 8}
    with pytest.raises(ValueError, match=r"`blocks` has 'block\.1', which matches no module; near it"):
        trained("auto", [Recompute(blocks=["block.1"])])

    class NoBlocks(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList()

    with pytest.raises(ValueError, match="`Recompute` found no blocks: `NoBlocks` has no repeated modules"):
        trained("auto", [Recompute()], module=NoBlocks())


def _refused(strategy: Any, devices: int, recompute: Any, message: str) -> str:
    # A rank may hear of it from another before it gets there.
    with pytest.raises((ValueError, RankFailedError), match=message):
        trained(strategy, [recompute], devices)
    return "refused"


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    """A stage that ends within a block that is to be run again."""
    message = r"names 'blocks', but the pipeline may be cut within it, before 'blocks\.0'"
    found = run_ranks(_refused, 2, PIPE, 2, Recompute(blocks=["blocks"]), message)
    assert found == ["refused"] * 2
    message = (
        r"`Recompute\(budget=3000\)` plans for micro-batches of one size, which `num_microbatches=\"auto\"` goes on"
    )
    auto = {"num_microbatches": "auto", "memory_limit_bytes": 10**6}
    assert run_ranks(_refused, 1, auto, 1, Recompute(budget=3000), message) == ["refused"]
    message = "`SquareRoot` computes a segment's blocks again before the backward of each, where `zero_stage=3`"
    compiled = {"compile_blocks": True, "zero_stage": 3}
    assert run_ranks(_refused, 2, compiled, 2, Recompute(SquareRoot()), message) == ["refused"] * 2


def _compiled() -> tuple[dict[str, Any], dict[str, Any]]:
    strategy = {"compile_blocks": {"backend": "eager"}}
    return trained(strategy, [], max_epochs=1), trained(strategy, [Recompute()], max_epochs=1)


def test_compiled_blocks() -> None:
    """Hooks on saved tensors that compiled code does not ask, or code compiled for another state."""
    ((plain, found),) = run_ranks(_compiled, 1)
    assert all(np.array_equal(found["weights"][name], value) for name, value in plain["weights"].items())
    assert found["left"] == []


class BatchNormed(Counted):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.dropout = torch.nn.Sequential(OverFeatures(16), torch.nn.Dropout(0.2))


class OverFeatures(torch.nn.Module):
    """BatchNorm of `(samples, positions, features)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """With features last."""
        normed: torch.Tensor = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return normed


def _lists(policy: Any) -> dict[str, Any]:
    precision = BigModelPrecision(
        "bf16-mixed",
        full_precision_ops=["softmax", "gelu"],
        half_precision_ops=["layer_norm"],
        full_precision_modules=["blocks.1", "*.mlp.1"],
    )
    return trained({"num_microbatches": 2}, policy, module=Counted(), plugins=[precision], max_epochs=1)


def _statistics(policy: Any) -> dict[str, Any]:
    return trained({}, policy, module=BatchNormed(), max_epochs=1)


def _deferred(policy: Any) -> dict[str, Any]:
    strategy = {"num_microbatches": 2, "deferred_batch_norm": True}
    return trained(strategy, policy, module=BatchNormed(), max_epochs=1)


def _differences() -> list[str]:
    found = []
    for run in (_lists, _statistics, _deferred):
        plain = run([])
        for policy in (Full(), Selective()):
            other = run([Recompute(policy)])
            found += [n for n, value in plain["weights"].items() if not np.array_equal(value, other["weights"][n])]
    return found


def test_lists_of_operators_and_running_statistics() -> None:
    """Operators in other types in the second run; statistics that are moved twice a batch."""
    assert run_ranks(_differences, 1, timeout_seconds=100.0) == [[]]


def _num_parts(limit: int) -> list[int]:
    found: list[int] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            """How many parts the batch was split into."""
            found.append(trainer.strategy.engine.num_parts)

    for recompute in ([], [Recompute()]):
        strategy = {"num_microbatches": "auto", "memory_limit_bytes": limit}
        trained(strategy, [Look(), *recompute], max_steps=1)
    return found


def test_larger_microbatches_fit() -> None:
    """An estimate that counts what is given up all the same."""
    assert run_ranks(_num_parts, 1, 330_000) == [[2, 1]]


def _measured(limit: int) -> list[dict[str, Any]]:
    found = []
    for policy in (None, Full(), Selective()):
        recompute = [] if policy is None else [Recompute(policy)]
        told: list[Any] = []
        num_parts: list[int] = []
        counted: list[int] = []
        failed: list[int] = []

        class Look(Callback):
            def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
                """Looks at what the search is told."""
                sizer = trainer.strategy.engine.sizer
                if sizer is not None and not num_parts:  # noqa: B023
                    measured = sizer.measured
                    sizer.measured = lambda *given: (told.append(given[1:-1]), measured(*given))  # noqa: B023
                    sizer.failed = lambda batch, num_parts: failed.append(num_parts)  # noqa: B023
                self.saved = SavedBytes() if sizer is None else nullcontext()
                self.saved.__enter__()

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                """How many parts the batch was split into, and what was kept."""
                num_parts.append(trainer.strategy.engine.num_parts)  # noqa: B023
                self.saved.__exit__(None, None, None)
                if isinstance(self.saved, SavedBytes):
                    counted.append(self.saved.peak_bytes)  # noqa: B023

        strategy: dict[str, Any] = {"pipeline_parallel_size": 2}
        auto = {**strategy, "num_microbatches": "auto", "memory_limit_bytes": limit}
        trained(auto, [Look(), *recompute], 2, batch_size=16, max_epochs=3)
        parts = list(num_parts)
        trained({**strategy, "num_microbatches": parts[0]}, [Look(), *recompute], 2, batch_size=16, max_epochs=1)
        found.append({"parts": parts, "told": told, "counted": counted, "failed": failed})
    return found


def test_a_pipeline_measures_what_a_microbatch_keeps() -> None:
    """Small micro-batches for good because of activations that are given up; what is computed again, forgotten."""
    held = (2, 1)
    for rank, found in enumerate(run_ranks(_measured, 2, 160_000, timeout_seconds=100.0)):
        for each in found:
            first = each["parts"][0]
            assert each["told"] == [(first, each["counted"][0], held[rank])]
            assert each["failed"] == []
        plain, full, selective = found
        assert full["counted"][0] < selective["counted"][0] < plain["counted"][0]
        # First by the trace, then by what was kept; 4 are the least.
        assert plain["parts"] == [16, 8, 8]
        assert full["parts"] == [16, 4, 4]


def test_what_would_run_a_block_three_times_or_not_at_all_is_refused() -> None:
    """A callback that does nothing, or the same as another one."""
    with pytest.raises(ValueError, match=r"Two `Recompute` callbacks take `blocks\.0`"):
        trained("auto", [Recompute(), Recompute(Selective())])
    with pytest.raises(ValueError, match=r"`Recompute` has nothing to do: 1 block\(s\)"):
        trained("auto", [Recompute(blocks=["blocks.3"])])
    module = Counted()
    module.blocks[2].gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"`blocks\.2` computes its layers again by itself"):
        trained("auto", [Recompute()], module=module)


class Watched(Counted):
    """Looks at itself while it trains."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Copies and pickles what is being trained."""
        twin = copy.deepcopy(self.blocks)
        again = pickle.loads(pickle.dumps(self.blocks[0]))
        given = {"scale": torch.ones(1, 1, 1)}
        hidden = torch.ones(1, 2, 16)
        for block in (self.blocks[0], twin[0], again):
            block.eval()
        expected = self.blocks[0](hidden, given=given)[0]
        assert torch.equal(twin[0](hidden, given=given)[0], expected)
        assert torch.equal(again(hidden, given=given)[0], expected)
        self.blocks[0].train()


def test_blocks_can_be_copied_and_pickled_while_they_train() -> None:
    """A callback that copies the model, as averages of weights do."""
    trained("auto", [Recompute()], module=Watched())


@pytest.mark.filterwarnings(r"ignore:(?s).*(was deprecated in v4|JsonargparseDeprecationWarning)")
def test_yaml(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies by class path."""
    (tmp_path / "config.yaml").write_text(
        """
seed_everything: 1
trainer:
  max_steps: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_bigmodel.Recompute
      init_args:
        policy:
          class_path: lightning_bigmodel.Selective
          init_args: {keep: [matmul, attention]}
        blocks: [blocks.0, blocks.1]
"""
    )
    monkeypatch.setattr("sys.argv", ["train"])
    cli = LightningCLI(Counted, args=["--config", str(tmp_path / "config.yaml")], run=False, save_config_callback=None)
    (recompute,) = (each for each in cli.trainer.callbacks if isinstance(each, Recompute))
    assert isinstance(recompute.policy, Selective)
    assert recompute.policy.keep == ("matmul", "attention")
    cli.trainer.fit(cli.model, DataLoader(data(), batch_size=8))
