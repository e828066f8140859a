"""What the sampler of a CPU run wrote (memory-node<R>.jsonl of an attempt): resident memory, process by process, phase
by phase, beside what the model predicts for its FSDP2 workers.

A phase is what a Ray worker calls itself while it works. Its growth is the highest sample over what it began with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from atlasrl.errors import UsageFault
from atlasrl.memory import sharded
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.job import MIB
from atlasrl.memory.sharded import Batch
from atlasrl.rundir import RunDir, read_json_lines

SMALL = 64 * MIB  # processes that never held more are told as one line
PREDICTED = {
    "actor_rollout_compute_log_prob": sharded.score_growth,
    "actor_rollout_update_actor": sharded.update_growth,
}


@dataclass
class Phase:
    """All times that one process did one thing."""

    times: int = 0
    peak: int = 0
    growths: list[int] = field(default_factory=list)


def files(run: RunDir) -> list[Path]:
    """The samples of the newest attempt that has some.

    Raises:
        UsageFault: none has.
    """
    for attempt in reversed(run.attempts()):
        if found := sorted(attempt.path.glob("memory-node*.jsonl")):
            return found
    raise UsageFault(f"run {run.name} has no samples of memory; train it with --set probe.memory=true")


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


def lines(run: RunDir, described: tuple[Architecture, Batch, int] | None) -> Iterator[str]:
    """For a person, node by node. `described`: architecture, batch and world size of FSDP2 workers, where known."""
    for file in files(run):
        found = phases(read_json_lines(file))
        peaks: dict[int, int] = defaultdict(int)
        for (pid, _), phase in found.items():
            peaks[pid] = max(peaks[pid], phase.peak)
        node = file.stem.removeprefix("memory-")
        for (pid, name), phase in found.items():
            if peaks[pid] >= SMALL:
                yield f"{node} {pid:>7}  {name:48} {_measured(phase)}{_predicted(name, described)}"
        small = [peak for peak in peaks.values() if peak < SMALL]
        if small:
            yield f"{node}          {len(small)} more processes, none above {max(small) / MIB:.0f} MiB"


def _measured(phase: Phase) -> str:
    grown = sorted(phase.growths)[len(phase.growths) // 2] / MIB
    return f"{phase.times:4} x, at most {phase.peak / MIB:7.1f} MiB, grows by {grown:6.1f}"


def _predicted(name: str, described: tuple[Architecture, Batch, int] | None) -> str:
    predict = PREDICTED.get(name.rpartition(".")[2])
    if predict is None or described is None:
        return ""
    a, batch, world = described
    size = predict(a, batch) if predict is sharded.score_growth else predict(a, batch, world)
    return f", predicted {size.total / MIB:.1f}"
