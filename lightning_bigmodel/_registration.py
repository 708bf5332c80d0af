"""Registers the strategies' short names with Lightning, without importing Lightning.

Importing `lightning.pytorch` takes seconds, because it brings torchmetrics and whatever torchmetrics finds installed.
The names are of no use before it is imported, so they are registered when it is: at once if it is loaded already,
otherwise at the end of its import. Either order of the two imports in a user's script works.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["register_with_lightning"]

_HOST = "lightning.pytorch"
_STRATEGIES = "lightning_bigmodel.strategies"


def register_with_lightning() -> None:
    """Registers the short names now if Lightning is loaded, or else as soon as it has been imported.

    Example::

        register_with_lightning()
        from lightning.pytorch.strategies import StrategyRegistry

        "bigmodel" in StrategyRegistry  # True
    """
    host = sys.modules.get(_HOST)
    # While it is still being imported it has no `Trainer`, and our strategies could not import what they need from it.
    if host is not None and hasattr(host, "Trainer"):
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    # The package registers the names at the end of its own import. If it is loaded, or being imported at this moment
    # (it may have been what started the import of Lightning), that is done or will be.
    if _STRATEGIES in sys.modules:
        return
    import_module(_STRATEGIES)


class _AfterImport(MetaPathFinder):
    """Finds Lightning as the other finders do, and registers our names once its module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _HOST:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None:
            return spec
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()

        # On the instance: the loader stays of its own type, so resources and source lookups keep working.
        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
