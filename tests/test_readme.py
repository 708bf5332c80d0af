"""Everything the README shows runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_README = Path(__file__).parent.parent / "README.md"
# What README snippets may be; a snippet of any other language would be neither run nor missed.
_LANGUAGES = {"bash", "python", "text", "yaml"}
_FRESH_MACHINE_COMMANDS = ("pip install . && bigmodel demo", "pip install -e '.[test]' && pytest")


def _snippets() -> list[tuple[str, str]]:
    """Returns `(language, text)` of each fenced block, in order; none if there is no README."""
    if not _README.exists():
        return []
    blocks = re.findall(r"^```(\S*)[^\n]*\n(.*?)^```\s*$", _README.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [(language, text) for language, text in blocks]


def _of(language: str) -> list[str]:
    return [text for found, text in _snippets() if found == language]


def _each(language: str) -> range:
    # One even where there is none: the test then fails instead of being skipped.
    return range(max(1, len(_of(language))))


def _run(arguments: list[str], folder: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_there_is_a_readme_with_snippets_of_each_kind():
    """Without a README, or with fences in a language nobody runs, the tests below would run nothing."""
    assert _README.exists(), "README.md is missing"
    assert {language for language, _ in _snippets()} <= _LANGUAGES
    assert {"bash", "python", "yaml"} <= {language for language, _ in _snippets()}
    assert len(re.findall(r"^```", _README.read_text(), flags=re.MULTILINE)) == 2 * len(_snippets())


@pytest.mark.parametrize("command", _FRESH_MACHINE_COMMANDS)
def test_the_commands_for_a_fresh_machine_are_there(command):
    """The two lines that a newcomer copies, and that CI runs, must be these to the letter."""
    lines = [line.strip() for text in _of("bash") for line in text.splitlines()]
    assert command in lines


@pytest.mark.parametrize("index", _each("python"))
def test_python_snippets_run(index, tmp_path):
    """A snippet that has gone stale is the first thing a newcomer meets."""
    # A file, not `-c`: strategies that launch ranks run the script again.
    script = tmp_path / "snippet.py"
    script.write_text(_of("python")[index])
    _run([str(script)], tmp_path)


_PARSE_CONFIG = """
import sys
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
import lightning_bigmodel

given = yaml.safe_load(open(sys.argv[1]))
model = [] if "model" in given else ["--model=lightning_bigmodel.testing.tiny.TinyChain"]
cli = LightningCLI(LightningModule, subclass_mode_model=True, run=False, args=["--config", sys.argv[1], *model])
# What was asked for must be what was built.
wanted = given["trainer"]["strategy"]
if isinstance(wanted, dict):
    assert type(cli.trainer.strategy).__name__ == wanted["class_path"].rpartition(".")[2], cli.trainer.strategy
"""


@pytest.mark.parametrize("index", _each("yaml"))
def test_yaml_snippets_parse(index, tmp_path):
    """A setting that LightningCLI does not accept must not be in the README."""
    config = tmp_path / "config.yaml"
    config.write_text(_of("yaml")[index])
    script = tmp_path / "parse.py"
    script.write_text(_PARSE_CONFIG)
    _run([str(script), str(config)], tmp_path)
