"""The same model and training loop cut by hand on `torch.distributed.pipelining`, without Lightning: the baseline."""

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_bigmodel.demo.model import ByteGPT

__all__ = ["HandWrittenLoop", "first_block_of_stage"]


def first_block_of_stage(num_blocks: int, num_stages: int) -> list[int]:
    """Index of the block each stage begins with: stages of equally many blocks, the later ones longer by one."""
    return [stage * num_blocks // num_stages for stage in range(num_stages)]


class HandStage(nn.Module):
    """Some blocks of the model, with the embeddings on the first stage and the head on the last."""

    def __init__(self, model: ByteGPT, stage: int, num_stages: int) -> None:
        super().__init__()
        starts = [*first_block_of_stage(len(model.blocks), num_stages), len(model.blocks)]
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(starts[stage], starts[stage + 1])})
        self.tokens, self.positions = (model.tokens, model.positions) if stage == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if stage == num_stages - 1 else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.tokens is not None:
            hidden = self.tokens(hidden) + self.positions(torch.arange(hidden.shape[1], device=hidden.device))
        for block in self.blocks.values():
            hidden = block(hidden)
        return self.head(self.norm(hidden)) if self.head is not None else hidden


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HandWrittenLoop:
    """What a user would write: stages with shapes given beforehand, torch's schedule, one optimizer a rank.

    Args:
        model: The whole model; this rank keeps its stages only.
        schedule: Name of torch's schedule. Stages are dealt to the ranks in turn.
        stages_per_rank: Stages each rank holds.
        num_microbatches: Parts each batch is split into.
        batch: An example batch (inputs, targets), for its shapes.
        loader: Batches for `step`, repeated without end.
    """

    def __init__(
        self,
        model: ByteGPT,
        schedule: str,
        stages_per_rank: int,
        num_microbatches: int,
        batch: tuple[Tensor, Tensor],
        loader: Iterable[Any],
    ) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        num_stages = world_size * stages_per_rank
        inputs = batch[0][: len(batch[0]) // num_microbatches]
        hidden = torch.zeros(*inputs.shape, model.head.in_features)
        logits = torch.zeros(*inputs.shape, model.head.out_features)
        self.is_first, self.is_last = rank == 0, rank == world_size - 1
        stages = []
        for index in range(rank, num_stages, world_size):
            is_last = index == num_stages - 1
            received = inputs if index == 0 else hidden.clone().requires_grad_()
            sent = (logits if is_last else hidden).clone().requires_grad_()
            stage = PipelineStage(
                HandStage(model, index, num_stages), index, num_stages, torch.device("cpu"), received, sent
            )
            stages.append(stage)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
        self.schedule = get_schedule_class(schedule)(
            stages[0] if stages_per_rank == 1 else stages, num_microbatches, loss_fn=_loss
        )
        self.optimizer = torch.optim.AdamW(self.parameters, lr=model.learning_rate, betas=(0.9, 0.95))
        self.last_loss = 0.0
        self._batches: Iterator[Any] = cycle(loader)

    def schedule_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Forwards, backwards and communication of one batch."""
        losses: list[Tensor] = []
        inputs = (batch[0],) if self.is_first else ()
        target = batch[1] if self.is_last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if self.is_last:
            self.last_loss = torch.stack(losses).mean().item()

    def step(self) -> None:
        """One step of the whole loop: next batch, schedule, optimizer."""
        batch = next(self._batches)
        self.optimizer.zero_grad()
        self.schedule_step(batch)
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """This rank's parameters by their name in the whole model."""
        return {self.names[id(parameter)]: parameter.detach() for parameter in self.parameters}
