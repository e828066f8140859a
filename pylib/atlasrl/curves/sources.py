"""Files that hold scalars, each with what was read so far; `update` reads on where the last one ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from atlasrl.curves import tables, textlogs
from atlasrl.curves.columns import Columns
from atlasrl.curves.events import Decoder
from atlasrl.curves.records import RecordFile
from atlasrl.curves.sessions import Session, split
from atlasrl.errors import Fault

PARTIAL = "--allow-truncated reads what comes before it"


class EventSource:
    """One TensorBoard event file."""

    def __init__(self, path: Path, number: int | None = None):
        self.path, self.number = path, number
        self.records, self.decoder, self.columns = RecordFile(path), Decoder(), Columns()
        self._sessions: list[Session] = []

    def update(self) -> bool:
        """Read what was added. True when points came."""
        parts = [self.decoder.decode(batch) for batch in self.records.read()]
        added = sum(len(part) for part in parts)
        if added:
            self.columns = Columns.joined([self.columns, *parts])
            self._sessions = split(self.path.name, self.columns, self.decoder.starts, self.number)
        return added > 0

    def sessions(self) -> list[Session]:
        """The same objects until an update adds points."""
        return self._sessions

    def damage(self) -> str:
        """Where reading had to stop, and why; empty when the file is intact."""
        if self.records.damage:
            return f"{self.path}: stopped at byte {self.records.position} of {self.records.size}: {self.records.damage}"
        if self.decoder.malformed:
            return f"{self.path}: {self.decoder.malformed} records have a right checksum but are no events"
        return ""

    def notes(self) -> list[str]:
        return _unfinished(self.path, self.records.unfinished)


class JsonLinesSource:
    """One JSONL file of metrics."""

    def __init__(self, path: Path, number: int | None = None):
        self.path, self.number = path, number
        self.file, self.columns, self.broken = textlogs.LineFile(path), Columns(), ""
        self._sessions: list[Session] = []

    def update(self) -> bool:
        """Read what was added. True when points came."""
        lines = self.file.read()
        if self.file.restarted:
            self.columns, self.broken, self._sessions = Columns(), "", []
        if self.broken:
            return False
        rows, self.broken = _rows_before_damage(self._rows(lines))
        self.file.lines += len(lines)
        if rows:
            self.columns = Columns.joined([self.columns, Columns.of_rows(rows)])
            self._sessions = split(self.path.name, self.columns, (), self.number)
        return bool(rows)

    def _rows(self, lines: list[str]) -> Iterator[textlogs.Row]:
        return textlogs.json_rows(lines, self.path, self.file.lines + 1)

    def sessions(self) -> list[Session]:
        """The same objects until an update adds points."""
        return self._sessions

    def damage(self) -> str:
        return self.broken

    def notes(self) -> list[str]:
        return _unfinished(self.path, self.file.unfinished)


class ConsoleSource(JsonLinesSource):
    """One log of verl's console output."""

    def _rows(self, lines: list[str]) -> Iterator[textlogs.Row]:
        return textlogs.console_rows(lines)


class TableSource:
    """One CSV table or trainer_state.json; read anew when it changed."""

    def __init__(self, path: Path, number: int | None = None):
        self.path, self.number, self.columns, self.broken, self._seen = path, number, Columns(), "", None

    def update(self) -> bool:
        """Read the table if it changed. True when it did."""
        status = self.path.stat()
        seen = (status.st_size, status.st_mtime_ns)
        if seen == self._seen:
            return False
        rows, self.broken = _rows_before_damage(self._read())
        self.columns, self._seen = Columns.of_rows(rows), seen
        return True

    def _read(self) -> Iterator[textlogs.Row]:
        if self.path.suffix == ".json":
            return textlogs.trainer_state_rows(self.path.read_text(errors="replace"), self.path)
        return tables.rows(self.path)

    def sessions(self) -> list[Session]:
        return split(self.path.name, self.columns, (), self.number)

    def damage(self) -> str:
        return self.broken

    def notes(self) -> list[str]:
        return []


Source = EventSource | JsonLinesSource | ConsoleSource | TableSource


def open_file(path: Path, number: int | None = None) -> Source:
    """The source for a file, chosen by its name, and for other names by its first lines.

    Raises:
        Fault: the file holds nothing that any reader knows.
    """
    name = path.name
    if "tfevents" in name:
        return EventSource(path, number)
    if name.endswith((".csv", ".csv.gz", ".json")):
        return TableSource(path, number)
    if name.endswith((".jsonl", ".ndjson")):
        return JsonLinesSource(path, number)
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if head.lstrip().startswith(b"{"):
        return JsonLinesSource(path, number)
    if b"\0" not in head:
        return ConsoleSource(path, number)
    raise Fault(f"{path} is none of: event file (*tfevents*), .jsonl, .json, .csv, .csv.gz, console log")


def _rows_before_damage(rows: Iterator[textlogs.Row]) -> tuple[list[textlogs.Row], str]:
    """The rows up to where their parser raised a Fault, and what it said; empty when it did not."""
    read: list[textlogs.Row] = []
    try:
        for row in rows:
            read.append(row)
    except Fault as fault:
        return read, str(fault)
    return read, ""


def _unfinished(path: Path, count: int) -> list[str]:
    if not count:
        return []
    return [f"{path.name}: its last {count} bytes are an unfinished record: still being written, or cut by a crash"]
