"""The audit finds what 16 bits break, proposes what mends it, and training takes no notice of it."""

from __future__ import annotations

import csv
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_bigmodel import BigModelPrecision, BigModelStrategy, PrecisionAudit
from lightning_bigmodel.callbacks._audit_blocks import audited_blocks
from lightning_bigmodel.callbacks._audit_report import AuditFindings
from lightning_bigmodel.callbacks._block_audit import BlockNumbers
from lightning_bigmodel.callbacks._block_twin import make_twin
from lightning_bigmodel.scaling.comparison import Comparison
from lightning_bigmodel.testing import run_ranks as run_ranks_for
from tests.strategies.scaled_modules import WIDTH, Overflowing, Pair, run

run_ranks = functools.partial(run_ranks_for, timeout_seconds=60.0)

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "alone": (1, 1, {}),
    "microbatches": (1, 1, {"num_microbatches": 2}),
    "replicas": (2, 2, {}),
    "pipe": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "zero_bubble": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "ZBVZeroBubble"}),
    "zero2": (2, 2, {"zero_stage": 2, "num_microbatches": 2}),
    "zero3": (2, 2, {"zero_stage": 3}),
}


class Sums(nn.Module):
    """Normalises by hand: its sums of squares are no numbers of fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        hidden = self.up(x) * 400
        out: Tensor = x + self.down(hidden / (hidden.square().sum(-1, keepdim=True) + 1).sqrt())
        return out


class Softmax(Sums):
    """Scores that differ by less than fp16 can tell near their size."""

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        scores = nn.functional.softmax(torch.add(self.up(x), 3000.0), -1)
        out: Tensor = x + self.down(scores)
        return out


class Faint(Sums):
    """On the way back a factor makes gradients vanish, and another makes up for it."""

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        out: Tensor = x + self.down(self.up(x).sin() * 1e-6 * 1e6)
        return out


class Wide(Sums):
    """Sums that overflow within a matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        out: Tensor = x + self.down(self.up(x * 3e4) * 1e-5)
        return out


class Habits(Pair):
    """What an extra run would change: random numbers, statistics, attributes, logs, memory of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(WIDTH, momentum=0.5)
        self.num_calls, self.kept = 0, []  # type: ignore[var-annotated]
        self.log_to: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        self.num_calls += 1
        self.kept.append(self.num_calls)
        if self.log_to is not None:
            self.log_to[0].log("calls", float(self.num_calls), on_step=True)
        x += torch.rand(())
        hidden = super().forward(self.dropout(x))
        return hidden + self.norm(hidden)


class Net(Overflowing):
    """Four good blocks and one in their midst."""

    def __init__(self, planted: type[nn.Module], loses_outside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Pair(), Pair(), planted(), Pair(), Pair()])
        self.loses_outside = loses_outside
        self.num_seen = 0
        self.blocks[1].register_forward_hook(self._saw)

    def _saw(self, *_: Any) -> None:
        self.num_seen += 1

    def on_train_start(self) -> None:
        """Blocks may log."""
        if isinstance(self.blocks[2], Habits):
            self.blocks[2].log_to = (self,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """With something to lose beside the blocks."""
        loss = super().training_step(batch, batch_idx)
        if self.loses_outside:
            loss = loss + 0.0 * (self.blocks[4].up(batch[0]).detach() + 300).square().clamp(max=1.0).float().mean()
        return loss

    def on_train_end(self) -> None:
        """No hook of its own."""

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def audited(planted: type[nn.Module], path: str, layout: str = "alone", **options: Any) -> dict[str, Any]:
    """Train under an audit; what it says."""
    devices, data_ranks, settings = LAYOUTS[layout]
    precision = BigModelPrecision("16-mixed", init_scale=256.0, **options.pop("lists", {}))
    audit = PrecisionAudit(**{"num_steps": 2, "output_path": path, **options})
    run(
        Net(planted),
        precision,
        BigModelStrategy(**settings),
        devices,
        data_ranks,
        callbacks=[audit],
        limit_train_batches=3,
    )
    assert audit.findings is not None
    assert audit.proposal is not None
    return {
        "blocks": {
            name: (n.output.error, n.gradient.error, n.rank, n.note) for name, n in audit.findings.blocks.items()
        },
        "bad": [name for name, n in audit.findings.blocks.items() if n.exceeds(audit.findings.tolerance)],
        "ops": list(audit.proposal.full_precision_ops),
        "modules": list(audit.proposal.full_precision_modules),
        "num_steps": audit.findings.num_steps,
    }


@pytest.mark.parametrize(("planted", "ops"), [(Sums, ["square"]), (Softmax, ["add"]), (Faint, ["sin"]), (Wide, [])])
def test_what_breaks_is_first_and_mended(planted: type[nn.Module], ops: list[str], tmp_path: Path) -> None:
    """A bad block among good ones; a list that is only a guess; costly operators for the whole model."""
    found = run_ranks(audited, 1, planted, str(tmp_path))[0]
    assert next(iter(found["blocks"])) == "blocks.2"
    assert found["bad"] == ["blocks.2"]
    assert found["num_steps"] == 2
    assert (found["ops"], found["modules"]) == (ops, [] if ops else ["blocks.2"])
    lists = {"full_precision_ops": found["ops"], "full_precision_modules": found["modules"]}
    mended = run_ranks(audited, 1, planted, str(tmp_path), lists=lists)[0]
    assert mended["bad"] == []
    assert (mended["ops"], mended["modules"]) == (found["ops"], found["modules"])
    assert max(mended["blocks"]["blocks.2"][:2]) < 0.0078


def trained(layout: str, path: str | None) -> dict[str, Any]:
    """Weights and all that a block of many habits leaves behind, with an audit if there is a path."""
    devices, data_ranks, settings = LAYOUTS[layout]
    module = Net(Habits if settings.get("num_microbatches", 1) == 1 else Sums, loses_outside=True)
    torch.manual_seed(17)
    callbacks = [] if path is None else [PrecisionAudit(num_steps=3, every_num_steps=2, output_path=path)]
    precision = BigModelPrecision("16-mixed", init_scale=2.0**20, growth_interval=100)
    found = run(module, precision, BigModelStrategy(**settings), devices, data_ranks, callbacks=callbacks, max_epochs=2)
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()]
    return {
        **found,
        "buffers": {name: buffer.numpy().copy() for name, buffer in module.named_buffers()},
        "random": torch.rand(3).tolist(),
        "num_seen": module.num_seen,
        "habits": {name: getattr(module.blocks[2], name, None) for name in ("num_calls", "kept")},
        "logged": {k: float(v) for k, v in module.trainer.callback_metrics.items()},
        "hooks": hooks,
        "left": [name for name in ("train_step_context", "log") if name in {**precision.__dict__, **module.__dict__}],
        "bad": [name for name, numbers in callbacks[0].findings.blocks.items() if numbers.exceeds(0.0078)]
        if callbacks
        else None,
        "ops": callbacks[0].proposal.full_precision_ops if callbacks else (),
        "notes": [n.note for n in callbacks[0].findings.blocks.values() if n.note] if callbacks else [],
        "output_errors": [n.output.error for n in callbacks[0].findings.blocks.values()] if callbacks else [],
        "num_compared": min(n.output.num_calls for n in callbacks[0].findings.blocks.values()) if callbacks else 0,
        "outside": [key.function for key in callbacks[0].findings.operators if not key.block] if callbacks else [],
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_takes_no_notice(layout: str, tmp_path: Path) -> None:
    """Random numbers drawn twice, statistics moved twice, gradients added twice, hooks and attributes left behind.

    The first steps overflow, so that skipped steps are audited too.
    """
    devices = LAYOUTS[layout][0]
    without = run_ranks(trained, devices, layout, None)
    watched = run_ranks(trained, devices, layout, str(tmp_path))
    for plain, found in zip(without, watched, strict=True):
        assert plain["seen"][0]["skipped"] == 1.0
        for kind in ("weights", "buffers"):
            for name, value in plain[kind].items():
                np.testing.assert_array_equal(found[kind][name], value, err_msg=name)
        for name in ("seen", "random", "num_seen", "habits", "logged", "hooks"):
            assert found[name] == plain[name], name
        assert found["left"] == []
        assert found["notes"]
        assert not any("cannot run again" in note for note in found["notes"])
        assert found["num_compared"] == 3 * LAYOUTS[layout][1]
        assert "square" in found["outside"]
        assert "square" in found["ops"]
    if LAYOUTS[layout][2].get("num_microbatches", 1) > 1:
        assert watched[0]["bad"][0] == "blocks.2"
    else:
        assert max(watched[0]["output_errors"]) < 0.0078  # both runs draw the same dropout
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".csv") == ["blocks.csv", "operators.csv"]


def rows(path: Path) -> list[dict[str, str]]:
    """A table as written."""
    with path.open() as file:
        return list(csv.DictReader(file))


def test_what_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that says something else than its file; a snippet that does not run; files in another place."""
    audit = PrecisionAudit(num_steps=1)
    options = {"callbacks": [audit], "limit_train_batches": 1, "default_root_dir": str(tmp_path)}
    run(Net(Sums), MixedPrecision("bf16-mixed", "cpu"), **options)
    assert all(numbers.output.error < 0.02 for numbers in audit.findings.blocks.values())
    assert "nothing has to change" in capsys.readouterr().out
    run(Net(Sums), BigModelPrecision("16-mixed", init_scale=256.0), **options)  # without our strategy
    printed = capsys.readouterr().out
    assert printed.index("blocks.2") < printed.index("blocks.0")
    snippet = next(line for line in printed.splitlines() if line.startswith("BigModelPrecision"))
    assert eval(snippet).full_precision_ops == ["square"]
    blocks, operators = rows(tmp_path / "precision_audit/blocks.csv"), rows(tmp_path / "precision_audit/operators.csv")
    assert [row["block"] for row in blocks[:1]] == ["blocks.2"]
    assert sorted(row["block"] for row in blocks) == [f"blocks.{index}" for index in range(5)]
    assert [row["rank"] for row in blocks] == ["1", "2", "3", "4", "5"]
    assert float(blocks[0]["output_error"]) == audit.findings.blocks["blocks.2"].output.error > 0.1
    assert float(blocks[0]["headroom_bits"]) < 1 < float(blocks[1]["headroom_bits"])
    first = operators[0]
    assert (first["block"], first["pass"], first["operator"]) == ("blocks.2", "forward", "pow")
    assert int(float(first["num_overflows"])) > 0
    assert {row["pass"] for row in operators} == {"forward", "backward"}
    assert not any(row["function"] for row in operators if row["pass"] == "backward")
    scaled = [float(row["gradient_underflow"]) for row in blocks[1:]]
    unscaled = [float(row["gradient_underflow_unscaled"]) for row in blocks[1:]]
    assert max(scaled) < max(unscaled)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_picture_is_optional(is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends with an ImportError after hours; a picture nobody can open."""
    if not is_there:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lost = Comparison(num_calls=1, num_compared=4, num_overflows=1)
    numbers = {"a": BlockNumbers(output=lost), "b": BlockNumbers(output=Comparison(difference=1.0, reference=4.0))}
    findings = AuditFindings(numbers, {}, tolerance=0.01, num_steps=1)
    assert list(findings.blocks) == ["a", "b"]
    said = findings.write(tmp_path)
    assert ("pip install matplotlib" in said) is not is_there
    assert (tmp_path / "blocks.png").exists() is is_there
    if is_there:
        assert (tmp_path / "blocks.png").read_bytes().startswith(b"\x89PNG")


def audited_by_lightning(kind: str, path: str) -> tuple[list[str], list[str], int]:
    """Under Lightning's own strategies, and with fewer steps than asked for."""
    audit = PrecisionAudit(num_steps=50, output_path=path, tolerance=0.05 if kind == "loose" else None)
    precision = BigModelPrecision("16-mixed" if kind != "true" else "16-true", init_scale=256.0)
    module, strategy = Net(Sums), DDPStrategy(process_group_backend="gloo") if kind == "ddp" else None
    run(module, precision, strategy, 2 if kind == "ddp" else 1, 2, callbacks=[audit], limit_train_batches=2)
    assert audit.proposal is not None
    assert audit.findings is not None
    return (
        list(audit.proposal.full_precision_ops),
        list(audit.proposal.full_precision_modules),
        int(next(n.output.num_calls for n in audit.findings.blocks.values())),
    )


def test_lightnings_own_strategies(tmp_path: Path) -> None:
    """Ranks of which one's numbers are lost; operators proposed where there are none to choose."""
    assert run_ranks(audited_by_lightning, 2, "ddp", str(tmp_path)) == [(["square"], [], 4)] * 2
    assert run_ranks(audited_by_lightning, 1, "true", str(tmp_path))[0] == ([], ["blocks.2"], 2)


class Failing(Net):
    """Breaks off in the middle of an audited step."""

    def on_after_backward(self) -> None:
        """After the audit has begun."""
        raise KeyError("on purpose")


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    """Hooks that keep inputs alive for ever; a module that logs nowhere any more."""
    module, precision = Failing(Sums), BigModelPrecision("16-mixed")
    audit = PrecisionAudit(output_path=tmp_path)
    before = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()]
    with pytest.raises(KeyError, match="on purpose"):
        run(module, precision, callbacks=[audit])
    assert [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()] == before
    assert "log" not in module.__dict__
    assert "train_step_context" not in precision.__dict__
    assert audit.findings is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_steps": 0}, "`num_steps=0`"),
        ({"num_steps": True}, "`num_steps=True`"),
        ({"every_num_steps": 1.5}, "`every_num_steps=1.5`"),
        ({"blocks": "blocks.*"}, "list of module names"),
        ({"blocks": []}, "list of module names"),
        ({"tolerance": 0.0}, "`tolerance=0.0`"),
        ({"tolerance": float("nan")}, "`tolerance=nan`"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """An audit of no steps, or one that finds everything good."""
    with pytest.raises(ValueError, match=said.replace("*", r"\*")):
        PrecisionAudit(**settings)


@pytest.mark.parametrize(
    ("precision", "audit", "said"),
    [
        ("32-true", {}, "Use one of .*16-mixed.*, or leave the callback out"),
        ("64-true", {}, "computes nothing in 16 bits"),
        ("bf16-mixed", {"blocks": ["layers.*"]}, "matches no module; near it"),
    ],
)
def test_what_cannot_be_audited_is_refused(precision: str, audit: dict[str, Any], said: str, tmp_path: Path) -> None:
    """A run that compares fp32 with itself."""
    with pytest.raises(ValueError, match=said):
        run(Net(Sums), precision, callbacks=[PrecisionAudit(output_path=tmp_path, **audit)])


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    """Extra runs within the step, which are taken for it."""
    module = Net(Sums)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="manual optimization"):
        run(module, BigModelPrecision("16-mixed"), callbacks=[PrecisionAudit(output_path=tmp_path)])


def refused(settings: dict[str, Any]) -> str:
    """What a layout is told."""
    with pytest.raises(ValueError, match="PrecisionAudit") as caught:
        run(Net(Pair), BigModelPrecision("bf16-mixed"), BigModelStrategy(**settings), 2, callbacks=[PrecisionAudit()])
    return str(caught.value)


def test_layouts_that_cannot_run_a_block_again() -> None:
    """Tensor ranks of which one runs a block again and waits for the other."""
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    for message in run_ranks(refused, 2, {"tensor_parallel_size": 2, "tensor_plan": plan}):
        assert "Audit with `tensor_parallel_size=1`" in message
    for message in run_ranks(refused, 2, {"compile_blocks": True}):
        assert "compile_blocks" in message


@pytest.mark.filterwarnings(r"ignore:(?s).*(was deprecated in v4|JsonargparseDeprecationWarning)")
def test_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that only Python can set up."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config = tmp_path / "config.yaml"
    config.write_text(
        """
seed_everything: 0
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  callbacks:
    - class_path: lightning_bigmodel.PrecisionAudit
      init_args: {num_steps: 2, every_num_steps: 5, blocks: ["blocks.*"], tolerance: 0.01, output_path: here}
"""
    )
    cli = LightningCLI(Overflowing, run=False, save_config_callback=None, args=["--config", str(config)])
    audit = next(each for each in cli.trainer.callbacks if isinstance(each, PrecisionAudit))
    assert (audit.num_steps, audit.every_num_steps, audit.blocks, audit.tolerance) == (2, 5, ["blocks.*"], 0.01)
    assert audit.output_path == Path("here")
    assert isinstance(cli.trainer, Trainer)


def test_blocks_are_whole() -> None:
    """A block of a class of its own among others is taken apart; a tower beside blocks is taken for one of them."""
    tower = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([Pair(), Pair()]))
    model = nn.ModuleList([Pair(), Sums(), Pair(), nn.Linear(2, 2), tower])
    assert list(audited_blocks(model)) == ["0", "1", "2", "3", "4.0", "4.1.0", "4.1.1"]


def test_a_twin_computes_the_same_and_keeps_to_itself() -> None:
    """A twin that shares buffers, lists, weights' gradients or the flat weights of a recurrent layer."""
    block = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "norm": nn.BatchNorm1d(4), "tied": nn.Linear(4, 4)})
    block["tied_too"] = block["tied"]
    block["made"] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    seen: list[str] = []
    block["tied"].register_forward_hook(lambda *_: seen.append("forward"))
    twin: Any = make_twin(block, {}, torch.Tensor.double)
    assert twin["tied_too"] is twin["tied"]
    assert twin["tied"] is not block["tied"]
    x = torch.randn(3, 4)
    expected = block["made"](block["tied"](block["rnn"](x)[0])).double()
    before = block["norm"].running_mean.clone()
    seen.clear()
    output = twin["made"](twin["tied"](twin["rnn"](x.double())[0]))
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    assert seen == []
    twin["norm"](output).sum().backward()
    make_twin(block, {}, lambda tensor: tensor)["norm"](x)
    assert all(parameter.grad is None for parameter in block.parameters())
    assert twin["rnn"].weight_hh_l0.grad is not None
    assert torch.equal(block["norm"].running_mean, before)
    assert not torch.equal(twin["norm"].running_mean, before.double())
