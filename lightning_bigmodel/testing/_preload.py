"""What the fork server imports once, so that the ranks it forks start with all of it loaded.

Only warms up: what cannot be imported here is imported, and fails if it must, in the rank that uses it.
"""

import contextlib
from importlib import import_module

for _name in (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "lightning",
    "lightning.pytorch",
    "lightning.pytorch.cli",
    "lightning_bigmodel",
    "lightning_bigmodel.strategies.bigmodel",
    "lightning_bigmodel.testing._rank_process",
    "lightning_bigmodel.testing.counters",
    "lightning_bigmodel.testing.tiny",
):
    # Any error, not only a missing module: one raised here would end the fork server, and with it every test.
    with contextlib.suppress(Exception):
        import_module(_name)
