"""Training data without its duplicates, made once per run.

DAPO-Math-17k as published (BytedTsinghua-SIA/DAPO-Math-17k) holds each of its 17 thousand prompts about a hundred
times: an "epoch" is a hundred epochs, and the seed decides how often a prompt is seen.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from atlasrl.errors import Fault
from atlasrl.rundir import RunDir, write_atomically

QUESTION = ("data_source", "prompt")
BATCH = 1 << 18
"""Rows read at a time; in many rows a text that comes back is hashed once."""


@dataclass(frozen=True)
class Count:
    """What the files of a data set hold."""

    rows: int
    prompts: int
    """different ones"""
    contradictions: int
    """prompts with more than one right answer; all are kept"""

    def __str__(self) -> str:
        words = f"{self.rows} rows hold {self.prompts} different prompts"
        if self.prompts < self.rows:
            words += f"; {self.rows - self.prompts} duplicates are left out (data.deduplicate: false keeps them)"
        if self.contradictions:
            words += f"; warning: {self.contradictions} questions come with more than one right answer"
        return words


def removed(files: list[str], run: RunDir) -> list[str]:
    """The files to train on: the given ones, or copies without duplicates in RUN/data.

    The first of equal rows stays, in its place. What was found is kept, printed and in the run's journal.

    Raises:
        Fault: a file cannot be read.
    """
    folder, identity = run.path / "data", [[str(file), Path(file).stat().st_size] for file in files]
    targets = [folder / f"train-{number}.parquet" for number in range(len(files))]
    known = _known(folder / "duplicates.json", identity)
    if known is None:
        kept, known = first_rows(files)
        folder.mkdir(parents=True, exist_ok=True)
        if known.prompts < known.rows:
            for file, rows, target in zip(files, kept, targets, strict=True):
                write_atomically(target, _selected(file, rows))
        write_atomically(folder / "duplicates.json", json.dumps({"files": identity, "count": asdict(known)}) + "\n")
        run.record("data", **asdict(known))
    print(f"data: {known}", flush=True)
    return [str(target) for target in targets] if known.prompts < known.rows else files


def first_rows(files: list[str]) -> tuple[list[list[int]], Count]:
    """Row numbers of each file that hold something new, and the count over all files."""
    import pyarrow.parquet

    seen: set[int] = set()
    questions: dict[int, int] = {}
    kept, rows = [], 0
    for file in files:
        fresh, row = [], 0
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            names = [name for name in (*QUESTION, "reward_model") if name in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(BATCH, columns=names):
                columns = {name: row_hashes(batch[name]) for name in batch.schema.names}
                asked = _mixed(*(columns[name] for name in QUESTION if name in columns))
                answered = _mixed(asked, *(columns[name] for name in columns if name not in QUESTION))
                for question, whole in zip(asked.tolist(), answered.tolist(), strict=True):
                    if whole not in seen:
                        seen.add(whole)
                        questions[question] = questions.get(question, 0) + 1
                        fresh.append(row)
                    row += 1
        except (OSError, pyarrow.ArrowException) as problem:
            raise Fault(f"{file} cannot be read: {problem}; is it the parquet file that preflight saw?") from None
        kept.append(fresh)
        rows += row
    return kept, Count(rows, len(seen), sum(answers > 1 for answers in questions.values()))


def _known(file: Path, identity: list) -> Count | None:
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return Count(**told["count"]) if told["files"] == identity else None


def row_hashes(column) -> np.ndarray:
    """[rows] uint64: equal where the rows of an Arrow array, however nested, are equal.

    Each different leaf is hashed once; Python sees no row. A chance collision among two million rows: about 1e-7.
    """
    import pyarrow

    if pyarrow.types.is_struct(column.type):
        fields = [row_hashes(column.field(index)) for index in range(column.type.num_fields)]
        return _mixed(*fields) if fields else np.zeros(len(column), np.uint64)
    if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        bounds = column.offsets.to_numpy()
        leaves = row_hashes(column.values)
        position = np.arange(bounds[-1] - bounds[0]) - np.repeat(bounds[:-1] - bounds[0], np.diff(bounds))
        placed = _mixed(leaves[bounds[0] : bounds[-1]], position.astype(np.uint64))
        sums = np.concatenate([[np.uint64(0)], np.cumsum(placed, dtype=np.uint64)])
        ends = bounds - bounds[0]
        return _mixed(sums[ends[1:]] - sums[ends[:-1]], np.diff(bounds).astype(np.uint64))
    encoded = column.dictionary_encode(null_encoding="encode")
    leaves = [hashlib.blake2b(repr(value).encode(), digest_size=8).digest() for value in encoded.dictionary.to_pylist()]
    return np.frombuffer(b"".join(leaves), np.uint64)[encoded.indices.to_numpy()]


def _mixed(*columns: np.ndarray) -> np.ndarray:
    """One hash per row of several; their order counts (splitmix64 between them)."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed = (mixed ^ column) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _selected(file: str, rows: list[int]) -> bytes:
    import pyarrow.parquet

    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).take(rows), content)
    return content.getvalue()
