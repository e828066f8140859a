"""Which event file belongs to which attempt of a run directory: decided by the values both logs hold.

An attempt's metrics.jsonl has its number in its path but no clock; event files have a clock, which may have been set
back, and rounded values. Times and throughputs never repeat, so equal values prove that both come from one process.
"""

from __future__ import annotations

import numpy as np

from atlasrl.curves.columns import Columns
from atlasrl.curves.sessions import Session

AGREEMENT = 0.99


def paired(events: list[Session], metrics: list[Session]) -> list[Session]:
    """Sessions with event and JSONL points of the same attempt united; whatever has no partner stays as it is."""
    united, free = [], list(metrics)
    for event in events:
        partner = max(metrics, key=lambda m: _agreement(event.columns, m.columns), default=None)
        if partner is None or _agreement(event.columns, partner.columns)[0] < AGREEMENT:
            united.append(event)
        elif partner in free:
            free.remove(partner)
            columns = _united(event.columns, partner.columns)
            source = f"attempt {partner.number}" if partner.number is not None else event.source
            united.append(Session(source, columns, min(event.begin, partner.begin), partner.number))
        else:
            united.append(Session(event.source, event.columns, event.begin, partner.number))
    return united + free


def _agreement(one: Columns, other: Columns) -> tuple[float, int]:
    """The share of common points with the same float32 value, and their number."""
    _, ours, theirs = _common(one, other)
    if not len(ours):
        return 0.0, 0
    same = _float32(one.value[ours]).view(np.uint32) == _float32(other.value[theirs]).view(np.uint32)
    nan = np.isnan(one.value[ours]) & np.isnan(other.value[theirs])
    return float((same | nan).mean()), len(ours)


def _united(event: Columns, exact: Columns) -> Columns:
    """The event file's points with the exact values of the JSONL, and the JSONL's points that it lacks."""
    (event, exact), ours, theirs = _common(event, exact)
    event.value[ours] = exact.value[theirs]
    lacking = np.setdiff1d(np.arange(len(exact)), theirs)
    joined = Columns.joined([event, exact.take(lacking)])
    return joined.take(np.argsort(joined.step, kind="stable"))


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
