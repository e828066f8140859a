"""The protobuf wire format, as far as event files need it. Foreign bytes: whatever is no message raises ValueError."""

from __future__ import annotations

import struct


def fields(payload: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a protobuf message: varints as int, everything else as bytes. ValueError when it is none."""
    found, at = [], 0
    while at < len(payload):
        key, at = varint(payload, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(payload, at)
        else:
            if kind == 2:
                size, at = varint(payload, at)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ValueError("group or unknown wire type")
            if at + size > len(payload):
                raise ValueError("field runs over the end")
            value = payload[at : at + size]
            at += size
        found.append((key >> 3, value))
    return found


def varint(payload: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = payload[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("varint too long")


def signed(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("step is no number")
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def double(value: int | bytes) -> float:
    return struct.unpack("<d", message(value))[0]


def message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("number where a message was expected")
    return value


def written(number: int) -> bytes:
    """A varint."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
