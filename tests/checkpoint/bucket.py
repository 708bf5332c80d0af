"""An object store in a folder: whole objects by name, no folders, no renames, and moments to fail or die at."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec import AbstractFileSystem


class Bucket(AbstractFileSystem):
    """`bucket://<name>`; an object is a file of the folder `BUCKET_ROOT`, an operation a line of `BUCKET_LOG`.

    `BUCKET_FAIL` is what a name that cannot be put has in it, on the rank `BUCKET_RANK`, which dies just before
    operation number `BUCKET_KILL_AT`.
    """

    protocol = "bucket"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(os.environ["BUCKET_ROOT"])

    num_operations = 0

    def _file(self, path: str) -> Path:
        return self.root / quote(self._strip_protocol(path), safe="")

    def _note(self, operation: str, path: str) -> None:
        with (self.root.parent / "log.txt").open("a") as log:
            log.write(f"{operation} {os.environ.get('RANK', '0')} {self._strip_protocol(path)}\n")
        if os.environ.get("RANK", "0") != os.environ.get("BUCKET_RANK", "0"):
            return
        Bucket.num_operations += 1
        if Bucket.num_operations == int(os.environ.get("BUCKET_KILL_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        if operation == "put" and (broken := os.environ.get("BUCKET_FAIL")) and broken in path:
            raise ConnectionError("the store does not answer")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        path = self._strip_protocol(path)
        found: dict[str, Any] = {}
        for file in self.root.iterdir():
            name = unquote(file.name)
            if name == path:
                found[name] = {"name": name, "size": file.stat().st_size, "type": "file"}
            elif name.startswith(f"{path}/"):
                first, *rest = name[len(path) + 1 :].split("/")
                kind = {"size": 0, "type": "directory"} if rest else {"size": file.stat().st_size, "type": "file"}
                found[f"{path}/{first}"] = {"name": f"{path}/{first}", **kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else sorted(found)

    def info(self, path: str, **options: Any) -> Any:
        path = self._strip_protocol(path)
        entries = self.ls(path)
        own = [entry for entry in entries if entry["name"] == path]
        return own[0] if own else {"name": path, "size": 0, "type": "directory"}

    def modified(self, path: str) -> Any:
        import datetime

        return datetime.datetime.fromtimestamp(self._file(path).stat().st_mtime, tz=datetime.timezone.utc)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are none."""

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """There are none."""

    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **options: Any) -> None:
        self._note("put", rpath)
        shutil.copyfile(lpath, self._file(rpath))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._note("pipe", path)
        self._file(path).write_bytes(value)

    def get_file(self, rpath: str, lpath: str, callback: Any = None, outfile: Any = None, **options: Any) -> None:
        self._note("get", rpath)
        time.sleep(0.05)  # so that another rank asks for it meanwhile
        shutil.copyfile(self._file(rpath), lpath)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self._note("copy", path2)
        shutil.copyfile(self._file(path1), self._file(path2))

    def rm_file(self, path: str) -> None:
        if self.isfile(path):
            self._note("remove", path)
            self._file(path).unlink()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return self._file(path).open(mode)


fsspec.register_implementation("bucket", Bucket, clobber=True)


def objects(root: Path) -> list[str]:
    """Names of all objects."""
    return sorted(unquote(file.name) for file in root.iterdir())


def operations(root: Path) -> list[tuple[str, int, str]]:
    """What was done, by which rank, to which object; the list begins anew."""
    log = root.parent / "log.txt"
    found = [tuple(line.split(" ", 2)) for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    return [(operation, int(rank), path) for operation, rank, path in found]
