"""The scalars of TensorBoard event records.

Nearly every record of a run is one scalar written by `SummaryWriter.add_scalar`, so its bytes follow one pattern.
Records of one length are decoded together; whatever does not fit the pattern is decoded field by field.
Field numbers are those of tensorboard/compat/proto/{event,summary,tensor}.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from atlasrl.curves.columns import Columns
from atlasrl.curves.protobuf import double, fields, message, signed
from atlasrl.curves.records import Batch

SCALAR_KINDS = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8"}  # TensorProto.dtype of a scalar summary
SESSION_START = 1
_HASH = np.random.default_rng(0).integers(1, 2**63, 256, dtype=np.uint64) | np.uint64(1)


class Decoder:
    """Turns batches of records into columns; tag numbers stay the same over all batches of a file."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.starts: list[tuple[int, int]] = []  # (points before it, purge step) of each SessionLog.START
        self.malformed = 0
        self._number: dict[bytes, int] = {}
        self._seen = 0

    def decode(self, batch: Batch) -> Columns:
        """The scalars of a batch, in the order they were written. Records that are no events are counted."""
        order, parts = [], []
        rest = np.ones(len(batch.starts), bool)
        for length in np.unique(batch.lengths):
            if not 24 <= length < 140:
                continue
            same = np.flatnonzero(batch.lengths == length)
            rows = batch.rows(same)
            for chosen, columns in self._plain_scalars(rows):
                order.append(same[chosen])
                parts.append(columns)
                rest[same[chosen]] = False
        unusual_order, unusual = self._unusual(batch, np.flatnonzero(rest), order)
        order.append(unusual_order)
        parts.append(unusual)
        columns = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        written = np.argsort(np.concatenate(order), kind="stable")
        self._seen += len(written)
        return Columns(self.tags, *(column[written] for column in columns))

    def _plain_scalars(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, tuple]]:
        """Rows with the bytes of `add_scalar`, one group per width of the step number.

        09 wall(8) | 10 step | 2a n | 0a n | 0a n tag | 15 value(4)
        """
        length = rows.shape[1]
        candidates = (rows[:, 0] == 0x09) & (rows[:, 9] == 0x10)
        ends = rows[:, 10:15] < 0x80
        width = np.where(ends.any(1), ends.argmax(1) + 1, 0)
        for bytes_of_step in range(1, 6):
            at = 10 + bytes_of_step
            tag_length = length - at - 11
            if tag_length < 1 or length - at - 2 > 127:
                continue
            fits = candidates & (width == bytes_of_step) & (rows[:, at + 6 + tag_length] == 0x15)
            frame = (0x2A, length - at - 2, 0x0A, length - at - 4, 0x0A, tag_length)
            for place, byte in enumerate(frame, at):
                fits &= rows[:, place] == byte
            chosen = np.flatnonzero(fits)
            if len(chosen):
                group = rows[chosen]
                step = sum((group[:, 10 + i].astype(np.int64) & 0x7F) << (7 * i) for i in range(bytes_of_step))
                value = np.ascontiguousarray(group[:, -4:]).view("<f4")[:, 0].astype(float)
                wall = np.ascontiguousarray(group[:, 1:9]).view("<f8")[:, 0]
                yield chosen, (self._numbers(group[:, at + 6 : at + 6 + tag_length]), step, value, wall)

    def _numbers(self, names: np.ndarray) -> np.ndarray:
        """Tag numbers of rows of tag bytes. Rows are grouped by a hash, which is then checked."""
        hashes = names.astype(np.uint64) @ _HASH[: names.shape[1]]
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        if not np.array_equal(names[first][inverse], names):
            return np.array([self._number_of(name.tobytes()) for name in names], np.int32)
        return np.array([self._number_of(names[i].tobytes()) for i in first], np.int32)[inverse]

    def _number_of(self, name: bytes) -> int:
        number = self._number.get(name)
        if number is None:
            number = self._number[name] = len(self.tags)
            self.tags.append(name.decode(errors="replace"))
        return number

    def _unusual(self, batch: Batch, indices: np.ndarray, plain: list[np.ndarray]) -> tuple[np.ndarray, tuple]:
        """Everything else: file version, session log, TF2 scalars in tensors, several values in one record."""
        order, rows = [], []
        before = np.sort(np.concatenate(plain)) if plain else np.zeros(0, np.int64)
        for index in indices.tolist():
            try:
                event = _event(batch.payload(index))
            except (ValueError, IndexError, struct.error):
                self.malformed += 1
                continue
            if event.purge is not None:
                points = self._seen + int(np.searchsorted(before, index)) + len(rows)
                self.starts.append((points, event.purge))
            for name, value in event.scalars:
                order.append(index)
                rows.append((self._number_of(name), event.step, value, event.wall))
        columns = tuple(zip(*rows, strict=True)) if rows else ((), (), (), ())
        types = (np.int32, np.int64, float, float)
        return np.array(order, np.int64), tuple(np.array(c, t) for c, t in zip(columns, types, strict=True))


@dataclass
class _Event:
    wall: float = float("nan")
    step: int = 0
    purge: int | None = None
    scalars: list[tuple[bytes, float]] = field(default_factory=list)


def _event(payload: bytes) -> _Event:
    event = _Event()
    starts = False
    for number, value in fields(payload):
        if number == 1:
            event.wall = double(value)
        elif number == 2:
            event.step = signed(value)
        elif number == 5:
            event.scalars += [scalar for n, v in fields(message(value)) if n == 1 for scalar in _scalar(message(v))]
        elif number == 7:
            starts = (1, SESSION_START) in fields(message(value))
    event.purge = event.step if starts else None
    return event


def _scalar(payload: bytes) -> Iterator[tuple[bytes, float]]:
    """Summary.Value: tag = 1, simple_value = 2, tensor = 8."""
    tag, value = b"", None
    for number, content in fields(payload):
        if number == 1:
            tag = message(content)
        elif number == 2:
            value = struct.unpack("<f", message(content))[0]
        elif number == 8:
            value = _tensor(message(content))
    if value is not None:
        yield tag, value


def _tensor(payload: bytes) -> float | None:
    """TensorProto of a single number: dtype = 1, shape = 2, content = 4, float_val = 5, double_val = 6, int_val = 7."""
    kind, data = 0, None
    for number, content in fields(payload):
        if number == 1:
            kind = content
        elif number == 4:
            data = message(content)
        elif number in (5, 6) and isinstance(content, bytes):
            data = content
    if kind not in SCALAR_KINDS or data is None or len(data) != np.dtype(SCALAR_KINDS[kind]).itemsize:
        return None
    return float(np.frombuffer(data, SCALAR_KINDS[kind])[0])
