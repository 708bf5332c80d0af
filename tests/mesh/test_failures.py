import ctypes
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel._host import default_store
from lightning_bigmodel.mesh import _liveness
from lightning_bigmodel.mesh._failure_board import FailureBoard, FailureRecord
from lightning_bigmodel.mesh.failures import FailureGuard, RankFailedError
from lightning_bigmodel.testing import RanksFailedError, run_ranks

# All waits end by themselves after this time, far above what any test allows.
_GROUP_TIMEOUT_SECONDS = 60.0
_SOON_SECONDS = 5.0


def _recv(rank: int, peer: int) -> None:
    dist.recv(torch.empty(3), src=peer)


def _pipeline_recv(rank: int, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.empty(3), peer)]):
        work.wait()


def _send(rank: int, peer: int) -> None:
    # More than the buffers of a connection take.
    dist.send(torch.empty(20_000_000), dst=peer)


def _all_reduce(rank: int, peer: int) -> None:
    dist.all_reduce(torch.ones(3))


def _barrier(rank: int, peer: int) -> None:
    dist.barrier()


def _broadcast_object_list(rank: int, peer: int) -> None:
    dist.broadcast_object_list([None], src=1)


def _recv_in_flight(rank: int, peer: int) -> None:
    # The large message of the failing rank is under way when that rank raises.
    if rank == 0:
        dist.recv(torch.empty(_IN_FLIGHT), src=1)
    _recv(rank, peer)


# 160 MB: tens of milliseconds on its way.
_IN_FLIGHT = 40_000_000
_OPERATIONS: dict[str, Callable[[int, int], None]] = {
    "recv": _recv,
    "pipeline_recv": _pipeline_recv,
    "send": _send,
    "all_reduce": _all_reduce,
    "barrier": _barrier,
    "broadcast_object_list": _broadcast_object_list,
    "recv_in_flight": _recv_in_flight,
}


def _surviving_peer(rank: int, failing_rank: int) -> int:
    """A rank that does not fail but waits as well: what ends the wait cannot be the connection to the failing one."""
    world_size = dist.get_world_size()
    others = [other for other in range(world_size) if other not in (rank, failing_rank)]
    return next((other for other in others if other > rank), others[0]) if others else failing_rank


def _outcome(
    operation: str, failing_rank: int, exception: BaseException, in_subgroup: bool = False, **settings: Any
) -> dict[str, Any]:
    rank = dist.get_rank()
    survivors = [other for other in range(dist.get_world_size()) if other != failing_rank]
    group = dist.new_group(survivors) if in_subgroup else None
    guard = FailureGuard(default_store(), rank, dist.get_world_size(), **settings)
    start = time.monotonic()
    caught: BaseException | None = None
    try:
        with guard.phase("training_step"):
            if rank == failing_rank:
                if operation == "recv_in_flight":
                    work = dist.isend(torch.empty(_IN_FLIGHT), dst=0)  # noqa: F841 - lives as long as the frame
                raise exception
            if not in_subgroup:
                _OPERATIONS[operation](rank, _surviving_peer(rank, failing_rank))
            elif rank != survivors[-1]:
                dist.all_reduce(torch.ones(3), group=group)
            else:
                _recv(rank, survivors[0])
    except BaseException as error:
        caught = error
    elapsed_seconds = time.monotonic() - start
    guard.close()
    return {
        "type": type(caught).__name__,
        "message": str(caught),
        "same": caught is exception,
        "details": (getattr(caught, "failed_rank", None), getattr(caught, "failed_host", None)),
        "original": getattr(caught, "original", None),
        "cause": type(caught.__cause__).__name__ if caught is not None else "",
        "elapsed_seconds": elapsed_seconds,
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("bigmodel-")],
    }


def _assert_told(outcome: dict[str, Any], failing_rank: int, world_size: int, original: str) -> None:
    host = socket.gethostname()
    assert outcome["type"] == "RankFailedError", outcome
    start = (
        f"Rank {failing_rank} of {world_size} (host {host}) failed in `training_step`: {original}. This rank stopped"
    )
    assert outcome["message"].startswith(start)
    assert "in _outcome" in outcome["message"], "the place of the error on the rank that failed"
    assert outcome["details"] == (failing_rank, host)
    assert outcome["original"] == original
    assert outcome["elapsed_seconds"] < _SOON_SECONDS
    assert outcome["threads"] == []


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_error_ends_every_kind_of_wait(operation: str) -> None:
    """A rank that waits for one that also waits would hang until the timeout of the group: no connection breaks."""
    outcomes = run_ranks(_outcome, 4, operation, 1, ValueError("boom"), timeout_seconds=_GROUP_TIMEOUT_SECONDS)
    for rank in (0, 2, 3):
        _assert_told(outcomes[rank], 1, 4, "ValueError: boom")
        assert outcomes[rank]["cause"] == "RuntimeError", "the broken wait stays visible as the cause"
    assert outcomes[1]["same"], "the rank that failed keeps its own exception"
    assert outcomes[1]["elapsed_seconds"] < _SOON_SECONDS


def test_error_ends_waits_in_groups_without_the_failing_rank() -> None:
    """Closing the default group alone would leave a data-parallel group hanging that the failing rank is no part of."""
    outcomes = run_ranks(_outcome, 4, "", 1, ValueError("boom"), True, timeout_seconds=_GROUP_TIMEOUT_SECONDS)
    for rank in (0, 2, 3):
        _assert_told(outcomes[rank], 1, 4, "ValueError: boom")


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_error_with_two_ranks(failing_rank: int) -> None:
    """Rank 0 is no special case as long as its process lives."""
    outcomes = run_ranks(_outcome, 2, "recv", failing_rank, ValueError("boom"), timeout_seconds=_GROUP_TIMEOUT_SECONDS)
    _assert_told(outcomes[1 - failing_rank], failing_rank, 2, "ValueError: boom")


@pytest.mark.parametrize(
    ("exception", "original"), [(KeyboardInterrupt(), "KeyboardInterrupt"), (SystemExit(3), "SystemExit: 3")]
)
def test_exits_are_reported(exception: BaseException, original: str) -> None:
    """`except Exception` would miss Ctrl-C on one rank, which leaves the others waiting just the same."""
    outcomes = run_ranks(_outcome, 2, "barrier", 1, exception, timeout_seconds=_GROUP_TIMEOUT_SECONDS)
    _assert_told(outcomes[0], 1, 2, original)
    assert outcomes[1]["same"]


def _raise_or_end(how: str, ending_rank: int, tcp: bool, machine_each: bool, heartbeat_timeout_seconds: float) -> None:
    if tcp:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_GROUP_TIMEOUT_SECONDS))
    rank = dist.get_rank()
    if machine_each:
        _liveness._machine = lambda: f"machine {rank}"
    guard = FailureGuard(
        default_store(),
        rank,
        dist.get_world_size(),
        # Rank 0, which may keep the store, learns of an error and leaves long before the others have looked.
        poll_seconds=0.1 if rank == 0 else 0.8,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    )
    # Liveness is known once all have registered and looked.
    dist.barrier()
    time.sleep(1.2)
    with guard.phase("training_step"):
        if rank == ending_rank:
            if how == "raise":
                raise ValueError("boom")
            if how == "exit":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        _recv(rank, _surviving_peer(rank, ending_rank))


def _failures_of_ending(how: str, ending_rank: int, world_size: int = 3, **settings: Any) -> dict[int, str]:
    settings = {"tcp": False, "machine_each": False, "heartbeat_timeout_seconds": 30.0, **settings}
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(
            _raise_or_end,
            world_size,
            how,
            ending_rank,
            timeout_seconds=_GROUP_TIMEOUT_SECONDS,
            init_process_group=not settings["tcp"],
            **settings,
        )
    return caught.value.failures


@pytest.mark.parametrize("ending_rank", [0, 1])
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_death_without_a_word(how: str, ending_rank: int) -> None:
    """A rank taken by the out-of-memory killer reports nothing, and the survivors wait for each other, not for it."""
    failures = _failures_of_ending(how, ending_rank)
    for rank in {0, 1, 2} - {ending_rank}:
        assert f"RankFailedError: Rank {ending_rank} of 3 (host {socket.gethostname()}) died without" in failures[rank]
        assert "out-of-memory" in failures[rank]


def test_error_of_rank_0_outlives_its_store() -> None:
    """A TCPStore ends with rank 0: if that leaves before the others read its error they only see a lost store."""
    failures = _failures_of_ending("raise", 0, tcp=True)
    assert "ValueError: boom" in failures[0]
    assert "RankFailedError" not in failures[0]
    for rank in (1, 2):
        assert re.search(r"RankFailedError: Rank 0 of 3 .* failed in `training_step`: ValueError: boom", failures[rank])


def test_error_of_another_rank_outlives_the_store() -> None:
    """Rank 0 also ends when another fails, and must not take the store away before the rest have read why."""
    failures = _failures_of_ending("raise", 1, tcp=True)
    for rank in (0, 2):
        assert re.search(r"RankFailedError: Rank 1 of 3 .* failed in `training_step`: ValueError: boom", failures[rank])


def test_death_of_the_store_is_the_death_of_rank_0() -> None:
    """With its TCPStore gone nobody can read or write an error; that itself must stop the others."""
    failures = _failures_of_ending("kill", 0, tcp=True)
    for rank in (1, 2):
        assert f"RankFailedError: Rank 0 of 3 (host {socket.gethostname()}) died without" in failures[rank]


def test_silent_machine_counts_as_dead() -> None:
    """The process ids of another machine cannot be seen: a machine that vanished must be found by its silence."""
    failures = _failures_of_ending("stop", 1, machine_each=True, heartbeat_timeout_seconds=2.0)
    for rank in (0, 2):
        assert re.search(r"RankFailedError: Rank 1 of 3 .* died .*gave a heartbeat for 2 seconds", failures[rank])


def _hold_interpreter(machine_each: bool) -> str:
    rank = dist.get_rank()
    if machine_each:
        _liveness._machine = lambda: f"machine {rank}"
    heartbeat_timeout_seconds = 2.5 if machine_each else 1.0
    guard = FailureGuard(
        default_store(), rank, 2, poll_seconds=0.2, heartbeat_timeout_seconds=heartbeat_timeout_seconds
    )
    dist.barrier()
    time.sleep(1.2)
    with guard.phase("training_step"):
        if rank == 1 or machine_each:
            # Rank 0 looks again before rank 1 can give a heartbeat.
            ctypes.PyDLL(None).usleep(4_000_000 if rank == 0 else 4_400_000)
        dist.barrier()
        time.sleep(0.5)
    guard.close()
    return "clean"


@pytest.mark.parametrize("machine_each", [False, True])
def test_busy_rank_is_not_dead(machine_each: bool) -> None:
    """No thread of a rank runs while native code holds the interpreter lock: it gives no heartbeat and looks at none.

    On one machine the other rank sees that it lives. Between machines a rank that was busy itself must not count its
    own stall as silence of the other.
    """
    assert run_ranks(_hold_interpreter, 2, machine_each) == ["clean", "clean"]


def _two_guards() -> list[str]:
    rank = dist.get_rank()
    seen: list[str] = []
    with FailureGuardContext(rank) as guard, guard.phase("first"):
        dist.barrier()
    try:
        with FailureGuardContext(rank) as guard, guard.phase("second"):
            if rank == 1:
                raise ValueError("boom")
            dist.barrier()
    except (RankFailedError, ValueError) as error:
        seen.append(type(error).__name__)
    with FailureGuardContext(rank) as guard:
        time.sleep(1.2)
        guard.check()
        seen.append("third is clean")
    return seen


class FailureGuardContext:
    def __init__(self, rank: int) -> None:
        self._guard = FailureGuard(default_store(), rank, dist.get_world_size())

    def __enter__(self) -> FailureGuard:
        return self._guard

    def __exit__(self, *exception: object) -> None:
        self._guard.close()


def test_guards_one_after_the_other() -> None:
    """The store outlives a guard: an old error or an old mark of a closed rank must not reach the next guard."""
    first, second = run_ranks(_two_guards, 2, timeout_seconds=_GROUP_TIMEOUT_SECONDS)
    assert first == ["RankFailedError", "third is clean"]
    assert second == ["ValueError", "third is clean"]


def _steady_state() -> tuple[int, int, list[str]]:
    main, num_calls = threading.current_thread(), 0
    num_looks = 0

    def count(name: str) -> None:
        plain = getattr(FailureBoard, name)

        def counted(*args: Any) -> Any:
            nonlocal num_calls, num_looks
            num_calls += threading.current_thread() is main
            if threading.current_thread() is not main:
                num_looks += 1
                # A slow network: the thread is inside a call when the guard is closed.
                time.sleep(0.3)
            return plain(*args)

        setattr(FailureBoard, name, counted)

    guard = FailureGuard(default_store(), dist.get_rank(), 2, poll_seconds=0.1)
    for name in ("publish", "read", "mark", "marked", "register", "members", "beat", "num_beats"):
        count(name)
    for _ in range(1000):
        with guard.phase("training_step"):
            guard.check()
    time.sleep(0.7)
    num_calls_in_steps = num_calls
    guard.close()
    guard.close()
    return num_calls_in_steps, num_looks, [thread.name for thread in threading.enumerate()]


def test_steady_state_costs_the_step_nothing_and_leaves_no_thread() -> None:
    """A request to the store in each step would cost every step a round trip to rank 0."""
    for num_calls, num_looks, threads in run_ranks(_steady_state, 2):
        assert num_calls == 0
        assert num_looks > 0, "the counting itself works"
        assert not any(name.startswith("bigmodel-") for name in threads)


def _compute_only() -> str:
    guard = FailureGuard(default_store(), dist.get_rank(), 2)
    try:
        if dist.get_rank() == 1:
            with guard.phase("validation_step"):
                raise ValueError("boom")
        deadline = time.monotonic() + _SOON_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.01)
            guard.check()
    except (RankFailedError, ValueError) as error:
        return str(error).splitlines()[0]
    finally:
        guard.close()
    return "never told"


def test_check_tells_a_rank_that_does_not_communicate() -> None:
    """A rank that computes for minutes has no wait to be woken from."""
    told, raised = run_ranks(_compute_only, 2)
    assert "failed in `validation_step`: ValueError: boom" in told
    assert raised == "boom"


def _all_fail() -> tuple[str, str]:
    guard = FailureGuard(default_store(), dist.get_rank(), 2)
    try:
        with guard.phase("fit"), guard.phase("training_step"):
            dist.barrier()
            raise ValueError(f"boom on {dist.get_rank()}")
    except Exception as error:
        record = guard._board.read()
        guard.close()
        return str(error), record.phase if record is not None else ""
    return "", ""


def test_ranks_that_fail_alike_keep_their_own_errors() -> None:
    """A wrong setting fails on all ranks at once; each must show its own error, and the inner phase is the place."""
    assert run_ranks(_all_fail, 2) == [("boom on 0", "training_step"), ("boom on 1", "training_step")]


# ---- whole processes, as a launcher starts them ----

_PRELUDE = """
import os, sys, time, datetime, torch, torch.distributed as dist
from lightning_bigmodel._host import default_store
from lightning_bigmodel.mesh.failures import FailureGuard
torch.set_num_threads(1)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
guard = FailureGuard(default_store(), rank, world_size, grace_seconds=float(os.environ["GRACE"]))
dist.barrier()
print("ready at", time.monotonic(), flush=True)
"""
_RAISE = """
try:
    with guard.phase("training_step"):
        if rank == int(os.environ["FAILING"]):
            raise ValueError("boom")
        dist.barrier()
finally:
    guard.close()
    if os.environ["DESTROY"] == "1":
        dist.destroy_process_group()
"""
_RAISE_WITHOUT_CLOSE = """
with guard.phase("training_step"):
    if rank == int(os.environ["FAILING"]):
        raise ValueError("boom")
    dist.barrier()
"""
_STUCK_IN_STORE = """
with guard.phase("setup"):
    if rank == 1:
        raise ValueError("boom")
    default_store().get("a key that nobody writes")
"""
_RANK_0_LEAVES_EARLY = """
with guard.phase("training_step"):
    dist.barrier()
if rank == 1:
    time.sleep(6)
    guard.check()
guard.close()
dist.destroy_process_group()
print("end of rank", rank)
"""


# A traceback ends with it; torch puts the rank in front of each line.
_LAST_LINE = r"^(\[rank\d+\]: )?"


def _run_script(body: str, world_size: int, tmp_path: Path, **environment: str) -> tuple[list[int], list[str], float]:
    script = tmp_path / "script.py"
    script.write_text(_PRELUDE + body)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world_size):
        variables = {
            **os.environ,
            **{"GRACE": "10", "FAILING": "1", "DESTROY": "1", "GLOO_SOCKET_IFNAME": "lo"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"RANK": str(rank), "WORLD_SIZE": str(world_size)},
            **environment,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        end = time.monotonic()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # The imports before take most of the time, and on a busy machine any time.
    ready = min(float(found) for output in outputs for found in re.findall(r"^ready at (\S+)", output, re.MULTILINE))
    return [process.returncode for process in processes], outputs, end - ready


@pytest.mark.parametrize(("failing_rank", "destroy"), [(0, "1"), (1, "1"), (1, "0")])
def test_script_ends_with_an_error_code_on_all_ranks(failing_rank: int, destroy: str, tmp_path: Path) -> None:
    """Neither `destroy_process_group` nor the end of the interpreter may hang or hide the error from the launcher."""
    codes, outputs, elapsed_seconds = _run_script(_RAISE, 2, tmp_path, FAILING=str(failing_rank), DESTROY=destroy)
    assert codes == [1, 1], outputs
    assert elapsed_seconds < 15
    for rank, output in enumerate(outputs):
        error = "ValueError: boom" if rank == failing_rank else rf"\S*RankFailedError: Rank {failing_rank} of 2"
        assert re.search(_LAST_LINE + error, output, re.MULTILINE), output


def test_script_that_leaves_the_guard_open_ends_too(tmp_path: Path) -> None:
    """A thread inside the store at the end of the interpreter ends the process with SIGABRT, or never."""
    codes, outputs, elapsed_seconds = _run_script(_RAISE_WITHOUT_CLOSE, 2, tmp_path)
    assert codes == [1, 1], outputs
    assert elapsed_seconds < 15
    assert "RankFailedError: Rank 1 of 2" in outputs[0]


def test_rank_that_nothing_can_wake_is_ended(tmp_path: Path) -> None:
    """A wait for a key of the store cannot be broken from outside; without the last resort it lasts half an hour."""
    codes, outputs, elapsed_seconds = _run_script(_STUCK_IN_STORE, 2, tmp_path, GRACE="1")
    assert codes == [1, 1], outputs
    assert elapsed_seconds < 15
    assert re.search(r"RankFailedError: Rank 1 of 2 .* failed in `setup`: ValueError: boom", outputs[0])
    assert "grace_seconds=1" in outputs[0]
    assert "script.py" in outputs[0], "where the main thread was"


def test_rank_0_may_end_first(tmp_path: Path) -> None:
    """The store ends with rank 0; a slower rank must not take a rank 0 that closed its guard for dead."""
    codes, outputs, _ = _run_script(_RANK_0_LEAVES_EARLY, 2, tmp_path)
    assert codes == [0, 0], outputs
    assert "end of rank 1" in outputs[1]


_LIGHTNING = """
import os, sys, time, torch, torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning_bigmodel._host import default_store
from lightning_bigmodel.mesh.failures import FailureGuard

class Guarded(DDPStrategy):
    def setup(self, trainer):
        super().setup(trainer)
        self.guard = FailureGuard(default_store(), self.global_rank, self.world_size)

    def training_step(self, *args, **kwargs):
        with self.guard.phase("training_step"):
            return super().training_step(*args, **kwargs)

    def backward(self, *args, **kwargs):
        with self.guard.phase("backward"):
            return super().backward(*args, **kwargs)

    def teardown(self):
        self.guard.close()
        super().teardown()

class Failing(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == int(os.environ["FAILING"]):
            print("ready at", time.monotonic(), flush=True)
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = Guarded(process_group_backend="gloo")
    Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, limit_val_batches=0, **quiet).fit(Failing())
"""


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_ranks_that_lightning_launches_end(failing_rank: int, tmp_path: Path) -> None:
    """Lightning starts the other ranks from rank 0 and tears down on an error; none of it may wait for a peer."""
    script = tmp_path / "script.py"
    script.write_text(_LIGHTNING)
    started = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    process = subprocess.run(
        [sys.executable, str(script)],
        env={**started, "FAILING": str(failing_rank), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    elapsed_seconds = time.monotonic() - float(process.stdout.partition("ready at ")[2].split()[0])
    assert process.returncode == 1, process.stderr
    assert elapsed_seconds < 15
    # Both ranks write to the same stderr.
    assert re.search(_LAST_LINE + "ValueError: boom", process.stderr, re.MULTILINE)
    assert re.search(rf"RankFailedError: Rank {failing_rank} of 2 .* failed in `training_step`", process.stderr)


# ---- without ranks ----


def test_single_rank_needs_nothing() -> None:
    """With one rank there is nobody to tell, and no store may be needed."""
    guard = FailureGuard(None, 0, 1)  # type: ignore[arg-type]
    boom = ValueError("boom")
    with pytest.raises(ValueError, match="boom") as caught, guard.phase("training_step"):
        raise boom
    assert caught.value is boom
    guard.check()
    guard.close()


@pytest.mark.parametrize("name", ["poll_seconds", "grace_seconds", "heartbeat_timeout_seconds"])
def test_times_must_be_positive(name: str) -> None:
    """A poll time of 0 would spin, a grace of 0 would end ranks before they can raise."""
    with pytest.raises(ValueError, match=f"`{name}=0`"):
        FailureGuard(dist.HashStore(), 0, 2, **{name: 0})


def test_error_survives_pickling() -> None:
    """Launchers that spawn processes pickle the error to hand it on."""
    error = RankFailedError("text", failed_rank=2, failed_host="a", original="ValueError: boom")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.failed_rank, copy.failed_host, copy.original) == ("text", 2, "a", "ValueError: boom")


def test_first_report_stands() -> None:
    """Errors follow from the first one: a later report must not replace the cause."""
    store = dist.HashStore()
    boards = [FailureBoard(store, rank, 2) for rank in range(2)]
    first = FailureRecord.of(ValueError("cause"), rank=0, host="a", phase="fit")
    second = FailureRecord.of(RuntimeError("x" * 10_000), rank=1, host="b", phase="fit")
    assert boards[0].publish(first) == first
    assert boards[1].publish(second) == first
    assert boards[1].read() == first
    assert len(second.original) < 5000
    assert second.original.endswith("[cut]")


def test_process_that_ended_is_not_alive() -> None:
    """A killed process stays in the process table until its parent collects it, and ids are used again."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    state_and_start = _liveness._state_and_start(child.pid)
    member = _liveness.Member(host="a", machine="a", pid=child.pid, started=state_and_start[1])
    assert member.is_alive()
    assert not _liveness.Member(host="a", machine="a", pid=child.pid, started="1").is_alive()
    child.kill()
    deadline = time.monotonic() + 10
    while member.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not member.is_alive(), "not collected yet"
    child.wait()
    assert not member.is_alive()
