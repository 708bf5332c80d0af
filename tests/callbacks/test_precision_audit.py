"""The audit finds what 16 bits break, proposes what mends it, and training takes no notice of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_bigmodel import BigModelPrecision, BigModelStrategy, PrecisionAudit
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
        assert "square" in found["outside"]
        assert "square" in found["ops"]
    if LAYOUTS[layout][2].get("num_microbatches", 1) > 1:
        assert watched[0]["bad"] == ["blocks.2"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".csv") == ["blocks.csv", "operators.csv"]
