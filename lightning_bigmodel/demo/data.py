"""Text for the demo: the sources of Python's own standard library, read byte by byte.

Every machine that can run the demo has this text already, so nothing is downloaded. The choice of files depends on
their names and sizes alone: two processes of one machine always read the same bytes in the same order.
"""

from __future__ import annotations

import math
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["ByteWindows", "byte_entropy_nats", "read_texts", "standard_library_files", "window_order"]

_EVERY_NTH_FILE_VALIDATES = 8


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Lists the top-level Python sources of the standard library, sorted by name.

    Args:
        root: Folder to read instead of the running interpreter's standard library.

    Returns:
        Paths of all non-empty ``*.py`` files directly inside the folder.

    Raises:
        ValueError: If there are fewer than 16 of them (an interpreter shipped without sources).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = sorted(path for path in root.glob("*.py") if path.stat().st_size > 0)
    if len(files) < 2 * _EVERY_NTH_FILE_VALIDATES:
        raise ValueError(
            f"found {len(files)} Python files in {root}; the demo learns from the standard library's sources and needs"
            f" at least {2 * _EVERY_NTH_FILE_VALIDATES}. Run it with an interpreter installed with its sources."
        )
    return files


def read_texts(
    root: Path | None = None, num_train_bytes: int = 1_500_000, num_validation_bytes: int = 200_000
) -> tuple[bytes, bytes]:
    """Reads the training and the validation text; no file is in both.

    Every eighth file validates, so both texts hold early and late names of the alphabet.

    Args:
        root: Folder to read instead of the running interpreter's standard library.
        num_train_bytes: At most so many bytes of training text.
        num_validation_bytes: At most so many bytes of validation text.

    Returns:
        The two texts.

    Raises:
        ValueError: If the folder holds too few files, see `standard_library_files`.

    Example:
        >>> train_text, validation_text = read_texts(num_train_bytes=1000, num_validation_bytes=100)
        >>> len(train_text), len(validation_text)
        (1000, 100)
    """
    files = standard_library_files(root)
    validation_files = files[::_EVERY_NTH_FILE_VALIDATES]
    train_files = [path for index, path in enumerate(files) if index % _EVERY_NTH_FILE_VALIDATES]
    return _read_up_to(train_files, num_train_bytes), _read_up_to(validation_files, num_validation_bytes)


def _read_up_to(files: list[Path], num_bytes: int) -> bytes:
    # An equal share of each file, rather than the first files whole: more kinds of code in the same number of bytes.
    share = max(1, math.ceil(num_bytes / len(files)))
    texts = [path.read_bytes().replace(b"\r\n", b"\n") for path in files]
    spare = num_bytes - sum(min(len(text), share) for text in texts)
    parts = []
    for text in texts:
        extra = min(max(0, len(text) - share), max(0, spare))
        spare -= extra
        parts.append(text[: share + extra])
    return b"".join(parts)[:num_bytes]


def byte_entropy_nats(text: bytes) -> float:
    """Entropy of single bytes: the loss of the best model that looks at no context at all.

    Args:
        text: Any non-empty bytes.

    Returns:
        Entropy in nats a byte, the unit of `torch.nn.functional.cross_entropy`; divide by ``ln 2`` for bits.

    Raises:
        ValueError: If the text is empty.

    Example:
        >>> round(byte_entropy_nats(b"abab"), 4)  # two equally likely bytes: ln 2
        0.6931
    """
    if not text:
        raise ValueError("`text` is empty; the entropy of its bytes needs at least one byte.")
    return -sum(count / len(text) * math.log(count / len(text)) for count in Counter(text).values())


def window_order(num_windows: int, num_needed: int, seed: int) -> Tensor:
    """Draws the order in which windows are visited: shuffled passes over all of them, one after the other.

    The order is drawn once for the whole run instead of by the loader, so that a run on any number of replicas, and one
    resumed in the middle, meet the same windows at the same step.

    Args:
        num_windows: Windows the text holds.
        num_needed: Length of the order.
        seed: Seed of the shuffling.

    Returns:
        Indices of windows, shape ``(num_needed,)``.

    Raises:
        ValueError: If there is no window.
    """
    if num_windows < 1:
        raise ValueError(
            f"`num_windows` is {num_windows}; the text must hold at least one window of `context` + 1 bytes."
        )
    generator = torch.Generator().manual_seed(seed)
    num_passes = math.ceil(num_needed / num_windows)
    passes = [torch.randperm(num_windows, generator=generator) for _ in range(num_passes)]
    return torch.cat(passes)[:num_needed] if passes else torch.empty(0, dtype=torch.long)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of fixed length over a text, each with the bytes that follow.

    Args:
        text: The text; costs 1 byte a byte.
        context: Bytes a window.
        order: Which windows, in which order, shape ``(num_items,)``; all of them in the text's order by default.

    Raises:
        ValueError: If the text is shorter than one window.

    Example:
        >>> inputs, targets = ByteWindows(b"abcdef", context=3)[0]
        >>> bytes(inputs.tolist()), bytes(targets.tolist())
        (b'abc', b'bcd')
    """

    def __init__(self, text: bytes, context: int, order: Tensor | None = None) -> None:
        self.num_windows = (len(text) - 1) // context
        if self.num_windows < 1:
            raise ValueError(
                f"`text` has {len(text)} bytes; a window takes `context` + 1 = {context + 1}. Give more text."
            )
        self.context = context
        self.order = torch.arange(self.num_windows) if order is None else order
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        """Number of items, which is the length of `order`."""
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, each int64 of shape ``(context,)``; targets are the inputs one byte later."""
        start = int(self.order[index]) * self.context
        window = self._bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]
