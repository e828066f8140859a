"""How far a run is: read from its journal, its metrics and its checkpoints, while it runs or afterwards.

No scheduler is asked here; a run is alive when somebody holds its owner lock.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from atlasrl import checkpoints
from atlasrl.errors import Fault
from atlasrl.rundir import RunDir, read_json_lines

REWARD = "critic/score/mean"
DECIDED = {"restart": "restarting", "requeue": "requeued", "done": "done"}
STEP_SECONDS = "timing_s/step"


@dataclass
class Progress:
    """The state of a run in numbers.

    `rewards` maps each step to its mean score; a later attempt wins from its first step on.
    """

    name: str
    state: str
    attempt: int = 0
    job: str | None = None
    stage: str | None = None
    total: int = 0
    rewards: dict[int, float] = field(default_factory=dict)
    step_seconds: float | None = None
    checkpoint: int | None = None
    started: float | None = None
    message: str = ""

    @property
    def is_open(self) -> bool:
        """Whether a job of the run should be somewhere, by the run's own word."""
        return self.state in ("submitted", "running", "restarting", "requeued", "died")

    @property
    def step(self) -> int:
        return max(self.rewards, default=0)

    @property
    def reward(self) -> float | None:
        return self.rewards[self.step] if self.rewards else None

    @property
    def eta_seconds(self) -> float | None:
        if self.step_seconds is None or self.step >= self.total:
            return None
        return (self.total - self.step) * self.step_seconds


def of(run: RunDir) -> Progress:
    """Read the progress of a run.

    Raises:
        Fault: not a run, or its journal is damaged.
    """
    try:
        total = json.loads(run.plan.read_text())["recipe"]["steps"]
    except FileNotFoundError:
        raise Fault(f"{run.path} is no run: it has no plan.json; `bin/status` lists the runs") from None
    progress = Progress(run.name, "created", total=total)
    alive = run.writer() is not None
    for event in run.events():
        _take_in(progress, event)
    if alive and progress.state not in ("submitted", "running"):
        progress.state = "running"
    elif not alive and progress.state == "running":
        progress.state, progress.message = "died", "its process is gone without a word"
    _read_metrics(progress, run)
    complete = checkpoints.complete(run)
    progress.checkpoint = complete[0].step if complete else None
    return progress


def _take_in(progress: Progress, event: dict) -> None:
    kind = event["event"]
    if kind == "submitted":
        if event["attempt"] >= progress.attempt and progress.attempt != event["attempt"]:
            progress.state, progress.stage, progress.started = "submitted", None, event["time"]
        progress.attempt, progress.job = event["attempt"], event["job"]
    elif kind == "attempt_start":
        progress.state, progress.attempt, progress.started = "running", event["attempt"], event["time"]
        progress.job, progress.stage, progress.message = event["job"], None, ""
    elif kind == "stage_start" and event["node"] == "node0":
        progress.stage = event["stage"]
    elif kind == "ray_up":
        progress.stage = "ray"
    elif kind == "attempt_end":
        progress.state, progress.message = event["state"], event["message"]
    elif kind == "decided":
        progress.state = DECIDED.get(event["action"], progress.state if progress.state != "running" else "failed")
        progress.message = event["message"]


def _read_metrics(progress: Progress, run: RunDir) -> None:
    seconds: list[float] = []
    for attempt in run.attempts():
        for number, line in enumerate(read_json_lines(attempt.metrics)):
            step, data = line["step"], line["data"]
            if number == 0:
                for old in [old for old in progress.rewards if old >= step]:
                    del progress.rewards[old]
            if REWARD in data:
                progress.rewards[step] = data[REWARD]
            if STEP_SECONDS in data:
                seconds.append(data[STEP_SECONDS])
    progress.step_seconds = statistics.median(seconds[-10:]) if seconds else None


def of_all(runs: list[RunDir]) -> list[Progress]:
    """The progress of several runs; one that cannot be read is shown as damaged and does not hide the others."""
    states = []
    for run in runs:
        try:
            states.append(of(run))
        except Fault as fault:
            states.append(Progress(run.name, "damaged", message=str(fault)))
    return states


def _readable_events(run: RunDir) -> Iterator[dict]:
    """The journal up to its first damaged line."""
    with contextlib.suppress(Fault):
        yield from read_json_lines(run.journal)


def runs(folder: Path) -> list[RunDir]:
    """All runs below a folder, by name."""
    return [RunDir(plan.parent) for plan in sorted(folder.glob("*/plan.json"))]


def find(name: str, folder: Path) -> RunDir:
    """The run that a name, a path or the job id of any of its attempts stands for.

    Job ids of a local machine are process ids and come back: the newest attempt with the id wins.

    Raises:
        Fault: there is no such run; the message lists the runs.
    """
    for path in (folder / name, Path(name)):
        if (path / "plan.json").exists():
            return RunDir(path.resolve())
    wanted = name.partition("_")[0]
    newest: tuple[float, RunDir] | None = None
    for run in runs(folder):
        for event in _readable_events(run):
            if str(event.get("job")) in (name, wanted) and (newest is None or event["time"] > newest[0]):
                newest = (event["time"], run)
    if newest:
        return newest[1]
    known = ", ".join(run.name for run in runs(folder)) or "none"
    raise Fault(f"no run and no job {name!r} below {folder}; runs there: {known}")
