"""Tools to test modules and techniques on several ranks of one machine; for this package's tests and for users' own.

Names load on first use: `run_ranks` alone does not import Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_bigmodel.testing.counters import CollectiveCounter, ForwardCounter
    from lightning_bigmodel.testing.equivalence import assert_parallel_equivalent
    from lightning_bigmodel.testing.ranks import RanksFailedError, fake_world, run_ranks
    from lightning_bigmodel.testing.saved_bytes import SavedBytes
    from lightning_bigmodel.testing.tiny import (
        TinyBatchNorm,
        TinyCalledTwice,
        TinyChain,
        TinyEncoderDecoder,
        TinyLeak,
        TinyManualOptimization,
        TinyModule,
        TinyNoChain,
        TinySkips,
        TinyTransformer,
    )
    from lightning_bigmodel.testing.weights import find_microbatch_weight

__all__ = [
    "CollectiveCounter",
    "ForwardCounter",
    "RanksFailedError",
    "SavedBytes",
    "TinyBatchNorm",
    "TinyCalledTwice",
    "TinyChain",
    "TinyEncoderDecoder",
    "TinyLeak",
    "TinyManualOptimization",
    "TinyModule",
    "TinyNoChain",
    "TinySkips",
    "TinyTransformer",
    "assert_parallel_equivalent",
    "fake_world",
    "find_microbatch_weight",
    "run_ranks",
]

# Public name -> the module of this package that defines it; every other public name is a tiny module.
_HOMES = {
    "CollectiveCounter": "counters",
    "ForwardCounter": "counters",
    "RanksFailedError": "ranks",
    "SavedBytes": "saved_bytes",
    "assert_parallel_equivalent": "equivalence",
    "fake_world": "ranks",
    "find_microbatch_weight": "weights",
    "run_ranks": "ranks",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its public names are {sorted(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'tiny')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
