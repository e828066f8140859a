"""Click commands, one module per verb: parse, call one function, print. No decisions.

Importing a command must stay cheap (`bin/* --help` answers in under 0.5 s), so pydantic, torch, ray and verl are
imported inside the functions that need them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from atlasrl.errors import Fault

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def command(function: Callable) -> click.Command:
    """Turn a function into a command that prints a `Fault` as one line and exits with its code.

    `--debug` (or ATLASRL_DEBUG=1) shows the traceback instead.
    """

    @click.option("--debug", is_flag=True, envvar="ATLASRL_DEBUG", help="Show the traceback of an error.")
    @functools.wraps(function)
    def run(debug: bool, **options):
        if debug:
            os.environ["ATLASRL_DEBUG"] = "1"
        try:
            return function(**options)
        except Fault as fault:
            if debug:
                raise
            click.echo(f"error: {fault}", err=True)
            sys.exit(fault.exit_code)

    return click.command(context_settings=CONTEXT)(run)


def runs_folder(folder: str | None, site=None) -> Path:
    """Where runs are: the option, the environment (ATLASRL_RUNS), the site's `runs`, or runs/ of this clone."""
    chosen = folder or os.environ.get("ATLASRL_RUNS") or (site and site.runs)
    return Path(chosen).expanduser().absolute() if chosen else Path(__file__).resolve().parents[3] / "runs"


def watch(attempt) -> int:
    """Follow an attempt, say how it ended, and return the exit code.

    Ctrl-C ends a job of this machine (checkpoints stay); a scheduler's job goes on without us.
    """
    import json

    from rich.console import Console

    from atlasrl import control, follow, progress

    run, console = attempt.run, Console(highlight=False, soft_wrap=True)
    try:
        outcome = follow.follow(attempt, control.is_alive, console)
    except KeyboardInterrupt:
        if json.loads(attempt.job.read_text())["site"] != "local":
            console.print(f"\nthe job goes on; watch again with bin/status {run.name}, end it with bin/stop {run.name}")
            return 130
        console.print("\ninterrupted: ending the job …")
        control.stop(run, save=False, deadline=60)
        now = progress.of(run)
        start = f"bin/resume {run.name}" + ("" if now.checkpoint else " --step 0")
        console.print(f"stopped at step {now.step}; last checkpoint {now.checkpoint or 'none'}; continue with: {start}")
        return 130
    state = progress.of(run)
    console.print(f"run {run.name} {outcome['state']}: step {state.step} of {state.total}; {follow.summary(state)}")
    if outcome["exit"] == 0:
        return 0
    click.echo(f"error: {outcome['message']}", err=True)
    click.echo(f"logs: bin/logs {run.name}; continue with: bin/resume {run.name}", err=True)
    return 1
