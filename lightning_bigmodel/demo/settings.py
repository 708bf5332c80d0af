"""What one run of the demo consists of; the same object is read by the parent process and by every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["DemoSettings"]

_NUM_EPOCHS = 4


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of the demo.

    Args:
        output: Folder for checkpoints, logs and results.
        num_ranks: 4 is two pipeline stages times two data replicas, 2 is two pipeline stages, 1 is one process.
        accelerator: Where the ranks compute.
        num_steps: Optimizer steps, at least 2.
        seed: Seed of the weights and of the order of the data.
        global_batch_size: Windows a step, over all data replicas together.
        num_microbatches: Micro-batches each replica cuts its batch into.
        schedule: Pipeline schedule.
        context: Bytes a window.
        width: Size of the model's hidden vectors.
        num_blocks: Transformer blocks.
        num_validation_batches: Global batches each validation reads.
        num_sample_bytes: Bytes of text generated at the end.

    Raises:
        ValueError: If `num_steps` is below 2 or `num_ranks` is none of 1, 2 and 4.
    """

    output: Path
    num_ranks: int = 4
    accelerator: Literal["cpu", "cuda"] = "cpu"
    num_steps: int = 120
    seed: int = 0
    global_batch_size: int = 32
    num_microbatches: int = 4
    schedule: str = "1F1B"
    context: int = 64
    width: int = 96
    num_blocks: int = 4
    num_validation_batches: int = 8
    num_sample_bytes: int = 240

    def __post_init__(self) -> None:
        """Refuses settings no run could follow."""
        if self.num_steps < 2:
            raise ValueError(
                f"`steps` is {self.num_steps}; resuming in the middle takes at least 2 steps. Choose `steps` >= 2."
            )
        if self.num_ranks not in (1, 2, 4):
            raise ValueError(f"`ranks` is {self.num_ranks}; choose 1, 2 or 4.")

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return min(2, self.num_ranks)

    @property
    def num_replicas(self) -> int:
        """Data replicas, each of them as many ranks as there are stages."""
        return self.num_ranks // self.num_stages

    @property
    def epoch_ends(self) -> tuple[int, ...]:
        """The step after which each epoch ends, ascending; the last is `num_steps`.

        An epoch is a quarter of the run: the model is validated and saved after each.
        """
        ends = {round(self.num_steps * (epoch + 1) / _NUM_EPOCHS) for epoch in range(_NUM_EPOCHS)}
        return tuple(sorted(end for end in ends if end > 0))

    @property
    def resume_step(self) -> int:
        """The step whose checkpoint is resumed: the end of the last epoch but one."""
        return self.epoch_ends[-2]

    def checkpoint_path(self, step: int) -> Path:
        """The checkpoint saved after a step that ends an epoch."""
        return self.output / "checkpoints" / f"step-{step}.ckpt"
