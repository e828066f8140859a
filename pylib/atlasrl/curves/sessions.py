"""Restart semantics: which of the points that several processes wrote count.

A run that is killed and resumed logs some steps twice, because logs are written more often than checkpoints. The rule
is that of TensorBoard's `purge_step`: a later session wins from its first step on. Merging "the last value of each
step" instead would keep values of a timeline that was given up.

What came later is told by what was written, never by file names. Clocks differ between hosts and are set back, so a
session that starts at step s > 1 must follow one that reached step s - 1; the clock only decides between sessions
which that leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from atlasrl.curves.columns import Columns
from atlasrl.curves.curve import Attempt, Curve, Reading
from atlasrl.errors import Fault


@dataclass(eq=False)
class Session:
    """What one process wrote without going back. `begin` is the step from which it replaces earlier sessions.

    `number` is the attempt's number where it is known (attempts/0002, order on the command line); `after` is the
    session before it in the same file.
    """

    source: str
    columns: Columns
    begin: int
    number: int | None = None
    after: Session | None = None

    @property
    def clock(self) -> float:
        walls = self.columns.wall
        return float(walls[0]) if len(walls) else float("nan")

    @property
    def last_step(self) -> int:
        return int(self.columns.step.max())

    def tags(self) -> set[str]:
        return {self.columns.tags[i] for i in np.unique(self.columns.tag)}


def split(
    source: str, columns: Columns, starts: Iterable[tuple[int, int]] = (), number: int | None = None
) -> list[Session]:
    """Cut the points of one file where its writer went back: at a SessionLog.START, or where a tag repeats steps.

    `starts` are (points before it, purge step). Values that are merely out of order, without any step twice, are one
    session: nothing was given up.
    """
    if not len(columns):
        return []
    purges = {at: step for at, step in starts if at < len(columns)}
    cuts = sorted({0, *purges} | set(_restarts(columns, sorted(purges))))
    sessions = []
    for first, end in zip(cuts, [*cuts[1:], len(columns)], strict=True):
        part = columns.take(slice(first, end))
        begin = purges.get(first)
        before = sessions[-1] if sessions else None
        sessions.append(Session(source, part, _first_step(part) if begin is None else begin, number, before))
    return sessions


def _restarts(columns: Columns, known: list[int]) -> list[int]:
    """Positions where some tag goes back in steps since the last cut."""
    order = np.argsort(columns.tag, kind="stable")
    tag, step = columns.tag[order], columns.step[order]
    back = np.flatnonzero((tag[1:] == tag[:-1]) & (step[1:] < step[:-1]))
    if not len(back):
        return []
    repeats = _tags_with_repeats(columns)
    pairs = sorted((int(order[i + 1]), int(order[i])) for i in back if int(tag[i]) in repeats)
    cuts, cut, pending = [], 0, list(known)
    for position, previous in pairs:
        while pending and pending[0] <= position:
            cut = max(cut, pending.pop(0))
        if previous >= cut:
            cut = position
            cuts.append(cut)
    return cuts


def _tags_with_repeats(columns: Columns) -> set[int]:
    order = np.lexsort((columns.step, columns.tag))
    tag, step = columns.tag[order], columns.step[order]
    return set(np.unique(tag[1:][(tag[1:] == tag[:-1]) & (step[1:] == step[:-1])]).tolist())


def _first_step(columns: Columns) -> int:
    """The first step of most tags: a validation before training logs its own tags one step earlier."""
    _, first = np.unique(columns.tag, return_index=True)
    steps, counts = np.unique(columns.step[first], return_counts=True)
    return int(steps[counts.argmax()])


def order(sessions: list[Session], notes: list[str]) -> list[Session]:
    """Sessions in the order they were written.

    Raises:
        Fault: two sessions could have come in either order, the order matters, and the clock is proven wrong.
    """
    waiting = sorted(sessions, key=_by_clock)
    placed: list[Session] = []
    reached, clock_is_wrong = None, False
    while waiting:
        next_number = min((s.number for s in waiting if s.number is not None), default=None)
        possible = [s for s in waiting if s.number in (None, next_number) and s.after not in waiting]
        if reached is None:
            lowest = min(s.begin for s in possible)
            ready = [s for s in possible if s.begin == lowest or s.number is not None]
        else:
            ready = [s for s in possible if s.begin <= reached + 1 or s.number is not None] or possible
        chosen = next((s for s in ready if s.number == next_number and s.number is not None), ready[0])
        if chosen.number is None:
            clock_is_wrong = clock_is_wrong or chosen is not waiting[0] or any(s.clock > chosen.clock for s in placed)
            rivals = [
                s for s in ready if s is not chosen and s.begin <= chosen.last_step and chosen.begin <= s.last_step
            ]
            if clock_is_wrong and rivals:
                raise Fault(_ambiguous(chosen, rivals[0]))
        waiting.remove(chosen)
        placed.append(chosen)
        reached = chosen.last_step if reached is None else max(reached, chosen.last_step)
    clocks = [s.clock for s in placed if not np.isnan(s.clock)]
    if any(later < earlier for earlier, later in pairwise(clocks)):
        notes.append("the clock went back between attempts; it was not used to order them")
    return placed


def _by_clock(session: Session) -> tuple:
    return (np.isnan(session.clock), np.nan_to_num(session.clock), session.source)


def _ambiguous(one: Session, other: Session) -> str:
    return (
        f"cannot tell whether {one.source} (steps {one.begin}-{one.last_step}) or {other.source} (steps {other.begin}-"
        f"{other.last_step}) was written first: both continue the same steps, and the clock went back in this run; "
        "give the files in order, separated by commas"
    )


def merge(sessions: list[Session], reading: Reading) -> tuple[dict[str, Curve], list[Attempt]]:
    """Curves by tag, and the attempts of the writer with the most points.

    Files that share no tag (trainer on one host, validation on another) do not replace each other. Counts what is
    dropped in `reading`; raises what `order` raises.
    """
    reading.points += sum(len(s.columns) for s in sessions)
    writers = [order(writer, reading.notes) for writer in _writers([s for s in sessions if len(s.columns)])]
    curves: dict[str, Curve] = {}
    attempts: list[Attempt] = []
    for writer in sorted(writers, key=lambda w: sum(len(s.columns) for s in w), reverse=True):
        found, made = _merge_writer(writer, reading)
        curves.update(found)
        attempts = attempts or made
    return dict(sorted(curves.items())), attempts


def _writers(sessions: list[Session]) -> list[list[Session]]:
    """Groups of sessions connected by common tags."""
    groups: list[tuple[set[str], list[Session]]] = []
    for session in sessions:
        tags, members = session.tags(), [session]
        for group in [g for g in groups if g[0] & tags]:
            groups.remove(group)
            tags, members = tags | group[0], group[1] + members
        groups.append((tags, members))
    return [members for _, members in groups]


def _merge_writer(sessions: list[Session], reading: Reading) -> tuple[dict[str, Curve], list[Attempt]]:
    """The later session wins from its first step on, tag by tag."""
    points = Columns.joined([s.columns for s in sessions])
    ends = np.cumsum([len(s.columns) for s in sessions])
    limit = np.full(len(points.tags), np.iinfo(np.int64).max)
    keep = np.ones(len(points), bool)
    attempts = []
    for session, end in zip(reversed(sessions), reversed(ends), strict=True):
        part = slice(end - len(session.columns), end)
        tag, step = points.tag[part], points.step[part]
        keep[part] = step < limit[tag]
        first = np.full(len(limit), np.iinfo(np.int64).max)
        np.minimum.at(first, tag, step)
        limit = np.minimum(limit, np.minimum(first, session.begin))
        replaced = int((~keep[part]).sum())
        reading.replaced += replaced
        attempts.append(Attempt(session.source, int(session.begin), session.last_step, replaced))
    return _curves(points, np.flatnonzero(keep), reading), attempts[::-1]


def _curves(points: Columns, kept: np.ndarray, reading: Reading) -> dict[str, Curve]:
    """Sort by tag and step; of a step that was logged twice the last one counts."""
    kept = kept[np.lexsort((kept, points.step[kept], points.tag[kept]))]
    tag, step = points.tag[kept], points.step[kept]
    last = np.append((tag[1:] != tag[:-1]) | (step[1:] != step[:-1]), True)[: len(kept)]
    reading.repeated += int((~last).sum())
    kept = kept[last]
    tag = points.tag[kept]
    present, first = np.unique(tag, return_index=True)
    return {
        points.tags[number]: Curve(points.step[part], points.value[part], points.wall[part])
        for number, part in zip(present.tolist(), np.split(kept, first[1:]), strict=True)
    }
