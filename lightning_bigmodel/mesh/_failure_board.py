"""What the ranks tell each other about failures, kept in the key-value store of the process group."""

import contextlib
import json
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["FailureBoard", "FailureRecord"]

_ERROR_KEY = "error"
# A store entry travels to every rank: long messages (tensors printed, compiler logs) are cut.
_MAX_MESSAGE_CHARACTERS = 4000
_MAX_TRACEBACK_FRAMES = 6


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """One rank's failure, as every other rank reads it.

    Args:
        rank: The rank that failed.
        host: The name of its machine.
        phase: What it was doing; empty where nobody knows.
        original: Exception type and message, or, where the rank `died`, how that was noticed.
        trace: The last frames of its traceback; empty where it `died`.
        died: Whether the rank left no exception.
    """

    rank: int
    host: str
    phase: str = ""
    original: str
    trace: str = ""
    died: bool = False

    @classmethod
    def of(cls, exception: BaseException, *, rank: int, host: str, phase: str) -> "FailureRecord":
        """Describe `exception`, raised on `rank` during `phase`."""
        message = str(exception)
        original = f"{type(exception).__name__}: {message}" if message else type(exception).__name__
        if len(original) > _MAX_MESSAGE_CHARACTERS:
            original = original[:_MAX_MESSAGE_CHARACTERS] + " [cut]"
        frames = traceback.extract_tb(exception.__traceback__)[-_MAX_TRACEBACK_FRAMES:]
        trace = "".join(traceback.format_list(frames))
        return cls(rank=rank, host=host, phase=phase, original=original, trace=trace)

    def text(self, world_size: int) -> str:
        """Return the message for the other ranks."""
        who = f"Rank {self.rank} of {world_size} (host {self.host})"
        if self.died:
            return (
                f"{who} died without an error message ({self.original}). This rank stopped with it. On that host, "
                "look for an out-of-memory kill (`dmesg -T | grep -i 'killed process'`, the log of the job scheduler) "
                "or a crash in native code."
            )
        separator = "" if self.original.endswith((".", "!", "?")) else "."
        text = f"{who} failed in `{self.phase}`: {self.original}{separator} This rank stopped with it."
        return f"{text} The last calls on rank {self.rank} were:\n{self.trace}" if self.trace else text


class FailureBoard:
    """The entries of one guard in the store: the first error, marks of single ranks, members, heartbeats.

    No call here waits for a key, so the threads of one rank can share the client: store clients serialise their calls
    by a lock of their own. The client is nevertheless a clone of the one it is given, because the main thread may be
    blocked inside that one (`new_group` waits for keys) while it holds the lock.

    Args:
        store: The store that all ranks share.
        rank: The rank of this process.
        world_size: The number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        client: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        client.set_timeout(timedelta(seconds=5))
        # Counting per rank and inside the store makes the number agree on all ranks without any communication, as long
        # as all ranks make the same guards on it. A counter in the process would not: one rank may be an older process.
        generation = client.add(f"bigmodel/failures/guards/{rank}", 1)
        self._store = PrefixStore(f"bigmodel/failures/{generation}", client)
        self._world_size = world_size

    def publish(self, record: FailureRecord) -> FailureRecord:
        """Write `record` unless another is there already; return the one that stands."""
        return _decode(self._store.compare_set(_ERROR_KEY, "", json.dumps(asdict(record))))

    def read(self) -> FailureRecord | None:
        """Return the error that stands, if any."""
        return _decode(self._store.get(_ERROR_KEY)) if self._store.check([_ERROR_KEY]) else None

    def mark(self, name: str, rank: int) -> None:
        """Set the mark `name` of `rank`; where the store is gone, nobody is left to read it."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{name}/{rank}", "1")

    def marked(self, name: str, rank: int) -> bool:
        """Return whether `rank` has the mark `name`."""
        return bool(self._store.check([f"{name}/{rank}"]))

    def register(self, rank: int, member: str) -> None:
        """Say which process `rank` is."""
        self._store.set(f"member/{rank}", member)

    def members(self) -> list[str] | None:
        """Return what the ranks registered, in order of rank; None until the last one has."""
        keys = [f"member/{rank}" for rank in range(self._world_size)]
        return [value.decode() for value in self._store.multi_get(keys)] if self._store.check(keys) else None

    def beat(self, machine: int) -> None:
        """Add one to the heartbeats of a machine."""
        self._store.add(f"beat/{machine}", 1)

    def num_beats(self, machine: int) -> int:
        """Return how many heartbeats a machine has given."""
        key = f"beat/{machine}"
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _decode(value: bytes) -> FailureRecord:
    return FailureRecord(**json.loads(value))
