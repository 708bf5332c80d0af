"""Offload: what backward needs is on the host in the meantime, and back before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_bigmodel.recompute._arguments import tensors_of
from lightning_bigmodel.recompute._bytes import check_bytes
from lightning_bigmodel.recompute._storages import lasting_storages
from lightning_bigmodel.recompute.frame import run_again_in_backward
from lightning_bigmodel.recompute.link import Link, link_of
from lightning_bigmodel.recompute.moved import MovedTensors
from lightning_bigmodel.recompute.policy import Block, Chain, RecomputePolicy, Treatment

__all__ = ["Moved", "Mover", "Offload"]


class Offload(RecomputePolicy):
    """Move what backward needs to the host as it is made, and fetch it back ahead of its use.

    The `prefetch` blocks behind the one at work keep theirs on the device; what is older leaves. In backward the
    `prefetch` blocks ahead of the one at work are on their way back, on streams of their own. Each storage is copied
    once, its views are rebuilt with their strides; parameters and views of them stay. As the activation offloading of
    DeepSpeed and Megatron-LM, with any shapes, and ahead of use. Do not use it where the link is slower than the
    blocks: it then waits in each; compare the table that `Recompute(budget=...)` prints. All devices of a machine share
    its links.

    Memory of the device, for blocks with activations of A bytes: (`prefetch` + 1) A, with `saved="inputs"` that of the
    inputs and one block's A. Of the host: what is moved, pinned, in powers of two. Traffic: each moved byte once out
    and once back.

    Args:
        prefetch: How many blocks ahead. More smooth over blocks of different cost.
        saved: `"all"`: everything that autograd saves within a block; `"inputs"`: only the block's inputs, while the
            block is computed again.
        min_bytes: Tensors of fewer bytes stay.
        max_host_bytes: Most to take of the host, as a number or `"64GiB"`. Default: no limit.
        max_in_flight_bytes: Most to be on its way out at a time; the host waits beyond it. Default: 1 GiB.
        path: Folder on a fast disk for what goes beyond `max_host_bytes`; written and read by a thread of its own.

    Raises:
        ValueError: For settings out of range, or a `path` without a limit that would make use of it.
        HostMemoryError: Before the first backward that lacks room on the host, with the least that would do.

    Example:
        >>> from lightning_bigmodel import Offload, Recompute
        >>> callback = Recompute(policy=Offload(prefetch=2))
    """

    def __init__(
        self,
        prefetch: int = 1,
        saved: Literal["all", "inputs"] = "all",
        min_bytes: int | str = "256KiB",
        max_host_bytes: int | str | None = None,
        max_in_flight_bytes: int | str = "1GiB",
        path: str | Path | None = None,
    ) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
            raise ValueError(f"`prefetch={prefetch!r}` must be a whole number of blocks of at least 1.")
        if not isinstance(saved, str) or saved not in ("all", "inputs"):
            raise ValueError(f"`saved={saved!r}` is not known. Use 'all' or 'inputs'.")
        if path is not None and not isinstance(path, (str, Path)):
            raise ValueError(f"`path={path!r}` must be the name of a folder.")
        self.prefetch, self.saved = prefetch, saved
        self.min_bytes = check_bytes("min_bytes", min_bytes, least=0)
        self.max_host_bytes = None if max_host_bytes is None else check_bytes("max_host_bytes", max_host_bytes)
        self.max_in_flight_bytes = check_bytes("max_in_flight_bytes", max_in_flight_bytes)
        if path is not None and self.max_host_bytes is None:
            raise ValueError(
                f"`path={str(path)!r}` is for what goes beyond `max_host_bytes`, and there is no such limit. Set "
                "`max_host_bytes`, or leave `path` out."
            )
        self.path = None if path is None else Path(path)

    def link(self, device: torch.device) -> Link:
        """The link to move over; for links of your own."""
        return link_of(device)

    def moved(self, device: torch.device) -> MovedTensors:
        """What moves the tensors of one chain."""
        return MovedTensors(
            self.link(device),
            prefetch=self.prefetch,
            min_bytes=self.min_bytes,
            max_host_bytes=self.max_host_bytes,
            max_in_flight_bytes=self.max_in_flight_bytes,
            spill_path=self.path,
        )

    def treatments(self, chain: Chain) -> Sequence[Treatment | None]:
        """Moves what every block saves."""
        last, mover = len(chain.blocks) - 1, Mover(self)
        return [
            None if index == last and chain.ends_in_backward else Moved(mover, runs_again=self.saved == "inputs")
            for index in range(len(chain.blocks))
        ]


class Mover:
    """One `MovedTensors` for a chain, made when its device is known."""

    def __init__(self, policy: Offload) -> None:
        self._policy = policy
        self.tensors: MovedTensors | None = None

    def of(self, module: nn.Module, args: Any) -> MovedTensors:
        """What moves the tensors of all blocks."""
        if self.tensors is None:
            tensor = next(iter([*tensors_of(args), *module.parameters()]), None)
            self.tensors = self._policy.moved(torch.device("cpu") if tensor is None else tensor.device)
        return self.tensors

    def close(self) -> None:
        """Give up what is held beyond a step."""
        if self.tensors is not None:
            self.tensors.close()
        self.tensors = None


class Moved(Treatment):
    """Move what a block saves.

    Args:
        mover: Shared by the blocks of a chain.
        runs_again: Whether only inputs are saved, and the block runs again.
    """

    def __init__(self, mover: Mover, *, runs_again: bool) -> None:
        self.mover, self._runs_again = mover, runs_again

    def call(
        self, chain: Chain, block: Block, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the forward under hooks."""
        moved = self.mover.of(block.module, (args, kwargs))
        with moved.moving(block.name, block.index, lasting_storages(block.module)):
            if not self._runs_again:
                return function(*args, **kwargs)
            return run_again_in_backward(block.name, block.own, function, args, kwargs, keepers=chain.keepers)

    def close(self) -> None:
        """Give up what is held on the host."""
        self.mover.close()
