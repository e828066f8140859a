"""Train: `python -m atlasrl.trainer RUN_DIR --attempt N [--resume-from CHECKPOINT]`.

verl's driver runs in this very process. It connects to the Ray cluster named by RAY_ADDRESS (without it: a private
Ray on this machine, for one node). Exit codes: 0 every step is done; 85 stopped on request; 86 dynamic sampling
exhausted; 1 a Fault, told in one line; 143 SIGTERM; 70 anything else, with its traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from atlasrl import recipe as recipes
from atlasrl.errors import Fault
from atlasrl.rundir import AttemptDir, RunDir

CRASH = 70
TERMINATED = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that nothing on the way swallows it."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m atlasrl.trainer", description="One attempt of a run.")
    parser.add_argument("run", type=Path, help="run directory with plan.json")
    parser.add_argument("--attempt", type=int, required=True, help="number of this attempt")
    parser.add_argument("--resume-from", type=Path, metavar="CHECKPOINT", help="a complete global_step_N folder")
    options = parser.parse_args(arguments)
    attempt = RunDir(options.run).attempt(options.attempt)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        train(attempt, options.resume_from)
        return 0
    except Terminated:
        print("error: SIGTERM: ended at once; work since the last checkpoint will be done again", file=sys.stderr)
        return TERMINATED
    except Exception as problem:
        fault = fault_behind(problem)
        if fault is None or os.environ.get("ATLASRL_DEBUG"):
            traceback.print_exc()
        if fault is None:
            return CRASH
        print(f"error: {fault}", file=sys.stderr, flush=True)
        return fault.exit_code


def train(attempt: AttemptDir, resume_from: Path | None) -> None:
    """Run one attempt to the end of the recipe.

    Raises:
        Fault: in all its kinds; see the module's exit codes.
    """
    plan = json.loads(attempt.run.plan.read_text())
    recipe = recipes.parse(plan["recipe"], str(attempt.run.plan))
    from atlasrl.trainer import saving, setup

    world_size = plan["nodes"] * plan["devices_per_node"]
    done = saving.check_start(attempt.run, recipe, resume_from, world_size)
    if done >= recipe.steps:
        print(f"nothing to do: the checkpoint is that of step {done}, the recipe asks for {recipe.steps}", flush=True)
        return
    setup.prepare_environment(plan, recipe, attempt, first_step=done + 1)
    setup.connect(plan, recipe)
    signal.signal(signal.SIGTERM, _terminate)  # ray.init installs a handler of its own
    trainer = setup.build_trainer(plan, recipe, attempt, resume_from)
    trainer.init_workers()
    trainer.fit()
    finished = trainer.global_steps - 1
    if finished < recipe.steps:
        raise Fault(
            f"verl's training loop ended after step {finished} of {recipe.steps} without an error: its dataloader ran "
            "dry or fit has changed; nothing is lost, resume from the last checkpoint"
        )
    trainer.judge(finished)
    print(f"done: {recipe.steps} steps", flush=True)


def fault_behind(problem: BaseException) -> Fault | None:
    """The Fault that `problem` is, was raised from, or carries from a Ray worker."""
    seen: set[int] = set()
    while problem is not None and id(problem) not in seen:
        if isinstance(problem, Fault):
            return problem
        seen.add(id(problem))
        problem = getattr(problem, "cause", None) or problem.__cause__
    return None


def _terminate(signum, frame):
    raise Terminated


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
