"""Several ranks on one machine: real processes with `run_ranks`, or one process that believes so with `fake_world`."""

import contextlib
import functools
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from lightning_bigmodel.testing._rank_process import EXIT_SECONDS, FAILED, RankProcess, RankSetup, main_module_hidden

__all__ = ["RanksFailedError", "fake_world", "run_ranks"]

_T = TypeVar("_T")

# How long the other ranks may go on once one has failed: enough for them to fail by themselves and tell their side.
_GRACE_SECONDS = 5.0
# How long a rank may take to write its stacks.
_STACK_SECONDS = 2.0


class RanksFailedError(RuntimeError):
    """Some ranks of a `run_ranks` call failed, died or did not end in time.

    Args:
        message: What happened to whom, with every traceback.
        failures: Rank -> its traceback, or what is known of its end. In the order of failing: the first is usually the
            cause, the others its peers' broken connections.
    """

    def __init__(self, message: str, failures: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failures)


def run_ranks(
    fn: Callable[..., _T],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    backend: str = "gloo",
    init_process_group: bool = True,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[_T]:
    """Calls `fn(*args, **kwargs)` on every rank of a new world and returns the results in the order of ranks.

    Each rank is a process forked from a server that has torch and Lightning loaded: the first call takes the seconds of
    that import, each later one some hundredths of a second a rank. The ranks find a process group, and the environment
    torchrun would give them, so that `Trainer(devices=world_size)` inside `fn` joins them and launches nothing.
    A rank runs on one thread and with the caller's environment, working directory, standard output and error. Variables
    that torch reads while it is imported come too late. Linux and macOS only.

    Args:
        fn: A function at the top of a module, which the ranks import.
        world_size: Number of ranks.
        args: Positional arguments of `fn`, the same on every rank. They are pickled, tensors by value.
        timeout_seconds: How long the call may take, the first import not counted; also the process group's timeout.
        backend: Backend of the process group. With "nccl", rank r uses device r.
        init_process_group: Whether the ranks find the process group initialised. False leaves it to `fn`; the
            environment then leads `torch.distributed.init_process_group("gloo")` to the other ranks.
        env: Further environment variables of the ranks; they win over all others.
        kwargs: Keyword arguments of `fn`.

    Returns:
        The result of each rank, at the index of its rank. Tensors arrive by value.

    Raises:
        ValueError: If `world_size` is under 1 or `timeout_seconds` is not positive.
        TypeError: If `fn` or an argument cannot be pickled.
        RanksFailedError: If a rank raises, dies, returns what cannot be pickled, or is late. Every rank, and whatever
            it started, has been ended by then.

    Example::

        def total(value: float) -> float:
            tensor = torch.tensor(value * torch.distributed.get_rank())
            torch.distributed.all_reduce(tensor)
            return tensor.item()

        assert run_ranks(total, 2, 3.0) == [3.0, 3.0]
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(
            f"`world_size={world_size!r}` must be an integer of 1 or more: a world of no ranks tests nothing."
        )
    if not timeout_seconds > 0:
        raise ValueError(f"`timeout_seconds={timeout_seconds!r}` must be more than 0.")
    work = _pickle_work(fn, args, kwargs)
    function = fn.func if isinstance(fn, functools.partial) else fn
    module_name = getattr(function, "__module__", "")
    name = f"{module_name}.{getattr(function, '__qualname__', function)}"
    ranks: list[RankProcess] = []
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder, _reserved_port() as port:
        try:
            with main_module_hidden(unless=b"__main__" in work):
                for rank in range(world_size):
                    setup = RankSetup(
                        rank=rank,
                        world_size=world_size,
                        environment={**os.environ, **_torchrun_environment(rank, world_size, port), **(env or {})},
                        backend=backend if init_process_group else None,
                        store_path=f"{folder}/store",
                        stack_path=f"{folder}/stack_{rank}",
                        timeout_seconds=timeout_seconds,
                        work=work,
                        module_name=module_name,
                        module_file=getattr(sys.modules.get(module_name), "__file__", None),
                    )
                    ranks.append(RankProcess(setup))
                    ranks[-1].start()
            return [pickle.loads(answer) for answer in _collect(ranks, timeout_seconds, name)]
        finally:
            # Whatever happened here, a KeyboardInterrupt too: nothing is left running.
            for rank_process in ranks:
                rank_process.end()


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Makes this process believe that it is one rank of a large world, with a process group that sends nothing.

    For what depends on the shape of the world alone, such as meshes and groups. The values that collectives give are
    wrong. Takes milliseconds for hundreds of ranks.

    Args:
        world_size: Number of ranks the process group claims.
        rank: The rank that this process plays.

    Raises:
        ValueError: If `rank` is not in the world.
        RuntimeError: If a process group exists already.

    Example::

        with fake_world(512, rank=17):
            mesh = torch.distributed.init_device_mesh("cpu", (8, 64), mesh_dim_names=("pipe", "data_shard"))
    """
    import torch.distributed as dist

    if not 0 <= rank < world_size:
        raise ValueError(f"`rank={rank}` must be at least 0 and less than `world_size={world_size}`.")
    if dist.is_initialized():
        raise RuntimeError("`fake_world` needs a process without a process group, and this one has one already.")
    dist.init_process_group("fake", store=_fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fake_store() -> Any:
    # Private to torch (seen in 2.11 to 2.13). Importing the module registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def _pickle_work(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        raise TypeError(
            f"`fn={fn!r}` or one of its arguments cannot be pickled ({error}). Ranks are other processes: pass a "
            "function defined at the top of a module, not a lambda or an inner function, and plain values."
        ) from error


def _torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Its presence tells torch, and through torch Lightning, that the processes were launched already.
        "TORCHELASTIC_RUN_ID": "run_ranks",
    }
    if "lo" in {name for _, name in socket.if_nameindex()}:
        # Gloo would look up the host's name, which fails in a sandbox without a network.
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return environment


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Holds a free port without listening on it: others are not given it, while rank 0 may still bind it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _collect(ranks: Sequence[RankProcess], timeout_seconds: float, name: str) -> list[bytes]:
    """Waits for every rank's answer and end; returns the pickled results or raises for all failures at once."""
    answers: dict[int, bytes] = {}
    failures: dict[int, str] = {}
    running = list(ranks)
    limit = time.monotonic() + timeout_seconds
    why = f"still running after `timeout_seconds={timeout_seconds}`"
    while running:
        ready = wait(
            [end for rank in running for end in (rank.connection, rank.process.sentinel)],
            max(0.0, limit - time.monotonic()),
        )
        if not ready:
            failures.update(_stuck(running, why))
            break
        for rank in [rank for rank in running if rank.connection in ready or rank.process.sentinel in ready]:
            running.remove(rank)
            answer = rank.answer()
            if answer is None:
                failures[rank.rank] = rank.fate()
            elif answer[:1] == FAILED:
                failures[rank.rank] = answer[1:].decode()
            else:
                answers[rank.rank] = answer[1:]
                continue
            if len(failures) == 1 and time.monotonic() + _GRACE_SECONDS < limit:
                limit = time.monotonic() + _GRACE_SECONDS
                why = f"still running {_GRACE_SECONDS} s after rank {rank.rank} failed"
    if not failures:
        for rank in ranks:
            with contextlib.suppress(ConnectionError):
                rank.connection.send_bytes(b"")
        for rank in ranks:
            rank.process.join(EXIT_SECONDS)
            if rank.process.exitcode is None:
                failures.update(_stuck([rank], f"answered, but did not end within {EXIT_SECONDS} s"))
            elif rank.process.exitcode != 0:
                failures[rank.rank] = f"answered, then ended with exit code {rank.process.exitcode}"
    if failures:
        heading = f"{len(failures)} of {len(ranks)} ranks failed in `{name}`."
        parts = [f"----- rank {rank} -----\n{text.rstrip()}" for rank, text in failures.items()]
        raise RanksFailedError("\n".join([heading, *parts]), failures)
    return [answers[rank.rank] for rank in ranks]


def _stuck(ranks: Sequence[RankProcess], why: str) -> dict[int, str]:
    """Says of each rank that it hangs and where."""
    for rank in ranks:
        rank.ask_for_stack()
    limit = time.monotonic() + _STACK_SECONDS
    while not all(rank.stack() for rank in ranks) and time.monotonic() < limit:
        time.sleep(0.02)
    time.sleep(0.05)  # a stack is written line by line
    return {rank.rank: f"{why}; its stack:\n{rank.stack() or '(it wrote none)'}" for rank in ranks}
