"""A project that is one YAML file: the commands of its README, run as they stand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLE = Path(__file__).parents[2] / "examples" / "yaml_only"


def _commands() -> list[list[str]]:
    """Returns the words of each command in the README's bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (_EXAMPLE / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(command) for block in blocks for command in block.replace("\\\n", " ").splitlines()]


def _run(folder: Path, command: list[str]) -> str:
    programs = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
    }
    words = [*programs[command[0]], *command[1:]]
    words = [sys.executable if word == "python" else word for word in words]
    words = [str(_EXAMPLE / word) if word.endswith(".yaml") and (_EXAMPLE / word).exists() else word for word in words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _validation_losses(text: str) -> list[float]:
    """Returns the losses that `validate` prints in its table."""
    return [float(value) for value in re.findall(r"val_loss\s*\D\s*([0-9.]+)", text)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all commands of the README ran, and what each wrote."""
    folder = tmp_path_factory.mktemp("yaml_only")
    for index, command in enumerate(_commands()):
        (folder / f"output-{index}.txt").write_text(_run(folder, command))
    return folder


def test_the_commands_train_save_and_validate(folder):
    """A README whose commands fail is worse than none."""
    commands = _commands()
    assert len(commands) >= 4
    assert (folder / "checkpoints" / "best.ckpt" / "bigmodel.json").exists()
    assert (folder / "config.yaml").exists()
    trained, alone = (_validation_losses((folder / f"output-{index}.txt").read_text()) for index in (-2 % len(commands), -1 % len(commands)))
    assert len(trained) == len(alone) == 1
    assert trained == pytest.approx(alone, rel=1e-5)
    assert trained[0] < 3.5  # an untrained model is at ln 256 = 5.5
