"""A link whose copies take place as late as they may, and that refuses what a real one would get wrong in silence."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bigmodel.recompute.link import Copy, Link

_POISON = 0xFF  # of floats: NaN


class _Late(Copy):
    def __init__(self, link: CheckedLink, source: Tensor, target: Tensor) -> None:
        self.link, self.source, self.target = link, source, target
        self.source_version = source._version
        self.is_over = False

    def touches(self, buffer: Tensor) -> bool:
        """Whether it reads or writes a buffer."""
        return not self.is_over and buffer.data_ptr() in (self.source.data_ptr(), self.target.data_ptr())

    def wait(self) -> None:
        """Now it takes place."""
        if not self.is_over:
            self.is_over = True
            self.link.under_way.remove(self)
            self.target.copy_(self.source)

    def finish(self) -> None:
        """As `wait`."""
        self.wait()


class CheckedLink(Link):
    """See the module. `sizes` is what was copied, out and in."""

    def __init__(self) -> None:
        self.under_way: list[_Late] = []
        self.sizes: tuple[list[int], list[int]] = ([], [])
        self.released = 0

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Poisoned until a copy to it is waited for."""
        return torch.full((num_bytes,), _POISON, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Poisoned too."""
        return torch.full((num_bytes,), _POISON, dtype=torch.uint8)

    def start_out(self, source: Tensor, target: Tensor) -> Copy:
        """Not before it is waited for."""
        return self._start(source, target, 0)

    def start_in(self, source: Tensor, target: Tensor) -> Copy:
        """Not before it is waited for. What has not arrived on the host cannot be sent back."""
        assert not any(copy.target.data_ptr() == source.data_ptr() for copy in self.under_way), "read before it arrived"
        return self._start(source, target, 1)

    def _start(self, source: Tensor, target: Tensor, direction: int) -> Copy:
        copy = _Late(self, source, target)
        self.under_way.append(copy)
        self.sizes[direction].append(source.numel())
        return copy

    def release(self, buffer: Tensor) -> None:
        """A buffer that a copy still needs must not go."""
        assert not any(copy.touches(buffer) for copy in self.under_way), "freed while a copy was under way"
        self.released += 1
