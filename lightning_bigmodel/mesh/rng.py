"""Random number states of this process: capture, restore, seed, derive."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["RngState", "capture_rng", "derive_seed", "restore_rng", "seed_all", "seeded_rng"]

_UINT32_MASK = 2**32 - 1
_SEED_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class RngState:
    """State of every global random number generator a training step may draw from. About 12 KiB, picklable.

    Args:
        python: State of the module `random`.
        numpy: State of numpy's global generator; None where numpy was not imported.
        torch_cpu: State of torch's CPU generator: a uint8 tensor of shape (5056,).
        device: State of the current accelerator device's generator; None without an accelerator in use.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | dict[str, Any] | None
    torch_cpu: torch.Tensor
    device: torch.Tensor | None

    def plain(self) -> dict[str, Any]:
        """As numbers, strings and tensors, which any reader of checkpoints takes."""
        numpy = self.numpy
        if isinstance(numpy, tuple):
            numpy = (numpy[0], [int(word) for word in numpy[1]], *(int(n) for n in numpy[2:4]), float(numpy[4]))
        return {"python": self.python, "numpy": numpy, "torch_cpu": self.torch_cpu, "device": self.device}

    @classmethod
    def of_plain(cls, state: dict[str, Any]) -> RngState:
        """What `plain` gave."""
        numpy = state["numpy"]
        version, words, gauss = state["python"]
        return cls(
            python=(version, tuple(words), gauss),
            numpy=tuple(numpy) if isinstance(numpy, (list, tuple)) else numpy,
            torch_cpu=state["torch_cpu"],
            device=state["device"],
        )


def capture_rng() -> RngState:
    """Return the present state of all global generators, and of the current accelerator device's (about 50 us)."""
    # An absent numpy is left absent: importing it here would cost every process 0.1 s for a state nobody drew from.
    numpy = sys.modules.get("numpy")
    device_module = _device_module()
    return RngState(
        python=random.getstate(),
        numpy=numpy.random.get_state() if numpy is not None else None,
        torch_cpu=torch.get_rng_state(),
        device=device_module.get_rng_state() if device_module is not None else None,
    )


def restore_rng(state: RngState) -> None:
    """Put back what `capture_rng` returned.

    A part that was not captured (numpy not imported then, no accelerator in use) is left as it is.
    """
    random.setstate(state.python)
    numpy = sys.modules.get("numpy")
    if numpy is not None and state.numpy is not None:
        numpy.random.set_state(state.numpy)
    torch.set_rng_state(state.torch_cpu)
    device_module = _device_module()
    if device_module is not None and state.device is not None:
        device_module.set_rng_state(state.device)


def seed_all(seed: int) -> None:
    """Seed python, numpy (if imported), torch's CPU generator and the current device's (10 us on CPU).

    Unlike `torch.manual_seed` it seeds the current device only; that call visits every backend, ten times slower, and
    this one stands in the inner loop (a seed a block and micro-batch).

    Args:
        seed: From 0 to 2**63 - 1.

    Raises:
        ValueError: If `seed` is outside that range.
    """
    if not 0 <= seed < _SEED_LIMIT:
        raise ValueError(f"`seed` must be in 0..2**63-1, got {seed}.")
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & _UINT32_MASK)
    torch.default_generator.manual_seed(seed)
    device_module = _device_module()
    if device_module is not None:
        device_module.manual_seed(seed)


def derive_seed(*parts: int) -> int:
    """Mix integers into one seed of 63 bits, the same in every process and on every machine.

    Args:
        *parts: For example a base seed, an epoch, a rank. Order matters, as does the number of parts.

    Returns:
        A number in 0..2**63-1.

    Example:
        >>> derive_seed(1, 2) == derive_seed(1, 2) != derive_seed(2, 1)
        True
    """
    text = ",".join([str(int(part)) for part in parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Run a block under a seed; the states from before are restored on the way out, also after an exception."""
    state = capture_rng()
    try:
        seed_all(seed)
        yield
    finally:
        restore_rng(state)


def _device_module() -> Any | None:
    """Return the torch module of the accelerator, or None where none is in use by this process.

    An accelerator not yet initialised is left alone: touching it would create a context, which costs hundreds of MiB
    and breaks later forks (data loader workers).
    """
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", None)
    return module if is_initialized is None or is_initialized() else None
