"""Give each rank of a pipeline its share of the parameters, and put the whole model together again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ParameterShare", "broadcast_module", "broadcast_tensors"]

_MESSAGE_BYTES = 64 * 1024 * 1024


def _runs(tensors: Sequence[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Consecutive (source, tensor) pairs of one source, dtype and device, up to a message's size."""
    run: list[tuple[int, Tensor]] = []
    num_bytes = 0
    for source, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if run and (
            (source, tensor.dtype, tensor.device) != (run[0][0], run[0][1].dtype, run[0][1].device)
            or num_bytes + size > _MESSAGE_BYTES
        ):
            yield run
            run, num_bytes = [], 0
        run.append((source, tensor))
        num_bytes += size
    if run:
        yield run


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[tuple[int, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Send each (source, tensor) from its source within the group to all, in place, several in one message."""
    for run in _runs(tensors):
        source = run[0][0]
        flat = torch.cat([tensor.detach().reshape(-1) for _, tensor in run])
        dist.broadcast(flat, group_src=source, group=group)
        if dist.get_rank(group) != source:
            for (_, tensor), part in zip(run, flat.split([tensor.numel() for _, tensor in run]), strict=True):
                tensor.copy_(part.view_as(tensor))


def broadcast_module(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make parameters and buffers equal those of the group's first rank, as data-parallel training does at its start.

    Communication: all parameters and buffers once.
    """
    tensors = [*module.parameters(), *module.buffers()]
    broadcast_tensors([(0, tensor.data) for tensor in tensors if tensor.numel() and not tensor.is_meta], group)


class ParameterShare:
    """What one rank of a pipeline holds of a module.

    Parameters of other ranks keep their object, name and shape - optimizers, name patterns and checks on shapes work as
    in one process - but no memory: their data is one NaN expanded to the full shape, and they never get a gradient.

    Args:
        module: The user's module, whole.
        owners: id(parameter) -> pipeline ranks that hold it, ascending.
        buffer_owners: Buffer name -> pipeline rank that holds the true value. Buffers stay on every rank.
        pipe_group: The ranks of this pipeline; a group that takes CPU tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        owners: Mapping[int, Sequence[int]],
        buffer_owners: Mapping[str, int],
        pipe_group: dist.ProcessGroup | None,
    ) -> None:
        self.module = module
        self._buffer_owners = dict(buffer_owners)
        self._group = pipe_group
        self._rank = dist.get_rank(pipe_group)
        self._owners = dict(owners)
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._released = False

    @property
    def owned(self) -> list[nn.Parameter]:
        """Parameters this rank holds."""
        return [parameter for parameter in self.module.parameters() if self.is_owned(parameter)]

    @property
    def counted(self) -> list[nn.Parameter]:
        """Parameters this rank holds and answers for where each may count once (norms, checkpoints)."""
        return [parameter for parameter in self.owned if self._owners[id(parameter)][0] == self._rank]

    def is_owned(self, parameter: nn.Parameter) -> bool:
        """Whether this rank holds `parameter`."""
        return self._rank in self._owners.get(id(parameter), (self._rank,))

    def owners_of(self, name: str) -> tuple[int, ...]:
        """Pipeline ranks that hold the parameter of that name."""
        key = next(key for key, known in self.names.items() if known == name)
        return tuple(self._owners.get(key, (self._rank,)))

    def shared(self) -> dict[tuple[int, ...], list[nn.Parameter]]:
        """Parameters held by several ranks of the pipeline, by owner set, on every rank alike."""
        found: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in self.module.parameters():
            owners = tuple(self._owners.get(id(parameter), ()))
            if len(owners) > 1:
                found.setdefault(owners, []).append(parameter)
        return found

    def owned_buffers(self) -> list[str]:
        """Names of the buffers whose true value is here."""
        return [name for name, _ in self.module.named_buffers() if self._buffer_owners.get(name, 0) == self._rank]

    def owns_state_of(self, module_name: str) -> bool:
        """Whether what the named module keeps besides tensors (its extra state) is true here."""
        prefix = module_name
        inside = [rank for name, rank in self._buffer_owners.items() if name.startswith(prefix)]
        parameters = [self._owners.get(key, (0,))[0] for key, name in self.names.items() if name.startswith(prefix)]
        return self._rank == (parameters or inside or [0])[0]

    def release(self) -> None:
        """Give up the memory of parameters of other ranks."""
        for parameter in self.module.parameters():
            if not self.is_owned(parameter):
                fill = float("nan") if parameter.is_floating_point() else 0
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                stand_in = torch.full((), fill, dtype=parameter.dtype, device=device).expand(parameter.shape)
                if parameter.is_meta:  # its data cannot be set; the object stays the same
                    torch.utils.swap_tensors(parameter, nn.Parameter(stand_in, requires_grad=parameter.requires_grad))
                else:
                    parameter.data = stand_in
                parameter.grad = None
        self._released = True

    def move_to(self, device: torch.device, keep: Collection[int] = ()) -> None:
        """Move what this rank holds, but the parameters with an id in `keep`.

        A plain `module.to` would give expanded parameters memory.
        """
        for parameter in self.module.parameters():
            if id(parameter) in keep:
                continue
            if self.is_owned(parameter) or not parameter.numel():
                parameter.data = parameter.data.to(device)
            else:
                one = parameter.data[(0,) * parameter.ndim]
                parameter.data = one.to(device).expand(parameter.shape)
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def restore(self) -> None:
        """Put the whole model into every rank's memory again (on the CPU). Collective over the pipeline.

        Communication: every parameter once, from its first owner.
        """
        if not self._released:
            return
        pairs = []
        for parameter in self.module.parameters():
            source = self._owners.get(id(parameter), (0,))[0]
            if self.is_owned(parameter):
                whole = parameter.data.cpu()
            else:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter.data = whole
            if parameter.numel():
                pairs.append((source, parameter.data))
        for name, buffer in self.module.named_buffers():
            if buffer.numel() and not buffer.is_meta:
                buffer.data = buffer.data.cpu()
                pairs.append((self._buffer_owners.get(name, 0), buffer.data))
        broadcast_tensors(pairs, self._group)
        self._released = False
