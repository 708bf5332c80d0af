"""A place for one checkpoint on a file system of fsspec: what is there, and the single steps of writing it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.index import DCP_METADATA_FILE, MARK_FILE, METADATA_FILE

UNFINISHED = "bigmodel.unfinished"
SIBLING = re.compile(r"\.(?P<name>.+)\.writing-[0-9a-f]{12}")
_OURS = (MARK_FILE, METADATA_FILE, DCP_METADATA_FILE, UNFINISHED)
_LOCAL_PROTOCOLS = ("file", "local")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL such as ``"s3://bucket/last.ckpt"`` of something else than this machine's files."""
    protocol, separator, _ = os.fspath(path).partition("://")
    return bool(separator) and protocol not in _LOCAL_PROTOCOLS


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path that ``path``, or a ``file://`` URL, means on this machine."""
    text = os.fspath(path)
    for protocol in _LOCAL_PROTOCOLS:
        text = text.removeprefix(f"{protocol}://")
    return Path(text)


class RemotePlace:
    """Where one checkpoint lies, or will, on a file system of fsspec. Paths here are without protocol.

    Args:
        url: Such as ``"s3://bucket/run/last.ckpt"``.

    Raises:
        ValueError: If the URL has no last part, or this installation has no file system for it.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        try:
            self.fs, path = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"`{url}` cannot be opened ({error}). Install what fsspec needs for it, such as `s3fs` for `s3://` and "
                "`gcsfs` for `gs://`."
            ) from error
        self.path: str = path.rstrip("/")
        self.parent, _, self.name = self.path.rpartition("/")
        if not self.parent or self.name in ("", ".", ".."):
            raise ValueError(
                f"`{url}` has no last part to be the checkpoint's name. Give one such as `{self.url}/last.ckpt`."
            )

    # -- what is there -------------------------------------------------------------------------------------------------

    def files(self, folder: str) -> dict[str, int]:
        """Name to size of the files in a folder; empty where there is none."""
        return {name: int(entry["size"]) for name, entry in self.entries(folder).items() if entry["type"] == "file"}

    def entries(self, folder: str) -> dict[str, Any]:
        """Name to what fsspec says of each file and folder in a folder; empty where there is none."""
        self.fs.invalidate_cache()  # other processes write there too
        try:
            entries = self.fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        # Some stores list an object of the folder's own name as well.
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries if entry["name"] != folder}

    def is_file(self) -> bool:
        """Whether an object has the name itself, such as a Lightning file."""
        self.fs.invalidate_cache()
        return bool(self.fs.isfile(self.path))

    def siblings(self) -> list[str]:
        """Folders of new checkpoints that were, or are, being written beside."""
        return [
            f"{self.parent}/{name}"
            for name in sorted(self.entries(self.parent))
            if (match := SIBLING.fullmatch(name)) and match["name"] == self.name
        ]

    def wrong(self, folder: str) -> str | None:
        """Why what is in a folder is no complete checkpoint of ours; None if it is one."""
        files = self.files(folder)
        where = self.fs.unstrip_protocol(folder)
        if MARK_FILE not in files:
            return f"`{where}` is incomplete: it has no completion mark `{MARK_FILE}`."
        try:
            wanted: dict[str, int] = json.loads(self.fs.cat_file(f"{folder}/{MARK_FILE}"))["files"]
        except (ValueError, KeyError, TypeError) as error:
            return f"`{where}` is incomplete: its completion mark `{MARK_FILE}` is damaged ({error})."
        lacking = [
            f"`{name}` is missing" if name not in files else f"`{name}` has {files[name]} bytes instead of {size}"
            for name, size in wanted.items()
            if files.get(name) != size
        ]
        return f"`{where}` is incomplete: {', '.join(lacking)}. Copy it again." if lacking else None

    def find(self) -> str:
        """The path, or that of a complete checkpoint beside it if a run died while this one was replaced."""
        if self.is_file() or self.wrong(self.path) is None:
            return self.path
        complete = self.complete_siblings()
        if not complete:
            return self.path
        warnings.warn(
            f"`{self.url}` is gone: a run died while it was replaced. Using `{self.fs.unstrip_protocol(complete[0])}`,"
            " which the next save removes.",
            stacklevel=2,
        )
        return complete[0]

    def complete_siblings(self) -> list[str]:
        """The complete ones among them."""
        return [folder for folder in self.siblings() if self.wrong(folder) is None]

    # -- writing -------------------------------------------------------------------------------------------------------

    def begin(self) -> str:
        """The folder to write into. Half-written ones of a dead run are removed."""
        there = self.entries(self.path)
        has_file = self.is_file()
        if there and not has_file and not any(name in there for name in _OURS):
            raise FileExistsError(
                f"`{self.url}` is a folder that is no checkpoint, and is not replaced by one. Choose another name, or"
                " remove it yourself."
            )
        has_one = has_file or MARK_FILE in there
        is_whole = has_file or (has_one and self.wrong(self.path) is None)
        for folder in self.siblings():
            if is_whole or self.wrong(folder) is not None:
                self.clear(folder)
        if there and not has_one:
            self.clear(self.path)
        folder = f"{self.parent}/.{self.name}.writing-{uuid.uuid4().hex[:12]}" if has_one else self.path
        self.start(folder)
        return folder

    def start(self, folder: str) -> None:
        """Say that what is in a folder is not finished."""
        self.fs.makedirs(folder, exist_ok=True)
        self.fs.pipe_file(f"{folder}/{UNFINISHED}", b"A checkpoint is being written or removed here.")

    def upload(self, local: Path, folder: str, names: Collection[str]) -> None:
        """Put files of a local folder into one there."""
        for name in names:
            self.fs.put_file(str(local / name), f"{folder}/{name}")

    def check(self, folder: str, sizes: dict[str, int]) -> None:
        """Raise if files did not arrive in their size."""
        there = self.files(folder)
        lost = [
            f"`{name}` has {there.get(name, 'no')} bytes instead of {size}"
            for name, size in sizes.items()
            if there.get(name) != size
        ]
        if lost:
            raise OSError(f"`{self.url}` did not arrive whole: {', '.join(lost)}.")

    def finish(self, folder: str) -> None:
        """After the completion mark."""
        self.fs.rm_file(f"{folder}/{UNFINISHED}")

    def make_room(self) -> None:
        """Remove the old checkpoint, once the new one is complete beside it."""
        if self.is_file():
            self.fs.rm_file(self.path)
        if self.entries(self.path):
            self.clear(self.path)
        self.start(self.path)

    def copy(self, folder: str, names: Collection[str]) -> None:
        """Copy files from the folder beside into place, within the store."""
        for name in names:
            self.fs.cp_file(f"{folder}/{name}", f"{self.path}/{name}")

    def clear(self, folder: str) -> None:
        """Remove a checkpoint of ours; from the first moment on it does not count as one."""
        files = self.files(folder)
        if files:
            self.fs.pipe_file(f"{folder}/{UNFINISHED}", b"A checkpoint is being written or removed here.")
        for name in sorted(files, key=lambda name: name != MARK_FILE):
            if name != UNFINISHED:
                self.fs.rm_file(f"{folder}/{name}")
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(folder, recursive=True)

    def clear_siblings(self) -> None:
        """Remove what is beside, once the checkpoint itself is complete. What stays is removed by the next save."""
        with contextlib.suppress(Exception):
            for folder in self.siblings():
                self.clear(folder)

    def discard(self) -> bool:
        """Remove a checkpoint, of one file too; False, and nothing is done, for what is none."""
        if self.is_file():
            self.fs.rm_file(self.path)
            return True
        if not any(name in self.entries(self.path) for name in _OURS):
            return False
        self.clear(self.path)
        return True

    def modified(self, path: str) -> float:
        """When a file, or a folder's mark, was written, in seconds since 1970; 0.0 where nothing says."""
        marker = path if self.fs.isfile(path) else f"{path}/{MARK_FILE}"
        try:
            return float(self.fs.modified(marker).timestamp())
        except (NotImplementedError, FileNotFoundError):
            return 0.0


def opened(url: str, ranks: Ranks) -> RemotePlace:
    """The place of a URL on every rank, or the same error on every rank."""
    places: list[RemotePlace] = []
    ranks.agree(f"Opening `{url}`", lambda: places.append(RemotePlace(url)))
    return places[0]


@contextlib.contextmanager
def local_folder() -> Iterator[Path]:
    """A new folder of this machine (where `TMPDIR` says) that goes afterwards."""
    folder = new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder() -> Path:
    """A new folder of this machine, where `TMPDIR` says."""
    folder = Path(tempfile.gettempdir()) / f"bigmodel-checkpoint-{uuid.uuid4().hex}"
    folder.mkdir(mode=0o700)
    return folder
