"""A DataLoader like the given one, whose sampler gives one rank's part only."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_bigmodel.mesh.samplers import ShardedBatchSampler, ShardedSampler

__all__ = ["distributed_sampler_of", "shard_dataloader"]

_SAMPLING_NAMES = frozenset({"batch_sampler", "batch_size", "drop_last", "sampler", "shuffle"})
_ADVICE = "Pass `use_distributed_sampler=False` and shard the data yourself"


def shard_dataloader(
    loader: DataLoader[Any],
    num_ranks: int,
    rank: int,
    group: dist.ProcessGroup | None,
    *,
    pad: bool,
    init_arguments: Mapping[str, Any] | None = None,
) -> tuple[DataLoader[Any], ShardedSampler | ShardedBatchSampler]:
    """Rebuild a map-style DataLoader so that it loads one rank's part.

    A default batch sampler is sharded by sample, `batch_size` being one rank's; the user's own batch sampler by batch.

    Args:
        loader: Any map-style DataLoader; its class, and every constructor argument found as an attribute, are kept.
        num_ranks: Number of ranks that load.
        rank: This rank among them.
        group: The ranks that load.
        pad: Whether ranks are padded to equal numbers of batches.
        init_arguments: Constructor arguments by name that a subclass does not keep as attributes.

    Returns:
        The new loader, and the sampler inside it that knows this rank's part.

    Raises:
        TypeError: If the loader's class cannot be constructed again from its attributes.
    """
    base_batches, order = loader.batch_sampler, (num_ranks, rank, group)
    sharded: ShardedSampler | ShardedBatchSampler
    sampling: dict[str, Any]
    if loader.batch_size is None and base_batches is not None and type(base_batches) is not BatchSampler:
        sharded = ShardedBatchSampler(base_batches, *order, pad=pad)
        sampling = {"batch_sampler": sharded}
    elif loader.batch_size is None and isinstance(base_batches, BatchSampler):
        batch_size, drop_last = base_batches.batch_size, base_batches.drop_last
        sharded = ShardedSampler(base_batches.sampler, *order, drop_last, batch_size, pad=pad)
        sampling = {"batch_sampler": BatchSampler(sharded, batch_size, drop_last)}
    else:
        sharded = ShardedSampler(loader.sampler, *order, loader.drop_last, loader.batch_size or 1, pad=pad)
        sampling = {"sampler": sharded, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return _reconstruct(loader, sampling, init_arguments or {}), sharded


def distributed_sampler_of(loader: object) -> DistributedSampler[Any] | None:
    """Return the torch `DistributedSampler` the user gave the loader, if any."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def _reconstruct(loader: DataLoader[Any], sampling: dict[str, Any], init_arguments: Mapping[str, Any]) -> Any:
    # Constructed anew rather than copied and patched: a subclass may derive more from its sampler in `__init__`, and a
    # patched copy would go on with the unsharded one without a word.
    cls = type(loader)
    parameters = dict(inspect.signature(cls.__init__).parameters)
    parameters.pop("self", None)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_any:
        inherited = inspect.signature(DataLoader.__init__).parameters
        parameters.update({name: inherited[name] for name in inherited if name not in ("self", *parameters)})
    arguments: dict[str, Any] = dict(sampling)
    missing = []
    for name, parameter in parameters.items():
        if name in _SAMPLING_NAMES or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if hasattr(loader, name):
            arguments[name] = getattr(loader, name)
        elif name in init_arguments:
            arguments[name] = init_arguments[name]
        elif parameter.default is parameter.empty:
            missing.append(name)
    if missing:
        raise TypeError(
            f"`{cls.__name__}` cannot be rebuilt with a sharded sampler: its constructor needs {missing}, not found as "
            f"attributes. Keep each as an attribute of the same name (`self.{missing[0]} = {missing[0]}`). {_ADVICE} "
            "otherwise."
        )
    refused = [name for name in sampling if name not in parameters]
    if refused:
        raise TypeError(
            f"`{cls.__name__}` cannot be rebuilt with a sharded sampler: its constructor does not take {refused}. Let "
            f"it take `**kwargs` and hand them to `DataLoader`. {_ADVICE} otherwise."
        )
    if arguments.get("in_order") is False:
        warnings.warn(
            "`in_order=False` is set to True in a sharded DataLoader: which batch is padding, and where predictions "
            "belong, is known by the order of batches.",
            stacklevel=2,
        )
        arguments["in_order"] = True
    try:
        rebuilt = cls(**arguments)
    except TypeError as error:
        raise TypeError(f"`{cls.__name__}` cannot be rebuilt with a sharded sampler ({error}). {_ADVICE}.") from error
    for name, value in vars(loader).items():  # what was hung on the loader after it was made
        if name not in vars(rebuilt):
            object.__setattr__(rebuilt, name, value)
    return rebuilt
