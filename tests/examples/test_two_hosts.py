"""Several hosts: two network namespaces under torchrun, and what SLURM would start."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLE = Path(__file__).parents[2] / "examples" / "two_hosts"


def _namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith("bigmodel-")]


def test_a_pipeline_over_two_hosts_gives_the_numbers_of_one_process():
    """Ranks that find each other on one machine only, or a shuffled order that differs by rank, fail here."""
    assert shutil.which("ip") is not None, "this test needs `ip netns`: install iproute2, and run as root"
    before = _namespaces()
    done = subprocess.run(
        [sys.executable, str(_EXAMPLE / "run.py"), "--ranks-per-host=2"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = {name: float(value) for name, value in (line.split(": ") for line in done.stdout.splitlines())}
    assert found["loss_error"] < 1e-5
    assert found["weight_error"] < 1e-5
    # The activations of 10 steps alone, of 16 samples by 128 values each way, are 82 kB: they did cross the cable.
    assert min(found["bytes_sent_by_host_0"], found["bytes_sent_by_host_1"]) > 82_000
    assert _namespaces() == before


def test_shards_stay_within_a_host():
    """Parameters gathered over the slow cable, where replicas of shard groups send the gradients of their rows only."""
    assert shutil.which("ip") is not None, "this test needs `ip netns`: install iproute2, and run as root"
    done = subprocess.run(
        [sys.executable, str(_EXAMPLE / "run.py"), "--ranks-per-host=2", "--layout=hybrid"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = {name: float(value) for name, value in (line.split(": ") for line in done.stdout.splitlines())}
    assert max(found["loss_error"], found["weight_error"]) < 1e-5
    parameter_bytes = 4 * (6 * (2 * 128 + 128 * 512 + 512 + 512 * 128 + 128) + 128 * 10 + 10)
    # In each of 10 steps the gradients once; gathering over the cable would send three times as much.
    assert 10 * parameter_bytes < found["bytes_sent_by_host_1"] < 11 * parameter_bytes


def test_namespaces_and_ranks_are_gone_after_an_interruption(tmp_path):
    """What is left behind holds the addresses and the cores until someone finds it."""
    assert shutil.which("ip") is not None, "this test needs `ip netns`: install iproute2, and run as root"
    before = _namespaces()
    example = subprocess.Popen([sys.executable, str(_EXAMPLE / "run.py")], stderr=subprocess.PIPE)
    try:
        names = [f"bigmodel-{example.pid}-{host}" for host in "ab"]
        pids = _pids_on(names[1], example)
        assert len(_namespaces()) == len(before) + 2
        example.terminate()
        assert example.wait(30) == 1
    finally:
        example.kill()
        example.communicate()
    assert _namespaces() == before
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def _pids_on(name: str, example: subprocess.Popen) -> list[str]:
    """Waits until something runs on a host; returns its process ids."""
    while example.poll() is None:
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        if done.stdout.strip():
            return done.stdout.split()
    raise AssertionError(f"the example ended by itself with {example.returncode}")


def test_an_error_on_a_host_is_told_and_cleaned_up(tmp_path):
    """A host that fails must not leave the other waiting for it."""
    before = _namespaces()
    broken = tmp_path / "run.py"
    shutil.copy(_EXAMPLE / "run.py", broken)
    source = (_EXAMPLE / "train.py").read_text()
    step = "features, labels = batch\n"
    assert step in source
    source = source.replace(step, f"{step}        assert self.global_rank == 0, 'the second host fails'\n")
    (tmp_path / "train.py").write_text(source)
    done = subprocess.run(
        [sys.executable, str(broken), "--ranks-per-host=1"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert "the second host fails" in done.stderr
    assert "torchrun on host" in done.stderr
    assert _namespaces() == before


def _slurm_environment(rank: int, port: int) -> dict[str, str]:
    """What `srun --nodes=2 --ntasks-per-node=1` gives task `rank`, on two nodes that are both this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    return {
        **kept,
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1,127.0.0.1",
        "SLURM_NODEID": str(rank),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def test_tasks_of_slurm_train_together(tmp_path):
    """Ranks that launch further ranks of their own, or do not find the first node, never end or train alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    train = [sys.executable, str(_EXAMPLE / "train.py")]
    tasks = [
        subprocess.Popen(
            [*train, "--num-nodes=2", "--stages=2", f"--output={tmp_path}"],
            env=_slurm_environment(rank, port),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [task.communicate(timeout=120)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(texts)
    subprocess.run([*train, f"--output={tmp_path / 'one'}"], check=True, timeout=100)
    expected = json.loads((tmp_path / "one" / "rank-0.json").read_text())["losses"]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["environment"] == "SLURMEnvironment"
        assert found["node"] == rank
        assert found["losses"] == pytest.approx(expected, rel=1e-5)
