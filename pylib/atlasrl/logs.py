"""The log files of a run: choose, show the tail, follow."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from atlasrl.errors import Fault
from atlasrl.rundir import RunDir

POLL_SECONDS = 0.3
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def select(run: RunDir, attempt: int | None, stage: str | None, node: int | None) -> list[Path]:
    """Log files of one attempt, oldest first.

    Raises:
        Fault: no such attempt or no such log; the message lists what there is.
    """
    attempts = run.attempts()
    chosen = [a for a in attempts if attempt is None or a.number == attempt][-1:]
    if not chosen:
        raise Fault(f"run {run.name} has no attempt {attempt or ''}; it has {len(attempts)}")
    files = sorted(chosen[0].logs.glob("*.log"), key=lambda file: file.stat().st_mtime)
    found = [
        file
        for file in files
        if (
            stage is None
            or file.stem.rpartition("-")[0] == stage
            or (file.stem.startswith(stage) and "-" not in file.stem)
        )
        and (node is None or file.stem.endswith(f"node{node}"))
    ]
    if not found:
        raise Fault(
            f"no such log in {chosen[0].logs}; there are {', '.join(file.stem for file in files) or 'none yet'}"
        )
    return found


def tail(file: Path, lines: int) -> list[str]:
    """The last lines of a file, undecodable bytes replaced."""
    with file.open(errors="replace") as stream:
        return [line.rstrip("\n") for line in deque(stream, lines)]


def added(files: list[Path]) -> Iterator[tuple[Path, str]]:
    """Lines that are appended from now on, for ever."""
    streams = {file: file.open(errors="replace") for file in files}
    try:
        for stream in streams.values():
            stream.seek(0, 2)
        while True:
            for file, stream in streams.items():
                for line in stream:
                    yield file, line.rstrip("\n")
            time.sleep(POLL_SECONDS)
    finally:
        for stream in streams.values():
            stream.close()


def last_line(log: Path, start: int = 0) -> str:
    """What a log says of its end: its first `error:` line behind byte `start`, else the last line with words."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 65536))
            text = COLOURS.sub("", file.read().decode(errors="replace"))
    except OSError:
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    more = f" (and {len(errors) - 1} more: {log})" if len(errors) > 1 else ""
    return (errors[:1] or lines[-1:] or ["(nothing in its log)"])[0][:500] + more
