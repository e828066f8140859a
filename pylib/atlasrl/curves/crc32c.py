"""CRC-32C (Castagnoli) of many equally long byte strings at once, as TensorBoard's record format uses it.

An event file has hundreds of thousands of short records of a few distinct lengths. Checking them column by column with
numpy is faster than one call per record into a compiled CRC, and needs no compiled package.
"""

from __future__ import annotations

import functools

import numpy as np

POLYNOMIAL = 0x82F63B78  # bit-reversed Castagnoli polynomial, RFC 3720 appendix B.4
MASK_DELTA = 0xA282EAD8  # TensorFlow stores rotated sums, so that a CRC over data holding CRCs stays meaningful
LANE = 1024


def masked(rows: np.ndarray) -> np.ndarray:
    """The masked CRC-32C of each row of a uint8 array of shape (rows, length); uint32 of shape (rows,)."""
    sums = plain(rows)
    return (sums >> np.uint32(15) | sums << np.uint32(17)) + np.uint32(MASK_DELTA)


def masked_of(data: bytes) -> int:
    """The masked CRC-32C of one string; for writing, where records come one by one."""
    table, state = _table_list(), 0xFFFFFFFF
    for byte in data:
        state = table[(state ^ byte) & 0xFF] ^ state >> 8
    state ^= 0xFFFFFFFF
    return ((state >> 15 | state << 17) + MASK_DELTA) & 0xFFFFFFFF


def plain(rows: np.ndarray) -> np.ndarray:
    """The CRC-32C of each row of a uint8 array of shape (rows, length); uint32 of shape (rows,)."""
    count, length = rows.shape
    if length <= 4 * LANE:
        return ~_absorb(np.full(count, 0xFFFFFFFF, np.uint32), rows)
    return np.array([_long(row) for row in rows], np.uint32)


def _absorb(state: np.ndarray, rows: np.ndarray) -> np.ndarray:
    table = _table()
    for column in np.ascontiguousarray(rows.T):
        state = table[(state ^ column) & np.uint32(0xFF)] ^ state >> np.uint32(8)
    return state


def _long(row: np.ndarray) -> np.uint32:
    """One long string: CRC is linear, so its lanes are summed side by side and then shifted into place.

    An initial state of all ones equals inverting the first four bytes and starting from zero; leading zeros then
    change nothing, so the row can be padded in front to whole lanes.
    """
    padding = -len(row) % LANE
    lanes = np.zeros(padding + len(row), np.uint8)
    lanes[padding:] = row
    lanes[padding : padding + 4] ^= 0xFF
    lanes = lanes.reshape(-1, LANE)
    shift = _shift_by_a_lane()
    state = 0
    for lane in _absorb(np.zeros(len(lanes), np.uint32), lanes).tolist():
        state = (
            lane
            ^ shift[0][state & 255]
            ^ shift[1][state >> 8 & 255]
            ^ shift[2][state >> 16 & 255]
            ^ shift[3][state >> 24]
        )
    return np.uint32(~state & 0xFFFFFFFF)


@functools.cache
def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> np.uint32(1) ^ np.where(table & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return table


@functools.cache
def _table_list() -> list[int]:
    return _table().tolist()


@functools.cache
def _shift_by_a_lane() -> list[list[int]]:
    """Four tables, one per state byte: what the byte becomes after LANE zero bytes."""
    bytes_ = np.arange(256, dtype=np.uint32)
    zeros = np.zeros((256, LANE), np.uint8)
    return [_absorb(bytes_ << np.uint32(8 * place), zeros).tolist() for place in range(4)]
