"""Two hosts on one machine: two network namespaces joined by a virtual cable, one torchrun in each.

Each namespace has a network stack of its own: the ranks of one reach those of the other through the cable only, as two
machines on one switch would. Needs Linux, root and `ip` (package iproute2). What is set up is taken down again, also
after an error, Ctrl-C or SIGTERM.

    python examples/two_hosts/run.py --ranks-per-host 2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

_TRAIN = Path(__file__).with_name("train.py")
_ADDRESSES = ("10.213.7.1", "10.213.7.2")
_LINK = "eth0"
_PORT = 29400
_TOLERANCE = 1e-5
_LAYOUTS = {
    "pipeline": ["--stages=2"],
    "hybrid": ["--zero-stage=3"],
    "sharded": ["--zero-stage=3", "--replicas=1"],
}


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


def _check_can_run() -> None:
    if shutil.which("ip") is None:
        raise RuntimeError("`ip` was not found. Install iproute2 (`apt-get install iproute2`); Linux only.")
    if os.geteuid() != 0:
        raise RuntimeError("Network namespaces can only be made by root. Run this as root, or with `sudo`.")


def _remove(name: str) -> None:
    """Ends what runs in a namespace and removes it; the cable goes with it."""
    with contextlib.suppress(RuntimeError):  # where it does not exist (yet)
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)


def _remove_left_behind() -> None:
    """Removes the namespaces of runs that were killed outright, as SIGKILL does."""
    names = [entry["name"] for entry in json.loads(_ip("-json", "netns", "list") or "[]")]
    for name in names:
        match = re.fullmatch(r"bigmodel-(\d+)-[ab]", name)
        if match and not Path("/proc", match[1]).exists():
            _remove(name)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Makes two namespaces joined by a cable; yields their names. Ends whatever runs in them afterwards."""
    _check_can_run()
    _remove_left_behind()
    names = (f"bigmodel-{os.getpid()}-a", f"bigmodel-{os.getpid()}-b")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", _LINK, "netns", names[0], "type", "veth", "peer", "name", _LINK, "netns", names[1])
        for name, address in zip(names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _LINK)
            for link in ("lo", _LINK):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            _remove(name)


def _sent_bytes(name: str) -> int:
    link = json.loads(_ip("-n", name, "-json", "-statistics", "link", "show", _LINK))[0]
    return int(link["stats64"]["tx"]["bytes"])


def _launch(name: str, node_rank: int, ranks_per_host: int, layout: list[str], output: Path) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node_rank}"]
    torchrun += [f"--nproc-per-node={ranks_per_host}", f"--master-addr={_ADDRESSES[0]}", f"--master-port={_PORT}"]
    train = [str(_TRAIN), "--num-nodes=2", f"--devices={ranks_per_host}", *layout, f"--output={output}"]
    # Without the name of the link gloo looks up the host's own name, which leads elsewhere than to the cable.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": _LINK, "OMP_NUM_THREADS": "1"}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # these hosts have no names, of which torch would warn
    # A session of its own, so that Ctrl-C reaches this script alone, which then ends all.
    return subprocess.Popen(["ip", "netns", "exec", name, *torchrun, *train], env=environment, start_new_session=True)


def _wait(hosts: list[subprocess.Popen[bytes]], timeout_seconds: float) -> None:
    limit = time.monotonic() + timeout_seconds
    while any(host.poll() is None for host in hosts):
        if any(host.returncode for host in hosts):
            break
        if time.monotonic() > limit:
            raise RuntimeError(f"The hosts were not done after {timeout_seconds:.0f} s.")
        time.sleep(0.05)
    failed = [index for index, host in enumerate(hosts) if host.returncode]
    if failed:
        raise RuntimeError(f"torchrun on host {failed[0]} ended with exit code {hosts[failed[0]].returncode}.")


def run(ranks_per_host: int, layout: list[str], output: Path, timeout_seconds: float) -> dict[str, float]:
    """Trains on two hosts and in one process, and compares.

    Returns:
        The largest difference of a loss and of a weight, the bytes each host sent, and the seconds of both runs.
    """
    start = time.perf_counter()
    with two_hosts() as names:
        hosts = [_launch(name, rank, ranks_per_host, layout, output / "two_hosts") for rank, name in enumerate(names)]
        _wait(hosts, timeout_seconds)
        sent = [_sent_bytes(name) for name in names]
    middle = time.perf_counter()
    subprocess.run([sys.executable, str(_TRAIN), f"--output={output / 'one_process'}"], check=True)
    end = time.perf_counter()
    expected = json.loads((output / "one_process" / "rank-0.json").read_text())["losses"]
    loss_error = 0.0
    for rank in range(2 * ranks_per_host):
        found = json.loads((output / "two_hosts" / f"rank-{rank}.json").read_text())
        if found["node"] != rank // ranks_per_host:
            raise RuntimeError(f"Rank {rank} ran on host {found['node']}.")
        loss_error = max([loss_error, *(abs(a - b) for a, b in zip(found["losses"], expected, strict=True))])
    weights, plain = (torch.load(output / folder / "weights.pt") for folder in ("two_hosts", "one_process"))
    weight_error = max(float((weights[name] - value).abs().max()) for name, value in plain.items())
    return {
        "loss_error": loss_error,
        "weight_error": weight_error,
        "bytes_sent_by_host_0": sent[0],
        "bytes_sent_by_host_1": sent[1],
        "seconds_two_hosts": middle - start,
        "seconds_one_process": end - middle,
    }


def main(arguments: list[str]) -> int:
    """Prints the comparison. Returns 0 if the two runs agree, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--layout", choices=_LAYOUTS, default="pipeline", help="what the two hosts share")
    parser.add_argument("--timeout-seconds", type=float, default=300.0)
    options = parser.parse_args(arguments)

    def stop(*_: object) -> None:
        raise SystemExit("ended by a signal")

    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run(options.ranks_per_host, _LAYOUTS[options.layout], Path(folder), options.timeout_seconds)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    for name, value in found.items():
        print(f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}")
    return 0 if max(found["loss_error"], found["weight_error"]) <= _TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
