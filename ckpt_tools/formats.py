"""What the bits of FP8 and BF16 mean, in plain numpy: slow and obvious, so that the compiled loop can be held to it."""

from __future__ import annotations

import numpy as np


def e4m3_values() -> np.ndarray:
    """The 256 values of F8_E4M3 as float32: sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where((code & 127) == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


E4M3 = e4m3_values()


def widen(data: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bytes of F32, BF16 or F16 as float32, exactly: uint8 [n bytes] -> float32 [n values]."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f4" if dtype == "F32" else "<f2").astype(np.float32, copy=False)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest BF16 of every float32, ties to even, as uint16 bits; NaN becomes 0x7fc0.

    BF16 has 8 significant bits, and no quantum below 2^-133. In float64 the quotient by a power of two is exact.
    """
    wide = values.astype(np.float64)
    _, exponent = np.frexp(wide)
    quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = (np.rint(wide / quantum) * quantum).astype(np.float32)
    return np.where(np.isnan(values), 0x7FC0, nearest.view(np.uint32) >> 16).astype(np.uint16)


def dequantise(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """DeepSeek's formula by look-up: a code can become 256 values in a block, each is rounded once.

    Args:
        codes: uint8 [rows, columns]. scales: float32 [begun row blocks, begun column blocks].

    Returns:
        bits of bfloat16(float32(code) * scale of its block): uint16 [rows, columns].
    """
    with np.errstate(over="ignore"):
        tables = round_to_bfloat16(E4M3 * scales[..., None])
    out = np.empty(codes.shape, np.uint16)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        out[part] = tables[i, j][codes[part]]
    return out
