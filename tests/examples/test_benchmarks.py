"""The benchmarks run, and what they count is what they claim; times are not looked at here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
_TINY = ["--width=16", "--num-blocks=4", "--context=8", "--batch-size=4", "--num-microbatches=4", "--rounds=1"]


def _run(script: str, options: list[str], path: Path, key: str) -> dict[str, dict]:
    """What a benchmark found, by `key`."""
    done = subprocess.run(
        [sys.executable, str(_BENCHMARKS / script), *options, f"--json={path}"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return {result[key]: result for result in json.loads(path.read_text())["results"]}


def test_memory_a_parameter(tmp_path: Path) -> None:
    """Counts of something else than weights, gradients and states; a way that does not save what it claims."""
    options = ["--width=128", "--num-blocks=2", "--context=8", "--batch-size=1", "--curve-steps=30", "--curve-width=64"]
    found = _run("memory_per_parameter.py", options, tmp_path / "results.json", "way")
    full = found["AdamW, fp32"]
    # Four times four bytes; beside them a text of 10 KB and a few numbers.
    assert full["zero_0"] == pytest.approx(16, abs=0.3)
    assert full["zero_3"] == pytest.approx(8, abs=0.3)
    for stage in ("zero_0", "zero_3"):
        small = [
            found[way][stage] for way in ("AdamW of 8 bits, fp32", "LoRA of rank 8, fp32", "QLoRA of rank 8, fp32")
        ]
        assert full[stage] > small[0] > small[1] > small[2]
    curve = [row for row in found.values() if "8 bits" in row]
    assert len(curve) == 10
    for row in curve:
        assert row["8 bits"] == pytest.approx(row["fp32"], rel=0.01)
    assert any(row["8 bits"] != row["fp32"] for row in curve)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """One run of the benchmark over three schedules: schedule -> what it found."""
    path = tmp_path_factory.mktemp("benchmark") / "results.json"
    options = ["--warmup-rounds=0", "--schedules", "GPipe", "1F1B", "Interleaved1F1B"]
    return _run("pipeline_cost.py", [*_TINY, *options], path, "schedule")


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
    assert set(messages) == {"send", "recv", "broadcast", "all_gather"}
    assert messages["all_gather"] == [2, 2 * 1024]  # one on each rank: logs, losses and outputs
    assert messages["broadcast"][0] == 4  # two on each rank: the batch's description and its values


# The parameters of this model: 256 tokens, 8 positions, 4 blocks, a norm and the head.
_SHARDING_TINY = ["--width=16", "--num-blocks=4", "--context=8", "--batch-size=4", "--rounds=1", "--warmup-rounds=0"]
_WHOLE_BYTES = 4 * (256 * 16 + 8 * 16 + 4 * (12 * 16 * 16 + 13 * 16) + 2 * 16 + 256 * 17)
_NUM_BLOCKS, _NUM_OUTER_UNITS = 4, 3
_LOGS = [1, 1024]  # what a step logs, gathered


@pytest.fixture(scope="module")
def sharding_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """One run of the benchmark over all pairs: pair -> what it found."""
    path = tmp_path_factory.mktemp("benchmark") / "results.json"
    options = ["--ranks=2", "--pairs", "replicas", "sharded", "kept"]
    return _run("sharding_cost.py", [*_SHARDING_TINY, *options], path, "pair")


@pytest.mark.parametrize("pair", ["replicas", "sharded", "kept"])
def test_both_sides_of_a_pair_learn_the_same(pair, sharding_results):
    """Sides that see other batches, or average otherwise, do not do the same work in the time that is compared."""
    result = sharding_results[pair]
    assert result["largest_weight_difference"] < 1e-5
    assert result["last_loss"][0] == pytest.approx(result["last_loss"][1], rel=1e-5)


def test_replicas_send_each_gradient_once(sharding_results):
    """As DDP does; beside it, once a step, which gradients there are, and what was logged."""
    for theirs, ours in zip(*sharding_results["replicas"]["messages"], strict=True):
        assert theirs["all_reduce"] == [1, _WHOLE_BYTES]
        num_calls, num_bytes = ours["all_reduce"]
        assert num_calls == 2
        assert 0 <= num_bytes - _WHOLE_BYTES < 1024
        assert ours["all_gather"] == _LOGS


@pytest.mark.parametrize(("pair", "num_gathers"), [("sharded", 2), ("kept", 1)])
def test_shards_gather_and_reduce_the_bytes_of_fully_shard(pair, num_gathers, sharding_results):
    """A unit gathered once more than needed, or padded, would be sent in every step."""
    for theirs, ours in zip(*sharding_results[pair]["messages"], strict=True):
        sides = ((theirs, _NUM_BLOCKS + 1, [0, 0]), (ours, _NUM_BLOCKS + _NUM_OUTER_UNITS, _LOGS))
        for messages, num_units, others in sides:
            # Counted is what a rank puts in: its half of the parameters, and all of its gradients.
            assert messages["all_gather"][1] - others[1] == num_gathers * _WHOLE_BYTES // 2
            assert messages["reduce_scatter"][1] == _WHOLE_BYTES
            assert messages["all_gather"][0] - others[0] <= num_gathers * num_units
            assert messages["reduce_scatter"][0] <= num_units
        assert ours["all_reduce"][1] < 1024


@pytest.mark.parametrize("pair", ["replicas", "sharded", "kept"])
def test_a_rank_keeps_no_more_tensors_than_by_other_hands(pair, sharding_results):
    """Whole parameters or gradients that outlive their use are what sharding is there to avoid."""
    theirs, ours = sharding_results[pair]["peak_live_bytes"]
    assert 0 < ours < 1.1 * theirs


@pytest.fixture(scope="module")
def activation_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What each recompute policy keeps and runs: policy -> numbers."""
    path = tmp_path_factory.mktemp("benchmark") / "results.json"
    options = ["bytes", "--width=16", "--num-heads=2", "--context=8", "--batch-size=2", "--num-blocks=8"]
    return _run("activations.py", options, path, "policy")


def test_policies_keep_and_run_what_they_say(activation_results):
    """A table of policies that did nothing."""
    results = activation_results
    forwards = {name: result["forwards"] for name, result in results.items()}
    assert forwards["none"] == forwards["offload"] == 8
    assert forwards["full"] == forwards["selective"] == forwards["offload, inputs"] == 15
    assert forwards["full, every second"] == 12
    peaks = {name: result["share"] for name, result in results.items()}
    assert peaks["none"] == 1
    assert peaks["full"] < peaks["square root"] < peaks["selective"] < 0.8
    assert peaks["offload"] <= 3 / 8
    assert peaks["optimal, half the bytes"] <= 0.5
    # Matrix products are kept: what runs again of them is nothing.
    assert results["selective"]["flops"] == results["none"]["flops"] < results["full"]["flops"]
