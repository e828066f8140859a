"""How an attempt ended, and what follows: exit code + last words + checkpoints -> kind and action. Pure.

    done              every step is trained and the model is exported           -> done
    stopped           a person asked for it                                     -> stop
    time limit        the allocation ends; a checkpoint was written before      -> requeue
    preemption        the scheduler warned us                                   -> requeue
    cancelled         SIGTERM from the scheduler, which alone knows why         -> leave it to the scheduler
    node failure      a node is gone                                            -> requeue, on other nodes
    crash             a process died, all nodes are healthy                     -> restart here, or requeue
    data exhausted    dynamic sampling finds no usable group                    -> stop
    wrong             a check failed and said what to mend                      -> stop
    no progress       several attempts in a row brought no new checkpoint       -> stop

Only checkpoints count as progress, whatever ended the attempt: submitit does not count an early signal, takes it for a
preemption each time, and requeues for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from atlasrl.site import Life

Kind = Literal[
    "done",
    "stopped",
    "time limit",
    "preemption",
    "cancelled",
    "node failure",
    "crash",
    "data exhausted",
    "wrong",
    "no progress",
]
Action = Literal["done", "stop", "restart", "requeue", "leave"]

STOPPED, EXHAUSTED, FAULT = 85, 86, 1  # exit codes of the trainer, and of a node, beside 0
DATA_WORDS = ("Generated too many",)  # verl's own ValueError when max_num_gen_batches is reached


@dataclass(frozen=True)
class Facts:
    """What is known when an attempt has ended.

    Attributes:
        exit: of rank 0's node process; negative: the signal that killed it.
        message: its last words.
        stage_exit: of the stage that failed on some node, None when no stage failed by itself.
        asked: why the attempt was asked to end: "person", "time limit", "warning" (SIGUSR2), "signal" (SIGTERM).
        lost: nodes whose task does not answer any more.
        fruitless: attempts in a row, this one included, without a new checkpoint.
        seconds_left: until the allocation ends; None: it has no end.
        seconds_needed: to start and to save once.
    """

    exit: int
    message: str = ""
    stage_exit: int | None = None
    asked: str | None = None
    lost: tuple[str, ...] = ()
    fruitless: int = 0
    seconds_left: float | None = None
    seconds_needed: float = 0


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    action: Action
    reason: str


def classify(facts: Facts, life: Life) -> Outcome:
    """Decide what an ended attempt was and what follows."""
    outcome = _by_itself(facts, life)
    if outcome.action in ("restart", "requeue") and facts.fruitless >= life.fruitless_attempts:
        reason = f"{facts.fruitless} attempts in a row ended without a new checkpoint; the last one: {outcome.reason}"
        return Outcome("no progress", "stop", f"{reason}; mend the cause, then bin/resume")
    return outcome


def _by_itself(facts: Facts, life: Life) -> Outcome:
    words = facts.message or _exit_in_words(facts.exit)
    if facts.exit == 0:
        return Outcome("done", "done", words if facts.message else "all steps are done")
    if facts.asked == "person":
        return Outcome("stopped", "stop", words)
    if facts.exit == EXHAUSTED or any(text in facts.message for text in DATA_WORDS):
        return Outcome("data exhausted", "stop", words)
    if facts.asked == "signal":
        return Outcome(
            "cancelled", "leave", f"SIGTERM from the scheduler (cancelled, preempted, or a node set down): {words}"
        )
    if facts.lost:
        return Outcome("node failure", "requeue", f"{', '.join(facts.lost)} does not answer: {words}")
    if facts.asked in ("time limit", "warning"):
        kind = "time limit" if facts.asked == "time limit" else "preemption"
        return Outcome(kind, "requeue", words)
    if facts.stage_exit == FAULT:
        return Outcome("wrong", "stop", words)
    if life.restart_in_place and (facts.seconds_left is None or facts.seconds_left > facts.seconds_needed):
        return Outcome("crash", "restart", words)
    return Outcome("crash", "requeue", words)


def _exit_in_words(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def fruitless_attempts(events: Iterable[dict]) -> int:
    """Attempts in a row, up to the last one that started, that brought no checkpoint beyond all earlier ones.

    A submission by a person starts the count again.
    """
    best, count, running, attempt = 0, 0, False, None
    for event in events:
        kind = event.get("event")
        if kind == "submitted" and event.get("by", "person") == "person":
            count, running = 0, False
        elif kind in ("allocated", "attempt_start") and event["attempt"] != attempt:
            count, running, attempt = count + running, True, event["attempt"]
        elif kind == "checkpoint" and event.get("step", 0) > best:
            best, count, running = event["step"], 0, False
    return count + running


def seconds_to_save(steps: list[dict[str, float]], saves: list[float], life: Life) -> tuple[float, str]:
    """How long before a planned end the checkpoint must be asked for, and why.

    The step that runs must end first: up to one whole step, then the save. Both are taken as the longest seen, and half
    of it again for a busy filesystem.

    Args:
        steps: metrics of the last steps.
        saves: seconds of the saves so far.
    """
    if life.save_minutes is not None:
        return life.save_minutes * 60, "life.save_minutes of the site"
    step = max((data["timing_s/step"] for data in steps if "timing_s/step" in data), default=0.0)
    save = max(saves, default=0.0)
    if step == 0 and save == 0:
        return 300, "nothing measured yet"
    measured = 1.5 * (step + save)
    if measured < 300:
        return 300, f"at least 5 min; longest step {step:.0f} s, longest save {save:.0f} s"
    return measured, f"1.5 × (longest step {step:.0f} s + longest save {save:.0f} s)"
