"""Run the stage scripts of a node, watched and recorded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from atlasrl import plan as plans
from atlasrl import processes
from atlasrl.errors import Fault
from atlasrl.logs import last_line
from atlasrl.outcome import EXHAUSTED, STOPPED
from atlasrl.peers import POLL_SECONDS, Node, Stopped

PATIENCE_SECONDS = 10  # between SIGTERM and SIGKILL: a checkpoint in flight is given up, not awaited
DROPPED = ("RAY_ADDRESS", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def environment(node: Node, **extra: str) -> dict[str, str]:
    """The environment of every process of the job on this node: inherited, then the plan's, then what only this
    attempt knows. Ray's address and proxies of the submitting shell would lead elsewhere and are dropped."""
    inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
    planned = {name: str(value.value) for name, value in node.plan.environment.items()}
    own = {
        "ATLASRL_RUN": str(node.run.path),
        "ATLASRL_ATTEMPT": str(node.attempt.number),
        "ATLASRL_NODE": node.name,
        "ATLASRL_RANK": str(node.rank),
        "ATLASRL_PYTHON": node.plan.python,
        "ATLASRL_INPUT_SCRIPT": str(node.plan.recipe.inputs.script if node.plan.recipe.inputs else ""),
        "ATLASRL_MODEL_INPUT": node.plan.model_input,
        "ATLASRL_MODEL": node.plan.model,
    }
    return {**inherited, **planned, **own, **extra}


def run_stage(node: Node, stage: str, env: dict[str, str], check: Callable[[], None]) -> None:
    """Run jobs/stages/<stage>.sh and record it.

    A script says why it had nothing to do in a last line that starts with `skipped:`. ATLASRL_STAGES names another
    folder of scripts, for example with a site's own cast.

    Args:
        check: called while the stage runs; raises to end it.

    Raises:
        Fault: the stage failed; the message ends with the last line of its log.
    """
    log = node.log(stage)
    size = log.stat().st_size if log.exists() else 0
    node.say("stage", stage)
    node.run.record("stage_start", attempt=node.attempt.number, node=node.name, stage=stage)
    started = time.monotonic()
    script = Path(env.get("ATLASRL_STAGES") or plans.ROOT / "jobs" / "stages") / f"{stage}.sh"
    process = processes.spawn(["bash", str(script)], env=env, log=log, death_signal=signal.SIGTERM)
    code: int | str = "ended"
    try:
        while (code := process.poll()) is None:
            code = "ended"
            check()
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            processes.end_tree(process, PATIENCE_SECONDS)
        words = last_line(log, size)
        node.run.record(
            "stage_end",
            attempt=node.attempt.number,
            node=node.name,
            stage=stage,
            exit=code,
            seconds=round(time.monotonic() - started, 2),
            **({"skipped": words.removeprefix("skipped:").strip()} if words.startswith("skipped:") else {}),
        )
    if code == STOPPED:
        raise Stopped(words.removeprefix("error: "))
    if code != 0:
        failure = Fault(f"{node.name}: stage {stage} failed with exit code {code}: {words.removeprefix('error: ')}")
        failure.exit_code = code if code == EXHAUSTED else 1
        raise failure
