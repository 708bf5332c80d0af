"""Remote checkpoints for tools that work on local ones: fetched into a folder of this machine, and put up from it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_bigmodel.checkpoint._place import UNFINISHED, RemotePlace, is_remote, local_folder, local_path
from lightning_bigmodel.checkpoint.index import MARK_FILE
from lightning_bigmodel.checkpoint.remote import refuse_folder, write_file, write_folder
from lightning_bigmodel.checkpoint.safetensors_files import INDEX_FILE

__all__ = ["convert_remotely", "fetched", "stored_bytes"]


@contextlib.contextmanager
def fetched(path: str | os.PathLike[str], *, with_tensors: bool) -> Iterator[Path]:
    """What lies at a path or a URL, whole or not, as a local one for the time of the block.

    Disk (where `TMPDIR` says): what is fetched. A single file is fetched whole.

    Args:
        path: A URL of fsspec's; a local path is given back as it is.
        with_tensors: ``False`` fetches no file of tensors of a sharded folder: empty ones of their size stand for them.

    Raises:
        FileNotFoundError: If there is nothing.
    """
    if not is_remote(path):
        yield local_path(path)
        return
    place = RemotePlace(os.fspath(path))
    source = place.find()
    with local_folder() as folder, _named_as(folder / place.name, place.url):
        local = folder / place.name
        if place.fs.isfile(source):
            place.fs.get_file(source, str(local))
        else:
            files = place.files(source)
            if not files:
                raise FileNotFoundError(f"There is no checkpoint `{place.url}`.")
            local.mkdir()
            for name, size in files.items():
                if name == UNFINISHED:
                    continue
                if name.endswith(".distcp") and not with_tensors:
                    with (local / name).open("wb") as file:
                        file.truncate(size)
                    continue
                place.fs.get_file(f"{source}/{name}", str(local / name))
        yield local


def convert_remotely(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    overwrite: bool,
    convert: Callable[[Path, Path], list[str]],
) -> list[str]:
    """Convert by way of this machine's disk where a path is a URL.

    Args:
        source: A local path or a URL.
        target: The same.
        overwrite: Replace what is there; a folder of safetensors, and a folder by a file, are not replaced.
        convert: Does it with local paths, and returns what is to be told.

    Raises:
        FileExistsError: If there is something, and ``overwrite`` is not set or cannot be followed.
    """
    if not is_remote(target):
        with fetched(source, with_tensors=True) as local:
            return convert(local, local_path(target))
    place = RemotePlace(os.fspath(target))
    exists = place.is_file() or bool(place.entries(place.path))
    if exists and not overwrite:
        raise FileExistsError(f"`{place.url}` exists. Give another name, or `overwrite=True` (`--overwrite`).")
    with (
        fetched(source, with_tensors=True) as local,
        local_folder() as folder,
        _named_as(folder / place.name, place.url),
    ):
        made = folder / place.name
        told = convert(local, made)
        if made.is_file():
            refuse_folder(place)
            write_file(place.url, lambda _: made)
        elif (made / MARK_FILE).is_file():
            write_folder(place.url, made)
        elif exists:
            raise FileExistsError(
                f"`{place.url}` exists, and a folder of safetensors replaces nothing in a remote place: there would be"
                " a moment with a mixture of both. Give another name, or remove it yourself."
            )
        else:
            # Their index last: without it nothing takes the folder for whole.
            names = sorted((file.name for file in made.iterdir()), key=lambda name: (name == INDEX_FILE, name))
            place.upload(made, place.path, names)
            place.check(place.path, {name: (made / name).stat().st_size for name in names})
    return told


def stored_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a file, or of the files in a folder, here or at a URL."""
    if is_remote(path):
        place = RemotePlace(os.fspath(path))
        return int(place.fs.info(place.path)["size"]) if place.is_file() else sum(place.files(place.path).values())
    local = local_path(path)
    return sum(file.stat().st_size for file in ([local] if local.is_file() else local.iterdir()) if file.is_file())


@contextlib.contextmanager
def _named_as(local: Path, url: str) -> Iterator[None]:
    """Errors of the block name the URL, not the folder of this machine."""
    try:
        yield
    except (ValueError, RuntimeError, FileNotFoundError, FileExistsError) as error:
        kinds = (ValueError, RuntimeError, FileNotFoundError, FileExistsError)
        if type(error) in kinds and str(local) in str(error):
            raise type(error)(str(error).replace(str(local), url)) from error
        raise
