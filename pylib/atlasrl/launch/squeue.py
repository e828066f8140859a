"""Ask Slurm about a job: squeue first, sacct where accounting exists, and no accounting is fine too.

squeue keeps ended jobs for MinJobAge (300 s by default); after that only sacct knows them.
"""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime

from atlasrl.errors import Fault

WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
ALIVE = {
    *WAITING,
    *("CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"),
}
SQUEUE = "%i|%T|%N|%e|%r"  # id, state, nodes, end, reason; the reason last: it may hold a bar
SACCT = "JobID,State,NodeList,End,Reason"
LATELY_SECONDS = 3
PATIENCE_SECONDS = 60  # a controller that fails over or reads a new configuration


_lately: dict[str, tuple[float, JobState | None]] = {}


@dataclass(frozen=True)
class JobState:
    """One line of squeue or sacct. `end` is epoch seconds, planned or real; None when there is none."""

    id: str
    state: str
    nodes: str
    end: float | None
    reason: str

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def parse(line: str) -> JobState:
    """Read one line of `squeue --format=%i|%T|%N|%e|%r` or of `sacct --parsable2` with the same columns."""
    job, state, nodes, end, reason = line.split("|", 4)
    # sacct writes "CANCELLED by 1000" and "CANCELLED+"
    return JobState(job, re.split(r"[ +]", state)[0], nodes.replace("None assigned", ""), _epoch(end), reason)


def _epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A, Unknown, NONE
        return None


def newest(lines: list[str]) -> JobState | None:
    """The state of the job itself out of several lines: steps (`12.batch`) are left out, the last entry wins."""
    jobs = [parse(line) for line in lines if line.count("|") >= 4]
    jobs = [job for job in jobs if "." not in job.id]
    return jobs[-1] if jobs else None


def state(job: str) -> JobState | None:
    """What Slurm knows of a job id such as 123 or 123_4; None when it does not know it (any more).

    Raises:
        Fault: Slurm does not answer, or the id is none.
    """
    if not re.fullmatch(r"\d+(_\d+)?", job):
        raise Fault(f"{job!r} is no Slurm job id; ids look like 123 or 123_4")
    answer = _ask("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={SQUEUE}")
    if answer.returncode == 0 and (found := newest(answer.stdout.splitlines())):
        return found
    if not has_accounting():
        return None
    told = _ask("sacct", "--noheader", "--parsable2", "--duplicates", f"--jobs={job}", f"--format={SACCT}")
    return newest(told.stdout.splitlines()) if told.returncode == 0 else None


def state_lately(job: str) -> JobState | None:
    """As `state`, but asks at most every few seconds: many followers must not weigh on the controller."""
    asked, known = _lately.get(job, (float("-inf"), None))
    if time.monotonic() - asked > LATELY_SECONDS:
        known = state(job)
        _lately[job] = time.monotonic(), known
    return known


def has_accounting() -> bool:
    """Whether sacct can answer here."""
    shown = _ask("scontrol", "show", "config").stdout
    match = re.search(r"^AccountingStorageType\s*=\s*(\S+)", shown, re.MULTILINE)
    return match is not None and not match[1].endswith("/none")


def _ask(*command: str) -> subprocess.CompletedProcess:
    """Run a query, again while the controller is away."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        except FileNotFoundError:
            raise Fault(f"{command[0]} is not on this machine; run the command where the Slurm client is") from None
        except subprocess.TimeoutExpired:
            raise Fault(
                f"{command[0]} did not answer within {PATIENCE_SECONDS} s; is slurmctld up? Try: scontrol ping"
            ) from None
        words = answer.stderr.strip()
        if answer.returncode == 0 or "Invalid job id" in words or not words:
            return answer
        if time.monotonic() > limit:
            raise Fault(f"{command[0]} fails: {words.splitlines()[-1]}; is slurmctld up? Try: scontrol ping")
        time.sleep(1)
