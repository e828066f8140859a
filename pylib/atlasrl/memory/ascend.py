"""Read the memory tables of Ascend's profiler, whatever their size: torch_npu's and msprof's layouts.

torch_npu (profiler/analysis, 2.7.1) writes MB, `operator_memory.csv`, `memory_record.csv` and `npu_module_mem.csv`;
CANN's msprof writes KB and a suffix to the names. Columns are found by name, units by the name's parentheses. Times may
end in a tab; totals below zero mean "only the release was seen" and are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atlasrl.errors import Fault, UsageFault
from atlasrl.memory.curve import Curve

BLOCK = 8 * 2**20  # bytes held at once
PART = 2**19  # bytes that one core parses at once
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
KINDS = {"npu_module_mem": "module", "memory_record": "record", "operator_memory": "operator"}
HEADER = re.compile(r"(?P<name>[^(]+?)\s*(?:\((?P<unit>\w+)\))?")


@dataclass(frozen=True)
class Table:
    """One CSV: where it is, which kind, and its columns in their order: name -> unit, "" where it has none."""

    path: Path
    kind: str  # module, record, operator
    columns: dict[str, str]

    def scale(self, column: str) -> int:
        """Bytes of one unit of a column."""
        return UNITS[self.columns[column]]


@dataclass
class Operators:
    """Who held memory at the peak."""

    time: float = np.nan  # microseconds
    holders: Counter = field(default_factory=Counter)  # operator name -> bytes


def tables(folder: Path) -> list[Table]:
    """All memory tables below a folder, or the one that `folder` is.

    Raises:
        UsageFault: there is none.
        Fault: one is empty or its columns are not those of a memory table.
    """
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.csv"))
    found = [table for file in files if (table := _table(file)) is not None]
    if not found:
        raise UsageFault(
            f"{folder} holds no {', '.join(f'{stem}*.csv' for stem in KINDS)}; profile with verl's "
            "global_profiler.tool=npu, contents=[npu,memory], export type Text (verl 0.7.0 writes .db)"
        )
    return found


def _table(file: Path) -> Table | None:
    kind = next((kind for stem, kind in KINDS.items() if file.name.startswith(stem)), None)
    if kind is None:
        return None
    with file.open("rb") as opened:
        header = opened.readline(65536).decode("utf-8-sig", "replace").strip()
    if not header:
        raise Fault(f"{file} is empty; the profiler was ended before it wrote, profile again or remove the file")
    names = header.split(",")
    columns = {}
    for text in names:
        match = HEADER.fullmatch(text.strip())
        columns |= {match["name"]: match["unit"] or ""} if match else {text: ""}
    if len(columns) < len(names):
        raise Fault(f"{file} names a column twice; its header is {header[:120]!r}, it was edited or damaged")
    needed = {
        "module": ("Component", "Timestamp", "Total Reserved"),
        "record": ("Component", "Timestamp", "Total Reserved", "Total Allocated"),
        "operator": ("Name", "Size", "Allocation Time", "Release Time", "Allocation Total Allocated"),
    }[kind]
    for column in needed:
        if column not in columns:
            raise Fault(f"{file} has no column {column!r}; its header is {header[:120]!r}, not that of a {file.stem}")
        if column.startswith(("Total", "Size", "Allocation Total")) and columns[column] not in UNITS:
            raise Fault(f"{file}: column {column!r} has the unit {columns[column]!r}; expected KB or MB")
    return Table(file, kind, columns)


def blocks(table: Table, numbers: tuple[str, ...], texts: tuple[str, ...] = ()) -> Iterator[dict]:
    """Yield a table block by block: column name -> numpy array (numbers, NaN when absent) or Arrow array (texts).

    Each block is parsed on all cores, which Arrow's own streaming reader does not do. A last line that a crash cut is
    left out.

    Raises:
        Fault: a row has too few or too many fields, or a number is none; the message names the file.
    """
    import pyarrow as pa
    import pyarrow.csv as csv

    damaged: list[str] = []

    def note(row) -> str:
        damaged.append(row.text[:80] if row.text else "")
        return "skip"

    kinds = dict.fromkeys(numbers, pa.float64()) | dict.fromkeys(texts, pa.dictionary(pa.int32(), pa.string()))
    read = csv.ReadOptions(column_names=list(table.columns), block_size=PART)
    parse = csv.ParseOptions(invalid_row_handler=note)
    convert = csv.ConvertOptions(
        column_types=kinds, include_columns=list(kinds), null_values=["", "N/A", "nan", "NaN", "\t"]
    )
    try:
        for lines in whole_lines(table.path):
            block = csv.read_csv(pa.BufferReader(lines), read, parse, convert)
            texts_read = {c: block.column(c).unify_dictionaries().combine_chunks() for c in texts}
            yield texts_read | {c: block.column(c).to_numpy() for c in numbers}
    except pa.ArrowInvalid as problem:
        raise Fault(f"{table.path}: {' '.join(str(problem).split())[:160]}; the file was edited or damaged") from None
    if damaged:
        raise Fault(
            f"{table.path} has {len(damaged)} rows of another width, first {damaged[0]!r}; it was edited or damaged"
        )


def whole_lines(path: Path) -> Iterator[memoryview]:
    """Yield the lines below the header in blocks; what follows the last line end is left out.

    Every block lies in the same memory: fresh pages cost more than the reading.
    """
    memory = bytearray(BLOCK)
    kept = 0  # bytes of a line whose end is not read yet
    with path.open("rb", buffering=0) as file:
        file.seek(len(file.readline()))
        while read := file.readinto(memoryview(memory)[kept:]):
            end = memory.rfind(b"\n", 0, kept + read) + 1
            if end:
                yield memoryview(memory)[:end]
            elif kept + read == BLOCK:
                raise Fault(
                    f"{path} has a line of over {BLOCK >> 20} MiB, so it is no table; was it damaged or joined?"
                )
            kept += read - end
            memory[:kept] = memory[end : end + kept]


def curves(table: Table, marks: np.ndarray | None = None) -> dict[str, Curve]:
    """Curves of a module or record table: component -> reserved, and component + " allocated" where it is known."""
    found: dict[str, Curve] = {}
    values = ("Total Reserved",) if table.kind == "module" else ("Total Reserved", "Total Allocated")
    for block in blocks(table, ("Timestamp", *values), ("Component",)):
        components = block["Component"]
        codes = components.indices.to_numpy(zero_copy_only=False)
        for code, component in enumerate(components.dictionary.to_pylist()):
            rows = codes == code
            for value in values:
                name = component if value == "Total Reserved" else f"{component} allocated"
                sizes = block[value][rows] * table.scale(value)
                sizes[sizes < 0] = np.nan
                found.setdefault(name, Curve(marks)).add(block["Timestamp"][rows], sizes)
    return {name: curve for name, curve in found.items() if curve.peak > 0}


def peak_of_operators(table: Table) -> tuple[float, float]:
    """(time, bytes) of the highest total that an allocation left behind."""
    best = (np.nan, -np.inf)
    for block in blocks(table, ("Allocation Time", "Allocation Total Allocated")):
        total = np.nan_to_num(block["Allocation Total Allocated"], nan=-np.inf)
        at = int(total.argmax())
        if total[at] * table.scale("Allocation Total Allocated") > best[1]:
            best = (float(block["Allocation Time"][at]), float(total[at]) * table.scale("Allocation Total Allocated"))
    return best


def operators_at(table: Table, time: float) -> Operators:
    """What was allocated at `time` (microseconds) and not yet released, summed by operator."""
    import pyarrow.compute as pc

    result = Operators(time)
    for block in blocks(table, ("Size", "Allocation Time", "Release Time"), ("Name",)):
        released = np.nan_to_num(block["Release Time"], nan=np.inf)
        live = (block["Allocation Time"] <= time) & (released > time) & (block["Size"] > 0)
        if live.any():
            rows = np.flatnonzero(live)
            names = pc.take(block["Name"], rows).to_pylist()
            for name, size in zip(names, block["Size"][rows] * table.scale("Size"), strict=True):
                result.holders[name or "(unnamed)"] += int(size)
    return result
