"""Checksums of tensor data that can be summed up piece by piece at memory speed.

A tensor's checksum depends on its bytes and their number only: not on its name, its shard, or the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ckpt_tools.errors import Fault
from ckpt_tools.files import STATE_FOLDER, write_json
from ckpt_tools.header import parse_json

PIECE = 256 << 10
"""Bytes per read; a multiple of 8, and small enough for a core's own cache, where every pass but the first runs."""


class Checksum:
    """Sum of the pieces of one tensor, in order. All pieces but the last have a multiple of 8 bytes."""

    def __init__(self):
        self.total, self.nbytes = 0, 0

    def update(self, piece: np.ndarray) -> None:
        """Add the next piece: uint8 [n]."""
        from ckpt_tools.kernels import mix_words

        if self.nbytes % 8:
            raise ValueError("only the last piece may have a length that is no multiple of 8")
        whole = piece.size // 8 * 8
        words = np.frombuffer(piece[:whole], "<u8")
        self.total += int(mix_words(words, self.nbytes // 8))
        if rest := bytes(piece[whole:]):
            word = np.frombuffer(rest + bytes(8 - len(rest)), "<u8")
            self.total += int(mix_words(word, (self.nbytes + whole) // 8))
        self.nbytes += piece.size

    def hexdigest(self) -> str:
        """16 hexadecimal digits."""
        from ckpt_tools.kernels import mix_words

        end = np.array([(self.total + self.nbytes) & 0xFFFFFFFFFFFFFFFF], np.uint64)
        return f"{int(mix_words(end, self.nbytes)):016x}"


def read_exactly(descriptor: int, buffer: np.ndarray, offset: int, where: object) -> None:
    """Fill a uint8 buffer from a file position. Raises Fault when the file ends first."""
    view, done = memoryview(buffer).cast("B"), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise Fault(f"{where}: ends at byte {offset + done} while being read; it changed, run the command again")
        done += count


def pieces(descriptor: int, begin: int, end: int, buffer: np.ndarray, where: object):
    """Yield the bytes of a file range as slices of one reused buffer."""
    for offset in range(begin, end, buffer.size):
        piece = buffer[: min(buffer.size, end - offset)]
        read_exactly(descriptor, piece, offset, where)
        yield piece


def range_checksum(descriptor: int, begin: int, end: int, buffer: np.ndarray, where: object) -> str:
    """Read a range of bytes of an open file and return its checksum."""
    checksum = Checksum()
    for piece in pieces(descriptor, begin, end, buffer, where):
        checksum.update(piece)
    return checksum.hexdigest()


def checksum_file(folder: Path) -> Path:
    return folder / STATE_FOLDER / "checksums.json"


def write_checksums(folder: Path, checksums: dict[str, str]) -> Path:
    path = checksum_file(folder)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"algorithm": "mix64", "tensors": dict(sorted(checksums.items()))})
    return path


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Checksums stored earlier, None when there are none. Raises Fault when the file is damaged."""
    path = checksum_file(folder)
    if not path.exists():
        return None
    try:
        content, _ = parse_json(path.read_bytes(), "the checksum file")
    except ValueError as error:
        raise Fault(f"{path}: {error}; remove it and run `ckpt verify --deep --write-checksums`") from None
    tensors = content.get("tensors") if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or content.get("algorithm") != "mix64":
        raise Fault(f"{path}: is no checksum file of this tool; remove it and run `ckpt verify --deep` again")
    return tensors
