"""`run_ranks` and `fake_world`: what a rank finds, and what comes back from it."""

import importlib.util
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_bigmodel.testing import RanksFailedError, fake_world, run_ranks


def scaled_rank_sum(scale: float, offset: float = 0.0) -> tuple[int, float]:
    value = torch.tensor(scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank(), value.item() + offset


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_in_rank_order_and_ranks_talk(world_size):
    """Ranks that never meet, or results in the order of arrival, would make every other test meaningless."""
    total = 2.0 * sum(range(1, world_size + 1)) + 0.5
    assert run_ranks(scaled_rank_sum, world_size, 2.0, offset=0.5) == [(rank, total) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0, "2"])
def test_a_world_without_ranks_is_refused(world_size):
    """A helper that runs no rank passes every test."""
    with pytest.raises(ValueError, match="`world_size=.*1 or more"):
        run_ranks(scaled_rank_sum, world_size, 1.0)


def test_a_timeout_of_nothing_is_refused():
    """A timeout of zero would report every rank as hanging."""
    with pytest.raises(ValueError, match="`timeout_seconds=0`"):
        run_ranks(scaled_rank_sum, 1, 1.0, timeout_seconds=0)


def test_what_cannot_travel_to_a_rank_is_named():
    """A lambda would otherwise fail deep inside multiprocessing."""
    with pytest.raises(TypeError, match="top of a module"):
        run_ranks(lambda: None, 1)


def rank_view() -> dict[str, object]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
    return {
        "environment": {name: os.environ.get(name) for name in names},
        "elastic": dist.is_torchelastic_launched(),
        "port": int(os.environ["MASTER_PORT"]),
        "caller": os.environ.get("SET_BY_CALLER"),
        "given": os.environ.get("GIVEN"),
        "path": os.environ.get("PATH"),
        "folder": os.getcwd(),
        "num_threads": torch.get_num_threads(),
    }


def test_ranks_have_torchruns_environment_and_the_callers(monkeypatch, tmp_path):
    """The fork server's own, older environment must not show through, and `env` must win."""
    run_ranks(rank_view, 1)  # the server exists from here on at the latest
    monkeypatch.setenv("SET_BY_CALLER", "yes")
    monkeypatch.chdir(tmp_path)
    views = run_ranks(rank_view, 2, env={"GIVEN": "too", "NODE_RANK": "7"})
    assert len({view["port"] for view in views}) == 1
    for rank, view in enumerate(views):
        assert view["environment"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "NODE_RANK": "7",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert (view["elastic"], view["caller"], view["given"]) == (True, "yes", "too")
        assert (view["folder"], view["num_threads"]) == (str(tmp_path), 1)
    monkeypatch.delenv("PATH")  # the server was started with it
    assert run_ranks(rank_view, 1)[0]["path"] is None


def fit_with_trainer(folder: str) -> dict[str, object]:
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_bigmodel.testing import TinyChain

    torch.manual_seed(int(os.environ["RANK"]))
    module = TinyChain()
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(module.dataset(16), batch_size=4))
    return {
        "pid": os.getpid(),
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "world_size": trainer.world_size,
        "rank": trainer.global_rank,
        "weights": torch.nn.utils.parameters_to_vector(module.parameters()).detach(),
    }


@pytest.mark.parametrize("init_process_group", [True, False])
def test_a_trainer_inside_joins_the_ranks(tmp_path, init_process_group):
    """A Trainer that launched its own processes, or stayed alone, would test another world than it says."""
    results = run_ranks(fit_with_trainer, 2, str(tmp_path), init_process_group=init_process_group)
    assert [result["environment"] for result in results] == ["TorchElasticEnvironment"] * 2
    assert [(result["world_size"], result["rank"]) for result in results] == [(2, 0), (2, 1)]
    assert len({result["pid"] for result in results}) == 2
    # DDP starts from rank 0's weights and averages gradients, so two different seeds end alike only if they talked.
    torch.testing.assert_close(results[0]["weights"], results[1]["weights"], rtol=0, atol=0)


def a_result_of_kind(kind: str) -> object:
    if kind == "lambda":
        return lambda: None
    return [torch.full((100,), float(index + dist.get_rank())) for index in range(1500)]


def test_a_result_that_cannot_travel_is_named():
    """The pickling error alone does not say that it is the test function's result."""
    with pytest.raises(RanksFailedError, match="result of `.*a_result_of_kind`, of type function, cannot be pickled"):
        run_ranks(a_result_of_kind, 1, "lambda")


def test_many_tensors_come_back_by_value():
    """Shared-memory tensors take a file descriptor each, and 1500 of them exhaust the usual limit of 1024."""
    num_open = len(os.listdir("/proc/self/fd"))
    first, second = run_ranks(a_result_of_kind, 2, "tensors")
    assert [tensor[0].item() for tensor in second] == [index + 1.0 for index in range(1500)]
    assert not any(tensor.is_shared() for tensor in first)
    assert len(os.listdir("/proc/self/fd")) <= num_open + 2


def parent_pid_and_modules() -> tuple[int, bool]:
    return os.getppid(), "lightning.pytorch" in sys.modules


def test_ranks_are_forked_from_one_loaded_server():
    """Without preloading each rank would import torch and Lightning for seconds, in each test."""
    results = run_ranks(parent_pid_and_modules, 2) + run_ranks(parent_pid_and_modules, 1)
    assert {loaded for _, loaded in results} == {True}
    assert len({parent for parent, _ in results}) == 1


def speak() -> None:
    # What `print` hands over as two writes (see PYTHONUNBUFFERED) would come out mixed with the other rank's.
    assert not sys.stdout.write_through
    print(f"out of rank {dist.get_rank()}")
    print(f"err of rank {dist.get_rank()}", file=sys.stderr)


def test_output_passes_through_to_the_caller(capfd):
    """Output lost with the server's own streams would leave nothing to debug with."""
    with capfd.disabled():
        run_ranks(rank_view, 1)  # the server exists from here on at the latest, with other streams
    run_ranks(speak, 2)
    captured = capfd.readouterr()
    assert sorted(captured.out.split("\n"))[1:] == ["out of rank 0", "out of rank 1"]
    assert "err of rank 0" in captured.err
    assert "err of rank 1" in captured.err


@pytest.mark.parametrize(("home", "num_runs"), [("__main__", 3), ("test_ranks", 1)])
def test_the_callers_script_runs_again_only_if_needed(tmp_path, home, num_runs):
    """Running pytest's start script in each rank costs more than the rank; a function of the script does need it."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            open({str(tmp_path / "log")!r}, "a").write("ran\\n")
            from test_ranks import scaled_rank_sum
            from lightning_bigmodel.testing import run_ranks

            def work(scale):
                return scaled_rank_sum(scale)

            if __name__ == "__main__":
                print(run_ranks({"work" if home == "__main__" else "scaled_rank_sum"}, 2, 1.0))
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[(0, 3.0), (1, 3.0)]", done.stderr
    assert (tmp_path / "log").read_text() == "ran\n" * num_runs


def test_a_module_on_no_import_path_reaches_the_ranks(tmp_path, monkeypatch):
    """Pytest's `importlib` mode loads test modules under names that a plain import does not find."""
    file = tmp_path / "hidden.py"
    file.write_text("import os\ndef rank():\n    return os.environ['RANK']\n")
    name = "no_such_folder.deeper.hidden"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    # As pytest does: the folders become empty modules.
    for parent in ("no_such_folder", "no_such_folder.deeper"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert run_ranks(module.rank, 2) == ["0", "1"]


def test_a_fake_world_has_its_shape_and_ends():
    """A mesh of hundreds of ranks must be testable in one process, and must not leak into the next test."""
    with fake_world(512, rank=130):
        mesh = dist.init_device_mesh("cpu", (8, 64), mesh_dim_names=("pipe", "data_shard"))
        assert (dist.get_world_size(), dist.get_rank()) == (512, 130)
        assert list(mesh.get_coordinate()) == [2, 2]
        with pytest.raises(RuntimeError, match="has one already"), fake_world(2):
            pytest.fail("a second world inside the first")
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), fake_world(4):
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="`rank=4`.*`world_size=4`"), fake_world(4, rank=4):
        pytest.fail("a rank outside the world")
