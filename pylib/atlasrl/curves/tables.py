"""Scalars from CSV tables: wide, long, a W&B chart export, TensorBoard's CSV download, and our own baseline store."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

from atlasrl.curves.textlogs import Row, number_in
from atlasrl.errors import Fault

STEP_COLUMNS = ("step", "_step", "global_step", "training/global_step", "iteration", "trainer/global_step")
TAG_COLUMNS = ("tag", "metric", "name")
WALL_COLUMNS = ("wall", "wall time", "wall_time", "_timestamp", "timestamp")
TENSORBOARD_NAME = re.compile(r"run-.*?-tag-(?P<tag>.+)")


def rows(path: Path) -> Iterator[Row]:
    """(tag, step, value, wall) rows of a table, in file order. Empty cells are no points; `nan` is one.

    Raises:
        Fault: no step column, or a cell that is no number in a column of numbers.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as problem:
            raise Fault(f"{path} is a damaged gzip file: {problem}") from None
    table = csv.reader(io.StringIO(data.decode("utf-8-sig", errors="replace"), newline=""))
    try:
        lines = [(table.line_num, line) for line in table if line]
    except csv.Error as problem:
        raise Fault(f"{path}:{table.line_num} is no CSV: {problem}") from None
    if not lines:
        raise Fault(f"{path} is an empty table; expected a header with a step column")
    header = [" ".join(cell.split()) for cell in lines[0][1]]  # a quoted name may hold line breaks
    lower = [cell.lower() for cell in header]
    step = _column(lower, STEP_COLUMNS)
    if step is None:
        raise Fault(f"{path} has no step column; found {', '.join(header[:8])}; looked for {', '.join(STEP_COLUMNS)}")
    wall, tag = _column(lower, WALL_COLUMNS), _column(lower, TAG_COLUMNS)
    if tag is not None and "value" in lower:
        tags = None
        value_columns = [lower.index("value")]
    else:
        tags = _wide_tags(path, header, {step, wall})
        value_columns = _numeric(lines[1:], list(tags))
    for number, line in lines[1:]:
        at = _step(line, step, f"{path}:{number}")
        clock = _cell(line, wall, f"{path}:{number}") if wall is not None else None
        for column in value_columns:
            value = _cell(line, column, f"{path}:{number}")
            if value is not None:
                yield tags[column] if tags else line[tag], at, value, math.nan if clock is None else clock


def _column(lower: list[str], names: tuple[str, ...]) -> int | None:
    return next((lower.index(name) for name in names if name in lower), None)


def _wide_tags(path: Path, header: list[str], taken: set[int | None]) -> dict[int, str]:
    """Column number -> tag. W&B names its columns "run - tag" and adds __MIN and __MAX."""
    columns = {i: name for i, name in enumerate(header) if i not in taken and not name.endswith(("__MIN", "__MAX"))}
    if [name.lower() for name in columns.values()] == ["value"]:
        match = TENSORBOARD_NAME.fullmatch(path.name.split(".")[0])
        return {i: match["tag"] if match else path.name.split(".")[0] for i in columns}
    split = {i: name.rpartition(" - ") for i, name in columns.items()}
    if split and all(separator for _, separator, _ in split.values()):
        names = sorted({run for run, _, _ in split.values()})
        if len(names) > 1:
            raise Fault(f"{path} holds several runs ({', '.join(names[:4])}); export one run per file")
        return {i: tag for i, (_, _, tag) in split.items()}
    return columns


def _numeric(lines: list[tuple[int, list[str]]], columns: list[int]) -> list[int]:
    """Columns with at least one number; a column of run names or states is no curve."""
    return [c for c in columns if any(c < len(line) and number_in(line[c]) is not None for _, line in lines)]


def _step(line: list[str], column: int, where: str) -> int:
    value = _cell(line, column, where)
    if value is None or not abs(value) < 2**62 or value != int(value):
        raise Fault(f"{where}: the step {line[column] if column < len(line) else ''!r} is no whole number")
    return int(value)


def _cell(line: list[str], column: int, where: str) -> float | None:
    if column >= len(line) or not line[column].strip():
        return None
    value = number_in(line[column])
    if value is None:
        raise Fault(f"{where}: {line[column]!r} is no number")
    return value
