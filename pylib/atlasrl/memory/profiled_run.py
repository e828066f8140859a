"""A run that sampled its memory (recipe: probe.memory): resident bytes of its processes, its workers as predicted."""

from __future__ import annotations

from pathlib import Path

from atlasrl import plan as plans
from atlasrl.errors import UsageFault
from atlasrl.memory import job, measured, residence
from atlasrl.memory.measured import Comparison
from atlasrl.rundir import AttemptDir, RunDir


def lines(run: RunDir, config: Path | None = None) -> list[str]:
    """What a run measured of itself: resident memory of every process, and its workers beside their prediction.

    Raises:
        UsageFault: nothing was sampled. Fault: damaged samples.
    """
    attempt = residence.sampled_attempt(run)
    resident = [*residence.lines(attempt)]
    if not attempt.workers.is_dir():
        return resident
    try:
        return [*resident, *measured.lines(compared(attempt, config))]
    except UsageFault as unknown:
        return [*resident, f"workers: {unknown}"]


def compared(attempt: AttemptDir, config: Path | None = None) -> list[Comparison]:
    """The workers of an attempt whose recipe sets probe.memory, each beside its prediction.

    Raises:
        UsageFault: they measured nothing, or are not predicted. Fault: damaged records.
    """
    plan = plans.load(attempt.run)
    model = Path(plan.model_input) / "config.json"
    a = job.architecture_of(plan.recipe, config or (model if model.is_file() else None))
    return [*measured.compare(plan.recipe, a, measured.read(attempt.workers))]
