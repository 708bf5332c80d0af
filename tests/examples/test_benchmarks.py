"""The benchmarks run, and what they count is what they claim; times are not looked at here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
_TINY = ["--width=16", "--num-blocks=4", "--context=8", "--batch-size=4", "--num-microbatches=4", "--rounds=1"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """One run of the benchmark over three schedules: schedule -> what it found."""
    path = tmp_path_factory.mktemp("benchmark") / "results.json"
    options = ["--warmup-rounds=0", f"--json={path}", "--schedules", "GPipe", "1F1B", "Interleaved1F1B"]
    done = subprocess.run(
        [sys.executable, str(_BENCHMARKS / "pipeline_cost.py"), *_TINY, *options],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return {result["schedule"]: result for result in json.loads(path.read_text())["results"]}


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_a_cut_module_sends_what_a_pipeline_by_hand_sends(schedule, results):
    """A cut that sends tensors nobody needs, or sends them twice, costs on every step."""
    result = results[schedule]
    num_cuts = 3 if schedule == "Interleaved1F1B" else 1
    # Each cut and micro-batch: one hidden state of 1 sample x 8 positions x 16 features forward, its gradient backward.
    expected = [2 * 4 * num_cuts, 2 * 4 * num_cuts * 8 * 16 * 4]
    for kind in ("send", "recv"):
        assert result["hand_messages"][kind] == expected
        assert result["ours_messages"][kind] == expected


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_both_sides_did_the_same_work(schedule, results):
    """Times of runs that learn different things compare nothing."""
    result = results[schedule]
    assert result["largest_weight_difference"] < 1e-5
    assert result["last_loss"]["ours"] == pytest.approx(result["last_loss"]["hand"], rel=1e-5)


def test_beside_the_pipeline_a_step_shares_the_batch_and_the_logs_once(results):
    """Further collectives in every step, added without notice, would slow every run down."""
    messages = results["1F1B"]["ours_messages"]
    assert set(messages) == {"send", "recv", "broadcast", "object"}
    assert messages["object"][0] == 2  # one on each rank: logs, losses and outputs
    assert messages["object"][1] < 4096
    assert messages["broadcast"][0] == 4  # two on each rank: the batch's description and its values
