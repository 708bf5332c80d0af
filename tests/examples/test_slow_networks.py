"""Replicas that send less: the example on real data runs, and the benchmark's hosts send what it says."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(("task", "num_syncs"), [("digits", 2), ("text", 4)])
def test_the_example_writes_a_curve_for_each_way_to_agree(task: str, num_syncs: int, tmp_path: Path) -> None:
    """A class that has moved, or curves that are not those of the run."""
    script = str(_EXAMPLES / "slow_networks" / "train.py")
    said = _run(script, task, "--seeds=1", "--max-steps=4", "--rates=1", f"--output={tmp_path}")
    rows = list(csv.DictReader((tmp_path / f"{task}.csv").read_text().splitlines()))
    assert len({row["sync"] for row in rows}) == num_syncs
    assert {row["step"] for row in rows} == {"4"}
    assert said.count("| `") == num_syncs


def test_the_readme_tells_what_the_kept_curves_say() -> None:
    """Numbers beside curves that have been measured anew, or better ones than those."""
    ends: dict[tuple[str, float], dict[str, float]] = {}
    for task, metric in (("digits", "val_accuracy"), ("text", "val_loss")):
        for row in csv.DictReader((_EXAMPLES / "slow_networks" / f"{task}.csv").read_text().splitlines()):
            # Rows go on in time: the last one stays.
            ends.setdefault((f"{task} {row['sync']}", float(row["rate"])), {})[row["seed"]] = float(row[metric])
    means = {side: sum(seeds.values()) / len(seeds) for side, seeds in ends.items()}
    said = (_EXAMPLES / "slow_networks" / "README.md").read_text()
    assert len(means) == 19
    for mean in means.values():
        assert f" {mean:.4f} " in said
    assert means["digits DGC(sparsity=0.999)", 1.0] > means["digits AllReduce", 1.0] - 0.005
    assert means["text DiLoCo(period=50)", 1.0] < 1.02 * means["text AllReduce", 1.0]
    averaged = "text LocalSGD(period=8, optimizer_state=average)"
    best = {
        name: min(mean for (side, _), mean in means.items() if side == name) for name in (averaged, "text AllReduce")
    }
    assert best[averaged] < 1.02 * best["text AllReduce"]


def test_a_slow_link_is_spared_what_the_period_says() -> None:
    """Gradients that are summed all the same, or bytes that are not those of the link."""
    assert shutil.which("tc") is not None, "this test needs `ip netns` and `tc`: install iproute2, and run as root"
    script = str(_EXAMPLES / "benchmarks" / "slow_links.py")
    said = _run(script, "--rates=none", "--width=128", "--sides", "DDPStrategy", "LocalSGD 16")
    table = [[cell.strip() for cell in line.split("|")] for line in said.splitlines() if line.startswith("| none")]
    num_bytes = {row[2]: float(row[4]) for row in table}
    gradient_bytes = 4 * 10 * 128 * 129
    # In a ring of four, 2 * 3/4 of the gradients; headers besides.
    assert 1.5 * gradient_bytes < num_bytes["DDPStrategy"] < 1.7 * gradient_bytes
    assert 12 < num_bytes["DDPStrategy"] / num_bytes["LocalSGD 16"] < 17
