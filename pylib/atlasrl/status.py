"""The state of runs as a table for people and as JSON for machines."""

from __future__ import annotations

import time

from rich.table import Table

from atlasrl.progress import Progress


def tree(progress: Progress) -> dict:
    """One run as plain data; times in seconds."""
    return {
        "run": progress.name,
        "state": progress.state,
        "attempt": progress.attempt,
        "job": progress.job,
        "stage": progress.stage,
        "step": progress.step,
        "steps": progress.total,
        "reward": progress.reward,
        "checkpoint": progress.checkpoint,
        "age_seconds": round(time.time() - progress.started) if progress.started else None,
        "eta_seconds": progress.eta_seconds,
        "message": progress.message,
    }


def table(states: list[Progress]) -> Table:
    """All runs, one line each; why a run ended stands in the last column."""
    shown = Table(box=None, pad_edge=False)
    for name in ("run", "state", "att", "job", "stage", "step", "reward", "ckpt", "age", "why"):
        numeric = name in ("att", "step", "reward", "ckpt", "age")
        shown.add_column(name, justify="right" if numeric else "left", no_wrap=name != "why", overflow="fold")
    for state in states:
        shown.add_row(
            state.name,
            state.state,
            str(state.attempt),
            str(state.job or "-"),
            state.stage or "-",
            f"{state.step}/{state.total}",
            "-" if state.reward is None else f"{state.reward:+.3f}",
            str(state.checkpoint or "-"),
            age(time.time() - state.started) if state.started else "-",
            state.message,
        )
    return shown


def age(seconds: float) -> str:
    """A duration in its largest unit: 42s, 17m, 5h, 3d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
