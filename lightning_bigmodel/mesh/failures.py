"""An error on one rank becomes a clear error on every rank within seconds, never a hang."""

import atexit
import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator

from torch.distributed.distributed_c10d import Store

from lightning_bigmodel.mesh._close_groups import close_process_groups, is_communication_error
from lightning_bigmodel.mesh._failure_board import FailureBoard, FailureRecord
from lightning_bigmodel.mesh._liveness import Liveness

__all__ = ["FailureGuard", "RankFailedError"]

_NUM_STORE_ATTEMPTS = 3


class RankFailedError(RuntimeError):
    """Another rank failed, and this one stopped with it.

    Args:
        message: The whole text.
        failed_rank: The rank that failed first.
        failed_host: The name of its machine.
        original: Type and message of its exception, or how its death was noticed.
    """

    def __init__(self, message: str, *, failed_rank: int = -1, failed_host: str = "", original: str = "") -> None:
        super().__init__(message)
        self.failed_rank = failed_rank
        self.failed_host = failed_host
        self.original = original


class FailureGuard:
    """Tells all ranks of an error on one of them and frees those that wait for it.

    The rank that fails writes its error to the store and closes its process groups; a thread on every other rank
    reads the store every `poll_seconds`, closes the groups there, and so ends the wait of the main thread with an
    exception, which `phase` turns into a `RankFailedError`: after at most four `poll_seconds`. The rank that failed
    keeps its own exception. A main thread that still does not come back within `grace_seconds` (a wait for a key of the
    store or for half a message from a killed rank, a long computation) is ended together with its process, after the
    error and the position of each thread were written to stderr.

    A rank that dies without a word is found by its process id on its machine and by heartbeats between machines. The
    store lives with rank 0 where it is a TCPStore: that it is gone means that rank 0 is.

    Every rank must make its guards in the same order, and must `close` them before it ends: a process that ends with
    an open guard counts as dead. Do not catch the error to go on with the same process groups:
    they are closed for good.

    Args:
        store: The store that all ranks share; the guard makes a client of its own from it.
        rank: The rank of this process.
        world_size: The number of ranks. With 1 the guard starts no thread and does nothing.
        poll_seconds: Time between two looks at the store. A look costs two small requests, on several machines up to
            two more for the heartbeats; the step itself pays nothing.
        grace_seconds: Time the main thread has to notice the error before its process is ended.
        heartbeat_timeout_seconds: Silence after which a whole machine counts as dead. A rank beside a living one on
            the same machine is never judged by it.

    Raises:
        ValueError: A time is not positive.

    Example::

        guard = FailureGuard(store, rank, world_size)
        try:
            for batch in loader:
                with guard.phase("training_step"):
                    step(batch)
        finally:
            guard.close()
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        poll_seconds: float = 0.5,
        grace_seconds: float = 10.0,
        heartbeat_timeout_seconds: float = 30.0,
    ) -> None:
        times = {
            "poll_seconds": poll_seconds,
            "grace_seconds": grace_seconds,
            "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        }
        for name, value in times.items():
            if value <= 0:
                raise ValueError(f"`{name}={value}` must be above 0. Give a time in seconds.")
        self._rank = rank
        self._world_size = world_size
        self._poll_seconds = poll_seconds
        self._grace_seconds = grace_seconds
        self._failure: FailureRecord | None = None
        self._failure_seen = threading.Event()
        self._handled = threading.Event()
        self._stop = threading.Event()
        self._reported = self._closed = self._kept_store = self._rank_0_closed = False
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._board = FailureBoard(store, rank, world_size)
            self._liveness = Liveness(self._board, rank, poll_seconds, heartbeat_timeout_seconds)
            self._thread = threading.Thread(target=self._watch, name="bigmodel-failure-guard", daemon=True)
            self._thread.start()
            # A thread inside the store while the interpreter goes down would end the process with SIGABRT.
            atexit.register(self._stop_thread)

    def check(self) -> None:
        """Raise if another rank failed; reads one variable, so it may stand between any two steps.

        Raises:
            RankFailedError: Another rank failed.
        """
        if self._failure is not None:
            raise self._error(self._failure)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report what is raised inside as an error of `name`; turn consequences of another rank's error into it.

        Raises:
            RankFailedError: Another rank failed before or during the block.
        """
        try:
            yield
        except RankFailedError:
            raise
        except BaseException as exception:
            error = self.translate(exception)
            if error is not exception:
                raise error from exception
            self.report(exception, name)
            raise
        self.check()

    def translate(self, exception: BaseException) -> BaseException:
        """Return the `RankFailedError` that `exception` is a consequence of, or `exception` where it is the cause.

        A broken connection may be noticed before the death behind it is found, so for an error of communication this
        waits for news for up to a second and four `poll_seconds`.
        """
        if self._thread is None or self._reported or isinstance(exception, RankFailedError):
            return exception
        if is_communication_error(exception):
            self._failure_seen.wait(1.0 + 4 * self._poll_seconds)
        return exception if self._failure is None else self._error(self._failure)

    def report(self, exception: BaseException, phase: str) -> None:
        """Tell all ranks that this one failed in `phase`, and close its process groups.

        The first report of any rank stands. Returns at once where this rank has reported or stopped already.
        """
        if self._thread is None or self._reported or isinstance(exception, RankFailedError):
            return
        self._reported = True
        self._handled.set()
        record = FailureRecord.of(exception, rank=self._rank, host=socket.gethostname(), phase=phase)
        with contextlib.suppress(RuntimeError):  # Without a store the others know already: rank 0 is gone.
            record = self._board.publish(record)
        self._board.mark("seen", self._rank)
        self._stop.set()
        # The others first: NCCL ends the process of a rank that sees a connection break before it closed it itself, and
        # a gloo message that was under way must arrive, because its wait cannot be ended.
        time.sleep(3 * self._poll_seconds)
        self._close_groups()
        self._keep_store(record.rank)

    def close(self) -> None:
        """End the thread and tell the others that this rank ends on purpose.

        Without a failure rank 0 waits here for the others to close, at most for a second and four `poll_seconds`: its
        end takes a TCPStore away, which must not look like a death.
        """
        if self._closed:
            return
        self._closed = True
        self._stop_thread()
        atexit.unregister(self._stop_thread)
        if self._world_size > 1:
            self._board.mark("closed", self._rank)
            if not self._reported and self._failure is None:
                self._keep_store(self._rank)

    def _watch(self) -> None:
        num_misses = 0
        while not self._stop.wait(self._poll_seconds):
            try:
                failure = self._look()
                num_misses = 0
            except RuntimeError as exception:
                num_misses += 1
                if num_misses < _NUM_STORE_ATTEMPTS:
                    continue
                failure = self._store_lost(exception)
                if failure is None:
                    return
            if failure is not None and not self._reported:
                self._stop_for(failure)
                return

    def _look(self) -> FailureRecord | None:
        failure = self._board.read()
        if failure is None:
            death = self._liveness.look()
            failure = None if death is None else self._board.publish(death)
        if failure is None and not self._rank_0_closed:
            self._rank_0_closed = self._board.marked("closed", 0)
        return failure

    def _store_lost(self, exception: RuntimeError) -> FailureRecord | None:
        if self._rank_0_closed or self._rank == 0:
            return None
        how = f"the store that rank 0 keeps cannot be reached: {str(exception).splitlines()[0]}"
        return FailureRecord(rank=0, host=self._liveness.host(0), original=how, died=True)

    def _stop_for(self, failure: FailureRecord) -> None:
        # The order matters: what the main thread gets from closed groups must find the failure already known.
        self._failure = failure
        self._failure_seen.set()
        self._board.mark("seen", self._rank)
        deadline = time.monotonic() + self._grace_seconds
        # Messages under way between healthy ranks arrive meanwhile.
        self._handled.wait(self._poll_seconds)
        self._close_groups()
        if self._handled.wait(deadline - time.monotonic()):
            return
        text = failure.text(self._world_size)
        rest = f"Rank {self._rank} did not stop within `grace_seconds={self._grace_seconds:g}` and is ended. It was at:"
        # Not by `sys.stderr`: the main thread may hold its lock.
        os.write(2, f"RankFailedError: {text}\n{rest}\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        os._exit(1)

    def _close_groups(self) -> None:
        # In a thread of its own, because an abort of NCCL can block for as long as the timeout of the group.
        closer = threading.Thread(target=close_process_groups, name="bigmodel-failure-closer", daemon=True)
        closer.start()
        closer.join(self._grace_seconds)

    def _error(self, failure: FailureRecord) -> RankFailedError:
        self._handled.set()
        self._keep_store(failure.rank)
        return RankFailedError(
            failure.text(self._world_size),
            failed_rank=failure.rank,
            failed_host=failure.host,
            original=failure.original,
        )

    def _keep_store(self, failed_rank: int) -> None:
        """On rank 0, stay until the others have read the news: where the store is a TCPStore it ends with rank 0."""
        if self._rank != 0 or self._kept_store:
            return
        self._kept_store = True
        waiting = set(range(1, self._world_size)) - {failed_rank}
        deadline = time.monotonic() + 1.0 + 4 * self._poll_seconds
        with contextlib.suppress(RuntimeError):
            while waiting and time.monotonic() < deadline:
                waiting = {r for r in waiting if not (self._board.marked("seen", r) or self._board.marked("closed", r))}
                time.sleep(0.02 if waiting else 0)

    def _stop_thread(self) -> None:
        self._stop.set()
        self._handled.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
