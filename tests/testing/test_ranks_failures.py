"""How `run_ranks` ends when a rank fails, dies or hangs: every rank reported, none left running."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_bigmodel.testing import RanksFailedError, run_ranks


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def _wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    limit = time.monotonic() + seconds
    while (left := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < limit:
        time.sleep(0.05)
    return left


def _pids_in(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.iterdir()]


def fail_on(ranks: list[int]) -> str:
    if dist.get_rank() in ranks:
        raise KeyError(f"broken on {dist.get_rank()}")
    return "fine"


def test_every_ranks_traceback_comes_back():
    """With only the first traceback one cannot tell a cause on all ranks from a cause on one."""
    with pytest.raises(RanksFailedError, match=r"2 of 3 ranks failed in `.*fail_on`") as caught:
        run_ranks(fail_on, 3, [0, 2])
    assert sorted(caught.value.failures) == [0, 2]
    for rank, text in caught.value.failures.items():
        assert f"KeyError: 'broken on {rank}'" in text
        assert "in fail_on" in text
        assert text.rstrip() in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.failures) == (str(caught.value), caught.value.failures)


def exit_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        sys.exit(0)


def test_a_rank_that_exits_has_failed():
    """`sys.exit(0)` inside a test must not pass for an answer."""
    with pytest.raises(RanksFailedError, match="SystemExit: 0"):
        run_ranks(exit_on_rank_zero, 2)


def fail_while_others_wait(folder: str, how: str) -> None:
    Path(folder, str(os.getpid())).touch()
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    if how == "barrier":
        dist.barrier()
    time.sleep(1000)


@pytest.mark.parametrize("how", ["barrier", "sleep"])
def test_one_failure_ends_the_ranks_that_wait(tmp_path, how):
    """A failure on one rank must be an error at once, not a hang until the timeout, and name the cause first."""
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="the cause") as caught:
        run_ranks(fail_while_others_wait, 2, str(tmp_path), how, timeout_seconds=200)
    assert time.monotonic() - start < 60
    assert list(caught.value.failures) == [1, 0]
    if how == "sleep":
        assert "still running 5.0 s after rank 1 failed" in caught.value.failures[0]
        assert "fail_while_others_wait" in caught.value.failures[0]
    assert len(_pids_in(tmp_path)) == 2
    assert _wait_until_gone(_pids_in(tmp_path)) == []


def die(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)


@pytest.mark.parametrize(("how", "message"), [("killed", "SIGKILL; exit code -9"), ("left", "ended with exit code 3")])
def test_a_rank_that_dies_is_reported(how, message):
    """A rank killed for memory leaves no traceback; waiting for its answer would hang."""
    with pytest.raises(RanksFailedError, match=message) as caught:
        run_ranks(die, 2, how, timeout_seconds=100)
    assert list(caught.value.failures) == [1]


def hang_somewhere_deep(folder: str, ranks: list[int]) -> None:
    Path(folder, str(os.getpid())).touch()
    if dist.get_rank() in ranks:
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(folder, str(helper.pid)).touch()
        time.sleep(1000)


def test_a_timeout_names_who_hangs_and_where_and_ends_all(tmp_path):
    """A hang must not outlive its test, nor leave processes that slow or block all later ones."""
    with pytest.raises(RanksFailedError, match="still running after `timeout_seconds=3`") as caught:
        run_ranks(hang_somewhere_deep, 3, str(tmp_path), [0, 2], timeout_seconds=3)
    assert sorted(caught.value.failures) == [0, 2]
    for text in caught.value.failures.values():
        assert "in hang_somewhere_deep" in text
    pids = _pids_in(tmp_path)
    assert len(pids) == 5  # three ranks and what two of them started
    assert _wait_until_gone(pids) == []


def leave_a_process_behind(folder: str) -> None:
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(folder, str(helper.pid)).touch()


def test_what_a_rank_started_ends_with_it(tmp_path):
    """A helper process of a rank that answered would be an orphan."""
    run_ranks(leave_a_process_behind, 2, str(tmp_path))
    assert len(_pids_in(tmp_path)) == 2
    assert _wait_until_gone(_pids_in(tmp_path)) == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_caller(tmp_path, ending):
    """Ctrl-C, or a CI that kills the test run, must not leave ranks that spin for ever."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_ranks_failures import hang_somewhere_deep\n"
        "from lightning_bigmodel.testing import run_ranks\n"
        f"if __name__ == '__main__': run_ranks(hang_somewhere_deep, 2, {str(tmp_path / 'pids')!r}, [0, 1])\n"
    )
    (tmp_path / "pids").mkdir()
    caller = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while len(_pids_in(tmp_path / "pids")) < 4 and time.monotonic() < limit:
        assert caller.poll() is None, caller.stderr.read()
        time.sleep(0.05)
    pids = _pids_in(tmp_path / "pids")
    assert len(pids) == 4
    caller.send_signal(ending)
    stderr = caller.communicate(timeout=150)[1]
    assert _wait_until_gone(pids) == []
    if ending is signal.SIGINT:
        assert stderr.rstrip().endswith("KeyboardInterrupt")
