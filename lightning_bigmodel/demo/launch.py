"""Starts ranks as processes of this machine, brings back what they report, and ends them - always all of them.

The parent hosts the store at which ranks meet, as ``torchrun``'s agent does, so its port is bound before any rank hears
of it and cannot be taken in between. Ranks never see Ctrl-C: the parent alone handles it and kills them, because a rank
that waits inside a collective could not answer. A rank whose parent is gone ends by itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Emit", "Event", "RankFailedError", "RankGroup", "abandon_launch", "prepare_launch"]

_JOIN_SECONDS = 2.0
_GRACE_SECONDS = 0.5


@dataclass(frozen=True)
class Event:
    """Something a rank reports: any picklable `value` under the name `kind`."""

    rank: int
    kind: str
    value: Any


Emit = Callable[[str, Any], None]
"""What a rank reports through: ``emit(kind, value)``."""


class RankFailedError(RuntimeError):
    """A rank raised an exception or was killed; the message says which, why, and where its log is."""


def prepare_launch(log_path: Path, preload: str) -> None:
    """Begins loading what ranks need, in the background, so that starting one then costs milliseconds.

    Does nothing where ranks cannot be forked from a prepared process (Windows).

    Args:
        log_path: File for whatever that process prints; its folder must exist.
        preload: Name of the module that defines the ranks' entry.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return
    from multiprocessing import forkserver, resource_tracker

    forkserver.set_forkserver_preload([preload])
    # The server and all ranks inherit this process's signal mask and its standard output and error. Nothing they might
    # print while they start or are interrupted belongs on the user's screen, and Ctrl-C is not theirs to answer.
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        # First, because this helper's start unblocks Ctrl-C when it is done.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
    finally:
        for descriptor, kept_descriptor in zip((1, 2), kept, strict=True):
            os.dup2(kept_descriptor, descriptor)
            os.close(kept_descriptor)
        os.close(log)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def abandon_launch() -> None:
    """Ends what `prepare_launch` began, without waiting for it to finish loading; a later launch begins anew."""
    from multiprocessing import forkserver

    # Left alone it ends as well, but only after it has loaded everything: seconds in which it outlives its user.
    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class RankGroup:
    """Ranks that run one function, as a context: when it is left, for whatever reason, no rank is left running.

    Args:
        entry: ``"module:function"``, called on every rank as ``function(rank, emit, *arguments)``. Named, not given, so
            that the parent need not load what only ranks use.
        num_ranks: Ranks to start.
        arguments: Picklable arguments for `entry`.
        name: Name of the group; rank ``r`` writes its output to ``<log_directory>/<name>-rank<r>.log``.
        log_directory: Existing folder.
        distributed: Whether ranks get ``torchrun``'s environment variables and a store to meet at.

    Example::

        with RankGroup("my_module:train", num_ranks=4, arguments=(), name="train", log_directory=folder) as ranks:
            for event in ranks.events():
                print(event.rank, event.kind, event.value)
    """

    def __init__(
        self,
        entry: str,
        *,
        num_ranks: int,
        arguments: tuple[Any, ...],
        name: str,
        log_directory: Path,
        distributed: bool = True,
    ) -> None:
        self._log_paths = [log_directory / f"{name}-rank{rank}.log" for rank in range(num_ranks)]
        self._context = _process_context()
        self._store = _host_store() if distributed else None
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        port = None if self._store is None else self._store.port
        for rank in range(num_ranks):
            receiving, sending = self._context.Pipe(duplex=False)
            call = (entry, rank, num_ranks, port, self._log_paths[rank], sending, arguments)
            process = self._context.Process(target=_rank_main, args=call, name=f"{name}-rank{rank}", daemon=True)  # type: ignore[attr-defined]
            self._connections.append(receiving)
            self._processes.append((process, sending))

    def __enter__(self) -> RankGroup:
        """Starts the ranks."""
        try:
            for process, sending in self._processes:
                process.start()
                sending.close()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all ranks that still run."""
        self.close()

    def events(self) -> Iterator[Event]:
        """Yields what ranks report, in each rank's own order, until all have returned.

        Raises:
            RankFailedError: If a rank raises or dies. The others are ended when the context is left.
        """
        open_connections = dict(zip(self._connections, range(len(self._connections)), strict=True))
        while open_connections:
            for connection in wait(list(open_connections)):
                assert isinstance(connection, Connection)
                rank = open_connections[connection]
                try:
                    event = connection.recv()
                except (EOFError, OSError):
                    del open_connections[connection]
                    if (end := self._silent_end(rank)) is not None:
                        raise self._failure(rank, end) from None
                    continue
                if event.kind == "error":
                    raise self._failure(rank, event.value)
                yield event

    def close(self) -> None:
        """Ends all ranks now; may be called again."""
        with _interrupts_ignored():
            started = [process for process, _ in self._processes if process.pid is not None]
            for process in started:
                process.kill()
            for process in started:
                process.join(_JOIN_SECONDS)
            for connection in self._connections:
                connection.close()
            self._store = None

    def _silent_end(self, rank: int) -> str | None:
        """Says how a rank that reports nothing more has ended, or None if it returned."""
        process = self._processes[rank][0]
        process.join(_JOIN_SECONDS)
        if process.exitcode == 0:
            return None
        if process.exitcode is not None and process.exitcode < 0:
            return f"ended by signal {signal.Signals(-process.exitcode).name}"
        return f"ended with exit code {process.exitcode} and no report"

    def _failure(self, rank: int, text: str) -> RankFailedError:
        # The peers of a rank that was killed fail too, saying only that a connection closed, and may be heard first.
        deadline = time.monotonic() + _GRACE_SECONDS
        while (remaining := deadline - time.monotonic()) > 0 and wait(
            [p.sentinel for p, _ in self._processes], remaining
        ):
            for index, (process, _) in enumerate(self._processes):
                if process.exitcode is not None and process.exitcode < 0:
                    rank, text, deadline = index, self._silent_end(index) or text, 0.0
                    break
            else:
                time.sleep(0.05)
        return RankFailedError(f"rank {rank}: {text} (its full log: {self._log_paths[rank]})")


def _process_context() -> BaseContext:
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")


def _host_store() -> Any:
    import torch.distributed as dist

    # Port 0: the system picks a free one while binding it. The store's clients need no number of workers.
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    # A second Ctrl-C while ranks are being ended must not leave half of them. Signals reach the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _rank_main(
    entry: str,
    rank: int,
    num_ranks: int,
    port: int | None,
    log_path: Path,
    connection: Connection,
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A launcher that started the parent may have left its own variables, which name another world.
    for name, value in _launch_environment(rank, num_ranks, port).items():
        os.environ.pop(name, None)
        if port is not None:
            os.environ[name] = value

    def emit(kind: str, value: Any) -> None:
        connection.send(Event(rank, kind, value))

    try:
        module_name, _, function_name = entry.partition(":")
        getattr(import_module(module_name), function_name)(rank, emit, *arguments)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        emit("error", f"{type(error).__name__}: {error}")
        # Not a normal exit: the process group's own threads may wait for peers that will never answer.
        os._exit(1)
    connection.close()


def _launch_environment(rank: int, num_ranks: int, port: int | None) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "bigmodel-demo",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
