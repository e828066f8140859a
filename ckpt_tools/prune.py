"""Retention of training checkpoints on disk: what may go, and how it goes.

Decided from what lies on disk, not from what a process remembers. The newest whole step and every pinned one always
stay. A link is never followed and never removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.training import Step, survey

PIN = "PINNED"
"""An empty file of this name in a step's folder protects the step."""
ASIDE = ".removing-"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to one step, and why."""

    step: Step
    stays: bool
    reason: str


def judge(steps: list[Step], keep: int, pinned: Iterable[int] = (), broken: bool = False) -> list[Verdict]:
    """Decide which steps stay.

    Args:
        steps: all steps, newest first.
        keep: number of whole steps to keep, at least 1.
        pinned: step numbers that always stay, besides those with a PINNED file.
        broken: also remove broken steps older than the newest whole one.

    Raises:
        UsageFault: keep is less than 1.
    """
    if keep < 1:
        raise UsageFault(f"--keep {keep} would remove the newest checkpoint; the least is 1")
    pins = set(pinned)
    newest = next((step.number for step in steps if not step.problems), None)
    verdicts, kept = [], 0
    for step in steps:
        if step.path.is_symlink() or not step.path.is_dir():
            verdicts.append(Verdict(step, True, "a link or a file, left alone"))
        elif step.number in pins or (step.path / PIN).exists():
            verdicts.append(Verdict(step, True, "pinned"))
            kept += not step.problems
        elif step.problems:
            goes = broken and newest is not None and step.number < newest
            advice = (
                "remove it with --broken" if newest is not None and step.number < newest else "may be in the making"
            )
            reason = f"broken: {step.problems[0]}"
            verdicts.append(Verdict(step, not goes, reason if goes else f"{reason}; {advice}"))
        elif step.number == newest or kept < keep:
            kept += 1
            verdicts.append(Verdict(step, True, "the newest whole step" if step.number == newest else f"one of {keep}"))
        else:
            verdicts.append(Verdict(step, False, f"beyond the {keep} newest"))
    return verdicts


def prune(
    root: Path, keep: int, pinned: Iterable[int] = (), broken: bool = False, apply: bool = False
) -> list[Verdict]:
    """Judge the steps under a root, and with `apply` remove those that go.

    Raises:
        UsageFault: no such folder, or the root itself is a link.
        Fault: a step changed between being judged and being removed.
    """
    if root.is_symlink():
        raise UsageFault(f"{root}: is a link; give the folder it points to, so that nothing is removed by surprise")
    verdicts = judge(survey(root), keep, pinned, broken)
    if apply:
        for verdict in verdicts:
            if not verdict.stays:
                _remove(verdict.step.path)
        for leftover in root.glob(f"{ASIDE}*"):
            if not leftover.is_symlink():
                shutil.rmtree(leftover)
    return verdicts


def _remove(path: Path) -> None:
    """Rename first, so that a crash half-way leaves nothing that looks like a checkpoint; rmtree follows no links."""
    aside = path.with_name(f"{ASIDE}{path.name}-{os.getpid()}")
    path.rename(aside)
    if aside.is_symlink():
        aside.rename(path)
        raise Fault(f"{path}: became a link meanwhile; it was put back, look who changes this folder")
    shutil.rmtree(aside)
