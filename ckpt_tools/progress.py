"""Progress in bytes with the time left: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt_tools.files import human

LINE_EVERY = 10.0
"""Seconds between two lines in a log."""


@contextmanager
def showing(label: str, quiet: bool = False) -> Iterator:
    """Give a function (bytes done, bytes in total) that shows progress on stderr."""
    if quiet:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _Lines(label)


def _bar():
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


class _Lines:
    def __init__(self, label: str):
        self.label, self.started, self.printed = label, time.monotonic(), time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.printed < LINE_EVERY or not done:
            return
        self.printed = now
        left = (now - self.started) / done * (total - done)
        print(f"{self.label}: {human(done)} of {human(total)}, about {left:.0f} s left", file=sys.stderr, flush=True)
