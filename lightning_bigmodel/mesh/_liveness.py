"""Which rank died without a word: by process id on the own machine, by heartbeats between machines."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_bigmodel.mesh._failure_board import FailureBoard, FailureRecord

__all__ = ["Liveness", "Member"]

_BEAT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Member:
    """The process of one rank.

    Args:
        host: Name of the machine, for messages.
        machine: Identity of the machine and its process table: two ranks with the same one can see each other's ids.
        pid: Process id.
        started: Start time in ticks since boot, which tells a process from a later one that got the same id.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def this_process(cls) -> "Member":
        """Describe the process that calls."""
        pid = os.getpid()
        return cls(host=socket.gethostname(), machine=_machine(), pid=pid, started=_state_and_start(pid)[1])

    def is_alive(self) -> bool:
        """Return whether the process runs; it must be one of this machine."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        state, started = _state_and_start(self.pid)
        # A killed process stays in the table as "Z" until its launcher collects it, which may be never.
        return state not in ("Z", "X") and started == self.started


class Liveness:
    """Finds ranks that died without writing an error.

    On one machine a rank watches the process id of the next rank: a fact of the kernel, so a rank that is merely busy
    (one that holds the interpreter lock for minutes, is stopped or swaps) is never taken for dead, and a death shows
    at the next poll. Between machines the lowest rank of each watches the heartbeats of the next machine, which all
    ranks there give together: it counts as dead only when none of its processes gave one for
    `heartbeat_timeout_seconds`. With one rank a machine, a call that holds the interpreter lock for longer than that
    (pickling many gigabytes) looks the same; choose the timeout above the longest such call.

    Args:
        board: Where members, marks and heartbeats are kept.
        rank: The rank of this process.
        poll_seconds: How often `look` is called.
        heartbeat_timeout_seconds: Silence after which a machine counts as dead.
    """

    def __init__(self, board: FailureBoard, rank: int, poll_seconds: float, heartbeat_timeout_seconds: float) -> None:
        self._board = board
        self._rank = rank
        self._poll_seconds = poll_seconds
        self._heartbeat_timeout_seconds = heartbeat_timeout_seconds
        self._members: list[Member] = []
        self._machines: list[list[int]] = []
        self._last_beat = self._last_look = float("-inf")
        self._num_beats, self._silent_seconds = -1, 0.0
        board.register(rank, json.dumps(asdict(Member.this_process())))

    def host(self, rank: int) -> str:
        """Return the host of `rank`, as far as it is known."""
        return self._members[rank].host if self._members else "unknown"

    def look(self) -> FailureRecord | None:
        """Give a heartbeat where one is due; return the death of a watched rank, if there is one.

        Raises:
            RuntimeError: The store cannot be reached.
        """
        if not self._members and not self._gather():
            return None
        record = self._look_at_next_process()
        if record is None and len(self._machines) > 1:
            record = self._look_at_next_machine()
        return record

    def _gather(self) -> bool:
        members = self._board.members()
        if members is None:
            return False
        self._members = [Member(**json.loads(member)) for member in members]
        by_machine: dict[str, list[int]] = {}
        for rank, member in enumerate(self._members):
            by_machine.setdefault(member.machine, []).append(rank)
        self._machines = list(by_machine.values())
        return True

    def _look_at_next_process(self) -> FailureRecord | None:
        ranks = self._machines[self._machine_index()]
        watched = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
        # The mark is read after the death: a rank sets it before it ends.
        if watched == self._rank or self._members[watched].is_alive() or self._board.marked("closed", watched):
            return None
        return self._death(watched, f"process {self._members[watched].pid} is gone")

    def _look_at_next_machine(self) -> FailureRecord | None:
        now = time.monotonic()
        own = self._machine_index()
        if now - self._last_beat >= _BEAT_SECONDS:
            self._board.beat(own)
            self._last_beat = now
        if self._rank != self._machines[own][0]:
            return None
        watched = (own + 1) % len(self._machines)
        num_beats = self._board.num_beats(watched)
        # Only time in which this rank looked counts: after a stall of its own it has missed heartbeats that were given.
        looked_seconds = min(now - self._last_look, 2 * self._poll_seconds)
        self._silent_seconds = self._silent_seconds + looked_seconds if num_beats == self._num_beats else 0.0
        self._num_beats, self._last_look = num_beats, now
        if self._silent_seconds < self._heartbeat_timeout_seconds:
            return None
        silent = [rank for rank in self._machines[watched] if not self._board.marked("closed", rank)]
        how = f"no rank of that host gave a heartbeat for {self._heartbeat_timeout_seconds:g} seconds"
        return self._death(silent[0], how) if silent else None

    def _machine_index(self) -> int:
        return next(index for index, ranks in enumerate(self._machines) if self._rank in ranks)

    def _death(self, rank: int, how: str) -> FailureRecord:
        return FailureRecord(rank=rank, host=self.host(rank), original=how, died=True)


def _machine() -> str:
    """Name the machine and its process table: containers of one machine can have tables of their own."""
    # Empty where the system is not Linux: the host name alone must do there.
    boot, table = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    boot_id = boot.read_text().strip() if boot.exists() else ""
    table_id = str(table.readlink()) if table.is_symlink() else ""
    return f"{socket.gethostname()}/{boot_id}/{table_id}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return state and start time of a process, both empty where the system does not show them."""
    try:
        # The second field, the name, is in parentheses and may hold anything: count from the last one.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        # The process ended since it was found, or there is no /proc.
        return ("X", "") if Path("/proc/self/stat").exists() else ("", "")
    except OSError:
        # It ended while its file was read, which gives "no such process".
        return "X", ""
    return fields[0], fields[19]
