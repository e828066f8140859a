"""Watch an attempt from the outside: one live line, then how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.text import Text

from atlasrl import progress as progresses
from atlasrl.errors import Fault
from atlasrl.logs import last_line
from atlasrl.progress import Progress
from atlasrl.rundir import AttemptDir

POLL_SECONDS = 0.5
CONTINUES = ("restart", "requeue", "leave")


def line(progress: Progress) -> str:
    """Stage, step/total, reward and ETA in one line."""
    words = [f"attempt {progress.attempt}", progress.stage or progress.state]
    if progress.stage == "train" and progress.total:
        words.append(f"step {progress.step}/{progress.total}")
        if progress.reward is not None:
            words.append(f"reward {progress.reward:+.3f}")
        if progress.step_seconds is not None:
            words.append(f"{progress.step_seconds:.1f} s/step")
        if progress.eta_seconds is not None:
            words.append(f"ETA {timedelta(seconds=round(progress.eta_seconds))}")
        if progress.checkpoint is not None:
            words.append(f"checkpoint {progress.checkpoint}")
    return " | ".join(words)


def follow(attempt: AttemptDir, job_is_alive: Callable[[AttemptDir], bool], console: Console) -> dict:
    """Show progress until the run ends: through restarts and requeues, which a job decides on by itself.

    On a terminal one line is kept up to date; elsewhere a line is printed whenever stage or step change.

    Returns:
        The outcome: {"state", "exit", "message"}.

    Raises:
        Fault: the job disappeared without an outcome (killed with SIGKILL, node lost).
    """
    last = None
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            alive = job_is_alive(attempt)  # before the outcome is looked for: it may be written in between
            now = progresses.of(attempt.run)
            text = line(now)
            if console.is_terminal:
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            elif (key := (now.stage, now.step)) != last:
                console.print(text, highlight=False, soft_wrap=True)
                last = key
            outcome = attempt.ending()
            if outcome and outcome.get("action") not in CONTINUES:
                return outcome
            if outcome and (following := attempt.run.attempt(attempt.number + 1)).job.exists():
                words = f"attempt {attempt.number}: {outcome['kind']}: {outcome['message']} -> {outcome['action']}"
                console.print(words, highlight=False, soft_wrap=True, markup=False)
                attempt, last = following, None
            elif outcome and not alive:
                return outcome
            elif not alive:
                raise Fault(
                    f"job of attempt {attempt.number} is gone without an outcome, at step {now.step} of {now.total}: "
                    f"{last_words(attempt)}; logs: bin/logs {attempt.run.name}; continue with: "
                    f"bin/resume {attempt.run.name}"
                )
            time.sleep(POLL_SECONDS)


def last_words(attempt: AttemptDir) -> str:
    """What an attempt without an outcome left behind; before its first node began, the batch script's own log."""
    job = json.loads(attempt.job.read_text())
    batch = attempt.run.path / job["site"] / f"{job.get('id')}_0_log.out"
    log = attempt.logs / "node0.log"
    return last_line(log if log.exists() or not batch.exists() else batch)


def summary(progress: Progress) -> str:
    """First and last reward of a run, for the end of `bin/train --follow`."""
    rewards = [progress.rewards[step] for step in sorted(progress.rewards)]
    if not rewards:
        return "no step was finished"
    first, last = rewards[:5], rewards[-10:]
    return (
        f"reward: first {rewards[0]:+.3f}, last {rewards[-1]:+.3f}; "
        f"mean of the first {len(first)} steps {sum(first) / len(first):+.3f}, "
        f"of the last {len(last)} {sum(last) / len(last):+.3f}"
    )
