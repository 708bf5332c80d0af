"""Files for saved tensors that the host has no room for, written and read ahead by a thread of their own."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from lightning_bigmodel.recompute.link import Copy

__all__ = ["SpillFile", "SpillFolder"]


class SpillFolder:
    """A folder of one process, which is removed by `close`.

    Args:
        path: Where it is made: on a fast disk.
        host_buffer: Makes memory to read into.

    Raises:
        OSError: Where it cannot be made; by `wait_for_one` and by what reads, where the disk failed or was full.
    """

    def __init__(self, path: Path, host_buffer: Callable[[int], Tensor]) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            # A disk that has gone must not hide the error that says so.
            self._folder = tempfile.TemporaryDirectory(
                prefix=f"activations-{os.getpid()}-", dir=path, ignore_cleanup_errors=True
            )
        except OSError as error:
            raise OSError(f"`path={str(path)!r}` takes no folder for activations: {error}. Give another.") from error
        self._path, self._failed = path, ""
        self._worker = ThreadPoolExecutor(1, "spill")
        self._host_buffer = host_buffer
        self._count = 0
        self.writing: deque[Future[None]] = deque()

    def write(self, buffer: Tensor, copy: Copy, written: Callable[[], None]) -> SpillFile:
        """Write a host buffer once the copy to it is over; `written` is called when it is not needed any more."""
        self._count += 1
        file = SpillFile(self, Path(self._folder.name) / f"{self._count}.bin", buffer.numel())

        def work() -> None:
            copy.finish()
            try:
                file.path.write_bytes(buffer.numpy().data)
            except OSError as error:
                self._failed = (
                    f"`path={str(self._path)!r}`: {buffer.numel()} bytes of activations could not be written: {error}. "
                    "Make room there, give another `path`, or raise `max_host_bytes`."
                )
                raise OSError(self._failed) from error
            written()

        self.writing.append(self._worker.submit(work))
        return file

    def wait_for_one(self) -> None:
        """Wait for the oldest write, and raise what went wrong with it."""
        self.writing.popleft().result()

    def read(self, path: Path, num_bytes: int) -> Future[Tensor]:
        """Read a file into a new host buffer, after all writes before."""

        def work() -> Tensor:
            if self._failed:
                raise OSError(self._failed)
            buffer = self._host_buffer(num_bytes)
            with path.open("rb") as file:
                found = file.readinto(buffer.numpy().data)
            if found != num_bytes:
                raise OSError(f"`{path}` has {found} bytes in place of {num_bytes}.")
            return buffer

        return self._worker.submit(work)

    def remove(self, path: Path) -> None:
        """Remove a file, after all that is under way."""
        self._worker.submit(path.unlink, missing_ok=True)

    def close(self) -> None:
        """End the thread and remove the folder."""
        self._worker.shutdown(wait=True)
        self._folder.cleanup()


class SpillFile:
    """One storage in a file."""

    def __init__(self, folder: SpillFolder, path: Path, num_bytes: int) -> None:
        self._folder, self.path, self._num_bytes = folder, path, num_bytes
        self._reading: Future[Tensor] | None = None

    def start(self) -> None:
        """Read ahead."""
        if self._reading is None:
            self._reading = self._folder.read(self.path, self._num_bytes)

    def take(self) -> Tensor:
        """What was read."""
        self.start()
        assert self._reading is not None
        buffer, self._reading = self._reading.result(), None
        return buffer

    def remove(self) -> None:
        """The file is not needed any more."""
        self._folder.remove(self.path)
