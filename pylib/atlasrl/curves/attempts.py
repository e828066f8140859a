"""Which event file belongs to which attempt of a run directory: decided by the values both logs hold.

An attempt's metrics.jsonl has its number in its path but no clock; event files have a clock, which may have been set
back, and rounded values. Times and throughputs never repeat, so equal values prove that both come from one process.
"""

from __future__ import annotations

import numpy as np

from atlasrl.curves.columns import Columns
from atlasrl.curves.sessions import Session

AGREEMENT = 0.99
SAMPLE = 2000  # points of an event file that are compared


class Pairing:
    """Pairs sessions, and remembers what it found: while a run grows, its sessions are the same until they change."""

    def __init__(self) -> None:
        self._agreements: dict[tuple[Session, Session], tuple[float, int]] = {}
        self._unions: dict[tuple[Session, Session], Session] = {}

    def paired(self, events: list[Session], metrics: list[Session]) -> list[Session]:
        """Sessions with event and JSONL points of the same attempt united; what has no partner stays as it is."""
        agreements, unions = self._agreements, self._unions
        self._agreements, self._unions = {}, {}
        found, free = [], list(metrics)
        for event in events:
            overlapping = [m for m in metrics if m.begin <= event.last_step and event.begin <= m.last_step]
            for metric in overlapping:
                key = (event, metric)
                self._agreements[key] = agreements.get(key) or _agreement(event.columns, metric.columns)
            partner = max(overlapping, key=lambda metric: self._agreements[event, metric], default=None)
            if partner is None or self._agreements[event, partner][0] < AGREEMENT:
                found.append(event)
            elif partner in free:
                free.remove(partner)
                key = (event, partner)
                self._unions[key] = unions.get(key) or _united(event, partner)
                found.append(self._unions[key])
            else:
                found.append(Session(event.source, event.columns, event.begin, partner.number))
        return found + free


def _agreement(one: Columns, other: Columns) -> tuple[float, int]:
    """The share of common points with the same float32 value, and their number, among the first points of `one`."""
    one = one.take(slice(SAMPLE))
    _, ours, theirs = _common(one, other)
    if not len(ours):
        return 0.0, 0
    same = _float32(one.value[ours]).view(np.uint32) == _float32(other.value[theirs]).view(np.uint32)
    nan = np.isnan(one.value[ours]) & np.isnan(other.value[theirs])
    return float((same | nan).mean()), len(ours)


def _united(event: Session, exact: Session) -> Session:
    """The event file's points with the exact values of the JSONL, and the JSONL's points that it lacks."""
    (points, values), ours, theirs = _common(event.columns, exact.columns)
    points.value[ours] = values.value[theirs]
    lacking = np.setdiff1d(np.arange(len(values)), theirs)
    joined = Columns.joined([points, values.take(lacking)])
    columns = joined.take(np.argsort(joined.step, kind="stable"))
    source = f"attempt {exact.number}" if exact.number is not None else event.source
    return Session(source, columns, min(event.begin, exact.begin), exact.number)


def _common(one: Columns, other: Columns) -> tuple[tuple[Columns, Columns], np.ndarray, np.ndarray]:
    """Both with the same tag numbers, and the positions of the points (tag, step) that both have."""
    numbers: dict[str, int] = {}
    one, other = one.renumbered(numbers), other.renumbered(numbers)
    one = Columns(list(numbers), one.tag, one.step, one.value.copy(), one.wall)
    _, ours, theirs = np.intersect1d(_keys(one), _keys(other), return_indices=True)
    return (one, other), ours, theirs


def _keys(columns: Columns) -> np.ndarray:
    return columns.tag.astype(np.int64) << 40 ^ columns.step


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
