"""Writes event files: scalars that TensorBoard shows."""

from __future__ import annotations

import struct

from atlasrl.curves.protobuf import written
from atlasrl.curves.records import encode


def encode_scalar(tag: str, step: int, value: float, wall: float) -> bytes:
    """One scalar as a record of an event file."""
    name = tag.encode()
    inner = b"\x0a" + written(len(name)) + name + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + written(len(inner)) + inner
    return encode(_stamp(wall, step) + b"\x2a" + written(len(summary)) + summary)


def encode_version(wall: float) -> bytes:
    """The record that every event file starts with."""
    return encode(_stamp(wall, 0) + b"\x1a\x0dbrain.Event:2")


def _stamp(wall: float, step: int) -> bytes:
    return b"\x09" + struct.pack("<d", wall) + (b"\x10" + written(step & (2**64 - 1)) if step else b"")
