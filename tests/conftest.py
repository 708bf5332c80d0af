"""Fixtures that give each test the same start, and fail the test that leaves something behind."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

# Lightning writes these for its own use; they are restored, and not held against the test.
_HOST_VARIABLES = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}
# What libraries set once for the life of the process, whichever test loads them, and pytest's note of where it is.
_LASTING_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
}
# How long threads and processes that are ending may take to be gone.
_ENDING_SECONDS = 5.0


# A shell that starts the tests in the background hands an ignored SIGINT on to every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What needs a GPU has a script of its own, `tests/gpu/run.sh`; elsewhere there is nothing to collect.
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    """Seeds every generator, so that a test gives the same numbers alone as among others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    """A leftover RANK or MASTER_ADDR makes later tests run in a world that is not theirs."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    leaked = {
        name: after.get(name)
        for name in before.keys() | after.keys()
        if name not in _LASTING_VARIABLES and before.get(name) != after.get(name)
    }
    for name in leaked:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    changed = {name: value for name, value in leaked.items() if name not in _HOST_VARIABLES}
    assert not changed, f"the test left these environment variables changed: {changed}"


@pytest.fixture(autouse=True)
def _no_leaked_process_group() -> Iterator[None]:
    """A leftover process group makes each later Trainer a rank of it."""
    yield
    left = dist.is_available() and dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left, "the test left a process group initialised"


@pytest.fixture(autouse=True)
def _no_leaked_torch_settings() -> Iterator[None]:
    """Torch's global settings change the numbers of every later test."""
    before = _torch_settings()
    yield
    after = _torch_settings()
    for name, restore in (
        ("default dtype", torch.set_default_dtype),
        ("grad enabled", torch.set_grad_enabled),
        ("deterministic algorithms", torch.use_deterministic_algorithms),
    ):
        if after[name] != before[name]:  # each call costs: the last one loads torch's compiler
            restore(before[name])
    assert after == before, "the test left torch's settings changed"


def _torch_settings() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad enabled": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    """A leftover thread goes on working, and may do so in the middle of another test."""
    before = set(threading.enumerate())
    yield
    left = _wait_for_none(lambda: [thread.name for thread in threading.enumerate() if thread not in before])
    assert not left, f"the test left these threads running: {left}"


@pytest.fixture(autouse=True)
def _no_leaked_processes() -> Iterator[None]:
    """A leftover rank holds ports and cores, and may wait for ever."""
    before = set(_children())
    yield
    left = _wait_for_none(lambda: [_describe(pid) for pid in _children() if pid not in before])
    assert not left, f"the test left these processes running: {left}"


def _children() -> list[int]:
    """Returns the child processes that still run, those of the fork server in place of the server itself."""
    multiprocessing.active_children()  # collects the ended ones
    children = []
    for pid in _children_of(os.getpid()):
        command = _describe(pid)
        if "multiprocessing.forkserver" in command:
            children += _children_of(pid)
        elif "multiprocessing.resource_tracker" not in command:
            children.append(pid)
    return children


def _children_of(pid: int) -> list[int]:
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        pids = [int(child) for file in files for child in file.read_text().split()]
        return [child for child in pids if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]
    except FileNotFoundError:  # one ended meanwhile, or the system has no /proc
        return []


def _describe(pid: int) -> str:
    try:
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except FileNotFoundError:
        return f"{pid}: ended"


def _wait_for_none(look) -> list[str]:
    limit = time.monotonic() + _ENDING_SECONDS
    while (left := look()) and time.monotonic() < limit:
        time.sleep(0.02)
    return left


@pytest.fixture(autouse=True)
def _no_files_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs each test in an empty folder and fails it for files left there; write into `tmp_path` instead."""
    folder = tmp_path_factory.mktemp("cwd")
    before = Path.cwd()
    # Not by `monkeypatch`: it would then be undone only after the other fixtures here have looked for leaks.
    os.chdir(folder)
    yield
    os.chdir(before)
    left = sorted(path.name for path in folder.iterdir())
    assert not left, f"the test left files in the working directory: {left}; give it `tmp_path`, or `default_root_dir`"
