"""What happens around the forward and the backward of a stage on one micro-batch: nothing, unless there are shards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["Passes"]


class Passes:
    """Told of every pass of one stage; also of those over slots without a micro-batch, so that ranks stay in step."""

    def forward(self, microbatch: Any) -> AbstractContextManager[Any]:
        """Entered around a forward."""
        return nullcontext()

    def begin_backward(self, microbatch: Any) -> None:
        """Called before a backward, or before each half of a split one."""

    def pause_backward(self, microbatch: Any) -> None:
        """Called between the halves of a split backward."""

    def end_backward(self, microbatch: Any) -> None:
        """Called after a backward."""
