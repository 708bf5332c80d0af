"""ZeRO (arXiv 1910.02054): optimizer states, gradients and parameters spread over the data ranks.

The module keeps its parameters as they are: the same objects under the same names. The optimizer works on *row shards*,
plain tensors that hold this rank's rows of each parameter. The stages differ in what is kept in between:

    stage 1: whole parameters, whole gradients until the optimizer step; row shards are views into the parameters
    stage 2: whole parameters; gradients are reduced after every micro-batch and kept as rows
    stage 3: rows only; whole parameters exist while a block computes (see `gather`)

Bytes kept a rank, with P parameters in fp32 and Adam on N ranks: 4P + 4P + 8P/N, 4P + 4P/N + 8P/N and 16P/N. With bf16
for computing (2 bytes for parameters and their gradients, 12 for the fp32 rows and moments): 2P + 2P + 12P/N,
2P + 4P/N + 12P/N and 16P/N; row gradients are kept in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bigmodel.sharding.flat import FlatRows, Pending
from lightning_bigmodel.sharding.offload import Arriving, HostCopies
from lightning_bigmodel.sharding.rows import RowShard

__all__ = ["ZeroShards"]

ComputeDtype = torch.dtype | Callable[[nn.Parameter], "torch.dtype | None"] | None

_BUCKET_BYTES = 64 * 1024 * 1024
_MAX_PENDING = 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ZeroShards:
    """Row shards of parameters for stages 1 and 2, and the traffic that keeps both forms equal.

    Args:
        parameters: Name -> parameter, whole, on the device where they stay. Parameters without dimensions are left out
            by the caller: they have no rows.
        stage: 1 or 2.
        group: The ranks the rows are spread over.
        compute_dtype: Type of the whole parameters, or a rule that tells it for each; None leaves the type they have.
            Row shards, and sums of gradients, keep that one.
        bucket_bytes: Largest message.
        copies: Keeps row shards and their gradients on the host; None: where the parameters are.

    Communication a step: stage 1, one reduce-scatter and one all-gather of all trained parameters, however many
    micro-batches; stage 2, a reduce-scatter a micro-batch and one all-gather (in messages of `bucket_bytes`).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        stage: int,
        group: dist.ProcessGroup | None,
        compute_dtype: ComputeDtype = None,
        bucket_bytes: int = _BUCKET_BYTES,
        copies: HostCopies | None = None,
    ) -> None:
        self.stage, self.group, self.copies = stage, group, copies
        self.parameters = list(parameters.values())
        self.num_ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._bucket_bytes = bucket_bytes
        self.records = {
            id(parameter): RowShard(name=name, shape=parameter.shape, num_ranks=self.num_ranks, rank=rank, group=group)
            for name, parameter in parameters.items()
        }
        self.shards: dict[int, nn.Parameter] = {}
        self.wholes: dict[int, Tensor] = {}
        self._arriving: list[tuple[Sequence[nn.Parameter], FlatRows, Arriving]] = []
        self._marks: dict[int, tuple[int, int]] = {}
        self._compute_dtype = compute_dtype
        self.reduce_dtype: torch.dtype | None = None  # in which gradients are sent and summed; None: at least fp32
        self._place()
        self._mark(self.parameters)
        self.present: set[int] = set()  # ids of parameters that had a gradient here since `start_window`

    def sum_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """In which the gradient of `parameter` is sent and summed."""
        kept = self.shards[id(parameter)].dtype
        if not kept.is_floating_point:
            return kept
        chosen = self.reduce_dtype if self.num_ranks > 1 else None  # else nothing is sent
        return chosen or torch.promote_types(kept, torch.float32)

    def used_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Type of the whole parameter."""
        chosen = self._compute_dtype
        if chosen is not None and not isinstance(chosen, torch.dtype):
            chosen = chosen(parameter)
        return parameter.dtype if chosen is None or not parameter.is_floating_point() else chosen

    def _place(self) -> None:
        for parameter in self.parameters:
            whole = parameter.data.contiguous()
            rows = self.records[id(parameter)].rows(whole)
            used = self.used_dtype(parameter)
            if self.copies is not None:
                rows = self.copies.zeros(rows.shape, rows.dtype).copy_(rows)
            elif used != whole.dtype:
                rows = rows.clone()
            whole = whole.to(used)
            parameter.data = whole
            self.wholes[id(parameter)] = whole
            self.shards[id(parameter)] = nn.Parameter(rows, requires_grad=parameter.requires_grad)

    # -- what stands for what ------------------------------------------------------------------------------------------

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What an optimizer holds in place of `parameter`: its rows, or itself if it has none."""
        return self.shards.get(id(parameter), parameter)

    def shard_records(self) -> dict[int, RowShard]:
        """id(row shard) -> which rows of what."""
        return {id(self.shards[key]): record for key, record in self.records.items()}

    def trained(self) -> list[nn.Parameter]:
        """Sharded parameters that take gradients at the time."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def hand_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Put row shards in place of whole parameters in an optimizer's groups and in the state it has already."""
        for group in optimizer.param_groups:
            group["params"] = [self.shard_of(parameter) for parameter in group["params"]]
        self._follow_new_groups(optimizer)
        for parameter in self.parameters:
            state = optimizer.state.pop(parameter, None)
            if state is not None:
                record = self.records[id(parameter)]
                shard = self.shard_of(parameter)
                optimizer.state[shard] = {
                    key: record.rows(value).clone().to(shard.device)
                    if isinstance(value, Tensor) and value.shape == record.shape
                    else value
                    for key, value in state.items()
                }

    def _follow_new_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Groups that user code adds later, such as layers that are unfrozen, get row shards too."""
        add = optimizer.add_param_group

        def add_param_group(group: dict[str, Any]) -> None:
            given = group["params"]
            given = [given] if isinstance(given, Tensor) else list(given)
            add({**group, "params": [self.shard_of(parameter) for parameter in given]})

        optimizer.__dict__["add_param_group"] = add_param_group

    def by_name(self) -> dict[str, nn.Parameter]:
        """Parameter name -> row shard."""
        self.take_changes()
        return {record.name: self.shards[key] for key, record in self.records.items()}

    # -- gradients -----------------------------------------------------------------------------------------------------

    def buckets(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Parameters of one type that travel together, in the order in which backward makes their gradients."""
        found: list[list[nn.Parameter]] = []
        num_bytes = 0
        for parameter in reversed(parameters):
            size = parameter.numel() * parameter.element_size()
            last = found[-1] if found else None
            if last is None or last[0].dtype != parameter.dtype or num_bytes + size > self._bucket_bytes:
                found.append([])
                num_bytes = 0
            found[-1].append(parameter)
            num_bytes += size
        return found

    def rows_of(self, parameters: Sequence[nn.Parameter]) -> FlatRows:
        """The message layout of some parameters."""
        return FlatRows([self.records[id(parameter)] for parameter in parameters])

    @torch.no_grad()
    def add_to_shards(self, parameters: Sequence[nn.Parameter], rows: FlatRows, reduced: Tensor) -> None:
        """Add reduced gradients to those of the shards, on the host once they are there (see `land`)."""
        if self.copies is None:
            self._add(parameters, rows.own(reduced))
            return
        self._arriving.append((parameters, rows, self.copies.to_host(reduced)))
        if len(self._arriving) > _MAX_PENDING:
            self._land_one()

    def _land_one(self) -> None:
        parameters, rows, arriving = self._arriving.pop(0)
        self._add(parameters, rows.own(arriving.wait()))

    @torch.no_grad()
    def land(self) -> None:
        """Wait for all copies between host and device: the host may read gradients and change rows. Not collective."""
        while self._arriving:
            self._land_one()
        if self.copies is not None:
            self.copies.wait()

    def _add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            shard = self.shards[id(parameter)]
            if shard.grad is None:
                shard.grad = gradient if gradient.dtype == shard.dtype else gradient.to(shard.dtype)
            else:
                shard.grad.add_(gradient)

    def start_window(self) -> None:
        """Forget which parameters had gradients."""
        self.present.clear()

    # -- whole parameters ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def publish(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Write the shards' values, changed by an optimizer, into the whole parameters of every rank. Collective."""
        chosen = self.parameters if parameters is None else list(parameters)
        waiting: list[tuple[list[nn.Parameter], FlatRows, Pending]] = []
        for bucket in self.buckets(chosen):
            rows = self.rows_of(bucket)
            own = self._packed(rows, [self.shards[id(parameter)] for parameter in bucket], bucket[0].dtype)
            waiting.append((bucket, rows, rows.gather(own)))
            if len(waiting) >= _MAX_PENDING:
                self._finish(*waiting.pop(0))
        for item in waiting:
            self._finish(*item)
        self._mark(chosen)

    def _packed(self, rows: FlatRows, shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """A local message, on the device."""
        if self.copies is None:
            return rows.pack_own(shards, dtype)
        flat = self.copies.zeros(rows.numel, dtype)
        torch._foreach_copy_(rows.own(flat), list(shards))
        return self.copies.to_device(flat)

    def whole_of(self, parameter: nn.Parameter, own: Tensor) -> Tensor:
        """A tensor of a parameter's shape from this rank's rows of it, where the module computes. Collective."""
        rows = self.rows_of([parameter])
        flat = self._packed(rows, [own], own.dtype)
        whole = torch.empty(parameter.shape, dtype=own.dtype, device=flat.device)
        rows.unpack(rows.gather(flat).wait(), [whole])
        return whole

    def _finish(self, bucket: Sequence[nn.Parameter], rows: FlatRows, pending: Pending) -> None:
        rows.unpack(pending.wait(), [self.wholes[id(parameter)] for parameter in bucket])

    @torch.no_grad()
    def _seen(self, parameters: Sequence[nn.Parameter]) -> dict[int, tuple[int, int]]:
        """What tells whether somebody has written into this rank's rows of whole parameters."""
        sums = []
        for parameter in parameters:
            rows = self.records[id(parameter)].rows(self.wholes[id(parameter)]).reshape(-1)
            numbers = rows.view(_INTEGERS.get(rows.element_size(), torch.int64))
            sums.append(numbers.sum(dtype=torch.int64))
        totals = torch.stack(sums).tolist() if sums else []
        return {id(p): (p._version, total) for p, total in zip(parameters, totals, strict=True)}

    def _mark(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.stage != 3:  # where nobody can write into parameters between steps
            apart = [p for p in parameters if self.copies is not None or p.dtype != self.shards[id(p)].dtype]
            self._marks.update(self._seen(apart))

    @torch.no_grad()
    def take_changes(self) -> None:
        """Rows take over what user code wrote into whole parameters, or put in their place. No communication."""
        if self.stage != 3:
            self._adopt_replaced()
        if not self._marks:
            return
        self.land()
        now = self._seen([p for p in self.parameters if id(p) in self._marks])
        for key in (key for key, mark in now.items() if mark != self._marks[key]):
            self.shards[key].copy_(self.records[key].rows(self.wholes[key]))
        self._marks = now

    def _adopt_replaced(self) -> None:
        """Rows are views of the memory that parameters have, also after user code has given them other memory."""
        for parameter in self.parameters:
            key, data = id(parameter), parameter.data
            whole, shard = self.wholes[key], self.shards[key]
            if data.data_ptr() == whole.data_ptr():
                continue
            if (data.dtype, data.device, data.shape) != (whole.dtype, whole.device, whole.shape):
                raise RuntimeError(
                    f"`{self.records[key].name}` has become {tuple(data.shape)} {data.dtype} on {data.device} after "
                    f"set-up, where it was {tuple(whole.shape)} {whole.dtype} on {whole.device}. Convert the module "
                    "before `fit`, in `__init__`, `setup` or `configure_model`, or by the Trainer's `precision`."
                )
            parameter.data = self.wholes[key] = data.contiguous()
            rows = self.records[key].rows(parameter.data)
            if self.copies is None and shard.dtype == rows.dtype:
                shard.data = rows
            else:
                shard.copy_(rows)

    def published_by(self, optimizer: torch.optim.Optimizer) -> None:
        """`publish` the parameters that one optimizer has stepped. Collective."""
        held = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
        self.publish([p for p in self.trained() if id(self.shards[id(p)]) in held])

    def restore(self) -> None:
        """Ordinary whole parameters again, in the type of the shards. Collective where that differs."""
        self.take_changes()
        self._marks.clear()
        for parameter in self.parameters:
            shard = self.shards[id(parameter)]
            if parameter.dtype != shard.dtype:
                self.wholes[id(parameter)] = parameter.data = parameter.data.to(shard.dtype)
        if any(
            shard.untyped_storage().data_ptr() != self.wholes[key].untyped_storage().data_ptr()
            for key, shard in self.shards.items()
        ):
            self.publish()
