"""A project that is one YAML file: the commands of its README, run as they stand."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

_EXAMPLE = Path(__file__).parents[2] / "examples" / "yaml_only"


def _commands() -> list[str]:
    """Returns the commands in the README's bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (_EXAMPLE / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def _run(command: str, folder: Path) -> str:
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    if words[0] == "torchrun":
        # A free port instead of torchrun's usual one, which another run may hold.
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        words = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *words[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A copy of the example in which all commands ran, and what each wrote to its standard output."""
    folder = tmp_path_factory.mktemp("project") / "yaml_only"
    shutil.copytree(_EXAMPLE, folder, ignore=shutil.ignore_patterns("results"))
    return folder, [_run(command, folder) for command in _commands()]


def _losses(folder: Path, version: int) -> dict[str, list[float]]:
    """Returns what a run logged, in order, by name."""
    with (folder / "results" / "lightning_logs" / f"version_{version}" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in ("train_loss", "val_loss")}


@pytest.mark.parametrize("version", [0, 1])
def test_two_ranks_log_what_one_process_logs(version, project):
    """A file whose strategy is not the one that trains, or trains otherwise, shows here and nowhere else."""
    found, alone = _losses(project[0], version), _losses(project[0], 2)
    assert (len(alone["train_loss"]), len(alone["val_loss"])) == (40, 4)
    for name in alone:
        assert found[name] == pytest.approx(alone[name], rel=1e-4), name
    assert alone["val_loss"][-1] < 3.5  # before training it is ln 256 = 5.5


def test_two_ranks_trained_under_the_strategy(project):
    """Both ranks training the whole model, each alone, would log the same losses."""
    logs = project[0] / "results" / "lightning_logs"
    for version in (0, 1):
        checkpoint = next((logs / f"version_{version}" / "checkpoints").iterdir())
        assert {path.name for path in checkpoint.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert next((logs / "version_2" / "checkpoints").iterdir()).is_file()


def test_a_saved_config_is_overridden_on_the_command_line(project):
    """The file beside a checkpoint must take overrides as the first one does."""
    settings = yaml.safe_load(project[1][3])["trainer"]["strategy"]["init_args"]
    assert (settings["num_microbatches"], settings["timeout"]) == (8, "0:05:00")
    assert settings["blocks"] == ["blocks.*"]
