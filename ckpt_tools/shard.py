"""Write one output shard of a cast, or prove that a finished one is still what was written."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ckpt_tools.checksum import PIECE, Checksum, pieces, read_exactly
from ckpt_tools.errors import Fault
from ckpt_tools.files import STATE_FOLDER, replacing, write_all, write_json
from ckpt_tools.formats import widen
from ckpt_tools.header import expected_bytes, parse_json
from ckpt_tools.plan import Move, ShardJob, Span


def record_path(target: Path, file: str) -> Path:
    """Where the checksums of a finished shard are noted: written after the shard itself."""
    return target / STATE_FOLDER / "cast" / f"{file}.json"


def cast_shard(job: ShardJob) -> dict:
    """Write one output shard beside its place, checksum what was written, fsync, rename, note it.

    Memory: three pieces and a tensor's scales, whatever the size of the shard.

    Returns:
        the shard's record: stamp, size, time of the file, checksums by tensor, who did it and for how long.

    Raises:
        Fault: this node does not see the folders, a scale is not a positive finite number, a file changed meanwhile.
    """
    source, target = Path(job.source), Path(job.target)
    started, host = time.monotonic(), socket.gethostname()
    for folder in (source, target):
        if not folder.is_dir():
            raise Fault(f"{host} does not see {folder}; source and target must lie on a file system all nodes share")
    checksums: dict[str, str] = {}
    with ExitStack() as stack:
        opened: dict[str, int] = {}
        for file in {span.file for move in job.moves for span in (move.source, move.scale) if span}:
            opened[file] = os.open(source / file, os.O_RDONLY)
            stack.callback(os.close, opened[file])
        with replacing(target / job.file) as out:
            write_all(out, job.header)
            widest = max((move.source.shape[1] for move in job.moves if move.scale), default=0)
            buffer = np.empty(max(PIECE, 4 * widest), np.uint8)
            values = np.empty(buffer.size, np.uint16)
            for move in job.moves:
                checksum = Checksum()
                for piece in _output_pieces(move, job.block, opened, buffer, values):
                    checksum.update(piece)
                    write_all(out, piece)
                checksums[move.name] = checksum.hexdigest()
    stat = (target / job.file).stat()
    record = {
        "stamp": job.stamp,
        "file": job.file,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "host": host,
        "pid": os.getpid(),
        "seconds": round(time.monotonic() - started, 3),
        "tensors": checksums,
    }
    write_json(record_path(target, job.file), record)
    return record


def _output_pieces(
    move: Move, block: tuple[int, int], opened: dict[str, int], buffer: np.ndarray, values: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the output bytes of one tensor, piece by piece: uint8 arrays of one of the reused buffers.

    Args:
        buffer: uint8 [n], at least four rows of the tensor. values: uint16 [n].
    """
    span = move.source
    if move.scale is None:
        yield from pieces(opened[span.file], span.begin, span.end, buffer, span.file)
        return
    from ckpt_tools.kernels import dequantise_into

    scales = read_scales(move.scale, opened[move.scale.file], move.name)
    rows, columns = span.shape
    at_once = buffer.size // max(1, columns) // 4 * 4  # four rows of BF16 are whole words of the checksum
    for first in range(0, rows if columns else 0, at_once):
        shape = min(at_once, rows - first), columns
        count = shape[0] * columns
        read_exactly(opened[span.file], buffer[:count], span.begin + first * columns, span.file)
        dequantise_into(buffer[:count].reshape(shape), first, scales, *block, values[:count].reshape(shape))
        yield values[:count].view(np.uint8)


def read_scales(scale: Span, descriptor: int, name: str) -> np.ndarray:
    """Read the scales of one weight: float32 [begun row blocks, begun column blocks].

    Raises:
        Fault: one of them is not a positive finite number.
    """
    data = np.empty(expected_bytes(scale.dtype, scale.shape), np.uint8)
    read_exactly(descriptor, data, scale.begin, scale.file)
    scales = widen(data, scale.dtype).reshape(scale.shape)
    bad = ~(np.isfinite(scales) & (scales > 0))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise Fault(
            f"{name}: the scale of block [{row}, {column}] in {scale.file} is {scales[row, column]}; "
            "the source is damaged, restore that file from the model's origin"
        )
    return scales


def read_record(target: Path, file: str) -> dict:
    """The note about a finished shard, {} when there is none or it cannot be read."""
    try:
        record, _ = parse_json(record_path(target, file).read_bytes(), "record")
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def prove_shard(job: ShardJob) -> dict | None:
    """Read a finished shard again and compare it with its note.

    Returns:
        its record when every byte is what was written for this very job; None when it has to be written again.
    """
    target = Path(job.target)
    record = read_record(target, job.file)
    path = target / job.file
    if record.get("stamp") != job.stamp or not path.is_file() or path.stat().st_size != job.size:
        return None
    buffer = np.empty(PIECE, np.uint8)
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        if os.pread(descriptor, len(job.header), 0) != job.header:
            return None
        for position, move in enumerate(job.moves):
            end = job.moves[position + 1].begin if position + 1 < len(job.moves) else job.size
            checksum = Checksum()
            for piece in pieces(descriptor, move.begin, end, buffer, path):
                checksum.update(piece)
            if checksum.hexdigest() != record.get("tensors", {}).get(move.name):
                return None
    stat = path.stat()
    return {**record, "mtime_ns": stat.st_mtime_ns, "proven": True}


def finish_shard(job: ShardJob) -> dict:
    """Prove the shard when it is there, else write it: the unit of work of a cast."""
    return prove_shard(job) or cast_shard(job)
