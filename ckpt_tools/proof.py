"""Recompute a sample of a finished cast by an independent, slow path and compare it bit for bit.

Independent means: bytes are read where each file's own header places them, not where the plan does, and plain numpy
does the arithmetic, not the compiled loop.
"""

from __future__ import annotations

import random

import numpy as np

from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.errors import Fault
from ckpt_tools.families import SCALE_SUFFIX
from ckpt_tools.formats import dequantise, widen
from ckpt_tools.header import Header
from ckpt_tools.plan import CastPlan, Move

SAMPLE_TENSORS = 64
WHOLE_BYTES = 32 << 20
"""A checkpoint of no more bytes than this is recomputed whole."""
BAND_BYTES = 1 << 20
"""About how much of each sampled tensor of a larger one."""

Band = tuple[Move, int, int]
"""Rows [first, last) of a tensor; the first begins a block."""


def spot_check(plan: CastPlan) -> int:
    """Recompute a sample of tensors from the source: all of a small checkpoint, a band of rows of 64 tensors else.

    Returns:
        how many tensors were compared.

    Raises:
        Fault: a tensor of the target has other bits than the reference gives.
    """
    written = {move.name: job.file for job in plan.jobs for move in job.moves}
    source, target = (read_checkpoint(folder).headers for folder in (plan.source, plan.target))
    block = plan.jobs[0].block
    bands = _sample([move for job in plan.jobs for move in job.moves], block[0], plan.stamp)
    for move, first, last in bands:
        found = _read_rows(target[written[move.name]], move.name, first, last)
        expected = _read_rows(source[move.source.file], move.name, first, last)
        if move.scale is not None:
            scale, header = move.name + SCALE_SUFFIX, source[move.scale.file]
            scales = widen(_read_rows(header, scale, first // block[0], -(-last // block[0])), move.scale.dtype)
            codes = expected.reshape(last - first, -1)
            expected = dequantise(codes, scales.reshape(-1, header.tensors[scale].shape[1]), block)
        if found.tobytes() != expected.tobytes():
            raise Fault(
                f"{plan.target / written[move.name]}: {move.name} is not what the reference formula gives; "
                "do not use it: remove the target, cast again, and report this"
            )
    return len(bands)


def _read_rows(header: Header, name: str, first: int, last: int) -> np.ndarray:
    """The bytes of some rows of a tensor, from where its file's header places it: uint8 [n]."""
    tensor = header.tensors[name]
    row_bytes = tensor.nbytes // max(1, _rows(tensor.shape))
    begin = header.data_start + tensor.begin + first * row_bytes
    return np.fromfile(header.path, np.uint8, (last - first) * row_bytes, offset=begin)


def _rows(shape: tuple[int, ...]) -> int:
    """The shape is taken as a matrix; a vector is one row."""
    return shape[0] if len(shape) > 1 else 1


def _sample(moves: list[Move], block_rows: int, seed: str) -> list[Band]:
    """Everything when it is little; else a random band, often the last, of some tensors, mostly cast ones."""
    if sum(move.source.nbytes for move in moves) <= WHOLE_BYTES:
        return [(move, 0, _rows(move.source.shape)) for move in moves]
    generator = random.Random(seed)
    shuffled = generator.sample(moves, len(moves))
    copies = [move for move in shuffled if move.scale is None][: SAMPLE_TENSORS // 4]
    casts = [move for move in shuffled if move.scale is not None][: SAMPLE_TENSORS - len(copies)]
    bands = []
    for move in copies + casts:
        rows = _rows(move.source.shape)
        blocks = max(1, BAND_BYTES * rows // max(1, move.source.nbytes) // block_rows)
        starts = range(0, max(1, rows), blocks * block_rows)
        first = generator.choice((starts[-1], generator.choice(starts)))
        bands.append((move, first, min(rows, first + blocks * block_rows)))
    return bands
