"""File system manners: write beside, fsync, rename; stay inside the folder; count bytes for people."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tools.errors import Fault, UsageFault

STATE_FOLDER = ".ckpt"
"""Our own notes inside a checkpoint folder: what a cast has finished, checksums, backups of a repair."""

COPY_BYTES = 8 << 20
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f]{1,255}")


def is_plain_name(name: str) -> bool:
    """True for a file name that stays in its folder: no separator, no `..`, no control character."""
    return bool(_PLAIN_NAME.fullmatch(name)) and name not in (".", "..")


def sync_folder(folder: Path) -> None:
    """Make renames and new names in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Give a descriptor of a file beside `path`; on success fsync it and rename it over `path`.

    A reader, and a crash, see the old file or the whole new one.
    """
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        try:
            yield descriptor
            os.fchmod(descriptor, 0o644)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_all(descriptor: int, data) -> None:
    """Write every byte of a buffer; `os.write` alone stops at 2 GiB and on signals."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(descriptor, view) :]


def write_atomically(path: Path, text: str) -> None:
    with replacing(path) as descriptor:
        write_all(descriptor, text.encode())


def write_json(path: Path, value) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy the bytes of one file beside the target, fsync, rename."""
    with source.open("rb") as file, replacing(target) as descriptor:
        while piece := file.read(COPY_BYTES):
            write_all(descriptor, piece)


def remove_parts(folder: Path) -> None:
    """Remove what an interrupted `replacing` of ours left in the folder."""
    for leftover in folder.glob(".*.part"):
        leftover.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two commands never change one checkpoint at the same time.

    Raises:
        UsageFault: another live process holds it.
    """
    state = folder / STATE_FOLDER
    state.mkdir(exist_ok=True)
    with (state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageFault(
                f"{folder} is being changed by another ckpt command; wait for it or stop it, then run this again"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            # Lustre mounted without -o flock: no lock to be had. Renames keep every file whole even so.
        yield


def check_room(folder: Path, needed: int) -> None:
    """Raise Fault when the folder's disk has less than `needed` bytes (plus 1 % and 64 MB) free."""
    free = shutil.disk_usage(folder).free
    wanted = needed + needed // 100 + (64 << 20)
    if free < wanted:
        raise Fault(
            f"{folder}: {human(wanted)} are needed and {human(free)} are free; "
            "free some space or choose a target on another disk"
        )


def human(count: float) -> str:
    """Bytes for people, decimal units as disks are sold: 1342052868096 -> '1.34 TB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
