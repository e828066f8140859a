"""Scalars from text: JSON lines, verl's console output, Hugging Face's trainer_state.json.

Each parser takes complete lines and yields (tag, step, value, wall) rows in written order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from atlasrl.errors import Fault

Row = tuple[str, int, float, float]

STEP_KEYS = ("step", "_step", "global_step", "training/global_step", "current_steps", "iteration")
CONSOLE_STEP = re.compile(r"\bstep:(\d{1,18}) - ")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
CONSOLE_VALUE = re.compile(r"(?:np\.\w+\()?([-+0-9.a-zA-Z]+)\)?(?:\s|$)")


class LineFile:
    """A text file that may still grow; each `read` returns the complete lines added since the last one.

    A last line without its newline is still being written, or was cut by a crash: `unfinished` counts its bytes. A file
    that became shorter was started anew (verl's file logger opens it with "w"): `restarted` says so.
    """

    def __init__(self, path: Path):
        self.path = path
        self.position = self.size = self.unfinished = self.lines = 0
        self.restarted = False

    def read(self) -> list[str]:
        with self.path.open("rb") as file:
            self.size = file.seek(0, 2)
            self.restarted = self.size < self.position
            if self.restarted:
                self.position = self.lines = 0
            file.seek(self.position)
            data = file.read()
        complete, newline, rest = data.rpartition(b"\n")
        self.position += len(complete) + len(newline)
        self.unfinished = len(rest)
        return complete.decode(errors="replace").split("\n") if newline else []


def json_rows(lines: list[str], path: Path, first_line: int = 1) -> Iterator[Row]:
    """Rows of JSON lines: verl's {"step", "data"}, W&B's flat history, LLaMA-Factory's trainer_log.

    Raises:
        Fault: a complete line is no JSON object or has no step.
    """
    for number, line in enumerate(lines, first_line):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise Fault(f"{path}:{number} is not a JSON object; the file is damaged there")
        yield from _record_rows(record, f"{path}:{number}")


def trainer_state_rows(text: str, path: Path) -> Iterator[Row]:
    """Rows of the `log_history` of Hugging Face's trainer_state.json (TRL, LLaMA-Factory).

    Raises:
        Fault: the file is not JSON or has no log_history.
    """
    try:
        history = json.loads(text)["log_history"]
        records = [dict(record) for record in history]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Fault(f"{path} is no trainer_state.json: it has no `log_history` list of objects") from None
    for number, record in enumerate(records, 1):
        yield from _record_rows(record, f"{path}: log_history entry {number}")


def console_rows(lines: list[str]) -> Iterator[Row]:
    """Rows of verl's console lines `step:12 - actor/pg_loss:0.1 - ...`; every other line is passed over."""
    for line in lines:
        match = CONSOLE_STEP.search(line)
        if match is None:
            continue
        for item in ANSI.sub("", line[match.end() :]).split(" - "):
            tag, _, text = item.rpartition(":")
            found = CONSOLE_VALUE.match(text)
            value = number_in(found[1]) if found else None
            if tag and value is not None:
                yield tag, int(match[1]), value, math.nan


def number_in(text: str) -> float | None:
    """The number a cell holds, NaN and infinity included; None for other text."""
    try:
        return float(text)
    except ValueError:
        return None


def _record_rows(record: dict, where: str) -> Iterator[Row]:
    data = record.get("data")
    if not isinstance(data, dict):
        data = record
    key = next((k for k in STEP_KEYS if _is_step(record.get(k))), None)
    if key is None:
        raise Fault(f"{where} has no step; looked for {', '.join(STEP_KEYS)}")
    wall = record.get("_timestamp", record.get("timestamp"))
    wall = float(wall) if isinstance(wall, (int, float)) else math.nan
    for tag, value in data.items():
        if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):  # W&B writes them as strings
            value = float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and tag not in (*STEP_KEYS, "_timestamp"):
            yield tag, int(record[key]), _float(value), wall


def _is_step(value: object) -> bool:
    """Whether a value is a whole number that 64 bits hold; NaN is none."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**62 and value == int(value)
    )


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf
