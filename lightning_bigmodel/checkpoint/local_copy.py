"""A remote checkpoint as a local one, for as long as it is read."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import torch.distributed as dist

from lightning_bigmodel.checkpoint._place import UNFINISHED, RemotePlace, new_folder, opened
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.index import MARK_FILE

__all__ = ["LocalCopy", "fetch_whole", "local_copy"]


class LocalCopy:
    """Files of a remote checkpoint in a folder of this machine, which its ranks share; each file is fetched once.

    Args:
        place: The checkpoint.
        source: Folder or file of it, without protocol.
        root: The folder of this machine.
    """

    def __init__(self, place: RemotePlace, source: str, root: Path) -> None:
        self._place, self._source, self._root = place, source, root
        self.path = root / place.name
        self._sizes: dict[str, int] = {}

    def begin(self, rank: int) -> None:
        """Fetch the file, or of a sharded checkpoint all but its tensors.

        Raises:
            FileNotFoundError: There is nothing.
            ValueError: It is incomplete.
        """
        place = self._place
        place.fs.invalidate_cache()
        if place.fs.isfile(self._source):
            self._fetch_one(self._source, self.path)
            return
        self._sizes = place.files(self._source)
        if not self._sizes:
            raise FileNotFoundError(f"There is no checkpoint `{place.url}`.")
        names = set(self._sizes) - {UNFINISHED}
        self.path.mkdir(exist_ok=True)
        # A folder of Lightning's own has no mark, and is fetched whole.
        if MARK_FILE in names or UNFINISHED in self._sizes:
            if rank == 0 and (reason := place.wrong(self._source)):
                raise ValueError(reason)
            names = {name for name in names if not name.endswith(".distcp")}
        self.fetch(names)

    def fetch(self, names: Collection[str]) -> None:
        """See to it that files are there. Ranks of one machine share the work."""
        ordered = sorted(names)
        first = os.getpid() % max(len(ordered), 1)  # so that they begin with different ones
        for name in ordered[first:] + ordered[:first]:
            if not (self.path / name).exists():
                self._fetch_one(f"{self._source}/{name}", self.path / name)

    def _fetch_one(self, source: str, target: Path) -> None:
        with _locked(self._root / f"{target.name}.lock"):
            if not target.exists():
                part = self._root / f"{target.name}.part"
                self._place.fs.get_file(source, str(part))
                size = self._sizes.get(target.name)
                if size is not None and part.stat().st_size != size:
                    raise OSError(
                        f"`{target.name}` of `{self._place.url}` arrived with {part.stat().st_size} bytes instead of "
                        f"{size}."
                    )
                part.replace(target)


@contextlib.contextmanager
def local_copy(url: str, *, process_group: dist.ProcessGroup | None = None) -> Iterator[LocalCopy]:
    """A remote checkpoint as a local one, for the time of the block. Collective.

    Of a sharded checkpoint the files of tensors are fetched as they are read (`LocalCopy.fetch`). The folder goes when
    the last rank of the machine leaves. Disk (where `TMPDIR` says): what the ranks of the machine read.

    Args:
        url: Of a sharded checkpoint or a file, such as ``"s3://bucket/last.ckpt"``.
        process_group: All ranks that read it. Default: ``None``, the default group, or this process alone.

    Raises:
        FileNotFoundError, ValueError: On all ranks: there is no checkpoint, or an incomplete one.
    """
    ranks = Ranks(process_group)
    place = opened(url, ranks)
    source = ranks.agree(f"Opening `{url}`", place.find, only_rank=0)[0]
    if source is None:
        raise AssertionError("rank 0 returned no folder")
    roots: list[Path] = []

    def offer() -> str:
        roots.append(new_folder())
        return str(roots[0])

    own_mark = uuid.uuid4().hex
    try:
        offered = ranks.agree("Making a local folder", offer)
        # The first that this rank sees: that of the first rank of its machine.
        root = next(Path(path) for path in offered if path is not None and Path(path).is_dir())
        users = root / "users"

        def enter() -> None:
            users.mkdir(exist_ok=True)
            (users / own_mark).touch()

        ranks.agree("Making a local folder", enter)
        if roots[0] != root:
            shutil.rmtree(roots.pop(), ignore_errors=True)
    except BaseException:
        for path in roots:
            shutil.rmtree(path, ignore_errors=True)
        raise
    copy = LocalCopy(place, source, root)
    try:
        ranks.agree(f"Fetching `{url}`", lambda: copy.begin(ranks.rank))
        yield copy
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        if type(error) in (ValueError, RuntimeError, FileNotFoundError) and str(copy.path) in str(error):
            raise type(error)(str(error).replace(str(copy.path), url)) from error
        raise
    finally:
        (users / own_mark).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are still there
            users.rmdir()
            shutil.rmtree(root, ignore_errors=True)


def fetch_whole(url: str, target: Path) -> None:
    """Fetch all of a sharded checkpoint into a new local folder."""
    place = RemotePlace(url)
    folder = place.find()
    target.mkdir()
    for name in place.files(folder):
        if name != UNFINISHED:
            place.fs.get_file(f"{folder}/{name}", str(target / name))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this machine at a time; the lock goes with a process that dies."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
