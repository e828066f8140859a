"""Start, continue and end runs: what bin/train, bin/resume and bin/stop do."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from atlasrl import checkpoints, lint, progress, schema
from atlasrl import plan as plans
from atlasrl.errors import Fault, UsageFault
from atlasrl.launch import submission
from atlasrl.plan import Plan
from atlasrl.recipe import find as find_recipe
from atlasrl.rundir import AttemptDir, RunDir, check_name, write_atomically

RUNS = plans.ROOT / "runs"
LET_GO_SECONDS = 60


def free_name(recipe: str, folder: Path) -> str:
    """The recipe's name, or the first `<name>-2`, `<name>-3` … that no run has yet."""
    stem = Path(recipe).stem
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 10**6))
    return check_name(next(name for name in names if not (folder / name).exists()))


def create(plan: Plan, recipe: str) -> None:
    """Make the run directory.

    Raises:
        UsageFault: the run exists; it is continued with bin/resume, never started over in place. Or its launcher says
            at once that the job cannot be submitted.
    """
    launcher = importlib.import_module(f"atlasrl.launch.{plan.site.kind}")
    if hasattr(launcher, "check"):
        launcher.check(plan)
    run = plan.rundir
    try:
        run.path.mkdir(parents=True)
    except FileExistsError:
        raise UsageFault(
            f"run {run.name} exists already in {run.path.parent}; continue it with bin/resume {run.name}, or give "
            "another --name"
        ) from None
    shutil.copyfile(find_recipe(recipe), run.recipe)
    write_atomically(run.plan, plan.to_json())
    if run.path.parent == plan.site.runs:
        _link(run)
    run.record("created", recipe=recipe, nodes=plan.nodes, devices_per_node=plan.devices_per_node)


def _link(run: RunDir) -> None:
    """Make a run that lives elsewhere known in this clone's runs/, so that commands find it by name and job id."""
    if "ATLASRL_RUNS" in os.environ:  # it tells the commands where to look
        return
    link = RUNS / run.name
    if run.path.parent != RUNS and not link.is_symlink() and not link.exists():
        RUNS.mkdir(exist_ok=True)
        link.symlink_to(run.path)


def resume(
    run: RunDir, step: int | None, steps: int | None, nodes: int | None = None, split: Sequence[str] = ()
) -> tuple[Plan, str | None, str]:
    """Decide how a run continues.

    Args:
        step: checkpoint to continue from; None takes the newest complete one; 0 starts again at the beginning.
        steps: new total number of steps; None keeps the recipe's.
        nodes, split: another number of nodes and `parallel.key=value` changes; what is left out stays.

    Returns:
        The plan, the checkpoint folder (None: from the beginning), and the decision in words.

    Raises:
        Fault: somebody writes the run, nothing complete to continue from, or nothing left to do.
    """
    plan = plans.load(run)
    _refuse_queued(run)
    wait_until_let_go(run)
    if steps is not None or nodes is not None or split:
        plan = _replanned(plan, steps, nodes, split)
    total = plan.recipe.steps
    if step == 0:
        if checkpoints.complete(run):
            raise Fault(f"run {run.name} has checkpoints that starting over would bury; start a new run with bin/train")
        return plan, None, f"from the beginning, since --step 0 was given; target step {total}"
    chosen = checkpoints.choose(run, step)
    if chosen.step >= total and (run.export / "config.json").exists():
        raise Fault(f"run {run.name} is done: step {chosen.step} of {total} is saved; go on with --steps {2 * total}")
    return plan, str(chosen.path), f"from step {chosen.step} ({chosen.path}); target step {total}"


def _replanned(plan: Plan, steps: int | None, nodes: int | None, split: Sequence[str]) -> Plan:
    for change in split:
        if not change.startswith("parallel."):
            raise UsageFault(
                f"--set {change}: a run keeps its recipe, only its split (parallel.*) can change; for the rest start "
                "another run with bin/train"
            )
    changes = [*split, *([f"steps={steps}"] if steps is not None else [])]
    remade = plans.make(
        schema.changed(plan.recipe, changes),
        plan.site,
        plan.rundir,
        nodes=plan.nodes if nodes is None else nodes,
        devices_per_node=plan.devices_per_node,
        allow_oom_risk=plan.allow_oom_risk,
    )
    return replace(remade, notes=plan.notes | {name: remade.notes[name] for name in ("nodes", "device memory")})


def wait_until_let_go(run: RunDir) -> None:
    """Wait for a writer whose job is over and that is still clearing up.

    Raises:
        Fault: the run is being written by a job that lives.
    """
    limit = time.monotonic() + LET_GO_SECONDS
    while writer := run.writer():
        attempt = run.attempts()[-1]
        over = attempt.outcome.exists() or not is_alive(attempt)
        if not over or time.monotonic() > limit:
            raise Fault(f"run {run.name} is being written by {writer}; end it first: bin/stop {run.name}")
        time.sleep(0.2)


def preview(plan: Plan) -> str:
    """The plan, what lint finds in it, and what would be submitted, as text for a person."""
    environment = {name: str(value.value) for name, value in plan.environment.items()}
    found = lint.findings(plan.recipe, plan.nodes, plan.devices_per_node, environment=environment)
    lines = [plans.show(plan), "", "lint", *(f"  {finding}" for finding in found or ["nothing found"])]
    launcher = importlib.import_module(f"atlasrl.launch.{plan.site.kind}")
    return "\n".join([*lines, *([launcher.preview(plan)] if hasattr(launcher, "preview") else [])])


def start(plan: Plan, resume_from: str | None = None) -> tuple[AttemptDir, str]:
    """Submit a new attempt; write the plan it follows first."""
    write_atomically(plan.rundir.plan, plan.to_json())
    return submission.submit(plan, resume_from)


def is_alive(attempt: AttemptDir) -> bool:
    """Whether the job of an attempt is queued or running, as its launcher sees it."""
    try:
        job = json.loads(attempt.job.read_text())
    except (OSError, ValueError):
        return False
    return _launcher(job).is_alive(attempt, job)


def scheduler_says(run: RunDir) -> str | None:
    """What the scheduler says of a run's newest job; None where there is none, or none to ask on this machine."""
    attempts = run.attempts()
    try:
        job = json.loads(attempts[-1].job.read_text())
    except (OSError, ValueError, IndexError):
        return None
    launcher = _launcher(job)
    if not hasattr(launcher, "describe") or shutil.which("squeue") is None:
        return None
    return launcher.describe(job)


def _launcher(job: dict):
    return importlib.import_module(f"atlasrl.launch.{job['site']}")


def _is_waiting(job: dict) -> bool:
    """Whether a job only waits in a scheduler's queue."""
    return hasattr(_launcher(job), "is_waiting") and _launcher(job).is_waiting(job)


def _refuse_queued(run: RunDir) -> None:
    """Refuse to continue a run whose job starts, waits, or comes back by itself; wait for one that is clearing up.

    Raises:
        Fault: the scheduler still has the job, and it will go on.
    """
    attempts = run.attempts()
    job = json.loads(attempts[-1].job.read_text()) if attempts else {"site": "local"}
    if not hasattr(_launcher(job), "is_waiting"):
        return
    limit = time.monotonic() + LET_GO_SECONDS
    while is_alive(attempts[-1]) and time.monotonic() < limit:
        ending = attempts[-1].ending()
        if _is_waiting(job) or ending is None or ending["action"] in ("restart", "requeue"):
            raise Fault(
                f"job {job['id']} of run {run.name} is with the scheduler and continues the run by itself; to continue "
                f"it otherwise end the job first: bin/stop {run.name}"
            )
        time.sleep(0.2)


def stop(run: RunDir, *, save: bool, deadline: float) -> str:
    """Ask the newest attempt to end and wait until it has.

    Args:
        save: write a checkpoint first, at the end of the step that is running.
        deadline: seconds to wait before the job is cancelled through its launcher.

    Returns:
        How it ended, in words.

    Raises:
        Fault: nothing is running.
    """
    attempts = run.attempts()
    if not attempts or not (run.writer() or is_alive(attempts[-1])):
        raise Fault(f"run {run.name} is not running: {progress.of(run).state}")
    limit = time.monotonic() + deadline
    while time.monotonic() < limit:
        attempt = run.attempts()[-1]  # a job may start again by itself just now
        if not attempt.stop_request.exists():
            write_atomically(attempt.stop_request, json.dumps({"save": save, "time": round(time.time(), 3)}) + "\n")
        job = json.loads(attempt.job.read_text())
        if _is_waiting(job):
            _launcher(job).cancel(attempt, job)
            return "its job was waiting in the queue and was taken back"
        alive = is_alive(attempt)
        if attempt.outcome.exists() and not alive:
            return json.loads(attempt.outcome.read_text())["message"]
        if not alive and not run.writer():
            return "its job is gone; nothing was running any more"
        time.sleep(0.2)
    _launcher(job).cancel(attempt, job)
    return f"did not end within {deadline:.0f} s; its job {job['id']} was cancelled"
