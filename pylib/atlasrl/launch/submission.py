"""Hand an attempt to whatever runs jobs here: this machine, Slurm, or hosts over ssh.

The launchers are the modules named as the site kinds: `submit(plan, attempt)`, `is_alive(attempt, job)` and
`cancel(attempt, job)`. Only this package knows submitit.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import secrets
import sys
import time

from atlasrl import __version__
from atlasrl.plan import Plan
from atlasrl.rundir import AttemptDir, write_atomically


def submit(plan: Plan, resume_from: str | None = None, *, by: str = "person") -> tuple[AttemptDir, str]:
    """Start a new attempt of a planned run.

    Args:
        resume_from: checkpoint folder to continue from; None starts at step 0.
        by: who submits: a person, or a job that Slurm would not requeue.

    Returns:
        The attempt and its job id. `launch.<site kind>.submit` does the handing over.
    """
    attempt = open_attempt(plan, resume_from)
    launcher = importlib.import_module(f"atlasrl.launch.{plan.site.kind}")
    job_id = launcher.submit(plan, attempt)
    _write_job(attempt, id=job_id)
    plan.rundir.record(
        "submitted", attempt=attempt.number, job=job_id, site=plan.site.kind, resume_from=resume_from, by=by
    )
    return attempt, job_id


def open_attempt(plan: Plan, resume_from: str | None, *, job: str | None = None) -> AttemptDir:
    """Make the folder of the next attempt; `job` is known when a running job opens it."""
    numbers = [attempt.number for attempt in plan.rundir.attempts()]
    attempt = plan.rundir.attempt(max(numbers, default=0) + 1)
    attempt.logs.mkdir(parents=True)
    _make_token(plan)
    facts = {
        "command": sys.argv,
        "resume_from": resume_from,
        "host": platform.node(),
        "python": platform.python_version(),
        "atlasrl": __version__,
        "site": plan.site.kind,
        "time": round(time.time(), 3),
    }
    write_atomically(attempt.job, json.dumps({"id": job, **facts}, indent=1) + "\n")
    return attempt


def _write_job(attempt: AttemptDir, **facts) -> None:
    write_atomically(attempt.job, json.dumps(json.loads(attempt.job.read_text()) | facts, indent=1) + "\n")


def _make_token(plan: Plan) -> None:
    """The secret of this run's Ray clusters; Ray refuses clients without it."""
    path = plan.rundir.path / "ray.token"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
