"""What the sampler of a CPU run wrote (memory-node<R>.jsonl of an attempt): resident memory, process by process, phase
by phase.

A phase is what a Ray worker calls itself while it works. Its growth is the highest sample over what it began with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from atlasrl.errors import UsageFault
from atlasrl.memory.job import MIB
from atlasrl.rundir import AttemptDir, RunDir, read_json_lines

SMALL = 128 * MIB  # processes that never held more are told as one line


@dataclass
class Phase:
    """All times that one process did one thing."""

    times: int = 0
    peak: int = 0
    growths: list[int] = field(default_factory=list)


def sampled_attempt(run: RunDir) -> AttemptDir:
    """The newest attempt that has samples.

    Raises:
        UsageFault: none has.
    """
    for attempt in reversed(run.attempts()):
        if _files(attempt):
            return attempt
    raise UsageFault(f"run {run.name} has no samples of memory; train it with --set probe.memory=true")


def _files(attempt: AttemptDir) -> list[Path]:
    return sorted(attempt.path.glob("memory-node*.jsonl"))


def phases(records: Iterable[dict]) -> dict[tuple[int, str], Phase]:
    """(pid, name) -> what was sampled, in the order of first appearance."""
    found: dict[tuple[int, str], Phase] = defaultdict(Phase)
    doing: dict[int, tuple[str, int]] = {}
    held: dict[int, int] = {}
    for record in records:
        pid, name, rss = record["pid"], record["name"], record["rss"]
        phase = found[pid, name]
        if doing.get(pid, ("", 0))[0] != name:
            doing[pid] = name, held.get(pid, rss)
            phase.times += 1
            phase.growths.append(0)
        phase.peak = max(phase.peak, rss)
        phase.growths[-1] = max(phase.growths[-1], rss - doing[pid][1])
        held[pid] = rss
    return dict(found)


def lines(attempt: AttemptDir) -> Iterator[str]:
    """For a person, node by node."""
    for file in _files(attempt):
        found = phases(read_json_lines(file))
        peaks: dict[int, int] = defaultdict(int)
        for (pid, _), phase in found.items():
            peaks[pid] = max(peaks[pid], phase.peak)
        node = file.stem.removeprefix("memory-")
        for (pid, name), phase in found.items():
            if peaks[pid] >= SMALL:
                grown = sorted(phase.growths)[len(phase.growths) // 2] / MIB
                at_most = f"at most {phase.peak / MIB:7.1f} MiB"
                yield f"{node} {pid:>7}  {name:48} {phase.times:4} x, {at_most}, grows by {grown:6.1f}"
        small = [peak for peak in peaks.values() if peak < SMALL]
        if small:
            yield f"{node}          {len(small)} more processes, none above {max(small) / MIB:.0f} MiB"
