"""Runs whose nodes are pods: the same run directory, plan and journal; the job is a file for kubectl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atlasrl import control, k8s
from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl import site as sites
from atlasrl.launch import submission
from atlasrl.plan import Plan
from atlasrl.rundir import AttemptDir, RunDir, check_name, write_atomically
from atlasrl.site import Site


@dataclass(frozen=True)
class Request:
    """A run to make, or to continue."""

    plan: Plan
    recipe: str | None = None
    """Absent: the run exists."""
    resume_from: str | None = None


def of_recipe(
    recipe: str,
    folder: str | None,
    *,
    name: str | None,
    nodes: int | None,
    site_name: str | None,
    changes: Sequence[str],
    oom: bool,
) -> Request:
    """Plan a new run. Raises UsageFault."""
    from atlasrl.cli import runs_folder

    site = sites.load(site_name) if site_name else Site(kind="slurm", description="pods")  # machines of their own
    runs = runs_folder(folder, site)
    run = RunDir(runs / (check_name(name) if name else control.free_name(recipe, runs)))
    loaded = recipes.load(recipe, list(changes))
    return Request(plans.make(loaded, site, run, nodes=nodes, allow_oom_risk=oom), recipe=recipe)


def of_run(name: str, runs: Path) -> Request:
    """Plan the next attempt of a run, from its newest complete checkpoint or, before the first, from the beginning.

    Raises:
        Fault: no such run, somebody writes it, or nothing is left to do.
    """
    from atlasrl import checkpoints, progress

    run = progress.find(name, runs)
    plan, checkpoint, _ = control.resume(run, None if checkpoints.complete(run) else 0, None)
    return Request(plan, resume_from=checkpoint)


def preview(request: Request, pods: k8s.Pods) -> str:
    """The job that `write` would write."""
    run = request.plan.rundir
    number = max((attempt.number for attempt in run.attempts()), default=0) + 1
    return k8s.text(_checked(request.plan, run.attempt(number), pods))


def write(request: Request, pods: k8s.Pods) -> Path:
    """Make the run or its next attempt and write the job beside it. Nothing is submitted.

    Raises:
        UsageFault: the run exists already, or the job would be no AscendJob; then nothing is made.
    """
    plan, run = request.plan, request.plan.rundir
    _checked(plan, run.attempt(1), pods)
    if request.recipe:
        control.create(plan, request.recipe)
    attempt = submission.open_attempt(plan, request.resume_from)
    _stand_alone(attempt)
    folder = run.path / "k8s"
    folder.mkdir(exist_ok=True)
    file = folder / f"attempt-{attempt.number:04d}.yaml"
    write_atomically(file, k8s.text(_checked(plan, attempt, pods)))
    run.record("submitted", attempt=attempt.number, job=str(file), site="k8s", resume_from=request.resume_from)
    return file


def _checked(plan: Plan, attempt: AttemptDir, pods: k8s.Pods) -> dict:
    tree = k8s.job(plan, attempt, pods)
    k8s.check(tree)
    return tree


def _stand_alone(attempt: AttemptDir) -> None:
    """A pod has no supervisor that decides what follows an attempt, as on one machine: rank 0's outcome is the last."""
    write_atomically(attempt.job, json.dumps(json.loads(attempt.job.read_text()) | {"site": "local"}, indent=1) + "\n")
