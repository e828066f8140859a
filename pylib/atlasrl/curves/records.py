"""TFRecord framing: the records of an event file, with both checksums of each checked.

A record is: length (8 bytes), masked CRC of the length (4), payload, masked CRC of the payload (4); all little-endian.
TensorBoard's own reader stops at the first bad checksum and says nothing; this one says where it stopped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atlasrl.curves import crc32c

HEADER, FOOTER = 12, 4
CHUNK = 8 << 20
_length_at = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class Batch:
    """Consecutive intact records: payload i is `data[starts[i] : starts[i] + lengths[i]]`."""

    data: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def rows(self, chosen: np.ndarray) -> np.ndarray:
        """The payloads of records of one length as a uint8 array of shape (chosen, length)."""
        return _rows(self.data, self.starts[chosen], int(self.lengths[chosen[0]]))

    def payload(self, index: int) -> bytes:
        return self.data[self.starts[index] : self.starts[index] + self.lengths[index]].tobytes()


@dataclass
class RecordFile:
    """An event file that may still grow. Each `read` continues where the last one ended.

    After `read`: `position` is the end of the last intact record, `damage` says what is wrong there (empty: nothing),
    and `unfinished` counts the bytes of a last record that is incomplete: still being written, or cut by a crash.
    """

    path: Path
    position: int = 0
    damage: str = ""
    unfinished: int = 0
    size: int = field(default=0, init=False)

    def read(self) -> Iterator[Batch]:
        """Yield the intact records that were added since the last call."""
        with self.path.open("rb") as file:
            self.size = file.seek(0, 2)
            self.unfinished = 0
            if self.size < self.position:
                self.damage = f"shrank from at least {self.position} to {self.size} bytes while it was being read"
            wanted = CHUNK
            while not self.damage and self.position < self.size:
                file.seek(self.position)
                data = np.frombuffer(file.read(min(wanted, self.size - self.position)), np.uint8)
                batch, used, self.damage = _intact(data)
                if len(batch.starts):
                    yield batch
                self.position += used
                if used == 0 and not self.damage:
                    if len(data) >= self.size - self.position:
                        self.unfinished = len(data)
                        return
                    wanted *= 4  # one record is larger than the chunk


def encode(payload: bytes) -> bytes:
    """One payload as a record."""
    length = struct.pack("<Q", len(payload))
    sums = struct.pack("<I", crc32c.masked_of(length)), struct.pack("<I", crc32c.masked_of(payload))
    return length + sums[0] + payload + sums[1]


def _intact(data: np.ndarray) -> tuple[Batch, int, str]:
    """The intact records at the start of `data`, the bytes they use, and what is wrong with the next."""
    starts, end = _frame(data)
    lengths = np.diff(np.append(starts, end)) - HEADER - FOOTER
    starts += HEADER
    bad_length = ~_holds(data, starts - HEADER, np.full(len(starts), 8), starts - FOOTER)
    bad_payload = ~_holds(data, starts, lengths, starts + lengths)
    bad = np.flatnonzero(bad_length | bad_payload)
    damage = ""
    if len(bad):
        damage = f"the checksum of a record's {'length' if bad_length[bad[0]] else 'content'} is wrong"
        starts, lengths, end = starts[: bad[0]], lengths[: bad[0]], int(starts[bad[0]]) - HEADER
    elif len(data) - end >= HEADER and not _holds(data, np.array([end]), np.array([8]), np.array([end + 8]))[0]:
        damage = "the checksum of a record's length is wrong"
    return Batch(data, starts, lengths), end, damage


def _frame(data: np.ndarray) -> tuple[np.ndarray, int]:
    """Where the complete records of `data` start, by their lengths alone, and where the last one ends."""
    buffer, limit = data.tobytes(), len(data)
    starts, position = [], 0
    while position + HEADER + FOOTER <= limit:
        end = position + _length_at(buffer, position)[0] + HEADER + FOOTER
        if end > limit:
            break
        starts.append(position)
        position = end
    return np.array(starts, np.int64), position


def _holds(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Whether the masked CRC stored at `sums` is that of the bytes at `starts`; bool of shape (records,)."""
    stored = _rows(data, sums, 4).view("<u4")[:, 0] if len(sums) else np.zeros(0, np.uint32)
    holds = np.zeros(len(starts), bool)
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        for part in np.array_split(same, 1 + len(same) * int(length) // CHUNK):
            if len(part):
                holds[part] = crc32c.masked(_rows(data, starts[part], int(length))) == stored[part]
    return holds


def _rows(data: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    if length == 0:
        return np.zeros((len(starts), 0), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(data, length)[starts]
