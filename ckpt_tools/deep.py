"""Read the data of a checkpoint once: NaN and infinity, and checksums that a later check can be held against."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from ckpt_tools.checkpoint import Checkpoint, read_checkpoint
from ckpt_tools.checksum import PIECE, Checksum, pieces, read_checksums, write_checksums
from ckpt_tools.files import human
from ckpt_tools.header import Header
from ckpt_tools.report import Report

MARKS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F8_E4M3": ("u1", 0x7F)}
"""Per dtype: how to read a word, and the bits that only NaN and infinity have all set (e4m3 has no infinity)."""

SHOULD_BE = "restore this tensor from the source, or from an earlier checkpoint"


def read_shard(header: Header) -> tuple[dict[str, str], dict[str, int]]:
    """Read all data of a shard, in file order.

    Returns:
        checksum by tensor; number of NaN or infinite values of the tensors that have some.
    """
    from ckpt_tools.kernels import count_marked_words

    checksums, unfinite = {}, {}
    buffer = np.empty(PIECE, np.uint8)
    descriptor = os.open(header.path, os.O_RDONLY)
    try:
        for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.begin):
            checksum, count = Checksum(), 0
            begin = header.data_start + tensor.begin
            for piece in pieces(descriptor, begin, begin + tensor.nbytes, buffer, header.path):
                checksum.update(piece)
                if tensor.dtype in MARKS:
                    word, mask = MARKS[tensor.dtype]
                    words = piece.view(word)
                    count += int(count_marked_words(words, words.dtype.type(mask)))
            checksums[tensor.name] = checksum.hexdigest()
            if count:
                unfinite[tensor.name] = count
    finally:
        os.close(descriptor)
    return checksums, unfinite


def read_all(
    checkpoint: Checkpoint, workers: int, progress: Callable[[int, int], None] | None = None
) -> tuple[dict[str, str], dict[str, int]]:
    """Read all shards with some threads (the loops release the interpreter lock); returns as `read_shard` does."""
    checksums: dict[str, str] = {}
    unfinite: dict[str, int] = {}
    done, total = 0, checkpoint.nbytes
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(read_shard, header): header for header in checkpoint.headers.values()}
        for future in as_completed(futures):
            shard_checksums, shard_unfinite = future.result()
            checksums |= shard_checksums
            unfinite |= shard_unfinite
            done += futures[future].nbytes
            if progress:
                progress(done, total)
    return checksums, unfinite


def verify_data(folder: Path, report: Report, workers: int = 1, store: bool = False, progress=None) -> None:
    """Add to a report what the data says: NaN and infinity, and differences from stored checksums.

    Args:
        store: write the checksums found into `.ckpt/checksums.json`, for a later check.
    """
    checkpoint = read_checkpoint(folder)
    started = time.monotonic()
    checksums, unfinite = read_all(checkpoint, workers, progress)
    seconds = max(time.monotonic() - started, 1e-6)
    report.facts["data read"] = f"{human(checkpoint.nbytes)} in {seconds:.1f} s, {human(checkpoint.nbytes / seconds)}/s"
    for name, count in sorted(unfinite.items()):
        report.error("not_finite", name, f"{count} values are NaN or infinite", SHOULD_BE)
    stored = read_checksums(folder)
    if stored is not None:
        report.facts["checksums"] = f"compared with {len(stored)} stored ones"
        for name in sorted(stored.keys() & checksums.keys()):
            if stored[name] != checksums[name]:
                problem = f"its data has checksum {checksums[name]}, {stored[name]} was stored"
                report.error("checksum", name, problem, f"the data changed since; {SHOULD_BE}")
    if store:
        path = write_checksums(folder, checksums)
        report.facts["stored"] = str(path)
