import os
import signal
import threading
import time
from unittest import mock

import pytest

from lightning_bigmodel.demo.launch import RankFailedError, RankGroup


def count(rank, emit, num_events):
    for number in range(num_events):
        emit("count", number)


def add_over_ranks(rank, emit):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(10.0**rank)
    dist.all_reduce(total)
    emit("total", (dist.get_rank(), dist.get_world_size(), total.item()))
    dist.destroy_process_group()


def fail_on_one(rank, emit):
    emit("alive", os.getpid())
    if rank == 1:
        raise ValueError("the reason")
    threading.Event().wait()


def die_on_one(rank, emit):
    emit("alive", os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def wait_for_ever(rank, emit):
    emit("alive", os.getpid())
    threading.Event().wait()


def show_environment(rank, emit):
    print("a note of the rank")
    emit("environment", {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")})


@pytest.fixture
def group(tmp_path):
    def make(name, *arguments, **settings):
        settings = {"num_ranks": 2, "name": name, "log_directory": tmp_path, **settings}
        return RankGroup(f"{__name__}:{name}", arguments=arguments, **settings)

    return make


def _gone(pid):
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_all_events_arrive_in_each_ranks_order(group):
    """A lost or late event would leave a hole in the loss curve."""
    with group("count", 50, distributed=False) as ranks:
        events = list(ranks.events())
    for rank in (0, 1):
        assert [event.value for event in events if event.rank == rank] == list(range(50))


def test_ranks_meet_in_one_process_group(group):
    """The environment must lead `init_process_group` to the parent's store, or ranks wait for each other in vain."""
    with group("add_over_ranks") as ranks:
        values = sorted(event.value for event in ranks.events())
    assert values == [(0, 2, 11.0), (1, 2, 11.0)]


def test_a_failing_rank_is_named_and_the_others_end(group, tmp_path):
    """One rank's exception must end all of them, with its reason; a rank left waiting is a process left behind."""
    pids = []
    with pytest.raises(RankFailedError, match="rank 1: ValueError: the reason"), group("fail_on_one") as ranks:
        pids.extend(event.value for event in ranks.events())
    assert pids
    assert all(_gone(pid) for pid in pids)
    assert "Traceback" in (tmp_path / "fail_on_one-rank1.log").read_text()


def test_a_killed_rank_is_named_with_its_signal(group):
    """A rank killed by the system (out of memory) reports nothing; the parent must not wait for it."""
    pids = []
    with pytest.raises(RankFailedError, match="rank 1: ended by signal SIGKILL"), group("die_on_one") as ranks:
        pids.extend(event.value for event in ranks.events())
    assert pids
    assert all(_gone(pid) for pid in pids)


def test_leaving_the_context_ends_ranks_that_still_run(group):
    """Ctrl-C leaves the context with an exception; ranks that wait in a collective must still end."""
    pids = []

    def interrupted():
        with group("wait_for_ever", distributed=False) as ranks:
            for event in ranks.events():
                pids.append(event.value)
                if len(pids) == 2:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(_gone(pid) for pid in pids)


def test_ranks_do_not_inherit_another_launchers_world(group, tmp_path):
    """Inside a torchrun or SLURM job the one-process run would otherwise join, or wait for, that job's world."""
    with (
        mock.patch.dict(os.environ, {"RANK": "7", "WORLD_SIZE": "9"}),
        group("show_environment", num_ranks=1, distributed=False) as ranks,
    ):
        (alone,) = ranks.events()
    assert alone.value == {"RANK": None, "WORLD_SIZE": None, "TORCHELASTIC_RUN_ID": None}
    with group("show_environment") as ranks:
        pair = {event.rank: event.value for event in ranks.events()}
    assert pair[1] == {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "bigmodel-demo"}
    assert "a note of the rank" in (tmp_path / "show_environment-rank1.log").read_text()
