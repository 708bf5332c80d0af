"""Imports go one way: the techniques are plain torch, and what is on top of them may use Lightning."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_bigmodel

_PACKAGE = Path(lightning_bigmodel.__file__).parent
_NAME = "lightning_bigmodel"

# Plain torch, one technique or concern each.
_MIDDLE = ("checkpoint", "mesh", "nn", "pipeline", "planner", "recompute", "replicas", "scaling", "sharding")
# Glue to Lightning, on top of the middle.
_GLUE = ("callbacks", "precision", "strategies")
# What users start, on top of everything.
_TOP = ("cli", "demo", "testing")
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


def _files(part: str) -> list[Path]:
    folder = _PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else sorted(_PACKAGE.glob(f"{part}.py"))


def _imports(file: Path, root: Path = _PACKAGE) -> set[str]:
    """Returns the full names that a file imports, wherever in it and under whatever condition."""
    names = set()
    parts = (_NAME, *file.relative_to(root).with_suffix("").parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # With the imported name too: `from lightning_bigmodel import pipeline` imports a subpackage.
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def _forbidden(part: str) -> list[str]:
    """Returns the prefixes of names that a part may not import."""
    if part in _TOP:
        return []
    if part in _GLUE:
        return [f"{_NAME}.{other}" for other in ("cli", "demo")]
    allowed = {part, "mesh"} | (set(_MIDDLE) if part == "planner" else set())
    return [*_LIGHTNING, *(f"{_NAME}.{other}" for other in (*_MIDDLE, *_GLUE, *_TOP) if other not in allowed)]


def _breaches(part: str, file: Path, root: Path = _PACKAGE) -> list[str]:
    forbidden = _forbidden(part)
    return [
        f"{file.relative_to(root)} imports {name}"
        for name in sorted(_imports(file, root))
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in forbidden)
    ]


@pytest.mark.parametrize("part", [*_MIDDLE, *_GLUE])
def test_imports_go_one_way(part):
    """A technique that needs Lightning, or another technique, cannot be used or tested alone."""
    assert [breach for file in _files(part) for breach in _breaches(part, file)] == []


def test_the_walk_sees_the_package():
    """A walk over no files finds no breach."""
    seen = {part: len(_files(part)) for part in (*_MIDDLE, *_GLUE, *_TOP)}
    assert {part for part, num_files in seen.items() if num_files} >= {"mesh", "pipeline", "checkpoint", "testing"}
    assert sum(seen.values()) > 10
    assert any(_imports(file) for file in _files("mesh"))
    folders = {path.parent.name for path in _PACKAGE.glob("*/__init__.py")} | {
        path.stem for path in _PACKAGE.glob("[!_]*.py")
    }
    assert folders <= {*_MIDDLE, *_GLUE, *_TOP}, "name a new part of the package in one of the lists above"


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("mesh", "import lightning.pytorch as pl"),
        ("mesh", "from ..pipeline.trace import trace_model"),
        ("pipeline", "def f():\n    from lightning.pytorch import Trainer"),
        ("pipeline", "from lightning_bigmodel import checkpoint"),
        ("pipeline", "from .. import strategies"),
        ("planner", "from lightning_bigmodel.callbacks import Recompute"),
        ("strategies", "import lightning_bigmodel.cli"),
    ],
)
def test_each_way_to_import_is_seen(part, line, tmp_path):
    """An import written in a way the walk does not read would pass."""
    file = tmp_path / part / "module.py"
    file.parent.mkdir()
    file.write_text(line)
    assert len(_breaches(part, file, tmp_path)) == 1


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("pipeline", "from lightning_bigmodel.mesh import axes\nfrom . import trace\nimport lightning_utilities"),
        ("planner", "from lightning_bigmodel.pipeline.trace import trace_model"),
        ("strategies", "import lightning.pytorch\nfrom lightning_bigmodel.pipeline import trace"),
    ],
)
def test_what_is_allowed_passes(part, line, tmp_path):
    """A rule that forbids too much is soon switched off."""
    file = tmp_path / part / "module.py"
    file.parent.mkdir()
    file.write_text(line)
    assert _breaches(part, file, tmp_path) == []


_IMPORT_WITHOUT_LIGHTNING = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"lightning", "lightning_fabric", "pytorch_lightning"}:
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.argv) - 1)
"""


def test_the_techniques_import_without_lightning():
    """Reading imports file by file misses Lightning behind a shared helper; importing everything does not."""
    modules = [
        ".".join((_NAME, *file.relative_to(_PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for part in _MIDDLE
        for file in _files(part)
    ]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_WITHOUT_LIGHTNING, *modules], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(modules) > 5
