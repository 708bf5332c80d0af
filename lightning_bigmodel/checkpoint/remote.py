"""Checkpoints in object stores and on other remote file systems, through fsspec.

Nothing there can be renamed at once, so a checkpoint counts from the moment its completion mark is there, which is
written last. A name that is free is written to directly. Over an older checkpoint the new one is first made complete
beside it, in ``.last.ckpt.writing-<random>``; then the old one is removed and the new one copied into its place, by
the store itself where it can. A run that dies at any moment leaves the old one, or a complete one beside.

A folder that is being written or removed holds ``bigmodel.unfinished``, so that it never passes for a user's own.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from lightning_bigmodel.checkpoint import _dcp
from lightning_bigmodel.checkpoint._content import SaveContent, write_own
from lightning_bigmodel.checkpoint._pickle import write_pickled
from lightning_bigmodel.checkpoint._place import SIBLING, RemotePlace, local_folder, new_folder, opened
from lightning_bigmodel.checkpoint._ranks import Ranks
from lightning_bigmodel.checkpoint.index import DCP_METADATA_FILE, MARK_FILE, METADATA_FILE, make_index, write_mark

__all__ = ["interrupted_remote", "refuse_folder", "write_file", "write_folder", "write_remote"]


def write_remote(url: str, content: SaveContent, ranks: Ranks) -> None:
    """Write a sharded checkpoint to a remote place: each rank to a local folder of its own, and from there up.

    Memory: on each rank's disk (where `TMPDIR` says) its part of the checkpoint, until it is uploaded.

    Raises:
        RuntimeError: On all ranks, if anything failed on any; the checkpoint before stays, or the new one is beside.
    """
    place = opened(url, ranks)
    folder = ranks.agree(f"Preparing `{url}`", place.begin, only_rank=0)[0]
    if folder is None:
        raise AssertionError("rank 0 returned no folder")
    staged: list[Path] = []
    is_safe = False  # whether the new checkpoint is complete, here or beside
    try:
        ranks.agree("Making a local folder", lambda: staged.append(new_folder()))
        local = staged[0]
        table = _dcp.write_tensors(local, dict(content.values), ranks)
        own: dict[str, int] = {}

        def upload() -> dict[str, int]:
            own.update(write_own(local, ranks.rank, content.rank_state))
            if ranks.rank == 0:
                write_pickled(content.metadata, local / METADATA_FILE)
                own.update({name: (local / name).stat().st_size for name in (METADATA_FILE, DCP_METADATA_FILE)})
            place.upload(local, folder, own)
            return own

        sizes = ranks.agree(f"Uploading to `{url}`", upload)

        def mark() -> None:
            files = {name: size for each in sizes for name, size in (each or {}).items()}
            place.check(folder, files)
            write_mark(
                local,
                make_index(table, files, content.progress, content.layout, ranks.num_ranks, content.num_optimizers),
            )
            place.upload(local, folder, [MARK_FILE])
            place.finish(folder)
            if folder == place.path:
                place.clear_siblings()

        ranks.agree(f"Completing `{url}`", mark, only_rank=0)
        is_safe = True
        if folder == place.path:
            return
        ranks.agree(f"Replacing `{url}`", place.make_room, only_rank=0)
        ranks.agree(f"Replacing `{url}`", lambda: place.copy(folder, own))

        def complete() -> None:
            place.copy(folder, [MARK_FILE])
            place.finish(place.path)
            place.clear_siblings()

        ranks.agree(f"Replacing `{url}`", complete, only_rank=0)
    except BaseException:
        if ranks.rank == 0 and not is_safe:
            with contextlib.suppress(Exception):  # it does not count, and its error would hide the one that matters
                place.clear(folder)
        raise
    finally:
        for path in staged:
            shutil.rmtree(path, ignore_errors=True)


def write_folder(url: str, local: Path) -> None:
    """Put a complete sharded checkpoint of this machine in place of what was there. One process calls it."""
    place = RemotePlace(url)
    folder = place.begin()
    sizes = {file.name: file.stat().st_size for file in local.iterdir()}
    own = sorted(sizes.keys() - {MARK_FILE})
    is_safe = False
    try:
        place.upload(local, folder, own)
        place.check(folder, {name: sizes[name] for name in own})
        place.upload(local, folder, [MARK_FILE])
        place.finish(folder)
        is_safe = True
    finally:
        if not is_safe:
            with contextlib.suppress(Exception):
                place.clear(folder)
    if folder != place.path:
        place.make_room()
        place.copy(folder, own)
        place.copy(folder, [MARK_FILE])
        place.finish(place.path)
    place.clear_siblings()


def write_file(url: str, make: Callable[[Path], Path]) -> None:
    """Put one file in place of what was there, once it is up. One process calls it.

    Stores of objects copy the new one over the old at once; where a move fails half-way, what is up stays beside until
    the next save.

    Args:
        url: Where it goes.
        make: Makes the file in the local folder it is given, and returns its path.

    Raises:
        FileExistsError: There is a folder of that name.
        OSError: It did not arrive whole, or could not be moved into place.
    """
    place = RemotePlace(url)
    refuse_folder(place)
    written = f"{place.parent}/.{place.name}.writing-{uuid.uuid4().hex[:12]}"
    try:
        with local_folder() as folder:
            made = make(folder)
            place.fs.put_file(str(made), written)
            place.fs.invalidate_cache()
            if (size := int(place.fs.info(written)["size"])) != made.stat().st_size:
                raise OSError(f"`{url}` arrived with {size} bytes instead of {made.stat().st_size}.")
    except BaseException:
        with contextlib.suppress(Exception):
            place.fs.rm_file(written)
        raise
    try:
        place.fs.mv(written, place.path)
        place.fs.invalidate_cache()
        if (there := int(place.fs.info(place.path)["size"])) != size:
            raise OSError(f"it has {there} bytes instead of {size}")
    except Exception as error:
        raise OSError(
            f"`{url}` could not be replaced ({type(error).__name__}: {error}). The new checkpoint is whole in "
            f"`{place.fs.unstrip_protocol(written)}` until the next save to that name: load that, or copy it."
        ) from error
    place.clear_siblings()


def refuse_folder(place: RemotePlace) -> None:
    """A folder is not replaced by a file: that could not be done without a moment in which there is neither."""
    if not place.is_file() and place.files(place.path):
        raise FileExistsError(
            f"`{place.url}` is a folder, such as a sharded checkpoint, which no file replaces in a remote place. Give"
            " another name, or remove it yourself."
        )


def interrupted_remote(url: str) -> list[str]:
    """URLs in a folder under which nothing complete is found, but a complete checkpoint beside."""
    folder = url.rstrip("/")
    inside = RemotePlace(f"{folder}/any")
    names = {match["name"] for name in inside.entries(inside.parent) if (match := SIBLING.fullmatch(name))}
    places = [RemotePlace(f"{folder}/{name}") for name in sorted(names)]
    lost = (place for place in places if not place.is_file() and place.wrong(place.path) is not None)
    return [place.url for place in lost if place.complete_siblings()]
