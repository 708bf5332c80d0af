"""Hosts on one machine whose links have a given speed: network namespaces on a bridge, with `tc tbf` at both ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["LINK", "address_of", "linked_hosts", "sent_bytes"]

LINK = "eth0"
_NAME = "bigmodel-link-{pid}-{index}"
# A bucket that passes several packets at once, and a queue that holds a second: TCP then fills the link without losses.
_BURST, _QUEUE = "128kb", "1s"


def address_of(index: int) -> str:
    """Of a host on the bridge."""
    return f"10.213.8.{index + 1}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _remove(name: str) -> None:
    with contextlib.suppress(RuntimeError):  # where it does not exist (yet)
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name)


def _remove_left_behind() -> None:
    """Those of runs that were killed outright."""
    for entry in json.loads(_run("ip", "-json", "netns", "list") or "[]"):
        match = re.fullmatch(_NAME.format(pid=r"(\d+)", index=r"\w+"), entry["name"])
        if match and not Path("/proc", match[1]).exists():
            _remove(entry["name"])


@contextlib.contextmanager
def linked_hosts(num_hosts: int, rate: str | None) -> Iterator[Sequence[str]]:
    """Make hosts and join them; yields the names of their namespaces, and takes all down again.

    Args:
        num_hosts: How many.
        rate: Speed of each host's link in each direction, as `tc` writes it: `"100mbit"`. None: as fast as it goes.

    Raises:
        RuntimeError: Without `ip` and `tc` (Debian's iproute2), or not as root.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"`{tool}` was not found. Install iproute2 (`apt-get install iproute2`); Linux only.")
    if os.geteuid() != 0:
        raise RuntimeError("Network namespaces can only be made by root. Run this as root, or with `sudo`.")
    _remove_left_behind()
    switch = _NAME.format(pid=os.getpid(), index="switch")
    names = [_NAME.format(pid=os.getpid(), index=index) for index in range(num_hosts)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            port = f"port{index}"
            _run("ip", "netns", "add", name)
            _run(
                *("ip", "link", "add", LINK, "netns", name),
                *("type", "veth", "peer", "name", port, "netns", switch),
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            _run("ip", "-n", name, "address", "add", f"{address_of(index)}/24", "dev", LINK)
            for place, link in ((name, "lo"), (name, LINK), (switch, port)):
                _run("ip", "-n", place, "link", "set", link, "up")
            if rate is not None:
                for place, link in ((name, LINK), (switch, port)):
                    limit = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
                    _run("tc", "-n", place, "qdisc", "add", "dev", link, *limit)
        yield names
    finally:
        for name in (*names, switch):
            _remove(name)


def sent_bytes() -> int:
    """What this host has put on its link so far; called on the host."""
    return int(Path("/sys/class/net", LINK, "statistics", "tx_bytes").read_text())
