"""The passes over bytes that must run at memory speed, compiled by numba.

The compiled code is kept in numba's cache (beside this file, or NUMBA_CACHE_DIR), so only the first run waits for it.
"""

from __future__ import annotations

import numpy as np

from ckpt_tools.errors import Fault

try:
    import numba
except ImportError:
    raise Fault("numba is not installed; `pip install numba`: casting and checksums need its compiled loops") from None


def _compiled(function):
    """Compile with a cache on disk; without one where no cache folder can be written (a read-only image)."""
    try:
        return numba.njit(cache=True, nogil=True, boundscheck=False)(function)
    except RuntimeError:
        return numba.njit(nogil=True, boundscheck=False)(function)


@_compiled
def dequantise_into(codes, first_row, scales, rows_per_block, columns_per_block, out):
    """Fill `out` (uint16 bits of BF16) with `bfloat16(float32(code) * scale of its block)`.

    One pass, no temporaries, written so that LLVM makes vector instructions of the inner loop: every step stays in 32
    bits (numba widens otherwise), and subnormal codes are converted as integers, since a multiplication by a subnormal
    float costs a hundred cycles on many processors. Twice as fast as a look-up in a table of 256 products per block.

    Args:
        codes: uint8 [rows, columns]. first_row: position of codes[0] among the rows that the scales are for.
        scales: float32 [begun row blocks, begun column blocks].
        out: uint16 [rows, columns].
    """
    u32, f32 = np.uint32, np.float32
    rows, columns = codes.shape
    for row in range(rows):
        for column_block in range(scales.shape[1]):
            scale = scales[(first_row + row) // rows_per_block, column_block]
            first = column_block * columns_per_block
            last = min(columns, first + columns_per_block)
            source, target = codes[row, first:last], out[row, first:last]
            for i in range(last - first):
                code = u32(source[i])
                magnitude = u32(code & u32(0x7F))
                normal = u32(u32(magnitude << u32(20)) + u32(120 << 23)).view(np.float32)
                subnormal = f32(np.int32(magnitude)) * f32(2.0**-9)
                value = normal if magnitude > u32(7) else subnormal
                bits = f32(value * scale).view(np.uint32)
                # Round to nearest even, as torch does; the sign is that of the code.
                odd = u32(u32(bits >> u32(16)) & u32(1))
                rounded = u32(u32(u32(bits + u32(0x7FFF)) + odd) >> u32(16))
                signed = u32(rounded | u32(u32(code & u32(0x80)) << u32(8)))
                target[i] = np.uint16(signed) if magnitude != u32(0x7F) else np.uint16(0x7FC0)


@_compiled
def mix_words(words, first):
    """Sum of a 64-bit mix (splitmix64's finaliser) of every word with its position.

    A sum, so the pieces of a tensor may come in any order and from several threads; the position inside the mix makes
    swapped words count. Guards against accidents, not against an adversary.

    Args:
        words: uint64 [n]. first: position of words[0] in the tensor.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    key = np.uint64(first) * step
    total = np.uint64(0)
    for i in range(words.size):
        z = words[i] ^ key
        z = (z ^ (z >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        total += z ^ (z >> np.uint64(32))
        key += step
    return total


@_compiled
def count_marked_words(words, mask):
    """Count words that have all bits of the mask set: the exponent bits of a float format mark NaN and infinity."""
    count = 0
    for i in range(words.size):
        if words[i] & mask == mask:
            count += 1
    return count
