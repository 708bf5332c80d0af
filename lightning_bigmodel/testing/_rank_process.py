"""Both ends of one rank's process.

The parent's end starts it, asks it and ends it. The inside sets the rank up, runs the work, answers, and waits to be
released.
"""

import contextlib
import datetime
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["EXIT_SECONDS", "FAILED", "RESULT", "RankProcess", "RankSetup", "main_module_hidden", "rank_main"]

# The first byte of an answer.
RESULT = b"R"
FAILED = b"F"

# The parent sends it to make a rank write the stack of each of its threads. `faulthandler` answers even while the
# interpreter is stuck in native code.
_STACK_SIGNAL = signal.SIGUSR1

# How long a rank may take to end after it has answered.
EXIT_SECONDS = 20.0

# `sys.modules` is one for all threads, and ranks start while it is changed.
_START_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Everything one rank needs to know.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        environment: The whole environment of the rank; what the fork server had is forgotten.
        backend: Backend of the process group, or None to initialise none.
        store_path: File of the rendezvous, not there yet.
        stack_path: File that receives the stacks on request.
        timeout_seconds: Timeout of the process group.
        work: `(fn, args, kwargs)`, pickled.
        module_name: Name of the module that defines `fn`.
        module_file: Its file, for a module that is on no import path, or None.
    """

    rank: int
    world_size: int
    environment: dict[str, str]
    backend: str | None
    store_path: str
    stack_path: str
    timeout_seconds: float
    work: bytes
    module_name: str
    module_file: str | None


@contextlib.contextmanager
def main_module_hidden(*, unless: bool) -> Iterator[None]:
    """Keeps new processes from running the caller's script again, as they do to find what was pickled from it."""
    with _START_LOCK:
        main = sys.modules["__main__"]
        if not unless:
            sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class RankProcess:
    """One rank's process, seen from the parent."""

    def __init__(self, setup: RankSetup) -> None:
        context = multiprocessing.get_context("forkserver")
        preload = ["lightning_bigmodel.testing._preload"]
        # A test module imports pytest, and each rank imports the test module.
        context.set_forkserver_preload([*preload, "pytest"] if "pytest" in sys.modules else preload)
        self.rank = setup.rank
        self._stack_path = Path(setup.stack_path)
        self.connection, theirs = context.Pipe(duplex=True)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # As connections, because these travel to a process that is forked elsewhere.
        stdout, stderr = (Connection(os.dup(descriptor), readable=False) for descriptor in (1, 2))
        self._passed_on = (theirs, stdout, stderr)
        self.process = context.Process(target=rank_main, args=(setup, *self._passed_on), name=f"rank {setup.rank}")

    def start(self) -> None:
        """Starts the process, inside `main_module_hidden`."""
        try:
            self.process.start()
        finally:
            for end in self._passed_on:
                end.close()

    def answer(self) -> bytes | None:
        """Returns the answer that has arrived, or None if the rank died without one."""
        try:
            return self.connection.recv_bytes() if self.connection.poll() else None
        except (EOFError, ConnectionError):
            return None

    def fate(self) -> str:
        """Says how a rank ended that left no answer."""
        self.process.join(EXIT_SECONDS)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"died of signal {-code} ({signal.Signals(-code).name}; exit code {code}) without an answer"
        return f"ended with exit code {code} without an answer"

    def ask_for_stack(self) -> None:
        """Makes the rank write the stacks of its threads, for `stack` to read."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, _STACK_SIGNAL)

    def stack(self) -> str:
        """Returns what the rank has written of its stacks so far."""
        return self._stack_path.read_text() if self._stack_path.exists() else ""

    def end(self) -> None:
        """Ends the process, if it still runs, and everything it started."""
        pid = self.process.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # the rank and all that it started
            self.process.kill()
            self.process.join()
            self.process.close()
        self.connection.close()


def rank_main(setup: RankSetup, parent: Connection, stdout: Connection, stderr: Connection) -> None:
    """Runs one rank from start to end.

    Args:
        setup: What to run and as which rank.
        parent: Carries the answer out and the release in.
        stdout: The parent's standard output at the time of the call.
        stderr: The parent's standard error at the time of the call.
    """
    # A session of its own: the parent can end the rank with everything it started, and Ctrl-C reaches only the parent.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for stream, descriptor in ((stdout, 1), (stderr, 2)):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    for text in (sys.stdout, sys.stderr):
        # A line is written whole: with `PYTHONUNBUFFERED`, `print` writes text and line end apart, and ranks mix them.
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True, write_through=False)
    stack_file = open(setup.stack_path, "w")  # noqa: SIM115 - stays open for as long as the process lives
    faulthandler.register(_STACK_SIGNAL, file=stack_file, all_threads=True)
    os.environ.clear()
    os.environ.update(setup.environment)
    try:
        answer = RESULT + _work(setup)
    except BaseException:  # `SystemExit` and the like too: the parent waits for an answer from every rank
        _flush()
        parent.send_bytes(FAILED + traceback.format_exc().encode())
        # At once, with no clean-up that could wait for a peer: closed sockets tell the peers that this rank is gone.
        os._exit(1)
    parent.send_bytes(answer)
    # The peers may still need what this rank holds (a store, an open connection), so it leaves only when all are done.
    with contextlib.suppress(EOFError, ConnectionError):
        parent.recv_bytes()
    _destroy_process_group()


def _work(setup: RankSetup) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if setup.backend is not None:
        if "nccl" in setup.backend:
            torch.cuda.set_device(setup.rank)
        dist.init_process_group(
            setup.backend,
            init_method=f"file://{setup.store_path}",
            rank=setup.rank,
            world_size=setup.world_size,
            timeout=datetime.timedelta(seconds=setup.timeout_seconds),
        )
    if setup.module_file is not None:
        _make_importable(setup.module_name, setup.module_file)
    fn, args, kwargs = pickle.loads(setup.work)
    result = fn(*args, **kwargs)
    try:
        # Plain pickle, not that of multiprocessing: tensors travel by value and take no file descriptor each.
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result of `{setup.module_name}.{getattr(fn, '__qualname__', fn)}`, of type "
            f"{type(result).__qualname__}, cannot be pickled ({error}). A rank's result travels back to the parent "
            "process: return plain values, tensors or containers of them."
        ) from error


def _make_importable(name: str, file: str) -> None:
    """Loads a module from its file unless importing it by name gives that file already."""
    if name in sys.modules:
        return
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None and os.path.samefile(found.origin, file):
            return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    # Unpickling imports the parents by name as well.
    parents = name.split(".")[:-1]
    for length in range(1, len(parents) + 1):
        parent = ".".join(parents[:length])
        try:
            importlib.import_module(parent)
        except ImportError:
            sys.modules[parent] = ModuleType(parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        # With all that this rank started; it leads its own process group.
        os.killpg(os.getpid(), signal.SIGKILL)


def _destroy_process_group() -> None:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
