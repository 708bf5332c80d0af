"""Importing the package is quick, touches no device, and still makes the short names known to Lightning."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_bigmodel

_REPORT = """
import json, sys
def report(**more):
    print(json.dumps({"modules": sorted(sys.modules), **more}))
"""


def _run(code: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", _REPORT + code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_imports_nothing_heavy():
    """Optional packages at import make the package unusable without them; the others cost seconds in every process."""
    modules = _run("import lightning_bigmodel; report()")["modules"]
    assert "lightning_bigmodel" in modules
    heavy = {"bitsandbytes", "fairscale", "lightning", "torch", "torchvision", "transformers"}
    assert heavy & set(modules) == set()


def test_no_module_imports_an_optional_package_at_its_top():
    """What needs bitsandbytes to be imported cannot be used for anything else; import it where it is used."""
    optional = {"bitsandbytes", "fairscale", "sklearn", "torchvision", "transformers"}
    files = sorted(Path(lightning_bigmodel.__file__).parent.rglob("*.py"))
    breaches = []
    for file in files:
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            breaches += [f"{file.name} imports {name}" for name in names if name.split(".")[0] in optional]
    assert breaches == []
    assert len(files) > 10


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_bigmodel; from lightning.pytorch import Trainer",
        "from lightning.pytorch import Trainer; import lightning_bigmodel",
        "import lightning_bigmodel, lightning; Trainer = lightning.Trainer",
        "import lightning_bigmodel, lightning.pytorch.strategies; from lightning import Trainer",
        "from lightning_bigmodel import BigModelStrategy; from lightning.pytorch import Trainer",
        "import lightning_bigmodel.strategies.bigmodel; from lightning.pytorch import Trainer",
    ],
)
def test_short_names_are_registered_in_either_order(imports):
    """`strategy="bigmodel"` must not depend on which of the two imports a formatter puts first."""
    code = f"""
{imports}
from lightning.pytorch.strategies import StrategyRegistry
import lightning_bigmodel, torch
trainer = Trainer(accelerator="cpu", devices=1, strategy="bigmodel", logger=False, enable_checkpointing=False)
hooks = [finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_bigmodel")]
report(
    names=[name for name in StrategyRegistry if name.startswith("bigmodel")],
    strategy=type(trainer.strategy).__name__,
    touched=torch.cuda.is_initialized(),
    num_hooks=len(hooks),
)
"""
    result = _run(code)
    assert {"bigmodel", "bigmodel_pipeline"} <= set(result["names"])
    assert result["strategy"] == "BigModelStrategy"
    assert result["touched"] is False
    assert result["num_hooks"] == 0


def test_public_names_are_listed_and_load():
    """A name in `__all__` that does not load breaks `from lightning_bigmodel import *` and every editor."""
    code = """
import lightning_bigmodel, lightning_bigmodel.testing
for module in (lightning_bigmodel, lightning_bigmodel.testing):
    for name in module.__all__:
        getattr(module, name)
    assert set(module.__all__) <= set(dir(module)), module
    try:
        module.no_such_name
    except AttributeError as error:
        assert "public names" in str(error)
    else:
        raise SystemExit("an unknown name was found")
report(version=lightning_bigmodel.__version__)
"""
    assert _run(code)["version"].count(".") == 2
