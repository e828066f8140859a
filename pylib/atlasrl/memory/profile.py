"""What a profile says: peaks, HCCL's share, whether sleep released memory, leaks, who held memory at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atlasrl.errors import Fault
from atlasrl.memory import ascend
from atlasrl.memory.curve import Curve
from atlasrl.memory.job import GIB
from atlasrl.memory.model import Prediction

ROLLOUT = ("rollout", "gen")  # names of the phase whose end should release the engine's memory
LEAK = 2**20  # bytes a second of steady growth that are worth a word


@dataclass(frozen=True)
class Marks:
    """Phases on the profile's time axis: `names[i]` lasts from `times[i]` to `times[i + 1]`, microseconds."""

    times: np.ndarray
    names: tuple[str, ...]

    def intervals(self, *names: str) -> list[int]:
        """Interval numbers of a Curve (0 is before the first mark) that carry one of the names."""
        return [i + 1 for i, name in enumerate(self.names) if name in names]


NO_MARKS = Marks(np.empty(0), ())


def read_marks(file: Path) -> Marks:
    """Read phases.jsonl: one {"time": seconds since 1970, "phase": name} per begin, "phase": null for none.

    Raises:
        Fault: not such a file, or times that go back.
    """
    from atlasrl.rundir import read_json_lines

    lines = [*read_json_lines(file)]
    try:
        times = np.array([float(line["time"]) for line in lines]) * 1e6
        names = tuple(line["phase"] or "" for line in lines)
    except (KeyError, TypeError, ValueError):
        raise Fault(f'{file} is no phase file: every line is {{"time": seconds, "phase": name or null}}') from None
    if (np.diff(times) < 0).any():
        raise Fault(f"{file}: times go back; phases of several processes are mixed, keep one file for each")
    return Marks(times, names)


def recognise(total: Curve) -> Marks:
    """Guess phases from the curve alone: long flat stretches near the top are rollouts, the rest is training.

    vLLM takes its whole share at once and keeps it, so a rollout is a plateau; training saws. Empty when nothing in the
    curve looks like sleep.
    """
    times, low, high = total.envelope()
    if len(times) < 10 or low.min() > 0.8 * high.max():
        return NO_MARKS
    level = (low.min() + high.max()) / 2
    upper = low > level
    starts = np.r_[0, np.flatnonzero(np.diff(upper)) + 1]
    marks, names = [], []
    for start, end in zip(starts, np.r_[starts[1:], len(times)], strict=True):
        part = slice(start, end)
        flat = end - start >= 4 and high[part].max() - np.median(low[part]) < 0.05 * high[part].max()
        name = "rollout" if upper[start] and flat else "training"
        if not names or names[-1] != name:
            marks.append(times[start])
            names.append(name)
    return Marks(np.array(marks), tuple(names)) if "rollout" in names else NO_MARKS


@dataclass
class Profile:
    """Curves of one rank and what they tell."""

    folder: Path
    curves: dict[str, Curve]
    marks: Marks = NO_MARKS
    operators: ascend.Operators | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> Curve | None:
        return _total(self.curves)


def read(folder: Path, marks: Marks = NO_MARKS) -> list[Profile]:
    """Read every rank's tables below a folder; without marks the phases are guessed and the tables read again.

    Raises:
        UsageFault: no tables. Fault: damaged ones.
    """
    by_folder: dict[Path, list[ascend.Table]] = {}
    for table in ascend.tables(folder):
        by_folder.setdefault(table.path.parent, []).append(table)
    profiles = []
    for place, group in sorted(by_folder.items()):
        curves = _curves(group, marks)
        own = marks
        if not marks.names and (total := _total(curves)) and (guessed := recognise(total)).names:
            own, curves = guessed, _curves(group, guessed)
        profile = Profile(place, curves, own, _operators(group, curves))
        if own is not marks:
            profile.notes.append("phases were recognised from the curve; --phases gives the real ones")
        for name, curve in curves.items():
            if curve.count > 2 and curve.first_time == curve.last_time:
                profile.notes.append(
                    f"all {curve.count} times of {name} are equal: the file went through a spreadsheet"
                )
        profiles.append(profile)
    return profiles


def _curves(tables: list[ascend.Table], marks: Marks) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for table in tables:
        if table.kind == "operator":
            continue
        for name, curve in ascend.curves(table, marks.times).items():
            if name not in found or curve.peak > found[name].peak:  # both tables hold APP; one sees shorter peaks
                found[name] = curve
    return found


def _total(curves: dict[str, Curve]) -> Curve | None:
    """The process's whole device memory: CANN's APP, else what the framework reserved."""
    return next((curves[name] for name in ("APP", "PTA+GE", "PTA") if name in curves), None)


def _operators(tables: list[ascend.Table], curves: dict[str, Curve]) -> ascend.Operators | None:
    table = next((table for table in tables if table.kind == "operator"), None)
    if table is None:
        return None
    allocated = curves.get("PTA allocated") or curves.get("PTA+GE allocated")
    return ascend.operators_at(table, allocated.peak_time if allocated else ascend.peak_of_operators(table)[0])


def hccl_share(p: Profile) -> float | None:
    """HCCL's part of the process's peak; None when the profile has no HCCL row."""
    if "HCCL" not in p.curves or p.total is None:
        return None
    return p.curves["HCCL"].peak / p.total.peak


@dataclass(frozen=True)
class Sleep:
    """One end of a rollout phase: bytes before it and the lowest after it."""

    time: float
    before: float
    after: float

    @property
    def released(self) -> float:
        return self.before - self.after


def sleeps(p: Profile) -> list[Sleep]:
    """What every rollout's end gave back, from the total curve."""
    if p.total is None:
        return []
    found = []
    for i in p.marks.intervals(*ROLLOUT):
        before, after = (
            p.total.interval_last[i],
            p.total.interval_low[i + 1] if i + 1 < len(p.total.interval_low) else np.nan,
        )
        if np.isfinite(before) and np.isfinite(after):
            found.append(
                Sleep(float(p.marks.times[i]) if i < len(p.marks.times) else np.nan, float(before), float(after))
            )
    return found


def sleep_verdict(found: list[Sleep], prediction: Prediction | None) -> str:
    """Did sleep release the weights?"""
    if not found:
        return "sleep: unknown, no rollout phase is marked; pass --phases"
    released = float(np.median([s.released for s in found]))
    text = f"sleep: {released / GIB:.1f} GiB come back after a rollout (median of {len(found)})"
    if prediction is None:
        return text if released > 0 else f"{text}: nothing is released, sleep mode is off or broken"
    engine = prediction.stages[0].phases["rollout"]
    weights = engine["rollout weights"] + engine.get("absorbed copies", 0)
    cache = engine["KV cache"]
    if released >= 0.9 * (weights + cache):
        return f"{text}: weights and KV cache, as predicted ({(weights + cache) / GIB:.1f})"
    if released >= 0.9 * cache:
        return (
            f"{text}: the KV cache ({cache / GIB:.1f}) but NOT the weights ({weights / GIB:.1f}); check the sleep level"
        )
    return f"{text}: less than the KV cache alone ({cache / GIB:.1f}); sleep did not work"


def phase_peaks(p: Profile) -> dict[str, float]:
    """Highest total bytes of every marked phase."""
    peaks: dict[str, float] = {}
    for i, name in enumerate(p.marks.names):
        high = p.total.interval_high[i + 1] if p.total else -np.inf
        if name and np.isfinite(high):
            peaks[name] = max(peaks.get(name, 0.0), float(high))
    return peaks


def leak(p: Profile) -> tuple[str, float] | None:
    """(curve, bytes a second) of the allocated curve that grows steadily; None when none does."""
    names = [n for n in p.curves if n.endswith(" allocated")] or [n for n in ("APP", "PTA") if n in p.curves]
    slopes = [(name, p.curves[name].growth()) for name in names]
    worst = max(slopes, key=lambda item: item[1], default=("", 0.0))
    return worst if worst[1] > LEAK else None


def lines(p: Profile, prediction: Prediction | None = None, top: int = 5) -> Iterator[str]:
    """The findings of one rank as text."""
    yield str(p.folder)
    if p.total is None:
        yield "  no total: the tables hold neither APP nor PTA rows"
        return
    for name in sorted(p.curves, key=lambda name: -p.curves[name].peak)[:8]:
        yield f"  {p.curves[name].peak / GIB:8.2f} GiB  peak of {name}"
    if (share := hccl_share(p)) is not None:
        yield f"  HCCL holds {share:.1%} of the process's peak"
    reserved, allocated = p.curves.get("PTA"), p.curves.get("PTA allocated")
    if reserved and allocated:
        yield f"  {(reserved.peak - allocated.peak) / GIB:8.2f} GiB  reserved but never allocated at once (PTA)"
    yield f"  {sleep_verdict(sleeps(p), prediction)}"
    growing = leak(p)
    yield f"  leak: {growing[0]} grows by {growing[1] / 2**20:.1f} MiB/s" if growing else "  leak: none"
    for name, peak in phase_peaks(p).items():
        expected = _predicted(prediction, name)
        against = f", predicted {expected / GIB:.2f} ({peak / expected - 1:+.0%})" if expected else ""
        yield f"  {peak / GIB:8.2f} GiB  highest in {name}{against}"
    if p.operators:
        for name, size in p.operators.holders.most_common(top):
            yield f"  {size / GIB:8.2f} GiB  held by {name} at the peak"
    yield from (f"  note: {note}" for note in p.notes)


# verl's timing names of the phases of the model.
TIMED = {"gen": "rollout", "old_log_prob": "log_prob", "ref": "reference", "update_actor": "update"}


def _predicted(prediction: Prediction | None, phase: str) -> int | None:
    if prediction is None:
        return None
    name = TIMED.get(phase, phase)
    return max((stage.peaks[name] for stage in prediction.stages if name in stage.peaks), default=None)


def as_json(p: Profile) -> dict:
    growing = leak(p)
    return {
        "folder": str(p.folder),
        "peaks": {name: int(curve.peak) for name, curve in p.curves.items()},
        "hccl_share": hccl_share(p),
        "sleeps": [{"before": s.before, "after": s.after} for s in sleeps(p)],
        "leak": {"curve": growing[0], "bytes_per_second": growing[1]} if growing else None,
        "phases": phase_peaks(p),
        "holders": dict(p.operators.holders.most_common(20)) if p.operators else None,
        "notes": p.notes,
    }
